"""How accuracies and batches are written, and the remarks on what is not as in the paper."""

from __future__ import annotations

from paceline.reproduce.experiment import ExperimentPlan

SMALLER = (
    "A small CNN on 16,384 images of Fashion-MNIST at 14x14 in place of AlexNet on ImageNet, 64 epochs, not 100; "
    "batches of 128, 2048, 8192 and 16384 stand for 512, 4096, 8192 and 16384 or more."
)
SAME_WARMUP = "The warm-up is a tenth of the steps for all; the paper's is 0 to 5 of 100 epochs."
IN_PLACE_OF_RESNET = (
    "A small CNN with batch normalisation on 16,384 images of Fashion-MNIST at 14x14 in place of ResNet-50 on "
    "ImageNet, which two cores cannot train; batches of 128, 2048 and 8192 stand for 256, 8K and 32K.",
    "The warm-up is a tenth of the steps for all; the paper's is 0 to 12 of 100 epochs.",
)
TRUST = (
    "LARS has trust 0.1 and leaves biases out, so its rates are a hundredth of the paper's, which has trust 0.001: a "
    "layer moves by rate times trust of its length."
)
CHOSEN = "Rates are chosen on training images held out; the paper shows the images that it chooses on."
FULL_SIZE = (
    "The paper's networks at CIFAR size on 49,152 images of Fashion-MNIST, 28x28, in place of ImageNet; its batches, "
    "epochs, rates, warm-up and trust."
)


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


def remarks_for(plan: ExperimentPlan, *more: str, smaller: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return what is not as in the paper, at this size; `smaller` says how the laboratory differs elsewhere."""
    if plan.size == "full":
        return (FULL_SIZE,)
    return (*((SMALLER, SAME_WARMUP) if smaller is None else smaller), *more)
