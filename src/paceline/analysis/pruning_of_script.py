"""The page on pruning for a training loop of one's own.

    pruning = paceline.FinePruning(len(dataset), batch_size=128)
    ...                                                             # train with it
    paceline.pruning_page(pruning, dataset, "pruning.html", model=model, classes=["cat", "dog"])

The sampler knows who sat out, the data set has images and labels, and the trained model says what it thinks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.analysis.pruning import BATCH, predictions, settings_of
from paceline.files import write_file
from paceline.reports import pruning_page as page
from paceline.traces.pruning_record import PruningRecord

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data.pruning.sampler import PrunedBatches


def pruning_page(
    pruning: PrunedBatches,
    dataset: torch.utils.data.Dataset[Any],
    path: str | Path,
    *,
    model: nn.Module,
    classes: Sequence[str] = (),
    most: int = 12,
    title: str = "paceline: who is pruned",
) -> Path:
    """Write a page that shows which samples a sampler left out again and again, and whose label looks wrong.

    `dataset` gives (input, label) for each number, the same for the same number: leave random augmentation out of it.
    `model` gives a score for each class; it is asked in eval mode, where it is. `classes` are their names, 0, 1, ...
    if there are none; `most` is how many images a row may have.

    >>> import tempfile, torch, paceline
    >>> dataset = torch.utils.data.TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 4)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    >>> pruning = paceline.InfoBatch(40, batch_size=8, epochs=8)
    >>> for epoch in range(3):
    ...     for batch in pruning:
    ...         loss = pruning.observe(torch.rand(len(batch)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = pruning_page(pruning, dataset, Path(folder, "pruning.html"), model=model)
    ...     "<h1>" in written.read_text(encoding="utf-8")
    True
    """
    record = record_of(pruning, dataset, model=model, classes=classes)
    images = {number: _array(dataset[number][0]) for number in page.shown(record, most=most).numbers}
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"cannot write the page to {target}: give a file in a folder that is there")
    return write_file(target, page.pruning_page(record, images, title=title, most=most))


def record_of(
    pruning: PrunedBatches, dataset: torch.utils.data.Dataset[Any], *, model: nn.Module, classes: Sequence[str] = ()
) -> PruningRecord:
    """The record of a sampler, its data set and the trained model; `write` keeps it, and `inspect-pruning` reads it.

    >>> import torch, paceline
    >>> pruning = paceline.InfoBatch(5, batch_size=2, epochs=8)
    >>> record_of(pruning, [(torch.zeros(3), 0)] * 4, model=torch.nn.Linear(3, 2))
    Traceback (most recent call last):
    ValueError: the data set has 4 samples, and the sampler is over 5: give the data set that it drew from
    """
    from torch.utils.data import DataLoader

    samples = len(dataset)  # type: ignore[arg-type]
    if samples != len(pruning.times_pruned):
        raise ValueError(
            f"the data set has {samples:,} samples, and the sampler is over {len(pruning.times_pruned):,}: "
            "give the data set that it drew from"
        )
    found = predictions(model, DataLoader(dataset, batch_size=BATCH))
    last = int(max(found["label"].max(), found["guess"].max()))
    return PruningRecord(
        policy=pruning.policy.name,
        settings=settings_of(pruning.policy),
        epochs=pruning.epoch - 1,
        classes=tuple(classes) or tuple(map(str, range(last + 1))),
        times_pruned=pruning.times_pruned.copy(),
        difficulty=pruning.difficulty(),
        **found,
    )


def _array(image: Any) -> Any:
    """An image as an array, if it can be one."""
    import numpy as np

    return image.detach().cpu().numpy() if hasattr(image, "detach") else np.asarray(image)
