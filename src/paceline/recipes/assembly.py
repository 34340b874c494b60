"""The parts that a recipe names, made and put together; and the recipe with every `auto` written out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.codecs import Codec, make_codec
from paceline.codecs.naming import codec_text, parse_codec, settings_of
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import Delays, Pareto, ShiftedExponential, SlowWorkers, read_recorded
from paceline.models import MODELS
from paceline.optim import OPTIMIZERS
from paceline.recipes.recipe import Recipe, RecipeChanges
from paceline.recipes.sections import fixed_seconds_refusal
from paceline.renaming import as_recorded
from paceline.settings import SettingError
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.averaging import AVERAGING, Averaging, make_averaging
from paceline.strategies.averaging.members import SETTINGS
from paceline.strategies.shares import SharesBySpeed
from paceline.user_code import UserCodeError, find, is_code, name_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data import Augmentation, Dataset
    from paceline.training import Training
    from paceline.workers.losses import SampleLoss


def make_strategy(recipe: Recipe) -> Strategy:
    """Make the strategy, with those of the section's settings that it has.

    >>> make_strategy(Recipe())
    LGC(k=7, warmup_rounds=0, scale_partial='auto')
    """
    if averages(recipe):
        raise ValueError(f"{recipe.strategy.name} has no server; choose from {', '.join(STRATEGIES)}")
    kind, settings = STRATEGIES[recipe.strategy.name], dataclasses.replace(recipe.strategy, k=recipe.k)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        values[field.name] = make_shares(recipe) if field.name == "shares" else getattr(settings, field.name)
    return kind(**values)


def make_shares(recipe: Recipe) -> SharesBySpeed | None:
    """Return how workers get batches by their speed; None where all of them have the same.

    >>> make_shares(Recipe()) is None, make_shares(Recipe().with_settings(worker={"shares": "speed"})).multiple
    (True, 4)
    """
    worker = recipe.worker
    if worker.shares == "equal":
        return None
    return SharesBySpeed(batch_size=worker.batch_size, least=worker.blocks, multiple=worker.blocks)


def refuse_late_blocks(recipe: Recipe) -> None:
    """Refuse a number of late blocks in a real run, where late workers stop at the block that they are in.

    >>> refuse_late_blocks(Recipe().with_settings(cluster={"late_blocks": 2}))
    Traceback (most recent call last):
    paceline.settings.SettingError: late_blocks is of simulated runs (late_blocks=2): real workers stop at the block ...
    """
    if (given := recipe.cluster.late_blocks) is not None:
        raise SettingError(
            ("cluster", "late_blocks"),
            f"late_blocks is of simulated runs (late_blocks={given}): real workers stop at the block that they are in; "
            "leave it out",
        )


def averages(recipe: Recipe) -> bool:
    """Whether a recipe's workers average among themselves, without a server.

    >>> averages(Recipe().with_strategy("hpsgd")), averages(Recipe())
    (True, False)
    """
    return recipe.strategy.name in AVERAGING


def make_member(recipe: Recipe) -> Averaging:
    """Make the averaging strategy, with those of the section's settings that it has.

    >>> make_member(Recipe().with_settings(strategy={"name": "local-sgd", "period": 4})).period
    4
    """
    section = recipe.strategy
    chosen: dict[str, Any] = {name: getattr(section, name) for name in SETTINGS[section.name]}
    return make_averaging(section.name, **{name: value for name, value in chosen.items() if value != "auto"})


def make_delays(recipe: Recipe) -> Delays:
    """Make the delay model.

    >>> make_delays(Recipe()).persistence
    10
    """
    delay = recipe.delay
    if delay.name == "pareto":
        return Pareto(
            scale_seconds=delay.scale_seconds, shape=delay.shape, persistence=delay.persistence, seed=recipe.seed
        )
    if delay.name == "recorded":
        recorded, workers = read_recorded(Path(delay.file)), recipe.cluster.workers
        if recorded.workers < workers:
            raise ValueError(
                f"{delay.file} has times for {recorded.workers} workers, and the cluster has {workers}; "
                f"give cluster.workers {recorded.workers} or fewer"
            )
        if delay.fixed_seconds > recorded.mean_seconds:
            raise ValueError(f"{delay.file}: {fixed_seconds_refusal(delay.fixed_seconds, recorded.mean_seconds)}")
        return recorded
    base = ShiftedExponential(
        shift_seconds=delay.shift_seconds,
        mean_seconds=delay.mean_seconds,
        persistence=delay.persistence,
        seed=recipe.seed,
    )
    if delay.name == "slow-worker":
        return SlowWorkers(base=base, slow=delay.slow_workers, factor=delay.slow_factor)
    return base


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """Objects of a script, in place of what a recipe names.

    `data` is (train, test), each a torch Dataset or a pair of tensors, or a function that returns them. `model` is a
    module, of which copies are trained, or a function that makes one. `loss` maps outputs and targets to losses. A
    name, as a recipe has it, does as well.

    >>> Given(model=lambda: None).named(Recipe()).model.name
    'paceline.recipes.assembly:object'
    """

    data: Any = None
    model: Any = None
    loss: Any = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.data, self.model, self.loss))

    def named(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the objects' names, for tables and journals; they are not found by them again."""
        model = {} if self.model is None else {"name": _name_of(self.model), "norm": ""}
        loss = {} if self.loss is None else {"loss": _name_of(self.loss)}
        data = {} if self.data is None else {"name": _name_of(self.data)}
        return recipe.with_settings(model=model | loss, data=data)

    def objects(self) -> Given:
        """Return what is given as objects; names are in the recipe once it is `named`."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return Given(**{name: None if isinstance(value, str) else value for name, value in values.items()})


NOTHING_GIVEN = Given()


def _name_of(given: Any) -> str:
    from paceline.data import Dataset

    return given if isinstance(given, str) else given.name if isinstance(given, Dataset) else name_of(given)


def load_data(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Dataset:
    """Load the data set: one of the table, a user's own by name, or the one that was given.

    >>> load_data(Recipe()).classes
    10
    """
    data, given = recipe.data, given.objects()
    if given.data is not None or is_code(data.name):
        from paceline.data.own import dataset_of, load_own

        if given.data is None:
            return load_own(data.name, directory=data.directory, seed=recipe.seed)
        return dataset_of(given.data, data.name, directory=data.directory, seed=recipe.seed)
    from paceline.data import load_dataset

    return load_dataset(
        data.name,
        directory=data.directory or None,
        download=data.download,
        seed=recipe.seed,
        samples=data.samples,
        classes=data.classes,
        channels=data.channels,
        size=data.size,
    )


def make_model(recipe: Recipe, dataset: Dataset, given: Given = NOTHING_GIVEN) -> nn.Module:
    """Build the network, sized for the data; of a module that was given, return a copy.

    >>> type(make_model(Recipe(), load_data(Recipe()))).__name__
    'Sequential'
    """
    import copy

    from torch import nn

    from paceline.models import build_model, own_model, seeded

    given = given.objects()
    if isinstance(given.model, nn.Module):
        return copy.deepcopy(given.model)
    name, source = recipe.model.name, given.model if given.model is not None else recipe.model.name
    if given.model is not None or is_code(name):
        offered = {"input_shape": lambda: dataset.input_shape, "classes": lambda: dataset.classes}
        with seeded(recipe.seed):
            return own_model(source, offered)
    inputs, _ = dataset.train.first(1)
    if not inputs.is_floating_point() or (name != "mlp" and inputs.ndim != 4):
        raise ValueError(
            f"model {name!r} takes {'numbers' if name == 'mlp' else 'images [channels, height, width]'}, and data set "
            f"{dataset.name!r} has inputs of shape {dataset.input_shape}, {str(inputs.dtype).removeprefix('torch.')}; "
            "give a network of your own (--model module:factory)" + ("" if name == "mlp" else ", or take mlp")
        )
    return build_model(
        name,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        norm=recipe.model.norm or None,
        seed=recipe.seed,
    )


def make_loss(recipe: Recipe, given: Given = NOTHING_GIVEN) -> SampleLoss:
    """Return the loss: cross-entropy, a user's own by name, or the one that was given.

    >>> type(make_loss(Recipe().with_settings(model={"loss": "torch.nn:MSELoss"}))).__name__
    'OwnLoss'
    """
    from paceline.workers.losses import CrossEntropy, OwnLoss

    if given.objects().loss is not None:
        return OwnLoss(given.loss, name_of(given.loss))
    name = recipe.model.loss
    return OwnLoss(find("loss", name), name) if is_code(name) else CrossEntropy()


def _check_parts(recipe: Recipe, model: nn.Module, dataset: Dataset, loss: SampleLoss) -> None:
    """Try a user's own parts on two samples before the run, so that a mistake is reported for what it is."""
    import torch

    from paceline.workers.losses import OwnLoss

    inputs, targets = dataset.train.first(2)
    name, training = recipe.model.name, model.training
    try:
        outputs = model.eval()(inputs)
    except Exception as error:
        raise UserCodeError(f"model {name!r} fails on a batch of shape {tuple(inputs.shape)}: {error}") from error
    finally:
        model.train(training)
    found = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if not isinstance(outputs, torch.Tensor):
        raise UserCodeError(f"model {name!r} must return a tensor (it gave a {found}); wrap it in a module that does")
    if isinstance(loss, OwnLoss):
        loss.check(outputs, targets)
    elif targets.is_floating_point():
        raise ValueError(
            f"data set {dataset.name!r} has numbers as targets, and {recipe.model.loss} is a loss of classes; give one "
            "of your own, such as --loss torch.nn.functional:mse_loss"
        )
    elif targets.ndim == 1:
        # Of data that are read one by one only these two are looked at: their classes would have to be counted.
        classes = int(targets.max()) + 1 if dataset.train.reads else dataset.classes
        expected, own_data = (len(inputs), classes), recipe.classes is None
        more = own_data and outputs.ndim == 2 and len(outputs) == len(inputs) and outputs.shape[1] > classes
        if found != expected and not more:  # a user may know more classes than are in the data
            raise UserCodeError(
                f"model {name!r} must return a tensor of shape {expected} for two samples (it gave {found})"
            )
    else:
        try:
            loss(outputs, targets)
        except IndexError as error:
            raise UserCodeError(
                f"data set {dataset.name!r} has targets that model {name!r} gives no score for: {error}"
            ) from None
    if not loss.per_sample:
        _refuse_without_sample_losses(recipe)


