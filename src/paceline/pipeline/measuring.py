"""What each layer of a model costs: seconds forward and backward, bytes kept for backward.

All layers are run one after another, each by itself, as training runs them; then backward, last to first:

    round    forward   0 ──> 1 ──> 2 ──> ...      each layer's inputs are cut off from the graph before it
             backward  0 <── 1 <── 2 <── ...      with gradients that the layers after it sent back

In every other round only the gradients of inputs are computed; the difference is what the weights' gradients cost. The
first rounds warm caches and are not counted; of the others the least is taken, on a clock that stands still while
others have the core (`paceline.stopwatch`), so that a plan made beside other work is the plan of a quiet machine. More
rounds are added while the least still falls. How far a layer's median is above its least is its spread. Whole rounds
are repeated and not layers, so that a layer finds the caches as training would leave them, and that what disturbs the
machine for a while disturbs all layers alike. Random numbers and buffers are put back afterwards.

How a layer's time depends on the size of the micro-batch is measured at two sizes, with a line through both:

    seconds(b) = fixed + b * slope        fixed = 2 seconds(b / 2) - seconds(b), and no less than 0

Advice on the number of micro-batches needs it: with twice as many, half as large, each takes more than half as long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from paceline.pipeline import PipelineError
from paceline.pipeline.graph import ModelGraph, cut_layer, cut_piece
from paceline.pipeline.profile import INPUT, Layer, Profile, Tensor
from paceline.pipeline.tracing import modes_kept
from paceline.stopwatch import Stopwatch, TimedTurns, settled, spread_of

OnRound = Callable[[int, int], None]
WARM_ROUNDS = 1
LEAST_REPEATS = 3
MOST_TIMES_REPEATS = 4  # rounds that are added while the least still falls
HALF_SHARE = 0.5  # of the seconds, for the half micro-batch


def measure(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    graph: ModelGraph | None = None,
    repeats: int = 5,
    seconds: float = 30.0,
    on_round: OnRound = lambda done, of: None,
    watch: Stopwatch | None = None,
    figure: Callable[[TimedTurns], float] = lambda turns: turns.least,
) -> Profile:
    """Return the layers of a model and what they cost with one micro-batch, on the device where model and inputs are.

    Rounds end after `repeats` of each kind and once the least no longer falls, at the latest after four times as many;
    or once they took so many `seconds`, but not before three of each. Another `watch` than that of the device, and
    another `figure` of a layer's turns than the least, are for comparisons.

    >>> profile = measure(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),), repeats=3)
    >>> [layer.name for layer in profile.layers], profile.crossing_bytes(1)
    (['0', '1'], 64)
    """
    graph = ModelGraph(model, inputs) if graph is None else graph
    inputs = tuple(each.clone() for each in inputs)  # a model may overwrite them
    with _put_back(model, inputs):
        rounds = _Rounds(graph, inputs, watch or _watch_of(inputs[0].device))
        kept_bytes, kept_nodes = rounds.kept_for_backward()
        total, began, leasts = 2 * (WARM_ROUNDS + repeats), time.perf_counter(), list[float]()
        for number in range(2 * (WARM_ROUNDS + MOST_TIMES_REPEATS * repeats)):
            both = number >= 2 * (WARM_ROUNDS + LEAST_REPEATS) and number % 2 == 0
            if both and (time.perf_counter() - began > seconds or (number >= total and settled(leasts))):
                break
            rounds.run(weights=number % 2 == 0, counted=number >= 2 * WARM_ROUNDS)
            if number % 2 and number >= 2 * WARM_ROUNDS:
                leasts.append(rounds.least_seconds)
            on_round(min(number + 1, total), total)
        on_round(total, total)
        evaluates, notes = _evaluates(model, graph, inputs)
    layers = [
        Layer(name=layer.name, kind=layer.kind, activation_bytes=kept_bytes[place], **rounds.figures(place, figure))
        for place, layer in enumerate(graph.layers)
    ]
    tensors = [
        Tensor(
            name=value.name,
            bytes=value.bytes,
            producer=value.producer,
            last_use=value.last_use,
            needs_gradient=value.needs_gradient,
            kept=value.node in kept_nodes or value.producer == INPUT,
        )
        for value in graph.values
    ]
    return Profile(
        layers=tuple(layers),
        tensors=tuple(tensors),
        weights=graph.weights,
        notes=(*graph.notes, *notes),
        evaluates=evaluates,
    )


class _Rounds:
    """Layers run one by one, forward and backward, with the seconds they took."""

    def __init__(self, graph: ModelGraph, inputs: tuple[torch.Tensor, ...], watch: Stopwatch) -> None:
        self._graph, self._watch = graph, watch
        self._layers = [cut_layer(graph, place) for place in range(len(graph.layers))]
        self._inputs = dict(zip(graph.inputs, inputs, strict=True))
        self._forward = [TimedTurns() for _ in self._layers]
        self._backward = [TimedTurns() for _ in self._layers]
        self._input_only = [TimedTurns() for _ in self._layers]

    def figures(self, place: int, figure: Callable[[TimedTurns], float]) -> dict[str, float]:
        """Return the seconds that layer `place` took, by a figure of its turns, and their spread."""
        turns = self._forward[place], self._backward[place], self._input_only[place]
        forward, backward, inputs = map(figure, turns)
        return {
            "forward_seconds": forward,
            "input_seconds": min(inputs, backward),
            "weight_seconds": max(backward - inputs, 0.0),
            "spread": spread_of(sum(each.median for each in turns[:2]), sum(each.least for each in turns[:2])),
        }

    @property
    def least_seconds(self) -> float:
        """The least seconds of all layers, forward and backward, in all rounds so far."""
        return math.fsum(turns.least for turns in (*self._forward, *self._backward, *self._input_only))

    def run(self, *, weights: bool, counted: bool) -> None:
        """Run one round; without `weights` only the gradients of inputs are computed."""
        done = list(self._run_forward(counted))
        gradients = {
            node: torch.ones_like(value)
            for layer, (_, given) in zip(self._layers, done, strict=True)
            for node, value in zip(layer.gives, given, strict=True)
            if node in self._graph.outputs
        }
        for place in reversed(range(len(self._layers))):
            seconds = self._run_backward(place, *done.pop(), gradients, weights=weights)
            if counted:
                (self._backward if weights else self._input_only)[place].add(seconds)

    def _run_forward(self, counted: bool) -> Iterator[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]]:
        """Yield every layer's inputs and outputs."""
        live = dict(self._inputs)
        for place, layer in enumerate(self._layers):
            taken = [live[node].detach().requires_grad_(live[node].requires_grad) for node in layer.takes]
            self._watch.start()
            given = layer.module(*taken)
            seconds = self._watch.stop()
            if counted:
                self._forward[place].add(seconds)
            live.update(zip(layer.gives, given, strict=True))
            yield taken, given

    def _run_backward(
        self,
        place: int,
        taken: list[torch.Tensor],
        given: tuple[torch.Tensor, ...],
        gradients: dict[fx.Node, torch.Tensor],
        *,
        weights: bool,
    ) -> float:
        layer = self._layers[place]
        sent_back = [(v, gradients.pop(n)) for n, v in zip(layer.gives, given, strict=True) if n in gradients]
        sent_back = [(value, gradient) for value, gradient in sent_back if value.requires_grad]
        wanted = [(node, leaf) for node, leaf in zip(layer.takes, taken, strict=True) if leaf.requires_grad]
        trained = [weight for weight in layer.module.parameters() if weight.requires_grad] if weights else []
        sources = [leaf for _, leaf in wanted] + trained
        if not sent_back or not sources:
            return 0.0
        values, grads = zip(*sent_back, strict=True)
        self._watch.start()
        found = torch.autograd.grad(values, sources, grads, allow_unused=True)
        seconds = self._watch.stop()
        for (node, _), gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                gradients[node] = gradients[node] + gradient if node in gradients else gradient
        return seconds

    def kept_for_backward(self) -> tuple[list[int], set[fx.Node]]:
        """Run forward once; return the bytes that autograd keeps of each layer's making, and the values among them.

        What several layers keep is counted where it was made.
        """
        kept_bytes, made_by = [0] * len(self._layers), dict[int, int]()
        place = 0  # the layer that is run
        nodes: dict[int, list[fx.Node]] = {}
        modules = [layer.module for layer in self._layers]
        held = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        held += [each for each in self._graph.attributes.values() if isinstance(each, torch.Tensor)]
        known = {_memory(tensor) for tensor in (*held, *self._inputs.values())}
        counted: set[int] = set()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            memory = _memory(tensor)
            if memory not in known and memory not in counted:
                counted.add(memory)
                kept_bytes[made_by.setdefault(memory, place)] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = []
            for done in self._run_forward(counted=False):
                alive.append(done)  # else memory is used again, and taken for what it was
                for node, value in zip(self._layers[place].gives, done[1], strict=True):
                    made_by.setdefault(_memory(value), place)
                    nodes.setdefault(_memory(value), []).append(node)
                place += 1
        return kept_bytes, {node for memory in counted for node in nodes.get(memory, ())}


