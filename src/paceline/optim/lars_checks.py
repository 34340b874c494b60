"""What LARS refuses: settings out of their range or of another type, and parameters it cannot scale."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
"""The types that torch's kernels take as they are; subclasses, such as DTensor, have rules of their own."""


def check_settings(group: dict[str, Any]) -> None:
    """Refuse a group's settings that cannot be, with the value and what is allowed."""
    _check_types(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element (lr has shape {tuple(lr.shape)})")  # as torch says it
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite ({name}={group[name]})")
    if not 0 <= group["momentum"] <= 1:
        raise ValueError(f"momentum must be between 0 and 1 (momentum={group['momentum']})")
    if group["trust"] is not None and not 0 < group["trust"] < math.inf:
        raise ValueError(f"trust must be above 0 and finite, or None for no scaling (trust={group['trust']})")
    if group["nesterov"] and group["momentum"] == 0:
        raise ValueError("nesterov needs momentum above 0 (momentum=0)")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach are two ways of one step: choose one (fused=True, foreach=True)")
    if group["differentiable"] and (group["fused"] or group["foreach"]):
        raise ValueError("differentiable goes step by step, neither fused nor foreach (differentiable=True)")


def _check_types(group: dict[str, Any]) -> None:
    for name in ("lr", "momentum", "weight_decay", "trust"):
        value = group[name]
        fits = isinstance(value, Real) or (name == "lr" and isinstance(value, Tensor))
        if isinstance(value, bool) or not (fits or (name == "trust" and value is None)):
            raise TypeError(f"{name} must be a number ({name}={value!r})")
    for name in ("exclude_bias_and_norm", "nesterov", "clip", "maximize", "differentiable", "foreach", "fused"):
        if not isinstance(group[name], bool) and not (name in ("foreach", "fused") and group[name] is None):
            raise TypeError(f"{name} must be True or False ({name}={group[name]!r})")


def check_parameter(parameter: Tensor, *, fused: bool | None) -> None:
    """Refuse a parameter whose length LARS cannot take, or that the fused kernel does not know."""
    if not parameter.is_floating_point():
        kind = "complex" if parameter.is_complex() else "not floating-point"
        raise TypeError(f"LARS takes real floating-point parameters; one is {kind} ({parameter.dtype})")
    if fused and not (parameter.is_cpu and type(parameter) in PLAIN):
        what = f"a {type(parameter).__name__} on {parameter.device}"
        raise TypeError(f"fused=True takes plain tensors on the CPU only; one is {what}: leave fused out")
