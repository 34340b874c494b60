"""Data fine-pruning: its figures, formulas and tables.

    plateaus       pruning-1            test loss and accuracy over the epochs: a plateau after each change of the rate
    sample_losses  pruning-2            the losses of the same samples in two trainings
    schedules      pruning-3            an example of a schedule
                   pruning-formulas     how many epochs are pruned: formulas (3) and (4) beside the schedule itself
    tables         pruning-table-1      time with and without pruning
                   pruning-table-2      accuracy with and without pruning; the same runs
    overhead       pruning-overhead     what pruning itself costs in 200 epochs
    bad_samples    pruning-bad-samples  whether other trainings and networks prune the same samples (its future work)
    setting                             what they share: how large a training is, its seeds, and the remarks on both

The laboratory has LeNet, which is one of the paper's ten networks, on CIFAR-10 made smaller. The paper states neither
how many samples sit out (PruningNum) nor the tolerance: ours are in `pruning_training.fine_settings`.
"""

from __future__ import annotations

from paceline.reproduce.experiment import Experiment
from paceline.reproduce.pruning import bad_samples, overhead, plateaus, sample_losses, schedules, tables

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="pruning-1",
            source="Data fine-pruning, figure 1",
            question="test loss and accuracy over the epochs: plateaus between changes of the rate",
            minutes=2.5,
            full_hours=40,
            data=("cifar10",),
            jobs=plateaus.jobs_of_figure_1,
            conclude=plateaus.conclude_figure_1,
        ),
        Experiment(
            name="pruning-2",
            source="Data fine-pruning, figure 2",
            question="the losses of the same samples in two trainings",
            minutes=0.7,
            full_hours=40,
            data=("cifar10",),
            seeds=2,
            jobs=sample_losses.jobs_of_figure_2,
            conclude=sample_losses.conclude_figure_2,
        ),
        Experiment(
            name="pruning-3",
            source="Data fine-pruning, figure 3",
            question="an example of a schedule",
            minutes=0.2,
            full_hours=0.01,
            jobs=schedules.jobs_of_figure_3,
            conclude=schedules.conclude_figure_3,
        ),
        Experiment(
            name="pruning-formulas",
            source="Data fine-pruning, formulas (2) to (7)",
            question="how many epochs are pruned: the formulas, and the schedule itself",
            minutes=0.2,
            full_hours=0.01,
            jobs=schedules.jobs_of_formulas,
            conclude=schedules.conclude_formulas,
        ),
        Experiment(
            name="pruning-table-1",
            source="Data fine-pruning, table 1",
            question="time with and without pruning",
            minutes=4.5,
            full_hours=1500,
            data=("cifar10",),
            timed=True,
            jobs=tables.jobs_of_tables,
            conclude=tables.conclude_table_1,
        ),
        Experiment(
            name="pruning-table-2",
            source="Data fine-pruning, table 2",
            question="accuracy with and without pruning",
            minutes=4.5,
            full_hours=1500,
            data=("cifar10",),
            timed=True,
            jobs=tables.jobs_of_tables,
            conclude=tables.conclude_table_2,
        ),
        Experiment(
            name="pruning-overhead",
            source="Data fine-pruning, section 5",
            question="what pruning itself costs in 200 epochs",
            minutes=0.3,
            full_hours=0.01,
            timed=True,
            jobs=overhead.jobs_of_overhead,
            conclude=overhead.conclude_overhead,
        ),
        Experiment(
            name="pruning-bad-samples",
            full_data=("cifar10",),
            source="Data fine-pruning, section 6",
            question="whether other trainings and networks prune the same samples",
            minutes=0.6,
            full_hours=100,
            seeds=2,
            jobs=bad_samples.jobs_of_bad_samples,
            conclude=bad_samples.conclude_bad_samples,
        ),
    )
}
