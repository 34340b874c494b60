"""Experiments on the examples, bounds and formulas of the lecture on scaling distributed training.

    lecture-one-bit      the example vector of 1-bit SGD
    lecture-sparsifier   quantised SGD with one level: P1 (unbiased), P2 (second moment), P3 (sparse), its bits
    lecture-qsgd         s levels: second moment and bits
    lecture-tradeoff     iterations against bits, each codec at its best rate
    lecture-theorem      the bound on convex SGD, with plain and with quantised gradients
    lecture-idle         loss factors of a pipeline
    lecture-placement    layers onto devices
    lecture-trends       the table of ImageNet runs

    printed      one-bit, trends
    quantising   sparsifier, qsgd
    tradeoff, theorem
                 each the experiment of its name
    pipelines    idle, placement
    cut_models   a model cut into stages, its layers and pieces timed; benchmarks use it too

`EXPERIMENTS` has all of them by name.
"""

from __future__ import annotations

from paceline.reproduce.experiment import Experiment
from paceline.reproduce.lecture import pipelines, printed, quantising, theorem, tradeoff

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="lecture-one-bit",
            source="lecture, 1-bit SGD",
            question="the example vector: its two means, its bits",
            minutes=0.1,
            full_hours=0.01,
            jobs=printed.jobs_of_one_bit,
            conclude=printed.conclude_one_bit,
        ),
        Experiment(
            name="lecture-sparsifier",
            source="lecture, quantised SGD",
            question="one level: unbiased, second moment, sparsity, bits",
            minutes=0.3,
            full_hours=0.05,
            jobs=quantising.jobs_of_sparsifier,
            conclude=quantising.conclude_sparsifier,
        ),
        Experiment(
            name="lecture-qsgd",
            source="lecture, controllable quantisation",
            question="s levels: second moment and bits against their bounds",
            minutes=0.2,
            full_hours=0.05,
            jobs=quantising.jobs_of_qsgd,
            conclude=quantising.conclude_qsgd,
        ),
        Experiment(
            name="lecture-tradeoff",
            source="lecture, iteration-communication trade-off",
            question="iterations against bits, each codec at its best rate",
            minutes=1,
            full_hours=0.2,
            jobs=tradeoff.jobs_of_tradeoff,
            conclude=tradeoff.conclude_tradeoff,
        ),
        Experiment(
            name="lecture-theorem",
            source="lecture, SGD convergence theorem",
            question="convex SGD against its bound, plain and quantised",
            minutes=0.8,
            full_hours=0.2,
            jobs=theorem.jobs_of_theorem,
            conclude=theorem.conclude_theorem,
        ),
        Experiment(
            name="lecture-idle",
            source="lecture, loss factor",
            question="idle share of a pipeline: formula, count, prediction",
            minutes=0.3,
            full_hours=0.1,
            jobs=pipelines.jobs_of_idle,
            conclude=pipelines.conclude_idle,
            timed=True,
        ),
        Experiment(
            name="lecture-placement",
            source="lecture, device placement",
            question="the slowest stage: equal counts, torchgpipe, the exact cut",
            minutes=1,
            full_hours=0.2,
            jobs=pipelines.jobs_of_placement,
            conclude=pipelines.conclude_placement,
            timed=True,
        ),
        Experiment(
            name="lecture-trends",
            source="lecture, ImageNet competition trends",
            question="the printed speed-ups, and those of the minutes",
            minutes=0.1,
            full_hours=0.01,
            jobs=printed.jobs_of_trends,
            conclude=printed.conclude_trends,
        ),
    )
}
