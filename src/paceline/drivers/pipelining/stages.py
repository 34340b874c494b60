"""One piece under a torch schedule: it names itself in errors, and records what it did when it is asked to.

What the schedules leave open is closed here:

- a gradient that is sent back is contiguous, as the backend wants it;
- the model's own output is a tensor of its own, so that a schedule may detach it;
- a piece of which nothing is trained, and behind nothing that is, has no backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline.drivers.pipelining.torch_internals import OpenStage, whole_backward
from paceline.pipeline import PipelineError
from paceline.pipeline.graph import PieceModule, hand_on
from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT


class StageSpan(NamedTuple):
    """One thing that a stage did, in time.perf_counter(): kind "F", "B" (the whole backward), "I" or "W" (its parts).

    >>> StageSpan(stage=1, piece=3, kind="F", microbatch=0, begin_seconds=0.25, end_seconds=0.5).seconds
    0.25
    """

    stage: int
    piece: int
    kind: str
    microbatch: int
    begin_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.begin_seconds


class StageLog:
    """The record of the stages of a rank: spans if wanted, and the error that was the user's own code's."""

    def __init__(self) -> None:
        self.spans: list[StageSpan] | None = None
        self.first_microbatch = 0
        self.error: Exception | None = None


class Stage(OpenStage):
    """Piece `number` of `pieces`, on the rank that has it; `outputs` are tensors without content for what it gives."""

    def __init__(
        self,
        piece: PieceModule,
        number: int,
        pieces: int,
        *,
        outputs: tuple[torch.Tensor, ...],
        device: torch.device,
        group: dist.ProcessGroup,
        log: StageLog,
        splits: bool,
    ) -> None:
        stage, last = number % dist.get_world_size(group), number == pieces - 1
        self._stage, self._log, self._traced = stage, log, outputs
        super().__init__(
            _WithOwnOutputs(piece.module) if last else piece.module,
            number,
            pieces,
            device,
            input_args=tuple(_empty(value.shape, value.dtype, value.needs_gradient) for value in piece.takes),
            output_args=outputs,
            group=group,
            dw_builder=None if splits else whole_backward,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **settings: Any) -> Any:
        """Compute the piece's forward of one micro-batch."""
        return self._recorded(FORWARD, fwd_chunk_id, self._forward, *args, **settings)

    def _forward(self, microbatch: int, *args: Any, **settings: Any) -> Any:
        output = super().forward_one_chunk(microbatch, *args, **settings)
        for number, (given, traced) in enumerate(zip(() if self.is_last else output, self._traced, strict=False)):
            if given.dtype is not traced.dtype or given.shape != traced.shape:
                raise PipelineError(
                    f"tensor {number} for the next stage is {given.dtype} {list(given.shape)}, and was traced as "
                    f"{traced.dtype} {list(traced.shape)}; make the pipeline under the same autocast as the step"
                )
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the piece's backward, or the part that others wait for."""
        if not self.trains:
            return
        outputs, inputs = self.kept(bwd_chunk_id)
        if self.is_last:
            outputs = (loss,)
        if any(output.requires_grad for output in outputs):
            backward, kind = super().backward_one_chunk, BACKWARD if full_backward else INPUT_GRADIENT
            self._recorded(kind, bwd_chunk_id, backward, loss, full_backward, last_backward)
        else:
            self.skip_backward(bwd_chunk_id, full_backward=full_backward)
        gradients = self.take_gradients(bwd_chunk_id)
        if not self.is_first:  # there nobody asks for them
            pairs = zip(gradients, inputs, strict=True)
            self.keep_gradients(bwd_chunk_id, [_to_send(gradient, value) for gradient, value in pairs])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the part of the piece's backward that nobody waits for."""
        if self.is_done(bwd_chunk_id):
            return
        run = super().backward_weight_one_chunk
        with self.own_gradients():
            self._recorded(WEIGHT_GRADIENT, bwd_chunk_id, run, last_backward=last_backward)

    def _recorded(self, kind: str, microbatch: int, run: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        begin_seconds = time.perf_counter()
        try:
            result = run(microbatch, *args, **settings)
        except Exception as error:
            # torch puts an error of its own, which prints tensors, around the one that tells what is wrong.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            self._log.error = cause
            part = "forward" if kind == FORWARD else "backward"
            cause.add_note(f"in {part} of micro-batch {microbatch} in stage {self._stage} of the pipeline")
            raise cause from None
        if self._log.spans is not None:
            place = self._log.first_microbatch + microbatch
            self._log.spans.append(
                StageSpan(self._stage, self.stage_index, kind, place, begin_seconds, time.perf_counter())
            )
        return result


class _WithOwnOutputs(nn.Module):
    """The last piece. What it returns may be a view; the schedules detach what they were given, and views refuse."""

    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what the piece returns, in tensors of their own."""
        returned = self.piece(*inputs)
        if isinstance(returned, torch.Tensor):
            return hand_on(returned)
        return tuple(hand_on(each) if isinstance(each, torch.Tensor) else each for each in returned)


def _to_send(gradient: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient for the stage before, which waits also for that of a tensor that was not used here."""
    if gradient is None:
        return torch.zeros_like(value) if value.requires_grad else None
    return gradient.contiguous()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, needs_gradient: bool) -> torch.Tensor:
    """Return a tensor without content, of the shape and type of what comes."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_gradient)


def without_content(values: Any) -> tuple[torch.Tensor, ...]:
    """Return tensors without content for what a piece gives."""
    return tuple(_empty(tuple(value.shape), value.dtype, bool(value.requires_grad)) for value in values)
