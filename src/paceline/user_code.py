"""Code of a user's own, named 'module:name': a network, a data set, a loss, a log.

The module is imported as Python would from a script in the current directory. Only what a user has typed, or written
into a recipe, comes here: no server, no folder of a run and no record may name code. What goes wrong inside the code is
the user's error and passes through unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError
from paceline.lookup import unknown


class UserCodeError(PacelineError, ValueError):
    """Code of a user's own that cannot be found, or does not give what it must.

    >>> raise UserCodeError("loss 'my_losses:f' gave no gradient")
    Traceback (most recent call last):
    paceline.user_code.UserCodeError: loss 'my_losses:f' gave no gradient
    """


def is_code(name: str) -> bool:
    """Return whether a name is of a user's own code.

    >>> is_code("my_models:net"), is_code("resnet18")
    (True, False)
    """
    return ":" in name


def find(kind: str, name: str) -> Any:
    """Import the module of 'module:name', and return what it holds by that name; `kind` is for errors.

    >>> find("loss", "torch.nn.functional:cross_entropy").__name__
    'cross_entropy'
    >>> find("model", "no_such_module:net")
    Traceback (most recent call last):
    paceline.user_code.UserCodeError: module 'no_such_module' of model 'no_such_module:net' was not found; ...
    """
    with _importable_here():
        return _find(kind, name)


Offered = Mapping[str, Callable[[], Any]]
"""Arguments that a factory may ask for; each is made when it does."""


def make(kind: str, name: str, offered: Offered) -> Any:
    """Call the factory 'module:factory' with those of the offered arguments that it takes; return what it makes.

    >>> make("model", "torch.nn:Identity", {"classes": lambda: 10})
    Identity()
    """
    factory = find(kind, name)
    if not callable(factory):
        raise UserCodeError(f"{kind} {name!r} names a {type(factory).__name__}; name a function or class to call")
    return call(kind, name, factory, offered)


def call(kind: str, name: str, factory: Callable[..., Any], offered: Offered) -> Any:
    """Call a factory with those of the offered arguments that it takes; refuse one that asks for more.

    >>> call("data set", "my_data:load", lambda seed: seed + 1, {"seed": lambda: 3, "directory": lambda: ""})
    4
    """
    with _importable_here():
        return factory(**_arguments(kind, name, factory, offered))


def _arguments(kind: str, name: str, factory: Callable[..., Any], offered: Offered) -> dict[str, Any]:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in callables do not say what they take
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    arguments = {key: value() for key, value in offered.items() if takes_any or key in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserCodeError(
            f"{kind} {name!r} cannot be built with {' and '.join(offered)} alone ({error}); "
            "give its factory's other arguments defaults"
        ) from None
    return arguments


@contextmanager
def _importable_here() -> Iterator[None]:
    """Let modules of the current directory be imported, as a script there could."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have taken it out itself
            sys.path.remove(here)


def _find(kind: str, name: str) -> Any:
    module_name, _, wanted = name.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ValueError(f"{kind} {name!r} names a file; name its module, without .py: {f'{dotted}:{wanted}'!r}")
    if not all(part.isidentifier() for part in [*module_name.split("."), wanted]):
        raise UserCodeError(f"{kind} {name!r} must be 'module:{_word(kind)}', such as {_EXAMPLES[kind]!r}")
    module = _import(kind, name, module_name)
    if not hasattr(module, wanted):
        raise _not_there(kind, module_name, wanted, vars(module))
    return getattr(module, wanted)


_EXAMPLES = {
    "model": "my_models:small_net",
    "data set": "my_data:load",
    "loss": "my_losses:focal_loss",
    "log": "my_logs:log",
}


def _word(kind: str) -> str:
    return "function" if kind in ("loss", "log") else "factory"


def _import(kind: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UserCodeError(
                f"module {missing!r} of {kind} {name!r} was not found; "
                "run from the directory that holds it, or install it"
            ) from None
        raise UserCodeError(
            f"module {module_name!r} of {kind} {name!r} could not be imported; mend its {type(error).__name__}: "
            + " ".join(str(error).split())
        ) from error


def _not_there(kind: str, module_name: str, wanted: str, contents: Mapping[str, object]) -> ValueError:
    defined = [
        key
        for key, value in contents.items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", "") == module_name
    ]
    if not defined:
        return UserCodeError(f"module {module_name!r} has no {wanted!r}, nor any function or class; add it")
    return UserCodeError(str(unknown(f"{_word(kind)} in module {module_name!r}:", wanted, defined)))


def name_of(thing: object) -> str:
    """Return 'module:name' of an object that a script gave, for tables and journals; nothing is imported by it.

    >>> name_of(unknown)
    'paceline.lookup:unknown'
    >>> name_of(([1], [2]))
    'script:tuple'
    """
    named = thing if isinstance(thing, type) or hasattr(thing, "__name__") else type(thing)
    module = getattr(named, "__module__", None) or "script"
    short = str(getattr(named, "__name__", "object"))
    return f"{'script' if module in ('builtins', '__main__') else module}:{short if short.isidentifier() else 'object'}"
