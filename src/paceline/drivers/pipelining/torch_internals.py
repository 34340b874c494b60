"""All that is used of torch.distributed.pipelining and is not documented: tried with torch 2.13.

`OpenStage` uses these attributes of torch's PipelineStage, and refuses a torch that has another of them:

    fwd_cache              micro-batch -> (outputs, inputs), from its forward to its backward
    bwd_cache              micro-batch -> gradients of the inputs, from its backward until they are sent
    dw_runner              micro-batch -> what is left of its backward, from I to W
    has_backward           whether the schedule trains
    clear_runtime_states   let go of what a step has left

`can_split` knows how torch takes a backward apart into the gradient of what came in (I) and that of the weights (W). It
finds the weights' part by walking from each weight up to where the path of the inputs is met, remembers what arrives
there during I, and goes on from there in W:

        input ──> mul ──> linear ──> output            W begins at linear, with the gradient that came there
                            ▲
        weight ─────────────┘

That is right if every weight meets the path of the inputs, and at one place. It is not where a weight is used several
times (an unrolled RNN), where an output depends on weights alone (an embedding of ids that were only handed on), where
nothing that came in has a gradient, or inside an operation that uses its weights many times (aten.lstm). Such a piece
has its whole backward in I, and nothing to do in W: the same gradients, less to fill idle time with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import PipelineStage

from paceline.pipeline import PipelineError
from paceline.pipeline.graph import PieceModule

USED = ("fwd_cache", "bwd_cache", "dw_runner", "has_backward", "clear_runtime_states")
TRIED = "2.13"
MANY_TIMES = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


def nothing() -> None:
    """The weights' part (W) of a backward that was done as a whole in I: there is nothing left to compute."""


def whole_backward() -> Callable[[], None]:
    """Serve as torch's `dw_builder` for a piece whose whole backward is done in I: return an empty W."""
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
        return bool(self.has_backward)

    def kept(self, microbatch: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return what a micro-batch's forward gave and took."""
        outputs, inputs = self.fwd_cache[microbatch]
        return outputs, inputs

    def skip_backward(self, microbatch: int, *, full_backward: bool) -> None:
        """Let a micro-batch have no backward, neither now nor later."""
        _, inputs = self.fwd_cache.pop(microbatch)
        self.bwd_cache[microbatch] = (None,) * len(inputs)
        if not full_backward:
            self.dw_runner[microbatch] = nothing

    def take_gradients(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        """Return the gradients of what a micro-batch took, and keep them no longer."""
        gradients: Sequence[torch.Tensor | None] = self.bwd_cache.pop(microbatch)
        return gradients

    def keep_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of what a micro-batch took until they are sent."""
        self.bwd_cache[microbatch] = tuple(gradients)

    def is_done(self, microbatch: int) -> bool:
        """Return whether nothing is left for W; then nothing is kept for it either."""
        done = self.trains and self.dw_runner.get(microbatch) is nothing
        if done:
            del self.dw_runner[microbatch]
        return done

    def clear(self) -> None:
        """Free what a step has left; buffers to receive in stay."""
        self.clear_runtime_states()

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Make gradients that begin within the `with` tensors of their own.

        W sets `weight.grad` to what autograd hands it, and adds to that in place for the next micro-batch. For `h + p`
        this is the gradient that flows on: that of another weight too, or the one being sent; and it may be expanded.
        """
        fresh = [weight for weight in self.submod.parameters() if weight.grad is None]
        yield
        for weight in fresh:
            if weight.grad is not None:
                weight.grad = _copied(weight.grad, weight.detach())


def _copied(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient, in memory as the weight is."""
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def can_split(piece: PieceModule) -> bool:
    """Return whether the backward of this piece may be taken apart.

    >>> from paceline.pipeline.graph import ModelGraph, cut_piece
    >>> from torch import nn
    >>> layer = nn.Linear(4, 4)
    >>> once = ModelGraph(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), layer), (torch.ones(2, 4),))
    >>> twice = ModelGraph(nn.Sequential(nn.Linear(4, 4), layer, nn.ReLU(), layer), (torch.ones(2, 4),))
    >>> can_split(cut_piece(once, 1, 3)), can_split(cut_piece(twice, 1, 4))
    (True, False)
    """
    graph = piece.module.graph
    if any(node.op == "call_module" for node in graph.nodes):
        return False
    came = {value.name for value in piece.takes if value.needs_gradient}
    on_path = _reached(node for node in graph.nodes if node.op == "placeholder" and node.name in came)
    weights = dict(piece.module.named_parameters(remove_duplicate=False))
    reads = [node for node in graph.nodes if node.op == "get_attr" and str(node.target) in weights]
    trained = [node for node in reads if weights[str(node.target)].requires_grad]
    once = len({id(weights[str(node.target)]) for node in trained}) == len(trained)
    return once and all(_meets_once(node, on_path) for node in trained)


def _reached(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += list(node.users)
    return found


def _meets_once(weight: fx.Node, on_path: set[fx.Node]) -> bool:
    """Whether all ways from a weight to the outputs lead through one operation on the path of the inputs."""
    meetings: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    left = list(weight.users)
    while left:
        node = left.pop()
        if node in on_path and node.op != "output":
            meetings.add(node)
        elif node.op == "output":
            return False
        elif node not in seen:
            seen.add(node)
            left += list(node.users)
    return len(meetings) == 1 and all(_is_plain(node) for node in meetings | seen)


def _is_plain(node: fx.Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return callable(operation) and getattr(operation, "__name__", "") in ("getitem", "hand_on")
    return operation._schema.name.partition("::")[2] not in MANY_TIMES
