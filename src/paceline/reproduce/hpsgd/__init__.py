"""Experiments that reproduce the figures of the paper on Hierarchical Parallel SGD.

    hpsgd-4a         accuracy over samples, several networks, 4 workers
    hpsgd-4b         the same for 4 to 16 workers
    hpsgd-5a         scale efficiency, by simulated times alone
    hpsgd-5b         seconds of an epoch
    hpsgd-6a         seconds to 40 % and to 80 % accuracy: computing, and everything else
    hpsgd-6b         the same totals for several networks
    hpsgd-analysis   section 3.2: averages and local steps in the time of a loop of Local SGD

HPSGD is shown twice: as the paper has it (`rebase` off), and as it is here by default (on). Claims are held against
the first. Two settings are shown where seconds to an accuracy count: the paper's rate of 0.01, and a rate five times
higher with another network.

    lanes      the lanes that are compared, what they train, and a lane's run
    accuracy   figures 4a and 4b
    scaling    figure 5a
    reached    when a run reached an accuracy, and which comparisons the measurements allow
    seconds    figures 5b, 6a and 6b
    analysis   section 3.2

`EXPERIMENTS` has all of them by name.
"""

from __future__ import annotations

from paceline.reproduce.experiment import Experiment
from paceline.reproduce.hpsgd import accuracy, analysis, lanes, scaling, seconds

small_network = lanes.small_network  # recipes name the network by this folder

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="hpsgd-4a",
            full_data=("cifar10",),
            source="HPSGD, figure 4a",
            question="accuracy over epochs on several networks: hpsgd, ssgd, local-sgd",
            minutes=2,
            full_hours=4000,
            data=("fashion-mnist",),
            jobs=accuracy.jobs_of_figure_4a,
            conclude=accuracy.conclude_figure_4a,
        ),
        Experiment(
            name="hpsgd-4b",
            full_data=("cifar10",),
            source="HPSGD, figure 4b",
            question="accuracy with 4 to 16 workers",
            minutes=1,
            full_hours=2000,
            seeds=2,
            jobs=accuracy.jobs_of_figure_4b,
            conclude=accuracy.conclude_figure_4b,
        ),
        Experiment(
            name="hpsgd-5a",
            source="HPSGD, figure 5a",
            question="scale efficiency with 4 to 16 workers",
            minutes=0.5,
            full_hours=0.1,
            jobs=scaling.jobs_of_figure_5a,
            conclude=scaling.conclude_figure_5a,
        ),
        Experiment(
            name="hpsgd-5b",
            full_data=("cifar10",),
            source="HPSGD, figure 5b",
            question="seconds of an epoch: ssgd, local-sgd, hpsgd, psgd",
            minutes=0.8,
            full_hours=1000,
            seeds=3,
            jobs=seconds.jobs_of_figure_5b,
            conclude=seconds.conclude_figure_5b,
        ),
        Experiment(
            name="hpsgd-6a",
            full_data=("cifar10",),
            source="HPSGD, figure 6a",
            question="seconds to 40 % and to 80 %: computing, waiting, network",
            minutes=1.5,
            full_hours=2000,
            seeds=3,
            jobs=seconds.jobs_of_figure_6a,
            conclude=seconds.conclude_figure_6a,
        ),
        Experiment(
            name="hpsgd-6b",
            full_data=("cifar10",),
            source="HPSGD, figure 6b",
            question="seconds to 40 % and to 80 % on several networks",
            minutes=2.0,
            full_hours=4000,
            seeds=3,
            jobs=seconds.jobs_of_figure_6b,
            conclude=seconds.conclude_figure_6b,
        ),
        Experiment(
            name="hpsgd-analysis",
            source="HPSGD, section 3.2",
            question="averages and steps in the time of a loop of Local SGD",
            minutes=0.1,
            full_hours=0.01,
            jobs=analysis.jobs_of_analysis,
            conclude=analysis.conclude_analysis,
        ),
    )
}
