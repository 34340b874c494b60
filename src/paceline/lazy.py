"""Public names that are imported when they are first used, so that importing a package is quick."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(package: str, homes: Mapping[str, str], packages: Sequence[str] = ()) -> Callable[[str], object]:
    """Return a `__getattr__` for a package, from {public name: module it lives in} and the names of sub-packages.

    A module is named from the package on ("drivers.ddp" in paceline), or in full ("paceline.drivers.ddp").

    >>> lazy_names("paceline", {"Joined": "events"})("Joined")
    <class 'paceline.events.Joined'>
    >>> lazy_names("paceline", {}, ["events"])("events").__name__
    'paceline.events'
    """

    def find(name: str) -> object:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_place_of(name, package, packages)}")
        home = homes[name]
        value = getattr(importlib.import_module(home if home.startswith("paceline.") else f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def _place_of(name: str, package: str, packages: Sequence[str]) -> str:
    """Return in which sub-package a name that was looked for stands, as the end of a sentence, if it does.

    >>> _place_of("Limits", "paceline", ["codecs", "cluster"])
    '; it is paceline.cluster.Limits'
    """
    if not packages or name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is not None:
        return ""  # Python itself asks for such names, and for a module before it imports it
    for each in packages:
        try:
            found = name in getattr(importlib.import_module(f"{package}.{each}"), "__all__", ())
        except ImportError:  # a framework that is not installed
            continue
        if found:
            return f"; it is {package}.{each}.{name}"
    return ""


def need_extra(extra: str, *modules: str) -> None:
    """Raise a ModuleNotFoundError that says what to install, if one of an extra's modules is not there.

    >>> need_extra("huggingface", "json")
    >>> need_extra("huggingface", "no_such_framework")
    Traceback (most recent call last):
    ModuleNotFoundError: paceline.huggingface needs no_such_framework: pip install 'paceline[huggingface]'
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise ModuleNotFoundError(f"paceline.{extra} needs {needed}: pip install 'paceline[{extra}]'", name=missing[0])
