"""Accuracies, batches and remarks on what is not as in the paper are written here, for all experiments on LARS."""

from __future__ import annotations

from paceline.reproduce.experiment import ExperimentPlan

SMALLER = (
    "A small CNN stands for AlexNet, and 16,384 images of Fashion-MNIST at 14x14 stand for ImageNet. Runs have 64 "
    "epochs, not 100. Batches of 128, 2048, 8192 and 16384 stand for 512, 4096, 8192 and 16384 or more."
)
SAME_WARMUP = "The warm-up is a tenth of the steps for all; the paper's is 0 to 5 of 100 epochs."
IN_PLACE_OF_RESNET = (
    "A small CNN with batch normalisation stands for ResNet-50, which two cores cannot train, and 16,384 images of "
    "Fashion-MNIST at 14x14 stand for ImageNet. Batches of 128, 2048 and 8192 stand for 256, 8K and 32K.",
    "The warm-up is a tenth of the steps for all; the paper's is 0 to 12 of 100 epochs.",
)
TRUST = (
    "LARS has trust 0.1 and leaves biases out, so its rates are a hundredth of the paper's, which has trust 0.001: a "
    "layer moves by rate times trust of its length."
)
CHOSEN = "Rates are chosen on training images held out; the paper shows the images that it chooses on."
FULL_SIZE = (
    "The paper's networks at CIFAR size are trained on 49,152 images of Fashion-MNIST, 28x28, in place of ImageNet, "
    "with the paper's batches, epochs, rates, warm-up, augmentation and trust."
)
FULL_AUGMENTATION = (
    "The paper does not print the augmentation of AlexNet and of GoogLeNet with SGD. It is minimal here, as in the "
    "files of Caffe that the paper names, which crop and mirror the images."
)
FULL_START = "The warm-up of SGD begins at a rate of 0.001 in the paper, and near zero here."


def points(value: float | None) -> str:
    """Write an accuracy in per cent, or a difference of two.

    >>> points(86.04), points(None)
    ('86.0 %', 'none')
    """
    return "none" if value is None else f"{value:.1f} %"


def batch_text(batch: float) -> str:
    """Write a batch size as the paper does.

    >>> batch_text(512), batch_text(8192)
    ('512', '8K')
    """
    return f"{batch:g}" if batch < 1024 or batch % 1024 else f"{batch / 1024:g}K"


def remarks_for(
    plan: ExperimentPlan,
    *laboratory: str,
    smaller: tuple[str, ...] = (SMALLER, SAME_WARMUP),
    full: tuple[str, ...] = (FULL_AUGMENTATION,),
) -> tuple[str, ...]:
    """Return the remarks on what is not as in the paper: `smaller`, then `laboratory`; or those of the full size."""
    return (FULL_SIZE, *full) if plan.size == "full" else (*smaller, *laboratory)
