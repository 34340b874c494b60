"""The places of a training at which all ranks come together, and the error if they do not come to the same one.

    rank 0   batch batch batch batch | end of epoch 0 | batch ...
    rank 1   batch batch ··· flush ··| end of epoch 0 | batch ...      fewer batches: it waits in the flush
    rank 2   batch validation        |                                 all raise: rank 2 is at another place

    rank 0   ... end of epoch 0 | end of training
    rank 1   ... end of epoch 0 | beginning of epoch 1                 all raise: rank 0 has stopped alone

Between places ranks train apart, by their own clocks. Lightning's collectives (reductions of metrics, broadcasts of
file names, barriers) have no names: those of ranks at different places would answer each other, or nobody. So ranks say
where they are when they come together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from paceline.lightning.trainer import LightningError

REMEDY = (
    "give all ranks as many batches (as Trainer(use_distributed_sampler=True) does), or validate and save at the ends "
    "of epochs: val_check_interval=1.0, no every_n_train_steps"
)
STOP_REMEDY = (
    "trainer.should_stop was not set on all ranks. Let them decide together, at the end of an epoch or validation: "
    "trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False), as EarlyStopping does"
)


class TrainingPlace(IntEnum):
    """Where a rank is when it asks for the others."""

    VALIDATION = 0
    EPOCH_END = 1
    SAVING = 2
    TRAINING_END = 3
    COLLECTIVE = 4
    EPOCH_START = 5


BETWEEN_EPOCHS = (TrainingPlace.EPOCH_START, TrainingPlace.TRAINING_END)  # one or the other follows an epoch's end
WORDS = {
    TrainingPlace.VALIDATION: "a validation",
    TrainingPlace.EPOCH_END: "the end",
    TrainingPlace.SAVING: "a checkpoint",
    TrainingPlace.TRAINING_END: "the end of training",
    TrainingPlace.COLLECTIVE: "a collective (a callback's, or self.log(sync_dist=True))",
    TrainingPlace.EPOCH_START: "the beginning",
}


class RankPlace(NamedTuple):
    """One rank's place: in which epoch it is, whether it has trained all batches of that, and whether it will stop.

    >>> str(RankPlace(TrainingPlace.VALIDATION, 2, epoch_is_over=False, stops=False))
    'a validation in epoch 2'
    """

    place: int
    epoch: int
    epoch_is_over: bool
    stops: bool

    def __str__(self) -> str:
        relation = "of" if self.place in (TrainingPlace.EPOCH_START, TrainingPlace.EPOCH_END) else "in"
        return f"{WORDS[TrainingPlace(self.place)]} {relation} epoch {self.epoch}"


def check_places(rows: Sequence[Sequence[int]]) -> list[RankPlace]:
    """Return where the ranks are; LightningError on all of them if not all are at the same place of the same epoch.

    >>> check_places([[1, 4, 1, 0], [0, 4, 0, 0]])
    Traceback (most recent call last):
    paceline.lightning.trainer.LightningError: rank 0 has come to the end of epoch 4, and rank 1 to a validation in ...
    """
    places = [RankPlace(place, epoch, bool(over), bool(stops)) for place, epoch, over, stops in rows]
    first = places[0]
    remedy = STOP_REMEDY if len({reached.stops for reached in places}) > 1 else REMEDY
    for rank, reached in enumerate(places):
        if reached[:2] != first[:2]:
            raise LightningError(f"rank 0 has come to {first}, and rank {rank} to {reached}: {remedy}")
    return places
