"""Live Gradient Compensation: its figures.

    example        lgc-1      three workers, three rounds: whose time is waited for
    skew           lgc-3      accuracy by skew (c classes a worker) and persistence (h rounds): full, fastest-k, lgc
    time_and_loss  lgc-4      loss over rounds and over time
                   lgc-5      K = 5 to 10: the frontier of time and loss
    partial_work   lgc-6      stragglers that do r of 4 blocks, with and without linear scaling
    system_sizes   lgc-sizes  5 to 40 workers
    setting                   what they share: the paper's cluster as a recipe, the lanes, means over seeds

The laboratory has LeNet in place of VGG-11, a few epochs in place of 60, and the paper's cluster: ten workers, K = 7,
batches of 32 in 4 blocks, delays of 0.05 s plus an exponential of mean 0.02 s, held for h rounds. Digits are too easy:
there nearly every cell ends at the same accuracy. Late work is `complete`, as in the paper.
"""

from __future__ import annotations

from paceline.reproduce.experiment import Experiment
from paceline.reproduce.lgc import example, partial_work, skew, system_sizes, time_and_loss

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="lgc-1",
            source="LGC, figure 1",
            question="three workers, three rounds: whose time is waited for",
            minutes=0.2,
            full_hours=0.01,
            jobs=example.jobs_of_figure_1,
            conclude=example.conclude_figure_1,
        ),
        Experiment(
            name="lgc-3",
            source="LGC, figure 3",
            question="accuracy by skew and persistence: full, fastest-k, lgc",
            minutes=9.5,
            full_hours=220,
            data=("cifar10",),
            seeds=2,
            jobs=skew.jobs_of_figure_3,
            conclude=skew.conclude_figure_3,
        ),
        Experiment(
            name="lgc-4",
            source="LGC, figure 4",
            question="loss over iterations and over time: full, fastest-k, lgc",
            minutes=2,
            full_hours=16,
            data=("cifar10",),
            jobs=time_and_loss.jobs_of_figure_4,
            conclude=time_and_loss.conclude_figure_4,
        ),
        Experiment(
            name="lgc-5",
            source="LGC, figure 5",
            question="K = 5 to 10: time against loss, fastest-k and lgc",
            minutes=2,
            full_hours=47,
            data=("cifar10",),
            jobs=time_and_loss.jobs_of_figure_5,
            conclude=time_and_loss.conclude_figure_5,
        ),
        Experiment(
            name="lgc-6",
            source="LGC, figure 6",
            question="stragglers that do r of 4 blocks: with and without linear scaling",
            minutes=3,
            full_hours=62,
            data=("cifar10",),
            jobs=partial_work.jobs_of_figure_6,
            conclude=partial_work.conclude_figure_6,
        ),
        Experiment(
            name="lgc-sizes",
            source="LGC, section III-C",
            question="5 to 40 workers: full, fastest-k, lgc",
            minutes=3,
            full_hours=47,
            data=("cifar10",),
            jobs=system_sizes.jobs_of_sizes,
            conclude=system_sizes.conclude_sizes,
        ),
    )
}
