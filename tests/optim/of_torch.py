"""Torch's own helpers for tests of optimisers, and LARS described to them.

`torch.testing._internal.common_optimizers` is what torch tests its optimisers with. To import it is slow (it loads
the samples of two thousand operators, of which it uses one small class), needs a package that torch does not require,
and changes settings of hypothesis for everybody; hence the detour here, taken when the first test asks.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import unittest

import hypothesis
import torch

from paceline import LARS
from paceline.optim.schedules import warmup_poly

OURS = {
    "default": {},
    "tensor lr": {"lr": torch.tensor(0.05)},
    "no momentum": {"momentum": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "clip": {"clip": True, "weight_decay": 0.1},
    "every layer scaled": {"exclude_bias_and_norm": False},
    "no trust": {"trust_coefficient": None},
}
SCHEDULES = (
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
    lambda optimizer: warmup_poly(optimizer, 3, 60),
)


class _Decorations:
    """Stands for torch's `DecorateInfo`, which says what to skip in its own suite."""

    def __init__(self, *what: object, **more: object) -> None: ...


@functools.cache
def helpers() -> types.ModuleType:
    """The module `torch.testing._internal.common_optimizers`."""
    samples = types.ModuleType("torch.testing._internal.common_methods_invocations")
    samples.DecorateInfo = _Decorations
    inline = types.ModuleType("expecttest")
    inline.TestCase = unittest.TestCase
    stand_ins = {module.__name__: module for module in (samples, inline) if module.__name__ not in sys.modules}
    profile = hypothesis.settings.get_current_profile_name()
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        for name in stand_ins:
            del sys.modules[name]
        hypothesis.settings.load_profile(profile)


def _inputs(device: str, dtype: torch.dtype | None = None) -> list:
    made = helpers().OptimizerInput
    return [
        made(params=None, kwargs={"lr": 0.05, "trust_coefficient": 0.02} | given, desc=name)
        for name, given in OURS.items()
    ]


def _errors(device: str, dtype: torch.dtype) -> list:
    """Torch's, for every optimiser; LARS has no rate of its own, so it gets one where they give none."""
    found = helpers().get_error_inputs_for_all_optims(device, dtype)
    for each in found:
        each.optimizer_error_input.kwargs.setdefault("lr", 0.1)
    return found


@functools.cache
def lars_info():
    """LARS as an `OptimizerInfo`."""
    return helpers().OptimizerInfo(
        LARS,
        optim_inputs_func=_inputs,
        optim_error_inputs_func=_errors,
        scheduler_inputs=tuple([schedule] for schedule in SCHEDULES),
        supported_impls=("foreach", "fused", "differentiable"),
        not_og_supported_flags=("foreach", "fused", "differentiable", "maximize", "clip", "exclude_bias_and_norm"),
        supports_sparse=False,
        supports_complex=False,
        supports_fused_on=("cpu",),
    )


def inputs(*, ways: bool = True, skip: tuple[str, ...] = ()) -> list:
    """All of LARS's inputs; with `ways` each also foreach, fused, differentiable, and with none of them."""
    if not ways:
        return _inputs("cpu")
    found = helpers()._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, lars_info(), skip=skip)
    for given in _inputs("cpu"):  # torch itself tries foreach on GPUs only
        given.kwargs["foreach"] = True
        found.append(given)
    return [*found, *_inputs("cpu")]


def equal_to(kept: object, tensor: torch.Tensor, message: str) -> None:
    """Compare with the next that a `TensorTracker` has kept, and go on from that."""
    from torch.testing._internal.common_utils import TestCase

    try:
        kept.pop_check_set(tensor, TestCase())
    except AssertionError as error:
        raise AssertionError(f"{message}: {error}") from None
