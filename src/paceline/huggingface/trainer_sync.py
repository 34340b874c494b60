"""Trainer's loop with ranks that train on their own: no DistributedDataParallel, and no collective where none may be.

`average` (averaging.py) and `take_rounds` (rounds.py) share this file. Between two meetings of the ranks nobody waits,
and all that a checkpoint or an evaluation sees is a model that all ranks hold alike:

    train          step step step step | evaluate   | step step step | save        | step ... | the end
    Trainer        log       log       |            | log            |             |          |
    the ranks      no collective       | flush      | no collective  | flush; each | none     | close: equal
                                       | (all equal)|                | rank's state|          |

What paceline stands around (hooks.py), and why, as read in and observed with transformers 5.23 and accelerate 1.15:

    accelerator.prepare_model      wraps the model in DistributedDataParallel: gradients would be averaged as well, and
                                   training would run to its end in silence. `evaluation_mode=True` leaves just that out
    args.average_tokens_...        gathers the number of tokens in every step (the default): switched off
    _maybe_log_save_evaluate       gathers the loss (`nested_gather`) at every log: the rank's own loss is logged
    store_flos                     gathers a number at every log: postponed to the next save, or the end
    _track_num_input_tokens        gathers in every micro-batch, if it is asked for: the rank's own tokens are counted
    training_step                  a script's own `accelerator.gather` in `compute_loss` is told of, or refused
    evaluate, predict, save_model  are for the model of all ranks: a flush comes first
    _save_checkpoint               Trainer saves what its main process has: a flush first, and every rank's own state
    _save_optimizer_and_scheduler  is where that state is written: before old checkpoints are deleted
    _finalize_training             loads the best model, if asked to: the ranks are done with each other before
    on the way there               ranks say where they are, right after the flush: one that has stopped alone (by its
                                   own loss) would else wait for ever in another collective than the others
    _prepare_for_training          has made, and loaded, model, optimiser and scheduler: here the ranks begin
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
import transformers.trainer
from accelerate.data_loader import DataLoaderDispatcher
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_utils import has_length

from paceline.distributed.agreement import raise_difference
from paceline.drivers.ranks.tracked_model import plain_optimizer
from paceline.huggingface.checkpoints import agreed_words, load_rank_state, save_rank_state
from paceline.huggingface.figures import add_part, check_part
from paceline.huggingface.hooks import TrainerSetupError, around, check_not_begun, check_trainer

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger("paceline.huggingface")

COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")


class TrainerPlace(IntEnum):
    """Where a rank is when it meets the others."""

    EVALUATION = 0
    PREDICTION = 1
    MODEL = 2
    CHECKPOINT = 3
    EPOCH_END = 4
    TRAINING_END = 5


PLACES = {
    TrainerPlace.EVALUATION: "an evaluation",
    TrainerPlace.PREDICTION: "a prediction",
    TrainerPlace.MODEL: "save_model()",
    TrainerPlace.CHECKPOINT: "a checkpoint",
    TrainerPlace.EPOCH_END: "the end of an epoch",
    TrainerPlace.TRAINING_END: "the end of training",
}


def refuse_waiting(trainer: Trainer, what: str) -> None:
    """Refuse settings of Trainer's with which ranks wait for one of them in every step, or one leaves the others."""
    args = trainer.args
    if trainer.is_model_parallel or trainer.get_tp_size() > 1:
        raise TrainerSetupError(
            f"{what} wants the whole model on one device of every rank, and this one is on several (device_map or "
            "tp_plan): load it without"
        )
    if args.world_size > 1 and args.auto_find_batch_size:
        raise TrainerSetupError(
            "auto_find_batch_size begins again on the rank alone that runs out of memory, and the others wait: set "
            "auto_find_batch_size=False and per_device_train_batch_size"
        )
    if args.world_size > 1 and args.enable_jit_checkpoint:
        raise TrainerSetupError(
            "enable_jit_checkpoint saves at the step at which a rank gets the signal, and ranks are at different ones: "
            "set enable_jit_checkpoint=False, and save every save_steps"
        )
    if args.world_size > 1 and args.accelerator_config.dispatch_batches:
        raise TrainerSetupError(
            "dispatch_batches=True hands out every batch from rank 0, so that ranks wait for it in every step: let "
            "each read its own, with accelerator_config={'dispatch_batches': False}"
        )


