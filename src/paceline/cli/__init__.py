"""Parse, call, print; nothing else.

Machine-readable output goes to stdout and nothing else does; progress and notes go to stderr. An error is one line
(`--debug` shows the traceback) and the exit code says whose fault it was: 2 for what was typed, 1 for the rest.
"""

from paceline.cli.main import main

__all__ = ["main"]
