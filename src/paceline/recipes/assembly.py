"""The parts that a recipe names, made and put together; and the recipe with every `auto` written out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.codecs import Codec, make_codec
from paceline.codecs.naming import codec_text, parse_codec, settings_of
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import Delays, Pareto, ShiftedExponential, SlowWorkers, read_recorded
from paceline.models import MODELS
from paceline.recipes.recipe import Recipe
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.averaging import AVERAGING, Averaging, make_averaging
from paceline.strategies.averaging.members import SETTINGS

if TYPE_CHECKING:
    from torch import nn

    from paceline.data import Dataset
    from paceline.training import Training


def make_strategy(recipe: Recipe) -> Strategy:
    """Make the strategy, with those of the section's settings that it has.

    >>> make_strategy(Recipe())
    LGC(k=7, warmup_rounds=0, scale_partial=True)
    """
    if averages(recipe):
        raise ValueError(f"{recipe.strategy.name} has no server; choose from {', '.join(STRATEGIES)}")
    kind = STRATEGIES[recipe.strategy.name]
    chosen = {field.name: getattr(recipe.strategy, field.name) for field in dataclasses.fields(kind)}
    return kind(**chosen)


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


def load_data(recipe: Recipe) -> Dataset:
    """Load the data set.

    >>> load_data(Recipe()).classes
    10
    """
    from paceline.data import load_dataset

    data = recipe.data
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


def make_model(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """Build the network, sized for the data.

    >>> type(make_model(Recipe(), load_data(Recipe()))).__name__
    'Sequential'
    """
    from paceline.models import build_model

    model = build_model(
        recipe.model.name,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        norm=recipe.model.norm or None,
        seed=recipe.seed,
    )
    if ":" in recipe.model.name:
        _check_output(recipe.model.name, model, dataset)
    return model


def _check_output(name: str, model: nn.Module, dataset: Dataset) -> None:
    """Try a user's own network on two samples before the run, so that a mistake is reported for what it is."""
    import torch

    batch, expected = dataset.train.inputs[:2], (2, dataset.classes)
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(batch)
    except Exception as error:
        raise ValueError(f"model {name!r} fails on a batch of shape {tuple(batch.shape)}: {error}") from error
    finally:
        model.train(training)
    found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if found != expected:
        raise ValueError(f"model {name!r} must return a tensor of shape {expected} for two samples (it gave {found})")


def make_training(recipe: Recipe, dataset: Dataset) -> Training:
    """Put together what is trained, on what, and how.

    >>> len(make_training(Recipe(), load_data(Recipe())).shards)
    10
    """
    from paceline.data import NoAugmentation, PadCropFlip, split
    from paceline.training import Training

    data, workers = recipe.data, recipe.cluster.workers
    shards = split(
        dataset.train.targets,
        workers,
        kind=data.split,
        classes_per_worker=data.classes_per_worker if data.split == "non-iid" else None,
        alpha=data.alpha if data.split == "dirichlet" else None,
        seed=recipe.seed,
    )
    return Training(
        module=make_model(recipe, dataset),
        dataset=dataset,
        shards=shards,
        optimizer=recipe.optimizer,
        total_steps=recipe.rounds * (1 if averages(recipe) else make_strategy(recipe).updates_per_round(workers)),
        batch_size=recipe.worker.batch_size,
        blocks=recipe.worker.blocks,
        seed=recipe.seed,
        augmentation=PadCropFlip() if data.augment else NoAugmentation(),
        evaluation_samples=recipe.evaluation_samples,
        codec=make_codec_of(recipe),
        pruning=recipe.pruning,
        worker_draws=recipe.rounds,
    )


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


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe with the values that `auto` and empty settings come to, for the journal of a run.

    A run that was recorded so stays the same when a default changes later. k = "auto" stays: K is chosen anew in every
    round.

    >>> recipe = resolved(Recipe().with_settings(strategy={"name": "bmuf"}, codec={"name": "one-bit"}))
    >>> recipe.strategy.period, recipe.strategy.outer_momentum, recipe.codec.error_feedback
    (8, 0.9, True)
    """
    found: dict[str, dict[str, Any]] = {"codec": {"error_feedback": _error_feedback(recipe)}, "strategy": {}}
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
        found["strategy"] = {
            name: value
            for name, value in values.items()
            if name in SETTINGS[member.name] and getattr(recipe.strategy, name) == "auto"
        }
    return recipe.with_settings(**found)


def make_setup(recipe: Recipe) -> Setup:
    """Put together the cluster.

    >>> make_setup(Recipe()).workers
    10
    """
    return Setup(
        name=recipe.strategy.label,
        strategy=make_strategy(recipe),
        workers=recipe.cluster.workers,
        rounds=recipe.rounds,
        delays=make_delays(recipe),
        network=recipe.network,
        late_work=recipe.cluster.late_work,
        blocks=recipe.worker.blocks,
        on=recipe.strategy.on,
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
