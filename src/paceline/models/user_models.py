"""A user's network, named 'module:factory'.

The module is imported as Python would from a script in the current directory. The factory is a function or
a class that returns an `nn.Module`; it is given `input_shape` and `classes` if it takes them.
What goes wrong inside the factory is the user's error and passes through unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from torch import nn

from paceline.lookup import unknown


def build_user_model(name: str, *, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Import the module, call the factory, and check that it returned a network.

    >>> build_user_model("torch.nn:Identity", input_shape=(1, 8, 8), classes=10)
    Identity()
    >>> build_user_model("no_such_module:net", input_shape=(1, 8, 8), classes=10)
    Traceback (most recent call last):
    ValueError: module 'no_such_module' of model 'no_such_module:net' was not found; ...
    """
    with _current_directory_importable():
        factory = _find_factory(name)
        model = factory(**_arguments_for(name, factory, {"input_shape": input_shape, "classes": classes}))
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned {type(model).__name__}; its factory must return a torch.nn.Module")
    return model


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()  # the module may have been written a moment ago
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have taken it out itself
            sys.path.remove(here)


def _find_factory(name: str) -> Callable[..., object]:
    module_name, _, factory_name = name.partition(":")
    parts = [*module_name.split("."), factory_name]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"model {name!r} must be 'module:factory', such as 'my_models:small_net'")
    module = _import(name, module_name)
    if not hasattr(module, factory_name):
        raise _no_factory(module_name, factory_name, vars(module))
    factory = getattr(module, factory_name)
    if not callable(factory):
        raise ValueError(f"model {name!r} names a {type(factory).__name__}; name a function or class to call")
    return factory  # type: ignore[no-any-return]


def _import(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"module {missing!r} of model {name!r} was not found; "
                "run from the directory that holds it, or install it"
            ) from None
        raise ValueError(
            f"module {module_name!r} of model {name!r} could not be imported; mend its {type(error).__name__}: "
            + " ".join(str(error).split())
        ) from error


def _no_factory(module_name: str, factory_name: str, contents: dict[str, object]) -> ValueError:
    defined = [
        key
        for key, value in contents.items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", "") == module_name
    ]
    if not defined:
        return ValueError(f"module {module_name!r} has no {factory_name!r}, nor any function or class; add it")
    return unknown(f"factory in module {module_name!r}:", factory_name, defined)


def _arguments_for(name: str, factory: Callable[..., object], offered: dict[str, Any]) -> dict[str, Any]:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in callables do not say what they take
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    arguments = {key: value for key, value in offered.items() if takes_any or key in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"model {name!r} cannot be built with input_shape and classes alone ({error}); "
            "give its factory's other arguments defaults"
        ) from None
    return arguments
