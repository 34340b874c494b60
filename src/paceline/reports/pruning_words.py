"""What a record of pruning says, in sentences. Only what was counted is said."""

from __future__ import annotations

import numpy as np

from paceline.quantities import loss_text, percent_text
from paceline.reports.pruning_facts import ClassFacts, PruningFacts

FEWEST_SAMPLES = 5  # of a smaller class nothing is said
CAUTION = (
    "A label looks wrong where the trained model is surer of another class than it is, on average, of samples labelled "
    "so (confident learning). The model was trained on these labels: what it has learned by heart it does not "
    "contradict, and a rare sample may look wrong though it is right. A list to look at, not one to delete."
)


def headline(facts: PruningFacts) -> str:
    """What was found, in one sentence.

    >>> from paceline.traces.pruning_record import empty_record
    >>> headline(PruningFacts(empty_record()))
    'Nothing was pruned in 0 epochs; no label looks wrong'
    """
    wrong, often = len(facts.suspects), int(facts.often.sum())
    labels = f"{wrong:,} label{'s look' if wrong != 1 else ' looks'} wrong" if wrong else "no label looks wrong"
    if not facts.prunings:
        return f"Nothing was pruned in {facts.record.epochs:,} epochs; {labels}"
    if facts.often_share == 1:
        return f"{often:,} of {facts.record.samples:,} samples took all prunings; {labels}"
    return (
        f"{often:,} samples, {percent_text(often / facts.record.samples)} of all, took "
        f"{percent_text(facts.often_share)} of the prunings; {labels}"
    )


def sentences(facts: PruningFacts) -> list[str]:
    """What else was found: how hard the most pruned are, where the suspects are, which class is pruned most."""
    return [said for said in (_how_hard(facts), _where_the_suspects_are(facts), _which_class(facts)) if said]


def _how_hard(facts: PruningFacts) -> str:
    if not facts.prunings or facts.often.all():
        return ""
    loss = facts.record.loss
    theirs, others = float(loss[facts.often].mean()), float(loss[~facts.often].mean())
    kind = "hard" if facts.prunes_the_hard else "easy"
    return (
        f"Here, to be pruned often is to be {kind}: who was pruned {times_text(facts.often_times)} or more has a mean "
        f"loss of {loss_text(theirs)} at the end, the others {loss_text(others)}."
    )


def _where_the_suspects_are(facts: PruningFacts) -> str:
    contradicted = facts.record.guess != facts.record.label
    if not contradicted.any() or not facts.prunings:
        return ""
    there, sure = int((contradicted & facts.often).sum()), len(facts.suspects)
    said = f"The model contradicts {contradicted.sum():,} labels, {there:,} of them among those pruned most often; "
    if sure:
        said += f"it is sure of {sure:,}, {int((facts.wrong & facts.often).sum()):,} of them there."
    else:
        said += "it is sure of none."
    return f"{said} Drawn blindly, {percent_text(float(facts.often.mean()))} would be there."


def _which_class(facts: PruningFacts) -> str:
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
    """How often, in words.

    >>> [times_text(times) for times in (0, 1, 2, 1000)]
    ['never', 'once', 'twice', '1,000 times']
    """
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times:,} times")


def conditions(facts: PruningFacts) -> list[str]:
    """What was pruned, by what."""
    record = facts.record
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.settings.items())
    right = float(np.mean(record.guess == record.label))
    said = [
        record.policy + (f": {settings}" if settings else ""),
        f"{record.epochs:,} epochs of {record.samples:,} samples",
        f"{facts.prunings:,} prunings",
        f"the model agrees with {percent_text(right, 1)} of the labels",
    ]
    data, model = (record.source.get(part) for part in ("data", "model"))
    if isinstance(data, dict) and isinstance(model, dict):
        said.insert(0, f"{model.get('name')} on {data.get('name')}")
    return said
