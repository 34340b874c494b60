"""A recipe carried out under the simulator."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.progress import Progress
from paceline.drivers.simulated.timing import AsyncTimes, RoundTimes
from paceline.errors import PacelineWarning
from paceline.pipeline.settings import refuse_pipeline
from paceline.recipes.assembly import (
    NOTHING_GIVEN,
    Given,
    averages,
    load_data,
    make_averaging_setup,
    make_codec_of,
    make_model,
    make_setup,
    make_training,
    notice_of_k,
    notice_of_skew,
    notice_of_slow_workers,
    sized,
    with_rounds,
)
from paceline.recipes.recipe import Recipe
from paceline.strategies import Async
from paceline.traces import Summary, Trace, summarise
from paceline.traces.time_split import time_split
from paceline.traffic import Traffic, all_reduce_traffic

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data import Dataset
    from paceline.workers.flat import FlatModel


MOST_GRADIENTS_BY_EVENT = 5_000_000
SHOWN = ("strategy", "rounds", "seconds", "loss", "accuracy")
FROM_TRACE = ("late_work", "clock", "diverged", "sent_bytes", "received_bytes")


class Run(Protocol):
    """A run that advances by being iterated over."""

    def __iter__(self) -> Iterator[Progress]:
        """Yield the progress of the run, round by round."""

    @property
    def trace(self) -> Trace:
        """All that has happened so far."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run: a summary, the trace of all that happened, and the trained model.

    `model.load_state_dict(result.state_dict)` puts it into a module of yours; `parameters` are all that was trained, in
    one vector. Both are None where nothing was trained.

    >>> result = simulate(Recipe(rounds=5))
    >>> result.rounds, result.loss == result.trace.evaluations[-1].loss
    (5, True)
    """

    summary: Summary
    trace: Trace
    parameters: torch.Tensor | None = None
    state_dict: dict[str, torch.Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Return the result in a line: the trace of a long run fills pages.

        >>> simulate(Recipe(rounds=5), timing_only=True)
        Result(strategy='lgc', rounds=5, seconds=..., loss=None, accuracy=None)
        """
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in SHOWN)
        return f"Result({shown})"

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.summary.strategy

    @property
    def rounds(self) -> int:
        """The number of rounds that were run."""
        return self.summary.rounds

    @property
    def seconds(self) -> float:
        """The time that passed on the cluster."""
        return self.summary.seconds

    @property
    def loss(self) -> float | None:
        """The mean loss on the training data at the end; None if nothing was trained or training diverged."""
        return self.summary.loss

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the test data at the end; None if nothing was trained or training diverged."""
        return self.summary.accuracy

    @property
    def test_loss(self) -> float | None:
        """The mean loss on the test data at the end; None if nothing was trained or training diverged."""
        return self.summary.test_loss

    @property
    def seconds_to_target(self) -> float | None:
        """The time at which the target loss was reached; None if it was not."""
        return self.summary.seconds_to_target

    @property
    def seconds_to_accuracy(self) -> float | None:
        """The time at which the target accuracy was reached; None if it was not, or nobody asked for one."""
        return self.summary.seconds_to_accuracy


def simulate(
    recipe: Recipe,
    *,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    timing_only: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Carry out a recipe on a simulated cluster. The same recipe gives the same result, bit for bit.

    `data`, `model` and `loss` are objects of your own in place of those that the recipe names: (train, test), each a
    torch Dataset or a pair of tensors; a module, or a function that makes one; a function of outputs and targets.

    >>> simulate(Recipe(rounds=3), timing_only=True).loss is None
    True
    >>> import torch
    >>> pair = torch.randn(60, 20), torch.arange(60) % 3
    >>> simulate(Recipe(rounds=3), data=(pair, pair), model=torch.nn.Linear(20, 3)).rounds
    3
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"simulate takes a Recipe, not a {type(recipe).__name__}; Recipe.load reads one from a file")
    given = Given(data=data, model=model, loss=loss)
    dataset = None if timing_only else load_data(given.named(recipe), given)
    run = make_run(recipe, timing_only=timing_only, dataset=dataset, given=given)
    give_notices((recipe, None if dataset is None else sized(given.named(recipe), dataset)), simulated=True)
    for progress in run:
        if on_progress is not None:
            on_progress(progress)
    return result_of(run)


def result_of(run: Run) -> Result:
    """Return the result of a run that has been iterated over."""
    trace = run.trace
    learner = getattr(run, "learner", None)
    if learner is None:
        return Result(summary=summarise(trace), trace=trace)
    parameters = learner.parameters.clone()
    state = state_with(learner.module, parameters)
    return Result(summary=summarise(trace), trace=trace, parameters=parameters, state_dict=state)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a module's state."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def state_with(module: nn.Module, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a copy of a module's state, with these parameters in place of its own.

    >>> from torch import nn, ones
    >>> state_with(nn.Linear(2, 1, bias=False), ones(2))
    {'weight': tensor([[1., 1.]])}
    """
    state = state_of(module)
    at, seen = 0, set[int]()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            state[name] = parameters[at : at + parameter.numel()].detach().reshape(parameter.shape).clone()
            at += parameter.numel()
    return state


