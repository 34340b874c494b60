"""Whole simulated runs on the digits: what is learned, and that it depends on the seed and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.data import BatchOrder, load_dataset, split
from paceline.drivers.simulated.cluster import Setup, TakenStep, Task
from paceline.drivers.simulated.delays import ShiftedExponential, SlowWorkers
from paceline.drivers.simulated.learner import Learner
from paceline.drivers.simulated.network import Network
from paceline.drivers.simulated.simulation import Simulation
from paceline.events import Share, Step
from paceline.models import build_model
from paceline.optim import OptimizerSettings
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces import summarise
from paceline.training import Training

ROUNDS, WORKERS = 6, 4


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def training(digits, *, model="mlp", module=None, workers=WORKERS, seed=0, rounds=ROUNDS, **optimizer):
    return Training(
        module=module or build_model(model, input_shape=digits.input_shape, classes=10, seed=seed),
        dataset=digits,
        shards=split(digits.train.targets, workers=workers, kind="iid", seed=seed),
        optimizer=OptimizerSettings(**({"lr": 0.05} | optimizer)),
        total_steps=rounds,
        batch_size=16,
        blocks=4,
        seed=seed,
        evaluation_samples=300,
    )


def with_batch_norm():
    """A small network of two layers with running statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def simulate(strategy, trained, *, workers=WORKERS, rounds=ROUNDS, seed=0, late_work="partial", delays=None):
    setup = Setup(
        name=str(strategy),
        strategy=strategy,
        workers=workers,
        rounds=rounds,
        delays=delays or ShiftedExponential(seed=seed),
        late_work=late_work,
        blocks=4,
        seed=seed,
    )
    simulation = Simulation(setup, training=trained, evaluate_every=3)
    simulation.progress = list(simulation)
    return simulation


@pytest.mark.parametrize("strategy", [Full(), FastestK(k=2), LGC(k=2), Async()], ids=str)
def test_the_same_seed_gives_the_same_parameters_to_the_last_bit_and_the_same_trace(digits, strategy):
    first, second = (simulate(strategy, training(digits)) for _ in range(2))
    assert torch.equal(first.learner.parameters, second.learner.parameters)
    assert first.trace == second.trace


def test_another_seed_gives_another_run(digits):
    first, second = (simulate(LGC(k=2), training(digits, seed=seed), seed=seed) for seed in (0, 1))
    assert not torch.equal(first.learner.parameters, second.learner.parameters)
    assert first.trace.seconds != second.trace.seconds


@pytest.mark.parametrize("late_work", ["partial", "complete"])
def test_with_k_of_everybody_lgc_fastest_k_and_full_train_the_same_model_to_the_last_bit(digits, late_work):
    runs = [simulate(s, training(digits), late_work=late_work) for s in (Full(), LGC(k=WORKERS), FastestK(k=WORKERS))]
    assert all(torch.equal(runs[0].learner.parameters, other.learner.parameters) for other in runs[1:])
    assert len({run.trace.seconds for run in runs}) == 1


def test_compensation_changes_what_is_learned_and_the_pace_stays_that_of_fastest_k(digits):
    fastest, compensated = (simulate(s, training(digits)) for s in (FastestK(k=2), LGC(k=2)))
    assert not torch.equal(fastest.learner.parameters, compensated.learner.parameters)
    assert fastest.trace.seconds == compensated.trace.seconds
    assert compensated.trace.late > 0 == fastest.trace.late


