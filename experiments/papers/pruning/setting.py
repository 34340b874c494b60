"""What the experiments on pruning share: the paper's numbers, the remarks, and seeds of trainings that are compared."""

from __future__ import annotations

import math

from experiments.core.story import Size

CIFAR_SAMPLES, PAPER_BATCH = 50_000, 128
NO_FIGURE = "not readable: the text has no figures"
SMALLER = "LeNet learns {images:,} images of CIFAR-10 in {epochs} epochs, in place of 50,000 in 200."
NOT_STATED = "The paper states neither PruningNum nor the tolerance, the block or the count: these are ours."


def trainings(size: Size) -> dict[str, int]:
    """Return by how much the seed of a training is above the size's: where these are compared, one is not enough.

    >>> trainings(Size(seeds=(200,))), trainings(Size(seeds=(200, 201, 202)))
    ({'training': 0, 'another training': 1}, {'training': 0})
    """
    return {"training": 0} | ({} if len(size.seeds) > 1 else {"another training": 1})


def written(value: float, style: str, unit: str = "") -> str:
    """Write a figure in a style; one that is missing is 'none'.

    >>> written(0.431, "+.2f"), written(11.8, ".2f", " %"), written(math.nan, ".3f")
    ('+0.43', '11.80 %', 'none')
    """
    return "none" if math.isnan(value) else f"{value:{style}}{unit}"
