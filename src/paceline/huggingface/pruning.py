r"""InfoBatch and data fine-pruning inside Trainer: samples sit epochs out, and Trainer's loop stays Trainer's.

    trainer = Trainer(model, args, train_dataset=data)
    paceline.huggingface.prune(trainer, "info-batch", ratio=0.5)
    trainer.train()

Where paceline stands in Trainer's loop, and why:

    get_train_dataloader         the user's collator and workers, our batch sampler. Accelerate shards every sampler
                                 among ranks, and ours has done so already: of two ranks each would see a half of its
                                 half. So it is prepared as if for one process, which still puts batches on the device.
    set_initial_training_values  how many steps: told to the schedule of the learning rate
    _init_training_state         the epoch that a checkpoint was saved in. Trainer divides steps by the length of an
                                 epoch, and epochs are not equally long here; then it would fetch and skip the batches
                                 that were trained on, and the sampler would wait for their losses.
    _run_epoch                   how many batches this epoch has: Trainer ends accumulation at its last one
    compute_loss                 the losses of samples, observed and weighted
    _save_rng_state              checkpoint-500/paceline-pruning-1-of-2.pt: how far rank 1 has come, with its losses

Steps and the learning rate, in four epochs of 100 samples, batches of 10, some of which info-batch leaves out:

    told to the schedule     10        10        10        10          most_batches: what no run exceeds
    steps taken              10        7         6         10
    schedule after them      10        20        30        40          at the end of an epoch it makes up for the steps
                                                                       that were left out: it comes to its end
`state.max_steps` follows at the beginning of each epoch, so that Trainer ends (evaluates, saves) with the last epoch.
Where `max_steps` is given, it is the number of steps, as always, and there are as many epochs as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.batch_samplers import let_set_epoch_through
from paceline.data.pruning import PRUNINGS
from paceline.data.pruning.epoch import BatchLayout
from paceline.data.pruning.groups import GroupOf
from paceline.data.pruning.ranks import TIMEOUT_SECONDS
from paceline.data.pruning.sampler import FinePruning, InfoBatch
from paceline.huggingface.checkpoints import RankStateError, load_rank_state_together, save_with_checkpoints
from paceline.huggingface.figures import add_part, check_part
from paceline.huggingface.hooks import TrainerSetupError, around, check_not_begun, check_trainer
from paceline.huggingface.losses import HINT, ModelLosses, SampleLosses, logits_of
from paceline.lookup import unknown
from paceline.randomness import seed_for

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

PART = "pruning"
INFO_BATCH = "info-batch"
FINE_PRUNING = "fine-pruning"
SETTINGS = {name: entry.settings for name, entry in PRUNINGS.items()}
KEPT = (  # settings of the user's loader that ours has too
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
Losses = Callable[[Any, Any], torch.Tensor]


def prune(
    trainer: Trainer,
    policy: str = INFO_BATCH,
    *,
    ratio: float | None = None,
    delta: float | None = None,
    window: int | None = None,
    starting_point: int | None = None,
    attenuation: float | None = None,
    block: int | None = None,
    count: int | None = None,
    prune: float | int | None = None,
    tolerance: float | None = None,
    window_at: Sequence[int] | None = None,
    protect: str | GroupOf | None = None,
    seed: int | None = None,
    base: Iterable[int] | None = None,
    losses: Losses | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TrainerPruning:
    """Let samples of a Trainer's data sit epochs out; call it between `Trainer(...)` and `trainer.train()`.

    `policy` is "info-batch" (with `ratio` and `delta`, see `paceline.InfoBatch`) or "fine-pruning" (with those of
    `paceline.FinePruning`). `seed` is by default Trainer's. `base` is a sampler of your own that draws for all ranks.

    The losses of samples are found from logits and labels, for models whose loss is the mean over tokens, classes or
    squares. For others `losses(outputs, inputs)` gives one number for each sample; their weighted mean is what is
    trained on, in place of the model's own loss, of `compute_loss_func` and of a `compute_loss` of your own.

    >>> import tempfile, torch, transformers
    >>> args = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, num_train_epochs=8)
    >>> trainer = transformers.Trainer(torch.nn.Linear(3, 2), args, train_dataset=[{"x": 1.0}] * 100)
    >>> prune(trainer, "info-batch", ratio=0.4).sampler
    InfoBatch(100 samples, batch_size=8, epoch 1, 0.0% sat out so far)
    """
    check_trainer(trainer, "prune()")
    check_not_begun(trainer, "prune()")
    check_part(trainer, PART)
    given = {
        "ratio": ratio,
        "delta": delta,
        "window": window,
        "starting_point": starting_point,
        "attenuation": attenuation,
        "block": block,
        "count": count,
        "prune": prune,
        "tolerance": tolerance,
        "window_at": window_at,
        "protect": protect,
    }
    part = TrainerPruning(trainer, policy, given, seed, base, losses, timeout_seconds)
    add_part(trainer, PART, part)
    return part


class TrainerPruning:
    """What `prune` returns: the sampler of the run under way, with all that it knows of the samples."""

    def __init__(
        self,
        trainer: Trainer,
        policy: str,
        settings: dict[str, Any],
        seed: int | None,
        base: Iterable[int] | None,
        losses: Losses | None,
        timeout_seconds: float,
    ) -> None:
        self.policy, self._settings = policy, _settings_of(policy, settings)
        self._trainer, self._base, self._losses = trainer, base, losses
        self._seed = seed if seed is not None else _seed_of(trainer.args)
        self._timeout_seconds = timeout_seconds
        _refuse_trainer(trainer, base is not None, losses is not None)
        self._strategy_sampler: Any = None
        around(trainer, "_get_train_sampler", self._get_sampler)
        self.sampler = self._make_sampler()
        """The `InfoBatch` or `FinePruning` of the run under way, or of the next; each `train()` begins a new one."""
        self._generator = torch.Generator()  # seeds workers; Trainer's own random numbers are for the model alone
        self._own_loss = "compute_loss" in vars(trainer) or _overridden(trainer, "compute_loss")
        self._model_losses: ModelLosses | None = None
        self._planned: list[int] = []  # the steps of each epoch, as told to the schedule
        self._trains, self._mean_weight = False, torch.ones(())  # of the items of a batch
        self._epoch = self._observed = self._batches = self._resumed_at = 0
        trainer.loss_is_scaled_for_ga = True  # of accumulated micro-batches: what we return is
        around(trainer, "get_train_dataloader", self._loader)
        around(trainer, "set_initial_training_values", self._initial_values)
        around(trainer, "_init_training_state", self._init_state)
        around(trainer, "_run_epoch", self._run_epoch)
        around(trainer, "training_step", self._training_step)
        around(trainer, "compute_loss", self._compute_loss)
        save_with_checkpoints(trainer, PART, lambda: self.sampler.state_dict())  # each train() has a new sampler
        trainer.callback_handler.callbacks.insert(0, StepEnds(self))  # before those who read what it sets

    def __repr__(self) -> str:
        return f"TrainerPruning({self.sampler!r})"

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now: the epoch, and which share sits out in it, and has so far."""
        return self.sampler.figures()

    # -- the loader ------------------------------------------------------------------------------------------------

    def _loader(self, plain: Callable[[], Any]) -> Any:
        _refuse_trainer(self._trainer, self._base is not None, self._losses is not None)
        theirs, accelerator = plain(), self._trainer.accelerator
        kept = {name: getattr(theirs, name) for name in KEPT}
        loader = DataLoader(theirs.dataset, batch_sampler=self._make_sampler(), generator=self._generator, **kept)
        prepared = prepare_data_loader(
            loader,
            device=accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
        )
        let_set_epoch_through(prepared)
        return prepared

    def _make_sampler(self) -> InfoBatch | FinePruning:
        args, data = self._trainer.args, self._trainer.train_dataset
        base = self._base if self._base is not None else self._strategy_base()
        drawn = len(base) if isinstance(base, Sized) else len(data)
        layout = BatchLayout(
            batch_size=self._trainer._train_batch_size, ranks=args.world_size, drop_last=args.dataloader_drop_last
        )
        batches = max(1, layout.steps(drawn))
        epochs = int(args.num_train_epochs)
        if args.max_steps > 0:
            epochs = math.ceil(args.max_steps / math.ceil(batches / args.gradient_accumulation_steps))
        make: Any = InfoBatch if self.policy == INFO_BATCH else FinePruning
        sampler: InfoBatch | FinePruning = make(
            data,
            batch_size=self._trainer._train_batch_size,
            epochs=epochs,
            seed=self._seed,
            base=base,
            drop_last=args.dataloader_drop_last,
            timeout_seconds=self._timeout_seconds,
            **self._settings,
        )
        return sampler

    def _get_sampler(self, plain: Callable[..., Any], *dataset: Any) -> Any:
        """Make the sampler of Trainer's strategy once: to group samples by length it reads all of them."""
        if self._strategy_sampler is None:
            self._strategy_sampler = plain(*dataset)
        return self._strategy_sampler

    def _strategy_base(self) -> Iterable[int] | None:
        """Return the sampler that `train_sampling_strategy` asks for; None where it is random."""
        if self._trainer.args.train_sampling_strategy == "random":
            return None
        sampler: Any = self._trainer._get_train_sampler()
        if hasattr(sampler, "generator"):  # alike on all ranks, in every run, and in checkpoints
            sampler.generator = torch.Generator().manual_seed(seed_for(self._seed, "pruning", "base"))
        drawn: Iterable[int] = sampler
        return drawn

    # -- how many steps --------------------------------------------------------------------------------------------

    def _initial_values(self, plain: Callable[..., Any], args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
        self.sampler, self._model_losses = dataloader.batch_sampler, None
        whole = self.sampler.batches_ahead
        epochs, *values, max_steps = plain(args, dataloader)
        if args.max_steps > 0:
            return max_steps, *values, max_steps  # so many epochs are enough: each has a step
        plan = self.sampler.plan(epochs)
        exact = plan.exact and self._base is None
        batches = plan.epoch_batches if exact else [whole] * epochs
        self._planned = [self._updates(each) for each in batches]
        return epochs, *values, sum(self._planned)

    def _updates(self, batches: int) -> int:
        return -(-batches // int(self._trainer.args.gradient_accumulation_steps))

    def _init_state(
        self,
        plain: Callable[..., tuple[int, int]],
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        begun = plain(max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
        self._resumed_at = 0
        if self._trainer.args.max_steps > 0:
            self._trainer.state.num_train_epochs = self.sampler.epochs
        if resume_from_checkpoint is None:
            return begun
        rank, world = self._trainer.args.process_index, self._trainer.args.world_size
        state = load_rank_state_together(
            resume_from_checkpoint, PART, self.sampler.load_state_dict, rank=rank, world=world
        )
        if state is None:
            raise RankStateError(
                f"{resume_from_checkpoint} was saved without prune(), or with save_only_model: it does not say who "
                "sits out, and how far the epoch was. Load the model alone with from_pretrained(), and begin a new run"
            )
        self._resumed_at = state["observed"]
        return self.sampler.epoch - 1, 0

    def _run_epoch(self, plain: Callable[..., None], **settings: Any) -> None:
        batches = self.sampler.batches_ahead
        self._epoch, self._observed = settings["epoch"], self._resumed_at
        self._batches, self._resumed_at = self._resumed_at + batches, 0
        updates, state = self._updates(batches), self._trainer.state
        if self._trainer.args.max_steps <= 0:
            state.max_steps = state.global_step + updates + sum(self._planned[self._epoch + 1 :])
        self._generator.manual_seed(
            seed_for(self._seed, "pruning", "workers", self._trainer.args.process_index, self._epoch)
        )
        plain(**settings | {"steps_in_epoch": batches, "num_update_steps_per_epoch": updates})

    def end_step(self, state: TrainerState) -> None:
        """Say how far the epoch is; at its end let the schedule make up for the steps that it was told of."""
        state.epoch = self._epoch + self._observed / self._batches
        scheduler = self._trainer.lr_scheduler
        made_by_trainer = self._trainer._created_lr_scheduler and isinstance(scheduler, LambdaLR)
        if self._observed == self._batches and self._planned and made_by_trainer:
            for _ in range(self._planned[self._epoch] - self._updates(self._batches)):
                scheduler.step()

    def end_epoch(self, control: TrainerControl) -> None:
        """Let an epoch count that a callback has ended early; one that ends with the training goes on when resumed."""
        if self._observed < self._batches and not control.should_training_stop:
            self.sampler.end_epoch()

    # -- the losses ------------------------------------------------------------------------------------------------

    def _training_step(self, plain: Callable[..., torch.Tensor], *inputs: Any, **named: Any) -> torch.Tensor:
        """Return the loss for the log: without what weights add to it, so that it can be compared with other runs'."""
        self._trains = True
        try:
            return plain(*inputs, **named) / self._mean_weight
        finally:
            self._trains = False

    def _compute_loss(
        self,
        plain: Callable[..., Any],
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if not self._trains:  # an evaluation
            return plain(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if self._losses is not None:
            outputs = plain(model, dict(inputs), return_outputs=True)[1] if self._own_loss else model(**inputs)
            losses = self._losses(outputs, inputs)
            loss = self._observe(losses, torch.ones_like(losses)) / self._trainer.current_gradient_accumulation_steps
        else:
            losses_of_model = self._model_losses or self._make_model_losses(inputs)
            found, outputs = self._find_losses(losses_of_model, plain, model, inputs, num_items_in_batch)
            self._observe(found.losses.detach(), found.items)
            total = (found.losses * found.items * self._weights).sum()
            loss = losses_of_model.together(total, found.items, num_items_in_batch, self._scale)
            if num_items_in_batch is None:
                loss = loss / self._trainer.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _make_model_losses(self, inputs: dict[str, Any]) -> ModelLosses:
        labels = inputs.get("labels")
        if labels is None:
            raise TrainerSetupError(f"the batch has no labels (it has: {', '.join(inputs)}): {HINT}")
        problem = getattr(getattr(self._trainer.model, "config", None), "problem_type", None)
        smoother = self._trainer.label_smoother
        self._model_losses = ModelLosses(
            smoothing=0.0 if smoother is None else float(smoother.epsilon),
            regression=problem == "regression" or (labels.is_floating_point() and labels.numel() == len(labels)),
        )
        return self._model_losses

    def _find_losses(
        self,
        losses_of_model: ModelLosses,
        plain: Callable[..., Any],
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items: torch.Tensor | int | None,
    ) -> tuple[SampleLosses, Any]:
        """Return the losses of the samples, and the model's outputs.

        The model is called as Trainer calls it, with the labels, and computes its own loss too, in every batch:
        encoder-decoders make the inputs of their decoder from the labels. Without them BART takes the inputs of its
        encoder instead, and T5 raises.
        """
        own_loss, outputs = plain(model, dict(inputs), return_outputs=True, num_items_in_batch=num_items)
        logits, labels = logits_of(outputs), inputs["labels"]
        if losses_of_model.shifted is None:
            return losses_of_model.learn(logits, labels, own_loss, num_items, self._scale), outputs
        return losses_of_model(logits, labels), outputs

    @property
    def _scale(self) -> int:
        """By what Trainer multiplies a loss that was divided by the items of all ranks: DDP divides by them again."""
        return int(self._trainer.accelerator.num_processes if self._trainer.args.average_tokens_across_devices else 1)

    def _observe(self, losses: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Let the sampler see the losses; return the mean of weight * loss over samples."""
        weights = self.sampler.next_weights()
        mean = self.sampler.observe(losses)
        self._observed += 1
        self._weights = torch.ones_like(items) if weights is None else weights.to(items.device)
        self._mean_weight = (self._weights * items).sum() / items.sum().clamp(min=1)
        return mean


class StepEnds(transformers.TrainerCallback):
    """Tells pruning of the ends of steps and epochs, before other callbacks look at them."""

    def __init__(self, pruning: TrainerPruning) -> None:
        self._pruning = pruning

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """End a step."""
        self._pruning.end_step(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End an epoch."""
        self._pruning.end_epoch(control)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _settings_of(policy: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, by name; refuse an unknown policy, and settings of another."""
    if policy not in SETTINGS:
        raise TrainerSetupError(str(unknown("pruning policy", policy, SETTINGS)))
    settings = {name: value for name, value in given.items() if value is not None}
    if other := sorted(settings.keys() - set(SETTINGS[policy])):
        raise TrainerSetupError(
            f"{policy} has the settings {', '.join(SETTINGS[policy])} (given: {', '.join(other)}): leave {other[0]} "
            f"out, or prune by {INFO_BATCH if policy == FINE_PRUNING else FINE_PRUNING}"
        )
    return settings


def _seed_of(args: TrainingArguments) -> int:
    return int(args.seed if args.data_seed is None else args.data_seed)


def _overridden(trainer: Trainer, method: str) -> bool:
    return getattr(type(trainer), method) is not getattr(transformers.Trainer, method)


def _refuse_trainer(trainer: Trainer, has_base: bool, has_losses: bool) -> None:
    """Refuse what pruning cannot be right with, before anything is trained."""
    args, data = trainer.args, trainer.train_dataset
    loaders = [name for name in ("get_train_dataloader", "_get_train_sampler") if _overridden(trainer, name)]
    reasons = {
        "prune() wants a train_dataset with a length and with samples by number (an IterableDataset has neither)": (
            not isinstance(data, Sized) or isinstance(data, IterableDataset)
        ),
        f"num_train_epochs must be a whole number (num_train_epochs={args.num_train_epochs}): part of a pruned epoch "
        "has no length before it begins; or give max_steps": (
            args.max_steps <= 0 and args.num_train_epochs != int(args.num_train_epochs)
        ),
        f"{type(trainer).__name__} has a {' and a '.join(loaders)} of its own, in whose place prune() puts its "
        "sampler: take Trainer's, and give prune() your sampler as base": bool(loaders),
        "dispatch_batches and split_batches let accelerate deal batches to the ranks, and the pruning sampler deals "
        "them itself: leave both out of accelerator_config": bool(
            trainer.accelerator.dispatch_batches or trainer.accelerator.split_batches
        ),
        "train_sampling_strategy='batch_rebalance' deals batches to the ranks, and the pruning sampler deals them "
        "itself: take random, sequential or group_by_length": args.train_sampling_strategy == "batch_rebalance",
        f"train_sampling_strategy={args.train_sampling_strategy!r} and base are two samplers: give one": (
            has_base and args.train_sampling_strategy != "random"
        ),
        "dataloader_in_order=False gives batches in another order than the sampler's, and losses would be taken for "
        "those of other samples: leave it out": not args.dataloader_in_order,
        "enable_jit_checkpoint saves in the middle of a step, when its losses have been observed and its gradient is "
        "lost: leave it out": args.enable_jit_checkpoint,
        f"{args.n_gpu} GPUs in one process are DataParallel, whose losses prune() does not see: start one process for "
        "each GPU, with torchrun": args.n_gpu > 1,
        f"compute_loss_func gives one loss for the batch: {HINT}": (
            trainer.compute_loss_func is not None and not has_losses
        ),
        f"{type(trainer).__name__} has a compute_loss of its own, which gives one loss for the batch: {HINT}": (
            not has_losses and _overridden(trainer, "compute_loss")
        ),
        f"use_liger_kernel computes the loss without logits: leave it out, or {HINT}": (
            bool(args.use_liger_kernel) and not has_losses
        ),
        f"Trainer of transformers {transformers.__version__} has no loss_is_scaled_for_ga: install the transformers "
        "that paceline[huggingface] asks for": not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise TrainerSetupError(reason)
