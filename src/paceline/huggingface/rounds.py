"""Rounds in Trainer: LGC and fastest-k over the ranks of a launch, in place of DistributedDataParallel.

    trainer = Trainer(model, args, train_dataset=..., eval_dataset=...)
    paceline.huggingface.take_rounds(trainer, "lgc", k=3)
    trainer.train()

Trainer counts its steps, a rank takes rounds, and a late rank applies several of them in one step:

    rank 0, global_step     1    2    3    4    5    6 | evaluate at 6
    rank 1, global_step     1    2 --------- > 4  -> 6 |

so `state.global_step` is the number of rounds on every rank, and schedulers are stepped by rounds. Nobody goes past a
round at which all evaluate or save: a gradient of that round can only come from a rank that is there, and each that
comes there waits for the others first. So all ranks find themselves at the same step there, and at the end of an
epoch, where they meet as well.

What Trainer's loop does, and what becomes of it:

    training_step       a micro-batch is a block of the rank's gradient; once the round has closed the rest is left out;
                        a batch that is cut has the loss of the whole one (see `_cut`)
    optimizer.step()    goes to sync.step(): report, wait for the round, apply what has come
    scheduler.step()    left out by Trainer itself, for which the optimiser's step was skipped: sync steps the scheduler
    global_step += 1    ends at the round that this rank is at
    _tr_loss            is divided by the steps since the last log: a step's loss counts once for each of its rounds
    the epoch's end     by rounds: a late rank takes fewer batches, and the rest comes first in its next epoch

A gradient that is not finite is dropped, and its batch makes no round; where that leaves a rank short at the end of an
epoch it takes part in the last rounds without a gradient, in the flush there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed import check_limits
from paceline.drivers.rounds.loop import RoundsError
from paceline.drivers.rounds.preparation import refuse_collective_sampler
from paceline.drivers.rounds.synchronizer import SYNCHRONIZERS, TIMEOUT_SECONDS, OnFlush, OnRound, RoundSync
from paceline.exchanges.plans import AUTO, check_plan
from paceline.huggingface.hooks import TrainerSetupError, around
from paceline.huggingface.trainer_sync import TrainerPlace, TrainerSync
from paceline.lookup import unknown
from paceline.strategies import STRATEGIES
from paceline.strategies.lgc import ScalePartial
from paceline.workers.blocks import cut_batch

if TYPE_CHECKING:
    from transformers import Trainer

OF_STRATEGY = {"lgc": ("k", "warmup_rounds", "scale_partial"), "fastest-k": ("k", "warmup_rounds"), "full": ()}


class RepeatedLoader:
    """The batches of a rank's loader, pass after pass, whoever ends an epoch when.

    Trainer asks for a new iterator in every epoch; each goes on where the last one was left.

    >>> loader = RepeatedLoader(["a", "b", "c"])
    >>> batches = iter(loader)
    >>> next(batches), next(batches)
    ('a', 'b')
    >>> batches = iter(loader)
    >>> next(batches), next(batches)
    ('c', 'a')
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._pass: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin with the pass of this epoch, unless a pass has begun: then passes are counted from there."""
        if self._pass is None:
            self._pass = epoch

    def __iter__(self) -> Iterator[Any]:
        while True:
            whole = self._batches is None
            if self._batches is None:
                self._batches = self._begin_pass()
            for batch in self._batches:
                whole = False
                yield batch
            self._batches = None
            if whole:
                raise TrainerSetupError("the training data has no batch for this rank: an epoch needs at least one")

    def _begin_pass(self) -> Iterator[Any]:
        number = self._pass or 0
        inner = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for each in (self._loader, inner):  # as Trainer does: accelerate's loader tells no sampler inside another
            set_epoch = getattr(each, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(number)
        self._pass = number + 1
        return iter(self._loader)


class GradientPart(NamedTuple):
    """A part of a gradient: a micro-batch or a block of one, the items that it is told of, and Trainer's divisor."""

    inputs: Any
    items: Any
    divisor: Any