def test_full_with_one_worker_is_a_plain_training_loop(digits):
    trained = training(digits, model="lenet", workers=1, momentum=0.9, weight_decay=0.01, decay_at=(0.5,))
    simulation = simulate(Full(), trained, workers=1)

    module = copy.deepcopy(trained.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    order = BatchOrder(trained.shards[0], 16, seed=0, worker=0)
    for step in range(ROUNDS):
        if step == ROUNDS // 2:
            optimizer.param_groups[0]["lr"] = 0.005
        indices = order.next()
        optimizer.zero_grad()
        F.cross_entropy(module(digits.train.inputs[indices]), digits.train.targets[indices]).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(simulation.learner.parameters, expected, rtol=0, atol=1e-6)


def test_full_with_four_workers_is_one_worker_with_four_times_the_batch(digits):
    trained = training(digits)
    simulation = simulate(Full(), trained)
    module = copy.deepcopy(trained.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    orders = [BatchOrder(shard, 16, seed=0, worker=worker) for worker, shard in enumerate(trained.shards)]
    for _ in range(ROUNDS):
        indices = torch.cat([order.next() for order in orders])
        optimizer.zero_grad()
        F.cross_entropy(module(digits.train.inputs[indices]), digits.train.targets[indices]).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(simulation.learner.parameters, expected, rtol=0, atol=1e-6)


def test_training_learns(digits):
    simulation = simulate(LGC(k=3), training(digits, rounds=60), rounds=60)
    losses = [evaluation.loss for evaluation in simulation.trace.evaluations]
    assert losses[-1] < 0.5 * losses[0]
    assert simulation.trace.evaluations[-1].accuracy > 0.7


def test_divergence_ends_the_run_and_is_told(digits):
    simulation = simulate(Full(), training(digits, lr=1e6, rounds=40), rounds=40)
    assert simulation.trace.diverged
    assert simulation.trace.rounds_done < 40
    assert summarise(simulation.trace).loss is None


def test_divergence_in_the_very_last_round_is_told_too(digits):
    """The update is finite, the parameters after it are not: there is no next gradient to show it."""
    simulation = simulate(Full(), training(digits, lr=1e6, weight_decay=1e36, momentum=0.0, rounds=1), rounds=1)
    finite = bool(torch.isfinite(simulation.learner.parameters).all())
    loss = simulation.trace.evaluations[-1].loss
    assert simulation.trace.diverged or (finite and math.isfinite(loss))


def test_a_diverged_run_loses_no_gradient_in_silence(digits):
    simulation = simulate(LGC(k=2), training(digits, lr=1e6, rounds=40), rounds=40)
    trace = simulation.trace
    assert trace.diverged
    begun = sum(state.draws for state in simulation._cluster._workers)
    assert trace.used + trace.late + sum(trace.dropped.values()) == begun


def test_progress_is_told_after_every_round_and_evaluations_when_due(digits):
    simulation = simulate(Full(), training(digits, rounds=5), rounds=5)
    assert [progress.round for progress in simulation.progress] == [0, 1, 2, 3, 4, 5]
    assert [evaluation.round for evaluation in simulation.trace.evaluations] == [0, 3, 5]
    seconds = [progress.seconds for progress in simulation.progress]
    assert seconds == sorted(seconds)
    assert seconds[-1] == simulation.trace.seconds


def test_a_round_of_async_is_as_many_steps_as_workers(digits):
    simulation = simulate(Async(), training(digits, rounds=3 * WORKERS), rounds=3)
    assert simulation.trace.rounds_done == 3
    assert simulation.trace.used == len(simulation.trace.rounds) == 3 * WORKERS


def test_a_run_without_training_keeps_time_alone():
    simulation = simulate(LGC(k=2), None, rounds=20)
    assert simulation.trace.rounds_done == 20
    assert simulation.trace.evaluations == ()
    assert all(progress.loss is None for progress in simulation.progress)


# -- BatchNorm's running statistics -------------------------------------------------------------------------------


def whole_tasks(workers):
    return tuple(
        Task(worker=w, version=0, draw=0, started_seconds=0, seconds=1, blocks=4, finished_seconds=1, blocks_done=4)
        for w in range(workers)
    )


def test_running_statistics_are_averaged_over_the_workers_of_the_step(digits):
    trained = training(digits, module=with_batch_norm(), workers=3)
    learner = Learner(trained)
    tasks = whole_tasks(3)
    step = Step(version=0, fresh=tuple(Share(worker=w, version=0, weight=1 / 3) for w in range(3)))
    learner.take(TakenStep(step=step, opened_seconds=0.0, fresh=tasks, late=()), oldest_version=0)
    assert learner.losses_of_steps.popleft()

    expected = []
    for worker in range(3):
        module = copy.deepcopy(trained.module).train()
        indices = BatchOrder(trained.shards[worker], 16, seed=0, worker=worker).next()
        for block in digits.train.inputs[indices].chunk(4):
            module(block)
        expected.append(torch.cat([buffer.flatten().float() for buffer in module.buffers()]))
    torch.testing.assert_close(learner._model.buffers, torch.stack(expected).mean(0), rtol=1e-4, atol=1e-5)


def test_a_batch_norm_model_is_evaluated_without_changing_its_statistics(digits):
    simulation = simulate(
        LGC(k=2),
        training(digits, module=with_batch_norm(), workers=3),
        workers=3,
        rounds=3,
        delays=SlowWorkers(base=ShiftedExponential(), slow=1, factor=1.5),
    )
    before = simulation.learner._model.buffers
    simulation.learner.evaluate()
    assert torch.equal(before, simulation.learner._model.buffers)
    assert math.isfinite(simulation.trace.evaluations[-1].loss)
    assert simulation.trace.late > 0


@pytest.mark.parametrize("strategy", [Full(), FastestK(k=2), LGC(k=2), Async()], ids=str)
@pytest.mark.parametrize(
    "network",
    [Network(latency_seconds=0.5), Network(worker_bits_per_second=2e6), Network(server_bits_per_second=4e6)],
    ids=["latency", "slow-links", "slow-server"],
)
def test_a_network_slower_than_the_rounds_keeps_every_version_that_is_on_its_way(digits, strategy, network):
    """A version still on the wire had no task yet, its parameters were forgotten, and the run ended in a KeyError."""
    setup = Setup(
        name="x", strategy=strategy, workers=WORKERS, rounds=8, delays=ShiftedExponential(), network=network, blocks=4
    )
    simulation = Simulation(setup, training=training(digits, rounds=8 * strategy.updates_per_round(WORKERS)))
    for _ in simulation:
        pass
    assert simulation.trace.rounds_done == 8
    assert not simulation.trace.diverged


def test_a_model_that_draws_gives_the_same_result_twice(digits):
    """Dropout drew from torch's global generator, and no two runs were alike."""

    def losses():
        trained = training(digits)
        module = torch.nn.Sequential(trained.module, torch.nn.Dropout(0.5))
        return simulate(LGC(k=2), dataclasses.replace(trained, module=module)).trace.evaluations

    torch.rand(3)
    first = losses()
    torch.rand(5)
    assert losses() == first
