"""How a layer's time depends on the size of the micro-batch: measured at two sizes, a line through both.

    seconds(b) = fixed + b * slope        fixed = 2 seconds(b / 2) - seconds(b), and no less than 0

Advice on the number of micro-batches needs it: with twice as many, half as large, each takes more than half as long.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from paceline.pipeline.errors import PipelineError
from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.layers import Profile
from paceline.pipeline.measuring import LEAST_REPEATS, WARM_ROUNDS, OnRound, measure

HALF_SHARE = 0.5  # of the seconds, for the half micro-batch


def measure_two_sizes(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    graph: ModelGraph,
    repeats: int = 5,
    seconds: float = 30.0,
    on_round: OnRound = lambda done, of: None,
) -> Profile:
    """The profile of a model with one micro-batch, with the fixed part of each layer's seconds.

    A micro-batch of one sample has no half: all of its time is then told as fixed, which no other size can be smaller
    than anyway.

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
    half = _traced(model, tuple(each[:size] for each in inputs)) if size else None
    if half is None or half.fingerprint != graph.fingerprint:
        on_round(total, total)
        return _with_fixed(whole, [layer.seconds for layer in whole.layers])
    smaller = measure(
        model,
        tuple(each[:size] for each in inputs),
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


def _traced(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> ModelGraph | None:
    """The graph for a smaller micro-batch; None if the model does not take one: BatchNorm refuses a single sample."""
    try:
        return ModelGraph(model, inputs)
    except PipelineError:
        return None


def _with_fixed(profile: Profile, fixed: list[float]) -> Profile:
    layers = [
        dataclasses.replace(layer, fixed_seconds=min(max(part, 0.0), layer.seconds))
        for layer, part in zip(profile.layers, fixed, strict=True)
    ]
    return dataclasses.replace(profile, layers=tuple(layers))
