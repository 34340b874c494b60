"""The options of `python -m benchmarks`; every benchmark reads those it knows."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run benchmarks by name. Tables go to stdout, progress to stderr, raw numbers to <out>/<name>.json."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which; 'all' runs all, none lists them."""
    quick: bool = False
    """A tiny version that takes seconds: shows that it runs, its figures mean nothing."""
    seeds: int | None = None
    """claims, codec-losses, large-batch, pruning, lgc-ranks, trainer: runs that are averaged; 3 if not
    given. shares: runs with jitter and of accuracy; 5 and 3 if not given. late-weights, choice-of-k:
    5 if not given."""
    only: str = ""
    """With commas between; empty: all. choice-of-k: delay models. gradients, pipeline-balance, plan-beside-load:
    networks. server-memory: sizes. corrupt: files, without commas in their names. lgc-ranks, shares: parts. soak:
    words in the names of faults. diagnosis: ddp, server. what-if: numbers of runs, from 0 on. late-weights:
    data sets."""
    strategies: str = ""
    """choice-of-k, server-memory: strategies, with commas between; empty: all."""
    workers: str = ""
    """server-memory: numbers of workers, with commas between; empty: all."""
    rounds: int | None = None
    """cluster, lgc-ranks: rounds of each run that trains; 300 and, by part, 180, 150 and 300 if not given."""
    repeat: int | None = None
    """cluster: runs of each strategy; 2 if not given. pipeline-*, lgc-ranks, shares: turns, of which the best counts.
    plan-beside-load: turns, of which the worst counts; 3 if not given."""
    faults: int | None = None
    """soak: how many; 1000 if not given."""
    seconds_per_fault: float = 0.0
    """soak: least time from one fault to the next."""
    seed: int = 0
    """soak: which faults, when and against whom. pipeline-*: of weights, samples, and models that are drawn.
    what-if: of the runs."""
    epochs: int | None = None
    """large-batch, pruning: epochs of each run; 64 and 50 if not given."""
    batches: str = ""
    """large-batch: batch sizes, with commas between; 128,512,2048,8192 if not given."""
    rates: str = ""
    """large-batch: learning rates that every cell tries, SGD's as LARS's, with commas between."""
    data: str = ""
    """large-batch, pruning: data set; fashion-mnist and cifar10 if not given."""
    model: str = ""
    """large-batch: small-cnn, small-cnn-bn, or a network of paceline's; small-cnn if not given."""
    images: int | None = None
    """pruning: so many of the training images; 50000 if not given."""
    shrink: int | None = None
    """pruning: images are averaged over squares of so many pixels; 2 if not given."""
    rate: float | None = None
    """pruning: the learning rate that runs begin with; 0.05 if not given."""
    fewer: float | None = None
    """pruning: share of the epochs that the control, fewer-epochs, leaves out; 0.3 if not given."""
    models: str = ""
    """pruning: networks, with commas between; empty: all."""
    policies: str = ""
    """pruning: policies, with commas between; empty: all."""
    first_seed: int = 0
    """pruning, trainer: the seed of the first of the runs that are averaged. shares, late-weights, choice-of-k: the
    same; 200 if it is 0."""
    jobs: int | None = None
    """pruning, late-weights: runs at once, one thread each; as many as there are cores if not given."""
    resume: bool = True
    """pruning: take up the runs that are among the raw numbers; --no-resume runs all that are asked for."""
    layers: int | None = None
    """pipeline-placement: layers of the model; 1000 if not given."""
    devices: int | None = None
    """pipeline-placement: devices it is placed on; 64 if not given."""
    microbatch: int | None = None
    """pipeline-balance, plan-beside-load, pipeline-idle: samples of a micro-batch; 8, 4 to 64 and 256 if not given."""
    microbatches: str = ""
    """pipeline-idle: numbers of micro-batches, with commas between; 1,2,4,8,16 if not given."""
    out: str = "runs/bench"
    """Folder for the raw numbers."""


def chosen(text: str, choices: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Those of the choices that a list with commas names, in the order of the choices; all if it is empty.

    >>> chosen("lgc", ("fastest-k", "lgc"), "strategy")
    ('lgc',)
    >>> chosen("lgd", ("fastest-k", "lgc"), "strategy")
    Traceback (most recent call last):
    ValueError: unknown strategy 'lgd'; choose from fastest-k, lgc
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(choices)}")
    return tuple(choice for choice in choices if choice in names) if names else choices