def _refuse_without_sample_losses(recipe: Recipe) -> None:
    what = "pruning" if recipe.pruning.on else 'k = "auto"' if recipe.k == "auto" else ""
    if what:
        raise ValueError(
            f"loss {recipe.model.loss!r} gives one number for a block, and {what} needs the loss of each sample; "
            "return losses of shape [samples]"
        )


def _refuse_blocks_of_one(recipe: Recipe, module: nn.Module, dataset: Dataset) -> None:
    """Refuse blocks of a single sample where the model cannot be trained on one, before anything is computed."""
    import torch

    from paceline.workers.gradients import has_batch_norm

    worker, samples = recipe.worker, recipe.worker.batch_size
    if averages(recipe) or not 1 < samples == worker.blocks or not has_batch_norm(module):
        return
    trial = copy.deepcopy(module).train()
    try:
        with torch.no_grad():
            trial(dataset.train.first(1)[0])
    except ValueError as error:
        fewer = next(count for count in range(samples // 2, 0, -1) if samples % count == 0)
        raise SettingError(
            ("worker", "blocks"),
            f"model {recipe.model.name!r} has a BatchNorm, which refuses blocks of one sample (batch_size={samples}, "
            f"blocks={worker.blocks}): give at most {fewer} blocks",
        ) from error


def make_training(recipe: Recipe, dataset: Dataset, given: Given = NOTHING_GIVEN) -> Training:
    """Put together what is trained, on what, and how.

    >>> len(make_training(Recipe(), load_data(Recipe())).shards)
    10
    """
    from paceline.data import ExtendedAugmentation, NoAugmentation, PadCropFlip
    from paceline.models import seeded
    from paceline.training import Training
    from paceline.training.pruned import groups_of

    given = given.objects()

    recipe = sized(recipe, dataset)
    shards = make_shards(recipe, dataset)
    recipe = _with_rounds_of(recipe, shards)
    data, workers = recipe.data, recipe.cluster.workers
    if data.augment and len(dataset.input_shape) != 3:
        raise ValueError(
            f"augment crops and flips images [channels, height, width], and data set {dataset.name!r} has inputs of "
            f"shape {dataset.input_shape}; leave it out"
        )
    module, loss = make_model(recipe, dataset, given), make_loss(recipe, given)
    if given or any(map(is_code, (recipe.model.name, recipe.model.loss, recipe.data.name))):
        with seeded(recipe.seed):  # what the trial draws is nobody's
            _check_parts(recipe, module, dataset, loss)
    with seeded(recipe.seed):
        _refuse_blocks_of_one(recipe, module, dataset)
    augmentation: Augmentation = NoAugmentation()
    if data.augment:
        augmentation = ExtendedAugmentation() if data.augment == "extended" else PadCropFlip()
    training = Training(
        module=module,
        dataset=dataset,
        shards=shards,
        optimizer=recipe.optimizer,
        total_steps=_planned_rounds(recipe, shards)
        * (1 if averages(recipe) else make_strategy(recipe).updates_per_round(workers)),
        batch_size=recipe.worker.batch_size,
        blocks=recipe.worker.blocks,
        seed=recipe.seed,
        augmentation=augmentation,
        evaluation_samples=recipe.evaluation_samples,
        codec=make_codec_of(recipe),
        plan=recipe.codec.plan,
        pruning=recipe.pruning,
        worker_draws=recipe.rounds,
        passes=recipe.epochs,
        loss=loss,
    )
    if recipe.pruning.protect is not None:
        groups_of(training)  # refuses targets that are no classes
    return training


def make_shards(recipe: Recipe, dataset: Dataset) -> Sequence[torch.Tensor]:
    """Deal the samples to the workers of a recipe that is `sized`.

    >>> data = load_data(Recipe())
    >>> len(make_shards(sized(Recipe(), data), data))
    10
    """
    import torch

    from paceline.data import split

    data, train = recipe.data, dataset.train
    if data.split == "iid":  # nobody looks at labels, which may have to be read
        labels = torch.zeros(len(train), dtype=torch.int64)
    elif train.labels is None:
        raise ValueError(
            f"data set {dataset.name!r} has no labels to make a {data.split} split by: its targets have shape "
            f"{tuple(train.first(1)[1].shape[1:])}; give --split iid"
        )
    else:
        labels = train.labels
    return split(
        labels,
        recipe.cluster.workers,
        kind=data.split,
        classes_per_worker=data.classes_per_worker if data.split == "non-iid" else None,
        alpha=data.alpha if data.split == "dirichlet" else None,
        seed=recipe.seed,
    )


def with_rounds(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe with the rounds that its epochs come to, if its budget is epochs; else as it is.

    In a round every worker draws a batch, so `epochs` passes over the largest shard take that many batches. This is the
    most: where samples are pruned, a simulated run ends when every worker has made its passes.

    >>> recipe = Recipe(epochs=2).with_settings(data={"split": "iid"}, cluster={"workers": 3})
    >>> with_rounds(recipe, load_data(recipe)).rounds  # of 500 samples each, 32 in a batch
    32
    >>> with_rounds(recipe.with_settings(rounds=100), load_data(recipe))
    Traceback (most recent call last):
    ValueError: give rounds or epochs, not both (rounds=100; epochs=2 are 32 rounds)
    """
    if recipe.epochs is None:
        return recipe
    recipe = sized(recipe, dataset)
    return _with_rounds_of(recipe, make_shards(recipe, dataset))


def _with_rounds_of(recipe: Recipe, shards: Sequence[torch.Tensor]) -> Recipe:
    if recipe.epochs is None:
        return recipe
    rounds = -(-recipe.epochs * max(map(len, shards)) // recipe.worker.batch_size)
    if recipe.rounds not in (Recipe.__dataclass_fields__["rounds"].default, rounds):
        raise ValueError(
            f"give rounds or epochs, not both (rounds={recipe.rounds}; epochs={recipe.epochs} are {rounds} rounds)"
        )
    return recipe.with_settings(rounds=rounds)


def _planned_rounds(recipe: Recipe, shards: Sequence[torch.Tensor]) -> int:
    """Return over how many rounds the learning rate's schedule is laid out.

    Where epochs end a run that prunes, it is as many as pruning leaves, as far as that is known beforehand: exactly for
    fine-pruning, and for info-batch as if it pruned nothing.
    """
    if recipe.epochs is None or not recipe.pruning.on:
        return recipe.rounds
    from paceline.data.pruning.plan import most_samples

    batch_size, sizes = recipe.worker.batch_size, [len(shard) for shard in shards]
    return max(-(-kept // batch_size) for kept in most_samples(recipe.pruning, sizes, passes=recipe.epochs))


def make_codec_of(recipe: Recipe) -> Codec:
    """Make the codec.

    >>> make_codec_of(Recipe().with_settings(codec={"name": "one-bit"}))
    ErrorFeedback(OneBit())
    """
    return parse_codec(codec_text_of(recipe))


def codec_text_of(recipe: Recipe) -> str:
    """Return the codec in words, for traces and workers; with error feedback where the recipe or the codec wants it.

    >>> codec_text_of(Recipe().with_settings(codec={"name": "qsgd", "levels": 3}))
    'qsgd levels=3'
    """
    section = recipe.codec
    settings = {name: value for name, value in dataclasses.asdict(section).items() if value != "auto"}
    return codec_text(section.name, settings, feedback=_error_feedback(recipe))


def _error_feedback(recipe: Recipe) -> bool:
    wanted = recipe.codec.error_feedback
    return make_codec(recipe.codec.name).biased if isinstance(wanted, str) else wanted


def sized(recipe: Recipe, dataset: Dataset | None = None) -> Recipe:
    """Return the recipe with the numbers that follow from its workers and its data, where they were not given.

    K is seven tenths of the workers. Samples are split by their labels, if they have any; every worker holds three
    classes, or as many as it takes so that every class is held. A user's own data must be there to know them.

    >>> recipe = sized(Recipe().with_settings(cluster={"workers": 3}))
    >>> recipe.strategy.k, recipe.data.split, recipe.data.classes_per_worker
    (3, 'non-iid', 4)
    """
    data, changes = recipe.data, dict[str, Any]()
    # Where they play no part K and classes per worker are what they were in records of before, 7 and 3.
    k = recipe.k if recipe.strategy.name in ("fastest-k", "lgc") or recipe.strategy.k is not None else 7
    if dataset is None and recipe.classes is None:
        return recipe.with_settings(strategy={"k": k})
    if data.split == "auto":
        labelled = dataset is None or dataset.train.labels is not None
        changes["split"] = "non-iid" if labelled else "iid"
    if data.classes_per_worker is None:
        changes["classes_per_worker"] = 3
        if changes.get("split", data.split) == "non-iid":
            changes["classes_per_worker"] = _classes_to_hold(recipe, dataset)
    return recipe.with_settings(strategy={"k": k}, data=changes)


def _classes_to_hold(recipe: Recipe, dataset: Dataset | None) -> int:
    """Return three classes for each worker, more if else a class is held by nobody, fewer if a class is too small."""
    workers = recipe.cluster.workers
    if dataset is None or dataset.train.labels is None:
        classes = recipe.classes or 1
        return min(classes, max(3, -(-classes // workers)))
    sizes = dataset.train.labels.bincount()
    classes = int((sizes > 0).sum())
    least = -(-classes // workers)
    room = int(sizes.clamp(max=workers).sum()) // workers  # a class has no more holders than samples
    return min(classes, max(least, min(3, room)))


def notice_of_k(recipe: Recipe) -> str:
    """Return what to say of a K that is another than it was in the last release; "" if there is nothing to say.

    >>> notice_of_k(Recipe().with_settings(cluster={"workers": 20}))
    'K is 14, seven tenths of 20 workers; unset it was 7 before this release: give k = 7 to have that again'
    >>> notice_of_k(Recipe())
    ''
    """
    workers, takes_k = recipe.cluster.workers, recipe.strategy.name in ("fastest-k", "lgc")
    if not takes_k or recipe.strategy.k is not None or recipe.k == 7 or workers < 7:
        return ""
    return (
        f"K is {recipe.k}, seven tenths of {workers:,} workers; unset it was 7 before this release: "
        "give k = 7 to have that again"
    )


def notice_of_slow_workers(recipe: Recipe) -> str:
    """Return what to say of a cluster whose workers are all slow ones: mostly one that was made smaller.

    >>> recipe = Recipe().with_settings(delay={"name": "slow-worker", "slow_workers": 2})
    >>> print(notice_of_slow_workers(recipe.with_settings(cluster={"workers": 2})))
    every worker is a slow one (delay.slow_workers = 2, cluster.workers = 2): give slow_workers = 0 for fast ones alone
    >>> notice_of_slow_workers(recipe)
    ''
    """
    slow, workers = recipe.delay.slow_workers, recipe.cluster.workers
    if recipe.delay.name != "slow-worker" or recipe.delay.slow_factor == 1 or slow < workers:
        return ""
    return (
        f"every worker is a slow one (delay.slow_workers = {slow:,}, cluster.workers = {workers:,}): "
        "give slow_workers = 0 for fast ones alone"
    )


def notice_of_skew(recipe: Recipe) -> str:
    """Return what to say of workers that keep their own change in flight, on skewed data and with momentum.

    The recipe's split must be `sized`. docs/averaging.md says why such a worker goes on along its own data.

    >>> print(notice_of_skew(sized(Recipe().with_strategy("hpsgd"))))
    hpsgd with momentum drifts along each worker's own data (split non-iid). Give rebase = false and a smaller learning
    rate, or take local-sgd.
    >>> notice_of_skew(sized(Recipe().with_settings(strategy={"name": "hpsgd", "rebase": False})))
    ''
    """
    momentum = recipe.optimizer.momentum if "momentum" in OPTIMIZERS[recipe.optimizer.name][1] else 0.0
    skewed = recipe.data.split in ("non-iid", "dirichlet") and recipe.cluster.workers > 1
    if not (averages(recipe) and skewed and momentum and make_member(recipe).rebase):
        return ""
    return (
        f"{recipe.strategy.name} with momentum drifts along each worker's own data (split {recipe.data.split}). "
        "Give rebase = false and a smaller learning rate, or take local-sgd."
    )


def resolved(recipe: Recipe, dataset: Dataset | None = None) -> Recipe:
    """Return the recipe with the values that `auto` and empty settings come to, for the journal of a run.

    A run that was recorded so stays the same when a default changes later. k = "auto" stays: K is chosen anew in every
    round.

    >>> recipe = resolved(Recipe().with_settings(strategy={"name": "bmuf"}, codec={"name": "one-bit"}))
    >>> recipe.strategy.period, recipe.strategy.outer_momentum, recipe.codec.error_feedback
    (8, 0.9, True)
    """
    if recipe.epochs is not None and recipe.pruning.on:
        raise ValueError(
            f"a real run that prunes has no budget of epochs (epochs={recipe.epochs}): no worker knows the passes of "
            "the others; give rounds, or simulate it"
        )
    recipe = sized(recipe, dataset)
    recipe = recipe if dataset is None else with_rounds(recipe, dataset)
    found: dict[str, dict[str, Any]] = {"codec": {"error_feedback": _error_feedback(recipe)}, "strategy": {}}
    if recipe.strategy.scale_partial == "auto":
        found["strategy"]["scale_partial"] = "samples"
    lossless = settings_of(recipe.codec.name).get("lossless")
    if recipe.codec.lossless == "auto" and lossless is not None:
        found["codec"]["lossless"] = lossless
    if recipe.model.name in MODELS and MODELS[recipe.model.name].norms and not recipe.model.norm:
        found["model"] = {"norm": MODELS[recipe.model.name].norms[0]}
    if recipe.pipeline.on:
        found["pipeline"] = {"chunks": recipe.pipeline.pieces}
    if averages(recipe):
        member = make_member(recipe)
        values = {
            "period": member.period,
            "rebase": member.rebase,
            "outer_rate": member.outer.rate,
            "outer_momentum": member.outer.momentum_of(recipe.cluster.workers),
        }
        found["strategy"] |= {
            name: value
            for name, value in values.items()
            if name in SETTINGS[member.name] and getattr(recipe.strategy, name) == "auto"
        }
    return recipe.with_settings(**cast("RecipeChanges", found))


def exchanges_encoded(recipe: Recipe) -> bool:
    """Whether a recipe's ranks exchange encoded changes or contributions to rounds, by a plan.

    >>> exchanges_encoded(Recipe().with_settings(strategy={"name": "hpsgd"}, codec={"name": "qsgd"}))
    True
    """
    on_ranks = averages(recipe) or recipe.strategy.rounds_on_ranks
    return on_ranks and not recipe.pipeline.on and recipe.codec.name != "identity"


def planned(recipe: Recipe, training: Training) -> Recipe:
    """Return the recipe with the plan that `auto` comes to for this model, for the record of a run.

    >>> recipe = Recipe().with_settings(strategy={"name": "hpsgd"}, codec={"name": "qsgd"}, cluster={"workers": 2})
    >>> planned(recipe, make_training(recipe, load_data(recipe))).codec.plan
    'gather'
    """
    from paceline.exchanges import make_exchange

    if not exchanges_encoded(recipe):
        return recipe
    shapes = [parameter.shape for parameter in training.module.parameters() if parameter.requires_grad]
    exchange = make_exchange(training.codec, shapes, 0, recipe.cluster.workers, recipe.codec.plan)
    return recipe.with_settings(codec={"plan": exchange.plan})


def recorded_recipe(document: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a recorded run; what it does not say is as it was before there was such a setting.

    Ranks gathered what they exchanged before there were plans, and `lgc` scaled partial work.

    >>> document = {"strategy": {"name": "hpsgd"}, "codec": {"name": "one-bit"}}
    >>> recorded_recipe(document).codec.plan, Recipe.from_document(document).codec.plan
    ('gather', 'auto')
    """
    recipe, codec = Recipe.from_document(as_recorded(document)), document.get("codec")
    if exchanges_encoded(recipe) and isinstance(codec, Mapping) and "plan" not in codec:
        return recipe.with_settings(codec={"plan": "gather"})
    return recipe


def going_on(recipe: Recipe, recorded: Recipe) -> Recipe:
    """Return a recipe with what a recorded run began with, where the recipe leaves the choice to paceline.

    >>> recorded = recorded_recipe({"strategy": {"name": "lgc"}})
    >>> going_on(Recipe(), recorded).strategy.scale_partial
    True
    """
    if recipe.codec.plan == "auto":
        recipe = recipe.with_settings(codec={"plan": recorded.codec.plan})
    if recipe.strategy.scale_partial == "auto":
        recipe = recipe.with_settings(strategy={"scale_partial": recorded.strategy.scale_partial})
    return recipe


def make_setup(recipe: Recipe) -> Setup:
    """Put together the cluster.

    >>> make_setup(Recipe()).workers
    10
    """
    return Setup(
        name=recipe.label,
        strategy=make_strategy(recipe),
        workers=recipe.cluster.workers,
        rounds=recipe.rounds,
        delays=make_delays(recipe),
        network=recipe.network,
        late_work=recipe.cluster.late_work,
        late_blocks=recipe.cluster.late_blocks,
        blocks=recipe.worker.blocks,
        on=recipe.strategy.on,
        fixed_seconds=recipe.delay.fixed_seconds,
        seed=recipe.seed,
        recipe=recipe.to_dict(),
    )


def make_averaging_setup(recipe: Recipe) -> AveragingSetup:
    """Put together the cluster of workers that average among themselves.

    >>> make_averaging_setup(Recipe().with_strategy("hpsgd")).member.overlap
    True
    """
    return AveragingSetup(
        member=make_member(recipe),
        workers=recipe.cluster.workers,
        rounds=recipe.rounds,
        delays=make_delays(recipe),
        network=recipe.network,
        seed=recipe.seed,
        recipe=recipe.to_dict(),
    )
