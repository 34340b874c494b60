"""The paper has four networks; this file says which models stand for them, and how the paper trains them.

    network      paper        laboratory         warm-up, epochs                augmentation
    plain        AlexNet      small-cnn          2.5 with SGD, 2 with LARS      minimal
    normed       AlexNet-BN   small-cnn-bn       none with SGD, 5 with LARS     minimal
    residual     ResNet-50    small-cnn-bn       table 4, by batch: 0 to 12     minimal or extended
    inception    GoogLeNet    small-googlenet    table 6, by batch: 0 to 110    minimal with SGD, extended with LARS

The last two columns hold at full size. The paper prints no augmentation of AlexNet, of AlexNet-BN and of GoogLeNet with
SGD. They are trained with minimal augmentation here, because the files of Caffe that the paper names for them
(bvlc_alexnet, AlexNet_bn and bvlc_googlenet) crop and mirror the images.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.reproduce.large_batch_training import WITH_SGD
from paceline.reproduce.published import LARS_TABLE_1_WARMUP, LARS_TABLE_3_WARMUP, LARS_TABLE_4, LARS_TABLE_6

Augment: TypeAlias = Literal["none", "minimal", "extended"]

PLAIN, NORMED, RESIDUAL, INCEPTION = "plain", "normed", "residual", "inception"
PAPER_NETWORK = {PLAIN: "alexnet", NORMED: "alexnet-bn"}  # in tables 1 and 3
SHOWN = {PLAIN: "AlexNet", NORMED: "AlexNet-BN", RESIDUAL: "ResNet-50", INCEPTION: "GoogLeNet"}
LABORATORY_MODEL = {
    PLAIN: "small-cnn",
    NORMED: "small-cnn-bn",
    RESIDUAL: "small-cnn-bn",
    INCEPTION: "small-googlenet",
}
FULL_MODEL = {PLAIN: "alexnet", NORMED: "alexnet-bn", RESIDUAL: "resnet50", INCEPTION: "plain-googlenet"}


def paper_warmup_epochs(network: str, optimizer: str, batch: int) -> float:
    """Return the epochs of warm-up that the paper gives a run.

    >>> paper_warmup_epochs("plain", "SGD", 4096), paper_warmup_epochs("residual", "LARS", 32768)
    (2.5, 12)
    """
    if network in PAPER_NETWORK:
        return (LARS_TABLE_1_WARMUP if optimizer == WITH_SGD else LARS_TABLE_3_WARMUP)[PAPER_NETWORK[network]]
    if network == RESIDUAL:
        by_batch = {row[0]: row[2] for row in LARS_TABLE_4}
    else:
        first, *others = LARS_TABLE_6  # the first row is the only one with SGD
        by_batch = {row[0]: row[3] for row in ([first] if optimizer == WITH_SGD else others)}
    return by_batch[batch] or 0


def paper_augmentation(network: str, optimizer: str) -> Augment:
    """Return the augmentation of the paper's runs, where a table has one.

    Table 4 has both for ResNet-50. Table 5 has the extended one: its 74.4 % in 100 epochs is that of table 4.

    >>> paper_augmentation("inception", "LARS"), paper_augmentation("inception", "SGD")
    ('extended', 'minimal')
    """
    return "extended" if network == RESIDUAL or (network == INCEPTION and optimizer != WITH_SGD) else "minimal"