def _watch_of(device: torch.device) -> Stopwatch:
    cuda = device.type == "cuda"
    return Stopwatch(synchronise=functools.partial(torch.cuda.synchronize, device) if cuda else None)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _put_back(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Put buffers, modes and random numbers back as they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [inputs[0].device] if inputs[0].device.type == "cuda" else []
    try:
        with modes_kept(model), torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _evaluates(model: nn.Module, graph: ModelGraph, inputs: tuple[torch.Tensor, ...]) -> tuple[bool, list[str]]:
    """Whether the graph does in eval mode what the model does."""
    whole = cut_piece(graph, 0, len(graph.layers)).module
    try:
        with torch.no_grad():
            given = [[each.clone() for each in inputs] for _ in range(2)]
            ours, theirs = whole.eval()(*given[0]), model.eval()(*given[1])
    except Exception as error:  # the model's own code, in a mode it may never have been in
        same, why = False, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    else:
        pairs = zip(_as_tuple(ours), _as_tuple(theirs), strict=False)
        same = len(_as_tuple(ours)) == len(_as_tuple(theirs)) and all(
            (mine.shape, mine.dtype) == (its.shape, its.dtype)
            and torch.allclose(mine, its, rtol=1e-3, atol=1e-5, equal_nan=True)
            for mine, its in pairs
        )
        why = "its forward takes another path"
    return same, [] if same else [f"in eval mode the model does not do what its traced graph does ({why})"]


def _as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def measure_two_sizes(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    graph: ModelGraph,
    repeats: int = 5,
    seconds: float = 30.0,
    on_round: OnRound = lambda done, of: None,
) -> Profile:
    """Return the profile of a model with one micro-batch, with the fixed part of each layer's seconds.

    A micro-batch of one sample has no half: all of its time then counts as fixed, as no size is smaller anyway.

    >>> model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(4, 4),)
    >>> profile = measure_two_sizes(model, inputs, graph=ModelGraph(model, inputs), repeats=3)
    >>> all(0 <= layer.fixed_seconds <= layer.seconds for layer in profile.layers)
    True
    """
    rounds, fewer = 2 * (WARM_ROUNDS + repeats), 2 * (WARM_ROUNDS + LEAST_REPEATS)
    total = rounds + fewer
    whole = measure(
        model, inputs, graph=graph, repeats=repeats, seconds=seconds, on_round=lambda done, of: on_round(done, total)
    )
    size = len(inputs[0]) // 2
    halves, half = tuple(each[:size] for each in inputs), None
    with contextlib.suppress(PipelineError):  # a model may not take a smaller one: BatchNorm refuses a single sample
        half = ModelGraph(model, halves) if size else None
    if half is None or half.fingerprint != graph.fingerprint:
        on_round(total, total)
        return _with_fixed(whole, [layer.seconds for layer in whole.layers])
    smaller = measure(
        model,
        halves,
        graph=half,
        repeats=LEAST_REPEATS,
        seconds=seconds * HALF_SHARE,
        on_round=lambda done, of: on_round(rounds + done, total),
    )
    ratio = len(inputs[0]) / size
    lines = [
        (ratio * less.seconds - more.seconds) / (ratio - 1)
        for more, less in zip(whole.layers, smaller.layers, strict=True)
    ]
    return _with_fixed(whole, lines)


def _with_fixed(profile: Profile, fixed: list[float]) -> Profile:
    layers = [
        dataclasses.replace(layer, fixed_seconds=min(max(part, 0.0), layer.seconds))
        for layer, part in zip(profile.layers, fixed, strict=True)
    ]
    return dataclasses.replace(profile, layers=tuple(layers))
