"""Ten experiments are the tables and figures of LARS's paper, Large Batch Training of Convolutional Networks.

    lars-table-1    SGD as the batch grows, with and without batch normalisation       growing_batch
    lars-table-2    |w| / |gradient| of AlexNet's layers before the first step         initial_ratios
    lars-table-3    LARS as the batch grows, beside SGD                                growing_batch
    lars-table-4    LARS with minimal and with extended augmentation                   augmentation
    lars-table-5    more epochs at a large batch                                       more_epochs
    lars-table-6    GoogLeNet without normalisation: more epochs, a longer warm-up     googlenet
    lars-figure-1   the gap between test and training loss, small and large batch      training_curves
    lars-figure-2   LARS at a large batch: accuracy and the layers' ratios by epoch    training_curves
    lars-figure-3   accuracy over the rate                                             rate_plateau
    lars-figure-4   accuracy over the epochs as the batch grows                        augmentation

All but table 2 are made of cells. A cell is a network, an optimiser, a batch and a rate, and it is one training for
each seed; cells that several experiments have are one job.

    networks   the paper's networks, what stands for each of them, and how the paper trains it
    cells      a cell, and the settings of its jobs
    grid       which batches and rates tables 1 and 3 have
    outcomes   the accuracy of a cell, the best of several, a curve
    wording    accuracies, batches, and remarks on what is not as in the paper
    accuracy_by_batch
               a table and a chart of accuracies by batch

The laboratory has a small CNN in place of AlexNet, Fashion-MNIST averaged to 14x14 pixels in place of ImageNet, 16,384
images and 64 epochs: 128 steps at a batch of 8,192, where the paper's runs have 15,600. Batches stand for each other:

    paper    512     4096    8192    16384, 32768
    ours     128     2048    8192    16384 (all images: one step an epoch)

Every rate is one run. The best rate is chosen on training images that no run trains on, and tables show the accuracy on
the test images; the paper chooses on what it shows.
"""

from __future__ import annotations

from paceline.reproduce.experiment import Experiment
from paceline.reproduce.lars import (
    augmentation,
    googlenet,
    growing_batch,
    initial_ratios,
    more_epochs,
    rate_plateau,
    training_curves,
)

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="lars-table-1",
            source="LARS, table 1",
            question="SGD as the batch grows, with and without normalisation",
            minutes=3.9,
            full_hours=190,
            data=("fashion-mnist",),
            jobs=growing_batch.jobs_of_table_1,
            conclude=growing_batch.conclude_table_1,
        ),
        Experiment(
            name="lars-table-2",
            source="LARS, table 2",
            question="weights over gradients, layer by layer",
            minutes=0.4,
            full_hours=0.01,
            data=("cifar10",),
            jobs=initial_ratios.jobs_of_table_2,
            conclude=initial_ratios.conclude_table_2,
        ),
        Experiment(
            name="lars-table-3",
            source="LARS, table 3",
            question="LARS as the batch grows, beside SGD",
            minutes=7.8,
            full_hours=210,
            data=("fashion-mnist",),
            jobs=growing_batch.jobs_of_table_3,
            conclude=growing_batch.conclude_table_3,
        ),
        Experiment(
            name="lars-table-4",
            source="LARS, table 4",
            question="minimal and extended augmentation",
            minutes=1.8,
            full_hours=760,
            data=("fashion-mnist",),
            jobs=augmentation.jobs_of_table_4,
            conclude=augmentation.conclude_table_4,
        ),
        Experiment(
            name="lars-table-5",
            source="LARS, table 5",
            question="more epochs at a large batch",
            minutes=1.6,
            full_hours=820,
            data=("fashion-mnist",),
            jobs=more_epochs.jobs_of_table_5,
            conclude=more_epochs.conclude_table_5,
        ),
        Experiment(
            name="lars-table-6",
            source="LARS, table 6",
            question="GoogLeNet without normalisation",
            minutes=5,
            full_hours=1230,
            data=("fashion-mnist",),
            jobs=googlenet.jobs_of_table_6,
            conclude=googlenet.conclude_table_6,
        ),
        Experiment(
            name="lars-figure-1",
            source="LARS, figure 1",
            question="gap between test and training loss",
            minutes=1.3,
            full_hours=43,
            data=("fashion-mnist",),
            jobs=training_curves.jobs_of_figure_1,
            conclude=training_curves.conclude_figure_1,
        ),
        Experiment(
            name="lars-figure-2",
            source="LARS, figure 2",
            question="LARS at a large batch, over the epochs",
            minutes=1.3,
            full_hours=17,
            data=("fashion-mnist",),
            jobs=training_curves.jobs_of_figure_2,
            conclude=training_curves.conclude_figure_2,
        ),
        Experiment(
            name="lars-figure-3",
            source="LARS, figure 3",
            question="accuracy over the rate",
            minutes=2.7,
            full_hours=140,
            data=("fashion-mnist",),
            jobs=rate_plateau.jobs_of_figure_3,
            conclude=rate_plateau.conclude_figure_3,
        ),
        Experiment(
            name="lars-figure-4",
            source="LARS, figure 4",
            question="accuracy over the epochs as the batch grows",
            minutes=0.9,
            full_hours=380,
            data=("fashion-mnist",),
            jobs=augmentation.jobs_of_figure_4,
            conclude=augmentation.conclude_figure_4,
        ),
    )
}
