"""What was saved, held against what it is to be loaded into, before anything is loaded.

Checksums tell what a disk has altered. They do not tell what never was a state: whoever can write a checkpoint can
write its checksums too. And torch's own `load_state_dict` takes tensors of any shape and texts for numbers, which end a
run rounds later, with an error that names neither. So the form is looked at here:

    a tensor       shape and type of the one it replaces, and every number finite
    an optimiser   its groups and settings as they are in the optimiser; for each parameter what one step of the same
                   optimiser leaves for a parameter, of its shape
    a schedule     the names and kinds that a fresh one has

What only its owner can judge (a codec's memory, an optimiser that a script brings) is loaded inside of `refusing`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import PacelineError

MOST = 1e38  # of a setting: what a float32 holds
MOST_STEPS = 2**53
_NEVER_NEGATIVE = ("step", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")  # torch takes roots and powers of them
_PROBE = (2, 3)  # the shape of the parameter that shows what an optimiser keeps
_FAILURES = (TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError, ArithmeticError)


class SavedStateError(PacelineError, ValueError):
    """A saved state that is none, or of something else.

    >>> raise SavedStateError("parameters has numbers that are not finite")
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: parameters has numbers that are not finite
    """


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn whatever a senseless state breaks while it is loaded into one line that begins with `name`.

    >>> with refusing("checkpoint 7"):
    ...     {}["strategy"]
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: checkpoint 7 is refused: it has no 'strategy'
    """
    try:
        yield
    except KeyError as error:
        raise SavedStateError(f"{name} is refused: it has no {error}") from error
    except _FAILURES as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise SavedStateError(f"{name} is refused: {lines[0][:300]}") from error


def check_tensor(name: str, found: Any, like: torch.Tensor, *, finite: bool = True) -> None:
    """Refuse a tensor of another shape or type than `like`, or with NaN; with `finite` also with infinite numbers.

    What comes from a file is on the CPU; numbers of a state that never left its GPU are not read back.

    >>> check_tensor("weight", torch.zeros(3), torch.zeros(2))
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: weight must be float32 of shape (2,), not float32 of shape (3,): ...
    """
    if not isinstance(found, torch.Tensor) or found.shape != like.shape or found.dtype is not like.dtype:
        other = isinstance(found, torch.Tensor) and found.shape != like.shape
        whose = ": it is of another model" if other else ""
        raise SavedStateError(f"{name} must be {_described(like)}, not {_described(found)}{whose}")
    on_cpu = found.device.type == "cpu"
    if on_cpu and found.is_floating_point() and not bool((found.isfinite() if finite else ~found.isnan()).all()):
        raise SavedStateError(f"{name} has numbers that are {'not finite' if finite else 'NaN'}")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r:.40}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def check_model(name: str, found: Any, like: Mapping[str, torch.Tensor]) -> None:
    """Refuse the `state_dict` of another model, or one with NaN; a buffer may be infinite (a mask).

    >>> check_model("model", {"bias": torch.zeros(1)}, {"weight": torch.zeros(1)})
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: model has no 'weight'
    """
    if not isinstance(found, Mapping):
        raise SavedStateError(f"{name} must be tensors by name, not {found!r:.40}")
    for key in [*like, *found]:
        if key not in found or key not in like:
            raise SavedStateError(f"{name} has {'no' if key in like else 'an unknown'} {key!r:.60}")
        check_tensor(f"{name}.{key}", found[key], like[key], finite=False)


# -- optimisers --------------------------------------------------------------------------------------------------------


_RENAMED = {"trust_coefficient": "trust"}  # what a group of LARS had before; the optimiser loads it


def check_optimizer(found: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that the optimiser could not step with.

    >>> optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9)
    >>> state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": torch.zeros(3)}}}
    >>> check_optimizer(state, optimizer)
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: optimizer.state[0].momentum_buffer must be of shape (2,), not (3,)
    """
    own = optimizer.state_dict()["param_groups"]
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict):
        raise SavedStateError("optimizer has no state")
    groups = found.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own):
        raise SavedStateError(f"optimizer.param_groups must be a list of {len(own)}, not {groups!r:.40}")
    for number, (group, ours) in enumerate(zip(groups, own, strict=True)):
        _check_group(f"optimizer.param_groups[{number}]", group, ours)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    forms = _forms(optimizer)
    for key, kept in found["state"].items():
        place = f"optimizer.state[{key!r:.20}]"
        if type(key) is not int or not 0 <= key < len(parameters) or not isinstance(kept, dict):
            raise SavedStateError(f"{place} is of no parameter: there are {len(parameters)}")
        _check_kept(place, kept, parameters[key], forms)


def _check_group(place: str, found: Any, own: dict[str, Any]) -> None:
    if not isinstance(found, dict) or found.get("params") != own["params"]:
        raise SavedStateError(f"{place} is of other parameters")
    for name, value in own.items():
        if name == "params":
            continue
        kept = _RENAMED.get(name, name) if name not in found else name
        if kept in found:
            check_form(f"{place}.{kept}", found[kept], value)
            if name == "capturable" and found[kept] is not value:  # a step would end with an assertion of torch's
                raise SavedStateError(f"{place}.capturable must be {value} as here, not {found[kept]}")
        elif value is not None and value is not False:  # a newer torch has more switches, which are off
            raise SavedStateError(f"{place} has no {name!r}")
    if isinstance(found.get("lr"), int | float) and found["lr"] < 0:
        raise SavedStateError(f"{place}.lr must be 0 or more, not {found['lr']}")


def _forms(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return what one step leaves for a parameter of the shape _PROBE; None for an optimiser that cannot be tried."""
    probe = nn.Parameter(torch.zeros(_PROBE))
    probe.grad = torch.zeros(_PROBE)
    kind, group = type(optimizer), optimizer.param_groups[0]
    if not kind.__module__.startswith(("torch.optim", "paceline.")):
        return None  # a script's own may do anything, and need not be made anew
    try:
        tried = kind([{**group, "params": [probe]}], lr=group["lr"])  # type: ignore[call-arg]
        tried.step()
    except (TypeError, ValueError, KeyError, RuntimeError):
        return None
    forms = dict(tried.state[probe])
    shapes = {tuple(value.shape) for value in forms.values() if isinstance(value, torch.Tensor)}
    return forms if shapes <= {(), _PROBE} else None  # one that factors matrices treats vectors in another way