class TrainerRounds(TrainerSync):
    """The ranks of a Trainer, which take rounds: what `take_rounds` returns.

    `sync` is the `LGCSync` (or other `RoundSync`) of the last `train()`, None before and with one rank.
    """

    part, verb = "rounds", "take rounds"
    sync: RoundSync | None

    def __init__(self, trainer: Trainer, make: partial[RoundSync], blocks: int) -> None:
        super().__init__(trainer, "take_rounds()")
        self._make, self._blocks = make, blocks
        self._flushed_at = -1
        self._untold = False  # in a flush at whose end this rank has not said yet at which place it is
        self._before = 0  # steps of Trainer's that were no rounds: from a checkpoint without any
        self._handled = 0  # the step whose logs, evaluation and save are done
        self._epoch_ends = self._rounds_per_epoch = 0
        self._left = 0  # micro-batches of the gradient that this rank computes
        self._stopped = False
        self._last_loss: torch.Tensor | None = None
        self._loss_before: torch.Tensor | float = 0.0  # Trainer's sum of losses, before this rank's gradient
        self._step_loss: torch.Tensor | float = 0.0  # what the last gradient has added to it
        self._loader: RepeatedLoader | None = None
        self._of_epoch: dict[str, Any] = {}  # what Trainer evaluates and saves with
        self._end_step = trainer.callback_handler.on_step_end
        around(trainer, "_run_epoch", self._run_epoch)
        around(trainer.callback_handler, "on_step_end", self._on_step_end)
        around(trainer.callback_handler, "on_epoch_end", self._on_epoch_end)

    # -- where ranks meet ----------------------------------------------------------------------------------------------

    def _check_begin(self, train_dataloader: Any) -> None:
        super()._check_begin(train_dataloader)
        sampler = train_dataloader
        while sampler is not None:  # accelerate's shard has the sampler inside
            refuse_collective_sampler(sampler, self._trainer.args.world_size, even_alone=True)
            sampler = getattr(sampler, "batch_sampler", None)
        if getattr(train_dataloader, "rng_types", None):
            raise TrainerSetupError(
                f"accelerate gives all ranks the same random numbers ({train_dataloader.rng_types}) where a pass over "
                "the data begins, and ranks that take rounds begin theirs at different times: keep "
                "accelerator_config={'use_seedable_sampler': True} and a dataset without a generator of its own"
            )

    def _open(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trainer = self._trainer
        scheduler = trainer.lr_scheduler
        by_metric = type(scheduler).__name__ in (
            "ReduceLROnPlateau",
            "GreedyLR",
        )  # Trainer steps them when it evaluates
        self.sync = self._make(model, optimizer, scheduler=None if by_metric else scheduler)
        self._before, self._handled = trainer.state.global_step, trainer.state.global_step
        self._flushed_at, self._left, self._loader = -1, 0, None
        self._step_loss, self._untold = 0.0, False
        trainer.optimizer.step = self._step

    def _release(self) -> None:
        if self._trainer.optimizer is not None:
            vars(self._trainer.optimizer).pop("step", None)

    def _flush(self, *, again: bool = False) -> bool:
        if self.sync is None:
            return False
        if self._untold:
            self._untold = False
            return True
        if self.sync.version == self._flushed_at and not again:
            return False
        self.sync.flush()
        self._flushed_at = self.sync.version
        return True

    def _take_state(self) -> dict[str, Any]:
        assert self.sync is not None
        return {"sync": self.sync.state_dict()} | self._scaler_state()

    def _meet_after_save(self) -> None:
        assert self.sync is not None
        self.sync.flush()

    def _load(self, state: dict[str, Any]) -> None:
        assert self.sync is not None
        self.sync.load_state_dict(state["sync"])
        self._load_scaler(state)
        self._before = self._trainer.state.global_step - self.sync.version

    def _met_in_step(self, name: str) -> None:
        raise RoundsError(
            f"accelerator.{name} is called in a training step (in compute_loss?), and ranks that take rounds are at "
            "different batches: it would wait for ever, or add up what does not belong together. Leave it out, or "
            "gather where Trainer evaluates"
        )

    # -- Trainer's loop ------------------------------------------------------------------------------------------------

    def _run_epoch(self, run: Callable[..., None], **given: Any) -> None:
        if not self._running:
            run(**given)
            return
        epoch, self._rounds_per_epoch = given["epoch"], given["num_update_steps_per_epoch"]
        self._epoch_ends, self._left = (epoch + 1) * self._rounds_per_epoch, 0
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        self._of_epoch = {name: given[name] for name in names}
        first = epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None
        skips = first and given["steps_trained_in_current_epoch"] > 0 and not self._trainer.args.ignore_data_skip
        if not skips:  # else Trainer skips batches of the loader itself, and the next epoch begins a new pass
            if self._loader is None:
                self._loader = RepeatedLoader(given["train_dataloader"])
            given["train_dataloader"] = self._loader
        run(**given)

    def _training_step(
        self, step: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not self._running or self.sync is None:
            loss: torch.Tensor = step(model, inputs, num_items_in_batch)
            return loss
        trainer = self._trainer
        micro_batches = trainer.current_gradient_accumulation_steps
        parts = [GradientPart(inputs, num_items_in_batch, micro_batches)]
        if micro_batches == 1 and self._blocks > 1:
            parts = self._cut(inputs, num_items_in_batch)
        if self._left == 0:
            self._left, self._stopped = micro_batches, False
            self._loss_before = trainer._tr_loss.clone()
            self.sync.begin_batch(max(micro_batches, len(parts)))
        self._left -= 1
        if self._stopped and self._last_loss is not None:
            return self._last_loss  # the round has closed: what is done of this gradient is late, and no more is done
        losses, is_scaled = [], trainer.loss_is_scaled_for_ga
        try:
            for part in parts:
                trainer.current_gradient_accumulation_steps = part.divisor
                if len(parts) > 1 and part.items is not None and is_scaled is None:
                    trainer.loss_is_scaled_for_ga = False
                losses.append(super()._training_step(step, model, part.inputs, part.items))
                self._stopped = not self.sync.block_done()
                if self._stopped:
                    break
        finally:
            trainer.current_gradient_accumulation_steps = micro_batches
            trainer.loss_is_scaled_for_ga = is_scaled
        self._last_loss = torch.stack(losses).sum() * (len(parts) / len(losses))
        return self._last_loss

    def _cut(self, inputs: Any, items: Any) -> list[GradientPart]:
        """Return a batch in blocks whose losses, divided by their divisors, add up to the loss of the whole batch.

        Trainer takes the loss of a model that is told the number of items for one that was divided by it, and most
        heads of transformers 5.23 that classify divide by their own batch instead: the sum over four blocks would be
        four times the loss. So a block is told the number of its own items, by which both kinds of heads divide, and
        counts by its share of all items. A block without any has no loss, and is left out.
        """
        trainer = self._trainer
        cut = cut_batch((inputs,), self._blocks)
        if items is None or trainer.loss_is_scaled_for_ga is not None:  # a mean, unless the script says otherwise
            return [GradientPart(block, items, len(cut)) for block in cut]
        counts = [trainer._get_num_items_in_batch([block], trainer.args.device) for block in cut]
        parts = [GradientPart(block, own, items / own) for block, own in zip(cut, counts, strict=True) if own]
        return parts if len(parts) > 1 else [GradientPart(inputs, items, 1)]

    def _step(self, closure: Any = None) -> None:
        """Take the place of the optimiser's step in Trainer's loop."""
        assert self.sync is not None
        trainer = self._trainer
        if not trainer.accelerator.sync_gradients:
            return
        self.sync.step()
        if trainer.optimizer.scaler is not None:
            trainer.optimizer.scaler.update()  # gradients were unscaled where Trainer took their norm
        trainer.optimizer._is_overflow = True  # "skipped": Trainer leaves the scheduler alone, which sync has stepped
        trainer.state.global_step = self._before + self.sync.version - 1  # Trainer adds one

    def _on_step_end(self, end: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        if not self._running:
            return end(args, state, control)
        trainer = self._trainer
        self._step_loss = trainer._tr_loss - self._loss_before
        trainer._tr_loss -= self._step_loss  # it is there once, and counts once for each round
        return self._end_round(end, args, state, control)

    def _end_round(self, end: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        before, self._handled = self._handled, state.global_step
        self._trainer._tr_loss += (state.global_step - before) * self._step_loss
        state.epoch = state.global_step / self._rounds_per_epoch
        control = end(args, state, control)
        if state.global_step == before:  # its gradient was not finite, and this step has been dealt with
            control.should_log = control.should_evaluate = control.should_save = False
        elif (
            args.logging_strategy == "steps"
            and state.global_step // state.logging_steps > before // state.logging_steps
        ):
            control.should_log = True  # it came from before that step to behind it
        if state.global_step >= self._epoch_ends:
            control.should_epoch_stop = True
        return control

    def _on_epoch_end(self, end: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        if self._running and self.sync is not None:
            while self._catch_up(args, state, control):
                control = self._trainer.control
            self._meet(TrainerPlace.EPOCH_END, again=True)
        return end(args, state, control)

    def _catch_up(self, args: Any, state: Any, control: Any) -> bool:
        """Flush, and return whether that was for a step of the others, at which this rank has met them now."""
        assert self.sync is not None
        trainer = self._trainer
        self._flush(again=True)
        self._untold = True
        state.global_step = self._before + self.sync.version
        if state.global_step > self._handled:  # rounds that came in the flush: the others are at their step's end
            trainer.control = self._end_round(self._end_step, args, state, control)
            trainer.control.should_log = False  # it has no loss of a batch of its own
            trainer._maybe_log_save_evaluate(trainer._tr_loss, None, **self._of_epoch)  # as they do: before the end
        return not self._untold  # else they are at the end of the epoch


def take_rounds(
    trainer: Trainer,
    strategy: str = "lgc",
    *,
    k: int | Literal["auto"] | None = None,
    warmup_rounds: int | None = None,
    scale_partial: ScalePartial | None = None,
    blocks: int = 1,
    most_behind: int = 10,
    codec: Codec | str = "identity",
    plan: str = AUTO,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = 15.0,
    seed: int = 0,
    record: bool = False,
    on_round: OnRound | None = None,
    on_flush: OnFlush | None = None,
) -> TrainerRounds:
    """Let the ranks of a Trainer take rounds that the fastest `k` close, in place of DistributedDataParallel.

    `strategy` is `lgc`, `fastest-k` or `full`, and the settings are those of its class (`paceline.LGCSync`). A rank's
    gradient is of its accumulated micro-batches, and a late rank stops between two of them; with
    `gradient_accumulation_steps=1` a batch is cut into `blocks` for that, which must not change its loss (losses that
    compare samples of a batch would change). Call it before `trainer.train()`, on every rank.

    >>> import tempfile, torch, transformers
    >>> model = torch.nn.Linear(2, 1)
    >>> arguments = transformers.TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
    >>> take_rounds(transformers.Trainer(model, arguments), "lgc", k=1)
    TrainerRounds(before training, or one rank)
    >>> take_rounds(transformers.Trainer(model, arguments), "full", k=2)
    Traceback (most recent call last):
    paceline.huggingface.hooks.TrainerSetupError: k is no setting of full; it has none
    """
    if strategy not in SYNCHRONIZERS:
        raise unknown("strategy of rounds", strategy, SYNCHRONIZERS)
    given = {"k": k, "warmup_rounds": warmup_rounds, "scale_partial": scale_partial}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in settings:
        if name not in OF_STRATEGY[strategy]:
            raise TrainerSetupError(
                f"{name} is no setting of {strategy}; it has {', '.join(OF_STRATEGY[strategy]) or 'none'}"
            )
    if "k" in OF_STRATEGY[strategy] and k is None:
        raise TrainerSetupError(f'{strategy} needs k: how many gradients close a round, or "auto"')
    STRATEGIES[strategy](**settings)  # refuses values that it cannot have
    for name, value in (("blocks", blocks), ("most_behind", most_behind)):
        if not isinstance(value, int) or value < 1:
            raise TrainerSetupError(f"{name} must be a whole number of 1 or more ({name}={value})")
    check_limits(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
    found = resolve_codec(codec)
    check_plan(plan, found)
    world = trainer.args.world_size if hasattr(trainer, "args") else 1
    if isinstance(k, int) and world > 1 and k > world:
        raise TrainerSetupError(f'k must be at most the number of ranks, {world}, or "auto" (k={k})')
    make = partial(
        SYNCHRONIZERS[strategy],
        most_behind=most_behind,
        codec=found,
        plan=plan,
        timeout_seconds=timeout_seconds,
        silence_seconds=silence_seconds,
        seed=seed,
        record=record,
        on_round=on_round,
        on_flush=on_flush,
        **settings,
    )
    return TrainerRounds(trainer, make, blocks)
