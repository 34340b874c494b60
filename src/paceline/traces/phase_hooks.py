"""Hooks on a model that tell a clock of its forward and backward passes.

    model(x)          the clock enters "forward", if gradients are enabled, in training mode and in eval mode
    loss.backward()   the clock enters "backward" when the gradient of the model's output is there, or of its first
                      output that has one; the loss itself, which is small, counts as forward both ways

What comes after a backward pass the hooks do not see: whoever has the loop enters the next phase. In code that torch
compiles, and in scripted modules, the hooks do nothing, and both passes count as the phase that the loop has entered.
The hooks are on the model only between `attach` and `detach`, so a model that is saved or copied between two batches is
as it was; one that is copied in between has a copy that tells nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.traces.step_clock import StepClock

MOST_DEEP = 4  # containers around the first output


class PhaseHooks:
    """Tells `clock` of the passes of `module`, while attached.

    >>> model, clock = nn.Linear(2, 1), StepClock(lambda times: None)
    >>> hooks = PhaseHooks(model, clock)
    >>> hooks.attach()
    >>> loss = model(torch.ones(1, 2)).sum()
    >>> before = clock.phase
    >>> loss.backward()
    >>> before, clock.phase
    ('forward', 'backward')
    >>> hooks.detach()
    """

    def __init__(self, module: nn.Module | None, clock: StepClock | None) -> None:
        self._module, self._clock = module, clock
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks on the model, if they are not there."""
        if not self._handles and self._module is not None and not isinstance(self._module, torch.jit.ScriptModule):
            self._handles = [
                self._module.register_forward_pre_hook(self._forward),
                self._module.register_forward_hook(self._forwarded),
            ]

    def detach(self) -> None:
        """Take the hooks away; once more does no harm."""
        while self._handles:
            self._handles.pop().remove()

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        if self._clock is not None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._clock.enter("forward")

    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._clock is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        found = _first_with_gradient(output, MOST_DEEP)
        if found is not None:
            found.register_hook(self._backward)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: torch.Tensor) -> None:
        if self._clock is not None:
            self._clock.enter("backward")

    def __deepcopy__(self, memo: dict[int, Any]) -> PhaseHooks:
        return PhaseHooks(None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return PhaseHooks, (None, None)


def _first_with_gradient(output: Any, deep: int) -> torch.Tensor | None:
    """Return the first tensor of an output, however it is nested, that a backward pass comes by."""
    if isinstance(output, torch.Tensor):
        return output if output.grad_fn is not None else None  # a parameter would keep the hook of every batch
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    found = (_first_with_gradient(part, deep - 1) for part in parts) if deep else iter(())
    return next((each for each in found if each is not None), None)
