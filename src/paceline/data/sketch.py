"""Whether two processes have the same data: how many samples, and some of their targets.

Server and workers, and the ranks of a launch, each load a data set by its name. Where a factory splits at random, or
where files differ, each would train on samples that the others test with, and nothing would show it. So they compare
a sketch of what they loaded before anything is trained. It costs the same for any number of samples: some targets that
lie evenly among all, of samples that must be read one by one only a few, and of those only test samples, since what is
read for training may be drawn anew.

Numbers are compared as far as machines compute them alike: a mean that was taken off targets may differ in its last
bits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from paceline.data.samples import Dataset, Samples
from paceline.decoding import Count, decode

MOST_TARGETS = 256
CLOSE, CLOSE_TO_ZERO = 1e-4, 1e-6  # of a number, and of the largest

Targets: TypeAlias = tuple[float | None, ...]  # None stands for what is not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSketch:
    """What is compared of training or test samples."""

    samples: Count
    targets: Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSketch:
    """What is compared of a data set."""

    train: PartSketch
    test: PartSketch


def sketch_of(dataset: Dataset) -> dict[str, Any]:
    """Return a data set's sketch as plain values.

    >>> few = Samples(inputs=torch.zeros(3, 2), targets=torch.tensor([4, 1, 2]))
    >>> sketch_of(Dataset(name="few", train=few, test=few, classes=5))["test"]
    {'samples': 3, 'targets': (4.0, 1.0, 2.0)}
    """
    parts = {"train": dataset.train, "test": dataset.test}
    return asdict(DataSketch(**{name: _part(part, name) for name, part in parts.items()}))


def _part(samples: Samples, name: str) -> PartSketch:
    if samples.reads and name == "train":
        return PartSketch(samples=len(samples), targets=())
    found = samples.some_targets(MOST_TARGETS)
    rows = found.reshape(len(found), -1).double()
    if rows.shape[1] == 0:
        return PartSketch(samples=len(samples), targets=())
    place = torch.arange(len(rows)) * 7919 % rows.shape[1]  # of a sequence another place each: many begin alike
    numbers = rows[torch.arange(len(rows)), place].tolist()
    return PartSketch(samples=len(samples), targets=tuple(each if math.isfinite(each) else None for each in numbers))


def data_difference(ours: dict[str, Any], theirs: dict[str, Any], *, here: str = "here", there: str) -> str:
    """Return how data differ from others by their sketches, "" if they do not; `here` and `there` say where each are.

    >>> one, other = ({"train": {"samples": n, "targets": []}, "test": {"samples": 9, "targets": []}} for n in (5, 6))
    >>> data_difference(one, other, there="on the server")
    '5 training samples here, and 6 on the server'
    """
    mine, others = decode(DataSketch, ours), decode(DataSketch, theirs)
    for kind, one, other in (("training", mine.train, others.train), ("test", mine.test, others.test)):
        if one.samples != other.samples:
            return f"{one.samples:,} {kind} samples {here}, and {other.samples:,} {there}"
        if len(one.targets) != len(other.targets):
            return f"{kind} targets {here} that are of another shape or kind {there}"
        largest = max((abs(each) for each in other.targets if each is not None), default=0.0)
        pairs = list(zip(one.targets, other.targets, strict=True))
        differ = [(a, b) for a, b in pairs if not _alike(a, b, largest)]
        if differ:
            (a, b), some = differ[0], f"{len(differ)} of {len(pairs)} {kind} samples that were compared"
            return f"other targets in {some}, such as {_number(a)} {here}, and {_number(b)} {there}"
    return ""


def _alike(one: float | None, other: float | None, largest: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE_TO_ZERO * largest)


def _number(value: float | None) -> str:
    return "one that is not finite" if value is None else f"{value:g}"


def refusal(name: str, difference: str) -> str:
    """Return why another data set is refused, in one sentence, with what to do.

    >>> refusal("my_data:load", "5 training samples here, and 6 on the server")
    "data set 'my_data:load' has 5 training samples here, and 6 on the server: every process must load the same; ..."
    """
    return (
        f"data set {name!r} has {difference}: every process must load the same; give all of them the same files, and "
        "let a random split follow from the `seed` that the factory is given (random_state=seed)"
    )
