"""scikit-learn's digits: small enough for a first try, and there without a network.

The split is fixed: it does not follow the seed, so test accuracies of different runs can be compared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data import Request
from paceline.data.samples import Dataset, Pixels, from_pixels
from paceline.randomness import uniform

TEST_SAMPLES = 297


def load_digits(request: Request) -> Dataset:
    """Load 1,500 digits to train on and 297 to test on, 8x8 pixels.

    >>> digits = load_digits(Request())
    >>> len(digits.train), len(digits.test), digits.input_shape
    (1500, 297, (1, 8, 8))
    """
    from sklearn.datasets import load_digits as bundled_digits

    bundle = bundled_digits()
    # Values 0..16. Dividing by 16 first would change nothing: normalising removes every scale.
    images = bundle.images.astype(np.uint8)[:, None]
    labels = bundle.target.astype(np.int64)
    test = _test_mask(labels)
    return from_pixels(
        "digits",
        Pixels(images=images[~test], labels=labels[~test]),
        Pixels(images=images[test], labels=labels[test]),
        classes=10,
    )


def _test_mask(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pick evenly spaced test samples among all, sorted by class and in random order within a class.

    sorted   0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2
    test           ^           ^           ^       so each class gets its share, to within one sample
    """
    order = np.lexsort((uniform(0, np.arange(len(labels))), labels))
    picks = ((np.arange(TEST_SAMPLES) + 0.5) * len(labels) / TEST_SAMPLES).astype(np.int64)
    mask = np.zeros(len(labels), dtype=np.bool_)
    mask[order[picks]] = True
    return mask
