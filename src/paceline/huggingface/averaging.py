"""Averaging in Trainer: one line between `Trainer(...)` and `trainer.train()`, in a script that torchrun starts.

    trainer = Trainer(model, args, train_dataset=..., eval_dataset=...)
    paceline.huggingface.average(trainer, "hpsgd", codec="qsgd levels=7")
    trainer.train()

    rank 0   step step step step step step | flush, evaluate | step step step | flush, save | step ... close
    rank 1   step  step  step  step  step  |                 | step  step     |             |
             `-- averages travel beside --'  `- equal ranks -'

Every rank takes Trainer's number of steps on its share of the data, each with an optimiser of its own; averages begin
and are merged at the steps (drivers/averaging). What Trainer does between ranks besides is in trainer_sync.py.

A rank's checkpoint has what only this rank knows:

    checkpoint-500/paceline-averaging-1-of-2.pt    sync        steps, windows, what the codec holds back
                                                   optimizer   this rank's momenta: those of ranks differ
                                                   scaler      of fp16, where there is one
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed import check_limits
from paceline.drivers.averaging.averager import AVERAGERS, TIMEOUT_SECONDS, Averager
from paceline.drivers.averaging.loop import OnAverage
from paceline.drivers.ranks.tracked_model import plain_optimizer
from paceline.exchanges.plans import AUTO, check_plan
from paceline.huggingface.hooks import TrainerSetupError
from paceline.huggingface.trainer_sync import TrainerSync
from paceline.lookup import unknown
from paceline.strategies.averaging import make_averaging

if TYPE_CHECKING:
    from transformers import Trainer


class TrainerAveraging(TrainerSync):
    """The ranks of a Trainer, which average: what `average` returns.

    `sync` is the `HPSGD` (or other `Averager`) of the last `train()`, None before and with one rank; it is closed when
    training is over, and its counts stay.
    """

    part, verb = "averaging", "average"
    sync: Averager | None

    def __init__(self, trainer: Trainer, make: partial[Averager]) -> None:
        super().__init__(trainer, "average()")
        self._make = make
        self._flushed_at = 0

    def _open(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.sync = self._make(model, optimizer)
        self._flushed_at = self._trained

    def _check_begin(self, train_dataloader: Any) -> None:
        super()._check_begin(train_dataloader)
        optimizer = plain_optimizer(self._trainer.optimizer)
        if callable(getattr(optimizer, "eval", None)):
            raise TrainerSetupError(
                f"{type(optimizer).__name__} replaces the weights for an evaluation, by each rank's own state, so that "
                "ranks would evaluate and save different models: use an optimiser without train() and eval()"
            )

    def _flush(self, *, again: bool = False) -> bool:
        if self.sync is None or (self._trained == self._flushed_at and not again):
            return False
        self.sync.flush()
        self._flushed_at = self._trained
        return True

    def _take_state(self) -> dict[str, Any]:
        assert self.sync is not None
        optimizer = plain_optimizer(self._trainer.optimizer)
        own = {"sync": self.sync.state_dict(settle=False), "optimizer": optimizer.state_dict()}
        return own | self._scaler_state()

    def _meet_after_save(self) -> None:
        assert self.sync is not None
        self.sync.gather_numbers([self.sync.steps])

    def _load(self, state: dict[str, Any]) -> None:
        assert self.sync is not None
        plain_optimizer(self._trainer.optimizer).load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])
        self._load_scaler(state)


def average(
    trainer: Trainer,
    strategy: str = "hpsgd",
    *,
    period: int | None = None,
    overlap: bool | None = None,
    rebase: bool | None = None,
    normalize: bool | None = None,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
    codec: Codec | str = "identity",
    plan: str = AUTO,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = 15.0,
    seed: int = 0,
    record: bool = False,
    on_average: OnAverage | None = None,
) -> TrainerAveraging:
    """Let the ranks of a Trainer average what they train, in place of DistributedDataParallel.

    `strategy` is one of `hpsgd`, `local-sgd`, `diloco`, `bmuf`, `ssgd`, `psgd`, and the settings are those of its class
    (`paceline.HPSGD`); None is that class's default. Call it before `trainer.train()`, on every rank. Evaluation,
    checkpoints and the end see the model that all ranks share; a run that goes on from a checkpoint of as many ranks
    goes on as if nothing had been.

    >>> import tempfile, torch, transformers
    >>> model = torch.nn.Linear(2, 1)
    >>> arguments = transformers.TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
    >>> trainer = transformers.Trainer(model, arguments)
    >>> average(trainer, "local-sgd", period=4, codec="qsgd levels=7")
    TrainerAveraging(before training, or one rank)
    >>> average(transformers.Trainer(model, arguments), "psgd", period=4)
    Traceback (most recent call last):
    ValueError: period is no setting of psgd; it has normalize
    """
    if strategy not in AVERAGERS:
        raise unknown("averaging strategy", strategy, AVERAGERS)
    given = {
        "period": period,
        "overlap": overlap,
        "rebase": rebase,
        "normalize": normalize,
        "outer_rate": outer_rate,
        "outer_momentum": outer_momentum,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    make_averaging(strategy, **settings)  # refuses what it has not, and values that it cannot have
    check_limits(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
    found = resolve_codec(codec)
    check_plan(plan, found)
    make = partial(
        AVERAGERS[strategy],
        codec=found,
        plan=plan,
        timeout_seconds=timeout_seconds,
        silence_seconds=silence_seconds,
        seed=seed,
        record=record,
        on_average=on_average,
        **settings,
    )
    return TrainerAveraging(trainer, make)
