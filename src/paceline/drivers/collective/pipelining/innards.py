"""All that is used of torch's PipelineStage and is not documented: tried with torch 2.13.

    fwd_cache              micro-batch -> (outputs, inputs), from its forward to its backward
    bwd_cache              micro-batch -> gradients of the inputs, from its backward until they are sent
    dw_runner              micro-batch -> what is left of its backward, from I to W
    has_backward           whether the schedule trains
    clear_runtime_states   let go of what a step has left

A torch that has another of them is refused when the pipeline is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from paceline.pipeline import PipelineError

USED = ("fwd_cache", "bwd_cache", "dw_runner", "has_backward", "clear_runtime_states")
TRIED = "2.13"


def nothing() -> None:
    """What is left to do when the whole backward is done."""


def nothing_later() -> Callable[[], None]:
    """For torch's `dw_builder`: the whole backward is done in I."""
    return nothing


class OpenStage(PipelineStage):
    """A PipelineStage whose micro-batches can be looked at between forward and backward."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        missing = [name for name in USED if not hasattr(self, name)]
        if missing:
            raise PipelineError(
                f"torch {torch.__version__} cannot run a pipeline: its PipelineStage has no {', '.join(missing)} "
                f"(tried with torch {TRIED})"
            )

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return bool(self.has_backward)

    def kept(self, microbatch: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What a micro-batch's forward gave and took."""
        outputs, inputs = self.fwd_cache[microbatch]
        return outputs, inputs

    def leave_out(self, microbatch: int, *, full_backward: bool) -> None:
        """Let a micro-batch have no backward, neither now nor later."""
        _, inputs = self.fwd_cache.pop(microbatch)
        self.bwd_cache[microbatch] = (None,) * len(inputs)
        if not full_backward:
            self.dw_runner[microbatch] = nothing

    def take_gradients(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        """The gradients of what a micro-batch took, which are no longer kept."""
        gradients: Sequence[torch.Tensor | None] = self.bwd_cache.pop(microbatch)
        return gradients

    def keep_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep them until they are sent."""
        self.bwd_cache[microbatch] = tuple(gradients)

    def is_done(self, microbatch: int) -> bool:
        """Whether nothing is left for W; then nothing is kept for it either."""
        done = self.trains and self.dw_runner.get(microbatch) is nothing
        if done:
            del self.dw_runner[microbatch]
        return done

    def clear(self) -> None:
        """Hold nothing from one step to the next but the room to receive in."""
        self.clear_runtime_states()

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Let gradients that begin in here be tensors of their own.

        W sets `weight.grad` to what autograd hands it, and adds to that in place for the next micro-batch. For `h + p`
        this is the gradient that flows on: that of another weight too, or the one being sent; and it may be expanded.
        """
        fresh = [weight for weight in self.submod.parameters() if weight.grad is None]
        yield
        for weight in fresh:
            if weight.grad is not None:
                weight.grad = _own(weight.grad, weight.detach())


def _own(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A copy, in memory as the weight is."""
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
