"""How a setting is declared: its default, what it is, and what it may be, in one place.

The reader of files, the command line, the help text and the checks at construction all read this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paceline.lookup import unknown


class SettingError(ValueError):
    """A setting that cannot be; `path` says which, such as ('strategy', 'k').

    >>> str(SettingError(("strategy", "k"), "k must be 1 or more (k=0)"))
    'k must be 1 or more (k=0)'
    """

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is allowed for one setting."""

    help: str
    choices: Callable[[], Iterable[str]] | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    infinite: bool = False
    alias: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise if a value breaks the rule.

        >>> Rule(help="", least=1, most=9).check("k", 0)
        Traceback (most recent call last):
        paceline.recipes.settings.SettingError: k must be between 1 and 9 (k=0)
        """
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and self.choices is not None and part not in (allowed := list(self.choices())):
                raise SettingError((name,), str(unknown(name.replace("_", " "), part, allowed)))
            if isinstance(part, (int, float)) and not isinstance(part, bool) and not self._allows(part):
                raise SettingError((name,), f"{name} must be {self.range} ({name}={part:,})".replace(",", ""))

    def _allows(self, value: float) -> bool:
        if math.isnan(value) or (math.isinf(value) and not self.infinite):
            return False
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        )

    @property
    def range(self) -> str:
        """The allowed range in words.

        >>> Rule(help="", above=0).range, Rule(help="", least=0, most=1).range
        ('more than 0', 'between 0 and 1')
        """
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        if self.above is not None:
            return f"more than {self.above:g}" + (f" and at most {self.most:g}" if self.most is not None else "")
        return f"{self.least:g} or more" if self.least is not None else "a finite number"


def setting(default: Any, help: str, **rule: Any) -> Any:
    """A field of a recipe with its rule.

    >>> @dataclass(frozen=True)
    ... class Example:
    ...     rounds: int = setting(300, "rounds to run", least=1)
    >>> Example().rounds
    300
    """
    return dataclasses.field(default=default, metadata={"rule": Rule(help=help, **rule)})


class Checked:
    """A frozen dataclass whose settings are checked when it is made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            rule: Rule | None = field.metadata.get("rule")
            if rule is not None:
                rule.check(field.name, getattr(self, field.name))