def _check_kept(place: str, kept: dict[str, Any], parameter: torch.Tensor, forms: dict[str, Any] | None) -> None:
    for name in forms or ():
        if name not in kept:
            raise SavedStateError(f"{place} has no {name!r}")
    for name, value in kept.items():
        if forms is not None and name not in forms:
            raise SavedStateError(f"{place} has {name!r:.40}, which the optimiser does not keep")
        form = None if forms is None else forms[name]
        if isinstance(form, torch.Tensor):
            wanted = parameter.shape if form.shape == _PROBE else form.shape
            if not isinstance(value, torch.Tensor) or value.shape != wanted:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
                raise SavedStateError(f"{place}.{name} must be of shape {tuple(wanted)}, not {shape}")
        elif form is not None:
            check_form(f"{place}.{name}", value, form)
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() and isinstance(form, torch.Tensor) and form.is_floating_point():
                raise SavedStateError(f"{place}.{name} must be floating-point numbers, not {value.dtype}")
            check_tensor(f"{place}.{name}", value, value, finite=False)
            if name in _NEVER_NEGATIVE and value.numel() and float(value.min()) < 0:
                raise SavedStateError(f"{place}.{name} must be 0 or more, and has {float(value.min()):g}")


# -- plain values ------------------------------------------------------------------------------------------------------


def check_schedule(found: Any, schedule: Any) -> None:
    """Refuse a state that a schedule of torch's could not go on with; others judge their own.

    >>> optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    >>> schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    >>> check_schedule(schedule.state_dict() | {"last_epoch": -(10**9)}, schedule)
    Traceback (most recent call last):
    paceline.training.saved_state.SavedStateError: schedule.last_epoch must be a whole number ...
    """
    if not isinstance(found, dict):
        raise SavedStateError(f"schedule must be an object, not {found!r:.40}")
    if type(schedule).__module__.startswith("torch.optim"):
        check_form("schedule", found, schedule.state_dict())


def check_form(place: str, found: Any, like: Any) -> None:
    """Refuse values of other names or kinds than those of `like`; None there may have become anything plain."""
    if isinstance(like, torch.Tensor):
        check_tensor(place, found, like)
    elif isinstance(like, Counter):
        if not isinstance(found, Counter) or not all(type(key) is int for key in found):
            raise SavedStateError(f"{place} must count whole numbers, not {found!r:.40}")
    elif isinstance(like, dict):
        if not isinstance(found, dict):
            raise SavedStateError(f"{place} must be an object, not {found!r:.40}")
        for name, value in like.items():
            if name in found:
                check_form(f"{place}.{name}", found[name], value)
            elif not str(name).startswith("_"):  # those are torch's own, and come and go with its versions
                raise SavedStateError(f"{place} has no {name!r}")
        for name in found:  # torch's schedules take over any name, and a number would stand where their method was
            if name not in like and callable(getattr(LRScheduler, str(name), None)):
                raise SavedStateError(f"{place} has {name!r:.40}, which is not kept")
    elif isinstance(like, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(like):
            raise SavedStateError(f"{place} must be a list of {len(like)}, not {found!r:.40}")
        for number, (one, other) in enumerate(zip(found, like, strict=True)):
            check_form(f"{place}[{number}]", one, other)
    elif place.endswith((".last_epoch", "._step_count")):
        if type(found) is not int or not -1 <= found <= MOST_STEPS:
            raise SavedStateError(f"{place} must be a whole number of -1 or more, not {found!r:.40}")
    elif isinstance(like, int | float) and not isinstance(like, bool):
        if type(found) not in (int, float) or not abs(found) <= MOST or not math.isfinite(found):
            raise SavedStateError(f"{place} must be a number, not {found!r:.40}")
    elif like is not None and type(found) is not type(like):
        raise SavedStateError(f"{place} must be of type {type(like).__name__}, not {found!r:.40}")
