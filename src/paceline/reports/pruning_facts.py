"""A record of pruning in numbers, sentences and tables: who was pruned again and again, and of which class.

"Most pruned" goes by times pruned and "hardest" by difficulty. They may be the same samples (a policy that leaves out
the hard ones) or opposite ones (a policy that leaves out the easy ones); which of both is found in the record, by
whether difficulty rises with times pruned, and not from the policy's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.quantities import UNKNOWN, loss_text, percent_text
from paceline.reports.table import PlainTable
from paceline.traces.label_errors import LEAST_TRUST, chance_probability, find_label_errors, label_trust, looks_wrong
from paceline.traces.pruning_record import PruningRecord

OFTEN = 0.1  # those pruned most often are about so large a share of all samples
MOST_BINS = 24
FEWEST_SAMPLES = 5  # of a smaller class nothing is said
CAUTION = (
    "A label looks wrong where the trained model is surer of another class than it is, on average, of samples labelled "
    "so (confident learning). The model was trained on these labels: what it has learned by heart it does not "
    "contradict, and a rare sample may look wrong though it is right. A list to look at, not one to delete."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """The samples, the prunings and the labels that look wrong of one class.

    >>> ClassFacts(name="cat", number=0, samples=10, share=0.5, prunings=30, pruned_share=0.75, wrong=1).beyond
    1.5
    """

    name: str
    number: int
    samples: int
    share: float
    prunings: int
    pruned_share: float
    wrong: int

    @property
    def beyond(self) -> float:
        """Share of the prunings over share of the samples: above 1, the class is pruned more than others."""
        return self.pruned_share / self.share if self.share else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Samples that were pruned so many times, and how many of their labels look wrong.

    >>> Bin(first=3, last=4, samples=10, wrong=2).text
    '3-4'
    """

    first: int
    last: int
    samples: int
    wrong: int

    @property
    def text(self) -> str:
        """The first and the last number of times as text."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class PruningFacts:
    """The numbers of a record, computed when they are first used.

    >>> from paceline.traces.pruning_record import empty_record
    >>> PruningFacts(empty_record()).prunings
    0
    """

    def __init__(self, record: PruningRecord) -> None:
        self.record = record
        self.prunings = record.prunings

    @cached_property
    def why_not_judged(self) -> str:
        """Why no label is judged, in a sentence; empty where labels are judged."""
        if label_trust(self.record) >= LEAST_TRUST:
            return ""
        chance = chance_probability(self.record)
        needed = chance + LEAST_TRUST * (1.0 - chance)
        return (
            f"The model gives the labels a probability of {percent_text(float(self.record.label_probability.mean()))} "
            f"on average, and {percent_text(needed)} are needed to judge them: train it longer, then look again."
        )

    @cached_property
    def wrong(self) -> NDArray[np.bool_]:
        """Which samples have a label that looks wrong; none where labels are not judged."""
        return np.zeros(self.record.samples, np.bool_) if self.why_not_judged else looks_wrong(self.record)

    @cached_property
    def label_errors(self) -> NDArray[np.int64]:
        """The samples whose label looks wrong, the surest first; none where labels are not judged."""
        return np.zeros(0, np.int64) if self.why_not_judged else find_label_errors(self.record)

    @cached_property
    def often_times(self) -> int:
        """The times pruned from which on a sample is among those pruned most often; 0 if nothing was pruned."""
        place = int(np.ceil(OFTEN * self.record.samples)) - 1
        at = int(np.partition(self.record.times_pruned, -1 - place)[-1 - place])
        return max(at, 1) if self.prunings else 0

    @cached_property
    def often(self) -> NDArray[np.bool_]:
        """Which samples were pruned most often: about a tenth, and all that are equal to the last of these."""
        if not self.prunings:
            return np.zeros(self.record.samples, np.bool_)
        return np.asarray(self.record.times_pruned >= self.often_times)

    @cached_property
    def often_share(self) -> float:
        """The share of all prunings that fell on those pruned most often."""
        return float(self.record.times_pruned[self.often].sum(dtype=np.int64) / max(self.prunings, 1))

    @cached_property
    def prunes_the_hard(self) -> bool:
        """Whether difficulty rises with times pruned (else it falls, or there is nothing to tell it by)."""
        times = self.record.times_pruned.astype(np.float64)
        ranks = np.empty(len(times))
        ranks[np.argsort(self.record.difficulty, kind="stable")] = np.arange(len(times))
        return bool(((times - times.mean()) * (ranks - ranks.mean())).sum() > 0)

    @cached_property
    def by_times(self) -> NDArray[np.int64]:
        """All samples, the most pruned first; among equals the hardest, or the easiest if the easy are pruned."""
        towards = self.record.difficulty if self.prunes_the_hard else -self.record.difficulty
        order = np.lexsort((np.arange(self.record.samples), -towards, -self.record.times_pruned.astype(np.int64)))
        return np.asarray(order, dtype=np.int64)

    def most_pruned(self, label: int, number: int) -> NDArray[np.int64]:
        """Return the most pruned samples of a class, without those that were never pruned."""
        ours = self._by_times_of(label)
        return ours[self.record.times_pruned[ours] > 0][:number]

    def least_pruned(self, label: int, number: int) -> NDArray[np.int64]:
        """Return the least pruned samples of a class, none of which is among its `number` most pruned."""
        ours = self._by_times_of(label)
        return ours[len(self.most_pruned(label, number)) :][::-1][:number]

    def _by_times_of(self, label: int) -> NDArray[np.int64]:
        return np.asarray(self.by_times[self.record.label[self.by_times] == label], dtype=np.int64)

    @cached_property
    def classes(self) -> list[ClassFacts]:
        """All classes, by their number."""
        record, many = self.record, len(self.record.classes)
        held = np.bincount(record.label, minlength=many)
        pruned = np.bincount(record.label, weights=record.times_pruned, minlength=many)
        wrong = np.bincount(record.label, weights=self.wrong, minlength=many)
        return [
            ClassFacts(
                name=name,
                number=number,
                samples=int(held[number]),
                share=float(held[number] / record.samples),
                prunings=int(pruned[number]),
                pruned_share=float(pruned[number] / max(self.prunings, 1)),
                wrong=int(wrong[number]),
            )
            for number, name in enumerate(record.classes)
        ]

    def most_pruned_classes(self, most: int) -> list[ClassFacts]:
        """Return all classes, or the `most` of them that are pruned most for their size."""
        if len(self.classes) <= most:
            return self.classes
        return sorted(self.classes, key=lambda each: -each.beyond)[:most]

    @cached_property
    def bins(self) -> list[Bin]:
        """How many samples were pruned how often: a bin for each number of times, or for several if there are many."""
        times = self.record.times_pruned
        wide = -(-(int(times.max()) + 1) // MOST_BINS)
        held = np.bincount(times // wide)
        wrong = np.bincount(times // wide, weights=self.wrong)
        return [
            Bin(first=at * wide, last=at * wide + wide - 1, samples=int(held[at]), wrong=int(wrong[at]))
            for at in range(len(held))
        ]


# -- sentences ---------------------------------------------------------------------------------------------------------


def headline(facts: PruningFacts) -> str:
    """Return what was found, in one sentence.

    >>> from paceline.traces.pruning_record import empty_record
    >>> headline(PruningFacts(empty_record()))
    'Nothing was pruned in 0 epochs; no label looks wrong'
    """
    wrong, often = len(facts.label_errors), int(facts.often.sum())
    labels = f"{wrong:,} label{'s look' if wrong != 1 else ' looks'} wrong" if wrong else "no label looks wrong"
    if facts.why_not_judged:
        labels = "the model is trained too little to judge labels"
    if not facts.prunings:
        return f"Nothing was pruned in {facts.record.epochs:,} epochs; {labels}"
    if facts.often_share == 1:
        return f"{often:,} of {facts.record.samples:,} samples took all prunings; {labels}"
    return (
        f"{often:,} samples, {percent_text(often / facts.record.samples)} of all, took "
        f"{percent_text(facts.often_share)} of the prunings; {labels}"
    )


def sentences(facts: PruningFacts) -> list[str]:
    """Return what else was found: how hard the most pruned are, where wrong labels are, which class is pruned most."""
    found = (_difficulty_sentence(facts), _label_error_sentence(facts), _class_sentence(facts))
    return [sentence for sentence in found if sentence]


def _difficulty_sentence(facts: PruningFacts) -> str:
    if not facts.prunings or facts.often.all():
        return ""
    loss = facts.record.loss
    theirs, others = float(loss[facts.often].mean()), float(loss[~facts.often].mean())
    kind = "hard" if facts.prunes_the_hard else "easy"
    return (
        f"Here, to be pruned often is to be {kind}: who was pruned {times_text(facts.often_times)} or more has a mean "
        f"loss of {loss_text(theirs)} at the end, the others {loss_text(others)}."
    )


def _label_error_sentence(facts: PruningFacts) -> str:
    if facts.why_not_judged:
        return facts.why_not_judged
    contradicted = facts.record.guess != facts.record.label
    if not contradicted.any() or not facts.prunings:
        return ""
    there, sure = int((contradicted & facts.often).sum()), len(facts.label_errors)
    sentence = f"The model contradicts {contradicted.sum():,} labels, {there:,} of them among those pruned most often; "
    if sure:
        sentence += f"it is sure of {sure:,}, {int((facts.wrong & facts.often).sum()):,} of them there."
    else:
        sentence += "it is sure of none."
    return f"{sentence} Drawn blindly, {percent_text(float(facts.often.mean()))} would be there."


def _class_sentence(facts: PruningFacts) -> str:
    large = [each for each in facts.classes if each.samples >= FEWEST_SAMPLES]
    if not facts.prunings or len(large) < 2:
        return ""
    most, least = (choose(large, key=lambda each: each.beyond) for choose in (max, min))
    return f"Most pruned for its size is class {_class_text(most)}; least, class {_class_text(least)}."


def _class_text(each: ClassFacts) -> str:
    return (
        f"{each.name} ({percent_text(each.share, 1)} of the samples, {percent_text(each.pruned_share, 1)} of prunings)"
    )


def times_text(times: int) -> str:
    """Return how often, in words.

    >>> [times_text(times) for times in (0, 1, 2, 1000)]
    ['never', 'once', 'twice', '1,000 times']
    """
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times:,} times")


def conditions(facts: PruningFacts) -> list[str]:
    """Return what was pruned, and by what."""
    record = facts.record
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.settings.items())
    right = float(np.mean(record.guess == record.label))
    phrases = [
        record.policy + (f": {settings}" if settings else ""),
        f"{record.epochs:,} epochs of {record.samples:,} samples",
        f"{facts.prunings:,} prunings",
        f"the model agrees with {percent_text(right, 1)} of the labels",
    ]
    data, model = (record.source.get(part) for part in ("data", "model"))
    if isinstance(data, dict) and isinstance(model, dict):
        phrases.insert(0, f"{model.get('name')} on {data.get('name')}")
    return phrases


# -- tables ------------------------------------------------------------------------------------------------------------


def class_table(facts: PruningFacts, *, most: int) -> PlainTable:
    """Return a table of every class, or of those that are pruned most for their size.

    >>> from paceline.traces.pruning_record import empty_record
    >>> class_table(PruningFacts(empty_record()), most=10).rows
    [['0', '1', '100.0 %', '0', '0.0 %', '0.00', '0']]
    """
    rows, number = facts.most_pruned_classes(most), len(facts.classes)
    cut = f" The {most} of {number:,} classes that are pruned most for their size." if number > most else ""
    return PlainTable(
        title="Classes",
        headings=("class", "samples", "share", "prunings", "share", "times its\nshare", "labels that\nlook wrong"),
        rows=[
            [
                each.name,
                f"{each.samples:,}",
                percent_text(each.share, 1),
                f"{each.prunings:,}",
                percent_text(each.pruned_share, 1),
                f"{each.beyond:.2f}",
                UNKNOWN if facts.why_not_judged else f"{each.wrong:,}",
            ]
            for each in rows
        ],
        caption=f"Times its share: share of the prunings over share of the samples.{cut}",
    )


def label_error_table(facts: PruningFacts, *, most: int) -> PlainTable:
    """Return a table of the labels that look wrong, the surest first.

    >>> from paceline.traces.pruning_record import empty_record
    >>> label_error_table(PruningFacts(empty_record()), most=10).rows
    []
    """
    record, found = facts.record, facts.label_errors
    rows = [
        [
            str(number),
            record.classes[record.label[number]],
            record.classes[record.guess[number]],
            percent_text(float(record.guess_probability[number]), 1),
            percent_text(float(record.label_probability[number]), 1),
            loss_text(float(record.loss[number])),
            f"{record.times_pruned[number]:,}",
        ]
        for number in found[:most].tolist()
    ]
    cut = f" The {most} surest of {len(found):,}." if len(found) > most else ""
    return PlainTable(
        title="Labels that look wrong",
        headings=("sample", "label", "model says", "sure by", "of the label", "loss", "times\npruned"),
        rows=rows,
        caption=f"Sample: its number in the training data, from 0.{cut}",
    )
