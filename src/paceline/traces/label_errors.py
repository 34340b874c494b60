"""Labels that look wrong, found by confident learning (Northcutt, Jiang and Chuang 2021) in its plain form.

    threshold of a class   the mean probability that the model gives to the class over the samples labelled so
    a label looks wrong    where the model's guess is another class, with at least that class's threshold,
                           and more than it gives to the label

So "sure" is measured by class: of a class that the model is seldom sure of, less is asked. The paper asks the same of
every class that reaches its threshold; here only of the guess, the most probable one, since a record holds no others.

What it can tell: where a model, after all it has learned from the other samples, contradicts a label.
What it cannot: the model was trained on these very labels. What it has learned by heart it does not contradict, so
after many epochs without regularisation few wrong labels are found; and labels that are wrong in one way throughout
(all wolves labelled dogs) are what the model takes for right. The paper predicts out of sample, by cross-validation.
A rare but rightly labelled sample may look wrong as well: this is a list to look at, not one to delete.

A model that has hardly been trained contradicts labels because it knows no better, and its thresholds are low, so that
it counts as sure. Labels are judged only where the model is sure enough of them on the whole: the mean probability that
it gives to the labels must be 0.8 of the way from chance (1 in 10 for ten classes of one size) to 1. On Fashion-MNIST:

    rounds of 320 samples    80       800     4,000
    of the way              0.74     0.83     0.88
    would look wrong       3,538    1,584      771

Labels of which more than a fifth are wrong are not judged either: no model that has not learned them by heart is so
sure of them.

What the rule finds, on digits with 45 of the 1,500 training labels changed on purpose (lenet, batches of 32, SGD with
momentum 0.9 at rate 0.05; fine-pruning with window 10, starting point 4, block 4, count 2, prune 0.2; seeds 0, 1, 2).
"Pruned most" is about a tenth of the samples under fine-pruning, 218 to 256 under info-batch:

    policy, epochs, weight decay   labels that look wrong   of these changed   changed among those pruned most
    fine-pruning, 20, 0.0005       11, 25, 12               11, 24, 12         45, 45, 45 of 45
    fine-pruning, 20, 0.01         28, 32, 27               27, 27, 27         45, 44, 45
    fine-pruning, 40, 0.0005       5, 17, 9                 5, 17, 6           45, 45, 45
    info-batch, 20, 0.0005         13, 33, 16               13, 22, 16         0, 0, 0
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.traces.pruning_record import PruningRecord

LEAST_TRUST = 0.8


def class_thresholds(record: PruningRecord) -> NDArray[np.float64]:
    """Return for each class the probability from which the model counts as sure of it; infinite without samples of it.

    >>> from paceline.traces.pruning_record import empty_record
    >>> class_thresholds(empty_record())
    array([1.])
    """
    classes = len(record.classes)
    held = np.bincount(record.label, minlength=classes)
    total = np.bincount(record.label, weights=record.label_probability, minlength=classes)
    return np.where(held > 0, total / np.maximum(held, 1), np.inf)


def label_trust(record: PruningRecord) -> float:
    """Return how sure the model is of the labels: 0 for one that knows their frequencies alone, 1 for certainty.

    >>> from paceline.traces.pruning_record import empty_record
    >>> label_trust(empty_record())
    1.0
    """
    chance = chance_probability(record)
    return (float(np.mean(record.label_probability)) - chance) / (1.0 - chance) if chance < 1.0 else 1.0


def chance_probability(record: PruningRecord) -> float:
    """Return the mean probability that a model gives to the labels which knows nothing but how frequent each class is.

    >>> from paceline.traces.pruning_record import empty_record
    >>> chance_probability(empty_record())
    1.0
    """
    shares = np.bincount(record.label) / len(record.label)
    return float(np.sum(shares**2))


def looks_wrong(record: PruningRecord) -> NDArray[np.bool_]:
    """Mark the samples whose label looks wrong.

    >>> record = PruningRecord(
    ...     policy="none", epochs=0, classes=("cat", "dog"), label=[0, 0, 1, 1], guess=[0, 0, 1, 0],
    ...     times_pruned=[0, 0, 0, 0], difficulty=[0, 0, 0, 0], label_probability=[0.9, 0.7, 0.9, 0.1],
    ...     guess_probability=[0.9, 0.7, 0.9, 0.9], loss=[0.1, 0.4, 0.1, 2.3])
    >>> looks_wrong(record)
    array([False, False, False,  True])
    """
    sure = record.guess_probability >= class_thresholds(record)[record.guess]
    return np.asarray(sure & (record.guess != record.label) & (record.guess_probability > record.label_probability))


def find_label_errors(record: PruningRecord) -> NDArray[np.int64]:
    """Return the samples whose label looks wrong, the surest first: by guess less label, then by number.

    >>> from paceline.traces.pruning_record import empty_record
    >>> find_label_errors(empty_record())
    array([], dtype=int64)
    """
    found = np.flatnonzero(looks_wrong(record))
    margin = record.guess_probability[found] - record.label_probability[found]
    return found[np.argsort(-margin, kind="stable")]
