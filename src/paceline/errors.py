"""The base of every error that paceline raises on purpose.

A class says besides what kind of error it is where users expect a built-in one, so both of these catch it:

    except paceline.PacelineError       anything that paceline refuses or gives up
    except ValueError                   as for a bad value of any other library
"""

from __future__ import annotations


class PacelineError(Exception):
    """What paceline refuses or gives up, in words for the person who asked.

    >>> import paceline
    >>> issubclass(paceline.RecipeError, PacelineError), issubclass(paceline.RecipeError, ValueError)
    (True, True)
    """


class PacelineWarning(UserWarning):
    """What somebody should know of a run that paceline does not refuse; commands print it as a line of their own.

    >>> issubclass(PacelineWarning, UserWarning)
    True
    """