class TrainerSync(ABC):
    """What `average` and `take_rounds` return: the ranks of one Trainer, which train on their own.

    `sync` is the averaging, or the rounds, of the last `train()`; it is None before, and where there is one rank only.
    `figures()` are its numbers by now. The subclasses say what a meeting of the ranks is.
    """

    part: ClassVar[str]  # in the names of a checkpoint's files
    verb: ClassVar[str]
    sync: Any

    def __init__(self, trainer: Trainer, what: str) -> None:
        check_trainer(trainer, what)
        check_not_begun(trainer, what)
        refuse_waiting(trainer, what)
        check_part(trainer, self.part)
        if not hasattr(transformers.trainer, "nested_gather"):
            raise TrainerSetupError(
                f"transformers {transformers.__version__} gathers losses in another way than paceline knows: install "
                "the transformers that paceline[huggingface] asks for"
            )
        self.sync = None
        self._trainer = trainer
        self._running = False  # between the beginning of training and its end, with other ranks
        self._logging = self._in_step = False
        self._trained = 0  # batches; alike on ranks at one place, which steps are not: fp16's scaler leaves some out
        self._noted: set[str] = set()
        self._rank_state: dict[str, Any] | None = None
        for method, then in (
            ("train", self._train),
            ("training_step", self._training_step),
            ("evaluate", functools.partial(self._after_flush, TrainerPlace.EVALUATION)),
            ("predict", functools.partial(self._after_flush, TrainerPlace.PREDICTION)),
            ("save_model", functools.partial(self._after_flush, TrainerPlace.MODEL)),
            ("store_flos", self._store_flos),
            ("_prepare_for_training", self._prepare_for_training),
            ("_maybe_log_save_evaluate", self._log_save_evaluate),
            ("_track_num_input_tokens", self._track_tokens),
            ("_save_checkpoint", self._save_checkpoint),
            ("_save_optimizer_and_scheduler", self._save_rank_state),
            ("_finalize_training", self._finalize),
            ("create_accelerator_and_postprocess", self._install_again),
        ):
            around(trainer, method, then)
        self._install()
        add_part(trainer, self.part, self)

    def _install(self) -> None:
        accelerator = self._trainer.accelerator
        around(accelerator, "prepare_model", self._prepare_model)
        for name in COLLECTIVES:
            around(accelerator, name, functools.partial(self._collective, name))

    def _install_again(self, create: Callable[..., None]) -> None:
        create()  # each trial of a search has an accelerator of its own
        self._install()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sync if self.sync is not None else 'before training, or one rank'})"

    def figures(self) -> dict[str, float]:
        """Return the numbers worth logging by now; none before training, and none with one rank."""
        return {} if self.sync is None else dict(self.sync.figures())

    # -- what a meeting is ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin with the other ranks: set `sync`."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Go on from this rank's state in a checkpoint, of which Trainer has loaded its part."""

    @abstractmethod
    def _flush(self, *, again: bool = False) -> bool:
        """Flush with the other ranks, and return whether: not if nothing was done since the last time, unless `again`.

        All ranks are equal then, and each has to say where it is.
        """

    @abstractmethod
    def _take_state(self) -> dict[str, Any]:
        """Return this rank's state, right after a flush."""

    @abstractmethod
    def _meet_after_save(self) -> None:
        """Wait until all ranks have written their states."""

    def _check_begin(self, train_dataloader: Any) -> None:
        """Refuse what only shows when training begins."""
        if isinstance(train_dataloader, DataLoaderDispatcher):
            raise TrainerSetupError(
                "rank 0 would hand out every batch (accelerate's default for an IterableDataset), so that ranks wait "
                "for it in every step: set accelerator_config={'dispatch_batches': False} in TrainingArguments, which "
                "lets every rank read the dataset and keep its own share"
            )

    def _scaler_state(self) -> dict[str, Any]:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def _load_scaler(self, state: dict[str, Any]) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None and "scaler" in state:
            scaler.load_state_dict(state["scaler"])

    # -- the beginning and the end -------------------------------------------------------------------------------------

    @property
    def _many(self) -> bool:
        return bool(self._trainer.args.world_size > 1)

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._many:
            self._note(f"one rank: training is plain, and nobody is there to {self.verb} with (start with torchrun)")
            return train(*args, **kwargs)
        settings = self._trainer.args
        if settings.average_tokens_across_devices:
            settings.average_tokens_across_devices = False
            self._note("average_tokens_across_devices=False from here on: it makes ranks wait in every step")
        self._note("each rank logs the loss of its own batches; train_loss, at the end, is the mean of all ranks")
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            if self._running:
                self._running = False
                self.sync.__exit__(type(error), error, error.__traceback__)  # the others hear of it at once
            raise
        finally:
            self._running = False
            self._release()

    def _release(self) -> None:  # noqa: B027 - not every subclass changes something
        """Let go of what was changed for the time of training."""

    def _prepare_model(self, prepare_model: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._many:
            if args:  # device_placement, evaluation_mode
                args = args[:1]
            kwargs["evaluation_mode"] = True
        return prepare_model(model, *args, **kwargs)

    def _prepare_for_training(
        self, prepare: Callable[..., Any], max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        trainer = self._trainer
        prepared = prepare(max_steps, train_dataloader, resume_from_checkpoint)
        if not self._many:
            return prepared
        state = self._agree(max_steps, train_dataloader, resume_from_checkpoint)
        self._open(trainer.model, plain_optimizer(trainer.optimizer))
        self._running = True
        if state is not None:
            self._load(state)
        return prepared

    def _agree(self, max_steps: int, train_dataloader: Any, checkpoint: str | None) -> dict[str, Any] | None:
        """Return this rank's saved state, if there is one; all ranks raise where one cannot begin, or they differ."""
        args, state, refusal = self._trainer.args, None, None
        try:
            if isinstance(self._trainer.model_wrapped, DistributedDataParallel):
                raise TrainerSetupError(
                    "this Trainer has wrapped its model in DistributedDataParallel already, which averages gradients: "
                    f"make a new Trainer, and call {self.verb} before its first train()"
                )
            self._check_begin(train_dataloader)
            if checkpoint is not None:
                state = load_rank_state(checkpoint, self.part, rank=args.process_index, world=args.world_size)
        except Exception as error:  # the others must hear of it: they would wait
            refusal = error
        words = {
            "number of steps": max_steps,
            "number of batches": len(train_dataloader) if has_length(train_dataloader) else "unknown",
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            f"{self.part} state in the checkpoint": "none" if state is None else "saved",
        }
        raise_difference(
            agreed_words(refusal, words, error=TrainerSetupError),
            "all ranks must train alike, and the {key} of {who} is {theirs}, that of {other} {ours}: give all the same "
            "arguments and checkpoint, and keep accelerate's even_batches",
            reference=0,
            error=TrainerSetupError,
        )
        if checkpoint is not None and state is None:
            log.warning(
                "%s has no %s state: training goes on from its model, with the optimiser of rank 0 on all ranks",
                checkpoint,
                self.part,
            )
        return state

    def _finalize(self, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        if self._running:
            self._meet(TrainerPlace.TRAINING_END, again=True)
            self.sync.close()
            self._running = False
            ours = torch.as_tensor(trainer._total_loss_scalar + trainer._tr_loss.item(), device=trainer.args.device)
            gathered = transformers.trainer.nested_gather(ours, trainer.args.parallel_mode)
            trainer._total_loss_scalar = gathered.mean().item()
            trainer._tr_loss = torch.zeros_like(trainer._tr_loss)
        return finalize(*args, **kwargs)

    # -- no collective in a step ---------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let Trainer's gathers of numbers return what this rank has."""
        module, accelerator, before = transformers.trainer, self._trainer.accelerator, self._logging
        gathers = module.nested_gather, accelerator.gather
        module.nested_gather = lambda tensors, *args, **kwargs: tensors
        accelerator.gather = lambda tensor: tensor
        self._logging = True
        try:
            yield
        finally:
            module.nested_gather, accelerator.gather = gathers
            self._logging = before

    def _log_save_evaluate(self, maybe: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        control = self._trainer.control
        if self._running and control.should_log:
            evaluate, save = control.should_evaluate, control.should_save
            control.should_evaluate = control.should_save = False
            with self._alone():
                maybe(*args, **kwargs)
            control = self._trainer.control  # a callback may have given another
            control.should_evaluate, control.should_save = (
                control.should_evaluate or evaluate,
                control.should_save or save,
            )
        maybe(*args, **kwargs)

    def _store_flos(self, store: Callable[[], None]) -> None:
        if not self._logging:
            store()

    def _track_tokens(self, track: Callable[..., None], inputs: Any) -> None:
        if not self._running or self._trainer.args.include_num_input_tokens_seen == "no":
            track(inputs)
            return
        self._note("num_input_tokens_seen counts the tokens of each rank alone")
        with self._alone():
            track(inputs)

    def _training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_step = self._running
        self._trained += 1
        try:
            return step(*args, **kwargs)
        finally:
            self._in_step = False

    def _collective(self, name: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_step:
            self._met_in_step(name)
        return collective(*args, **kwargs)

    def _met_in_step(self, name: str) -> None:
        """Tell of a collective that the script itself has in its training step."""
        self._note(
            f"accelerator.{name} is called in a training step (in compute_loss?): there every rank waits for the "
            f"slowest, which is what ranks that {self.verb} need not; leave it out, or gather where Trainer evaluates"
        )

    # -- where ranks meet ----------------------------------------------------------------------------------------------

    def _meet(self, place: TrainerPlace, *, again: bool = False) -> None:
        """Flush; all ranks raise if they are not at the same place of the same step."""
        if not self._flush(again=again):
            return
        rows = self.sync.gather_numbers([place, self._trainer.state.global_step])
        if any(row != rows[0] for row in rows):
            where = [f"rank {rank} at {PLACES[TrainerPlace(at)]}, step {step}" for rank, (at, step) in enumerate(rows)]
            raise self.sync.error_type(
                f"all ranks must come to the same place of training, and they differ: {'; '.join(where)}. "
                "If a callback has stopped one of them, or evaluates or saves there: let it decide alike on all ranks "
                "(by metrics of an evaluation, or the step; each rank logs a loss of its own)"
            )

    def _after_flush(self, place: TrainerPlace, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            self._meet(place)
        return method(*args, **kwargs)

    def _save_checkpoint(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._running:
            self._meet(TrainerPlace.CHECKPOINT)
            self._rank_state = None if self._trainer.args.save_only_model else self._take_state()
        save(*args, **kwargs)
        self._rank_state = None

    def _save_rank_state(self, save: Callable[..., Any], output_dir: str) -> None:
        save(output_dir)
        if self._rank_state is not None:
            args = self._trainer.args
            save_rank_state(output_dir, self.part, self._rank_state, rank=args.process_index, world=args.world_size)
            self._meet_after_save()

    def _note(self, text: str) -> None:
        """Say something once."""
        if text not in self._noted:
            self._noted.add(text)
            if self._trainer.is_world_process_zero():
                log.warning("%s", text)