def give_notices(*runs: tuple[Recipe, Recipe | None], simulated: bool = False) -> None:
    """Say what somebody should know of runs that are about to begin, once nothing is left to refuse; each thing once.

    A run is the recipe that was given, and the one that is trained, its split known (None: nothing is trained, or not
    here). Of the first: that K, which follows from the number of workers, was another in the last release. Of the
    second: what averaging does on skewed data. Of delays, where a run has any: that all workers are slow.
    """
    notices: dict[str, type[Warning]] = {}
    for given, trained in runs:
        launched = trained or given
        notices[notice_of_k(given)] = FutureWarning
        if simulated or launched.delay.inject:
            notices[notice_of_slow_workers(launched)] = PacelineWarning
        if trained is not None:
            notices[notice_of_skew(trained)] = PacelineWarning
    for notice, kind in notices.items():
        if notice:
            warnings.warn(notice, kind, stacklevel=3)


def make_run(
    recipe: Recipe, *, timing_only: bool = False, dataset: Dataset | None = None, given: Given = NOTHING_GIVEN
) -> Run:
    """Return a run of a recipe that has not begun yet.

    >>> [progress.round for progress in make_run(Recipe(rounds=2), timing_only=True)]
    [1, 2]
    """
    refuse_pipeline(recipe.pipeline, "a pipeline is not simulated")
    recipe = given.named(recipe)
    if timing_only:
        if recipe.epochs is not None:
            raise ValueError(
                f"timing only knows no shards, and so not how many rounds are {recipe.epochs} epochs; give rounds"
            )
        recipe = sized(recipe)
        return _make_averaged_timing(recipe, given) if averages(recipe) else _make_timing(recipe, given)
    dataset = load_data(recipe, given) if dataset is None else dataset
    recipe = with_rounds(sized(recipe, dataset), dataset)
    training = make_training(recipe, dataset, given)
    if averages(recipe):
        return AveragedSimulation(make_averaging_setup(recipe), training=training, evaluate_every=recipe.evaluate_every)
    from paceline.drivers.simulated.simulation import Simulation

    return Simulation(make_setup(recipe), training=training, evaluate_every=recipe.evaluate_every)


def _make_timing(recipe: Recipe, given: Given) -> Run:
    setup = make_setup(recipe)
    if setup.shares is not None:
        return _make_timing_with_shares(recipe, given)
    if setup.on == "ranks":
        return RoundTimes(setup, round_traffic=_round_traffic(recipe, given, free=setup.network.free))
    if not setup.network.free:
        return _make_timing_by_event(recipe, given)
    return AsyncTimes(setup) if isinstance(setup.strategy, Async) else RoundTimes(setup)


def _make_timing_with_shares(recipe: Recipe, given: Given) -> Run:
    """Play every gradient: the strategy hears of each, and assigns shares by what it has heard."""
    from paceline.drivers.simulated.simulation import Simulation

    _refuse_many_gradients(recipe, "shares by speed", "give shares = equal")
    setup = make_setup(recipe)
    if setup.on == "ranks":
        return Simulation(setup, round_traffic=_round_traffic(recipe, given, free=setup.network.free))
    return Simulation(setup) if setup.network.free else _make_timing_by_event(recipe, given)


def _refuse_many_gradients(recipe: Recipe, reason: str, otherwise: str) -> None:
    gradients = recipe.cluster.workers * recipe.rounds
    if gradients > MOST_GRADIENTS_BY_EVENT:
        raise ValueError(
            f"timing with {reason} plays every gradient: workers x rounds must be at most "
            f"{MOST_GRADIENTS_BY_EVENT:,} (it is {gradients:,}); lower one, or {otherwise}"
        )


def _make_timing_by_event(recipe: Recipe, given: Given) -> Run:
    """Play every message: with limited bandwidth workers wait for each other; only the event queue knows how long."""
    from paceline.drivers.simulated.simulation import Simulation
    from paceline.training.outgoing import change_bytes
    from paceline.workers.flat import FlatModel

    _refuse_many_gradients(recipe, "limited bandwidth", "leave the bandwidth unlimited")
    model = FlatModel(make_model(recipe, load_data(recipe, given), given))
    up, down = _payload_bytes(recipe, model), change_bytes(make_codec_of(recipe).fresh(model.shapes), model.shapes)
    buffer_bytes = 4 * model.buffers.numel()
    return Simulation(make_setup(recipe), up_bytes=up + buffer_bytes, down_bytes=down + buffer_bytes)


def _make_averaged_timing(recipe: Recipe, given: Given) -> Run:
    setup = make_averaging_setup(recipe)
    if setup.network.free:
        return AveragedSimulation(setup)
    from paceline.exchanges.plans import adds_plainly
    from paceline.workers.flat import FlatModel

    model = FlatModel(make_model(recipe, load_data(recipe, given), given))
    payload_bytes, buffer_bytes = _payload_bytes(recipe, model), 4 * model.buffers.numel()
    if adds_plainly(make_codec_of(recipe), recipe.codec.plan):
        return AveragedSimulation(setup, message_bytes=payload_bytes + buffer_bytes)
    return AveragedSimulation(
        setup, traffic=_encoded_traffic(recipe, model) + Traffic(given_bytes=(setup.workers - 1) * buffer_bytes)
    )


def _round_traffic(recipe: Recipe, given: Given, *, free: bool) -> Traffic:
    """Return what ranks put on the network for the sum of a round; where bandwidth is `free`, bytes may be left out."""
    from paceline.exchanges.plans import adds_plainly
    from paceline.workers.flat import FlatModel

    workers = recipe.cluster.workers
    plain = adds_plainly(make_codec_of(recipe), recipe.codec.plan)
    if plain and free:
        return all_reduce_traffic(0, workers)
    model = FlatModel(make_model(recipe, load_data(recipe, given), given))
    buffer_bytes = 4 * model.buffers.numel()
    if plain:
        return all_reduce_traffic(4 * model.parameters.numel() + buffer_bytes, workers)
    return _encoded_traffic(recipe, model) + all_reduce_traffic(buffer_bytes, workers)


def _encoded_traffic(recipe: Recipe, model: FlatModel) -> Traffic:
    """Return what the exchange of an encoded vector of the model's length puts on the network, whatever is in it."""
    from paceline.exchanges import make_exchange
    from paceline.exchanges.plans import traffic_of

    _payload_bytes(recipe, model)  # refuses codecs whose payloads vary in size
    workers = recipe.cluster.workers
    exchange = make_exchange(make_codec_of(recipe), model.shapes, 0, workers, recipe.codec.plan)
    return traffic_of(exchange.plan, exchange.codec, exchange.elements, workers)


def _payload_bytes(recipe: Recipe, model: FlatModel) -> int:
    """Return the size of an encoded vector of the model's length, whatever is in it."""
    codec = make_codec_of(recipe).fresh(model.shapes)
    if not codec.fixed_size:
        raise ValueError(
            f"timing only cannot know the bytes of codec {recipe.codec.name!r}, which depend on the gradient; "
            "run it with training, or choose a codec of fixed size (such as qsgd, packed)"
        )
    return codec.most_bytes(model.parameters.numel())


def as_document(
    recipe: Recipe | None, results: Sequence[Result], varied: Sequence[Mapping[str, Any]] = ()
) -> dict[str, object]:
    """Return results as one machine-readable document; what JSON cannot hold (infinite bandwidth) becomes null.

    `varied` are the settings of each result in which it is not as the recipe says.

    >>> sorted(as_document(Recipe(), []))
    ['recipe', 'results']
    """
    return {
        "recipe": {} if recipe is None else recipe.to_document(),  # a script has none
        "results": [
            dataclasses.asdict(result.summary)
            | {name: getattr(result.trace, name) for name in FROM_TRACE}
            | ({"pruned": dataclasses.asdict(result.trace.pruned)} if result.trace.pruned else {})
            | ({"shares": dataclasses.asdict(result.trace.shares)} if result.trace.shares else {})
            | ({"missing": list(result.trace.missing)} if result.trace.missing else {})
            | ({"time_split": dataclasses.asdict(split)} if (split := time_split(result.trace)) else {})
            | ({"varied": dict(values)} if values else {})
            for result, values in zip(results, varied or [{}] * len(results), strict=True)
        ],
    }
