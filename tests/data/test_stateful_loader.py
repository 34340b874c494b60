"""Loaders that keep their own place (torchdata's StatefulDataLoader): nothing is repeated or left out."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import paceline
from paceline.data.pruning.policy import PruningError
from paceline.drivers.rounds.sampler import SampleCounter, TakenBatches
from tests.data.pruning_play import KINDS, SAMPLES, losses_of, passes
from tests.data.stateful_loader import StatefulLoader
from tests.rounds.jobs.checkpoints import saved

NUMBERS = torch.utils.data.TensorDataset(torch.arange(SAMPLES))


def imitated(sampler, workers):
    return StatefulLoader(sampler, ahead=2 * workers)


def of_torchdata(sampler, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(NUMBERS, batch_sampler=sampler, num_workers=workers)


MAKERS = [imitated, of_torchdata] if importlib.util.find_spec("torchdata") else [imitated]
loaders = pytest.mark.parametrize("make", MAKERS)
workers_of = pytest.mark.parametrize("workers", [0, 2])
every_kind = pytest.mark.parametrize("kind", KINDS)


def numbers_of(batch):
    return batch[0].tolist() if isinstance(batch[0], torch.Tensor) else batch


def balanced():
    """A model of one rank whose Balance deals batches of 8, and its sampler."""
    model = torch.nn.Linear(1, 1)
    balance = paceline.Balance(model, batch_size=8)
    return model, balance, balance.sampler(SAMPLES)


def train(model, loader, *, passes=1, stop_after=None):
    """Train passes over a loader, or so many batches; return the samples of each batch."""
    taken = []
    for _ in range(passes):
        for batch in loader:
            taken.append(numbers_of(batch))
            model(torch.tensor(taken[-1]).float().unsqueeze(1)).mean().backward()
            if len(taken) == stop_after:
                return taken
    return taken


@loaders
@workers_of
@pytest.mark.parametrize("stop_after", [1, 3, 7, 12])
@pytest.mark.parametrize("own_states", [False, True])
def test_balances_epoch_goes_on_behind_the_last_batch_that_was_trained(make, workers, stop_after, own_states):
    whole = train(*_whole(), passes=3)
    model, balance, sampler = balanced()
    loader = make(sampler, workers)
    before = train(model, loader, passes=2, stop_after=stop_after)
    assert len(before) == stop_after
    held, states = loader.state_dict(), (balance.state_dict(), sampler.state_dict())
    model, balance, sampler = balanced()
    if own_states:  # as the page says for a plain loader
        balance.load_state_dict(states[0])
        sampler.load_state_dict(states[1])
    loader = make(sampler, workers)
    loader.load_state_dict(held)
    epochs = stop_after // 7 + 1  # of 7 batches each
    assert before + train(model, loader) == whole[: 7 * epochs]
    assert sampler.state_dict()["epoch"] == epochs


def _whole():
    model, _, sampler = balanced()
    return model, torch.utils.data.DataLoader(NUMBERS, batch_sampler=sampler)


@loaders
@every_kind
def test_pruning_refuses_a_loader_that_asks_before_losses_are_known(make, kind):
    loader = make(KINDS[kind](), 2)
    with pytest.raises(PruningError, match=r"num_workers=0.*save \w+\.state_dict\(\)"):
        iter(loader)


@loaders
@every_kind
@pytest.mark.parametrize("dealt", [False, True])
def test_pruning_goes_on_exactly_where_nothing_is_fetched_ahead(make, kind, dealt):
    def made():
        pruning = KINDS[kind]()
        sampler = paceline.Balance(torch.nn.Linear(1, 1), batch_size=8).sampler(pruning) if dealt else pruning
        return pruning, make(sampler, 0)

    def observe(pruning, loader, *, stop_after=None):
        taken = []
        while pruning.epoch <= 3:
            epoch = pruning.epoch
            for batch in loader:
                taken.append((epoch, numbers_of(batch)))
                pruning.observe(losses_of(taken[-1][1], epoch))
                if len(taken) == stop_after:
                    return taken
        return taken

    for stop_after in (3, 7, 10):
        pruning, loader = made()
        before = observe(pruning, loader, stop_after=stop_after)
        again, second = made()
        second.load_state_dict(loader.state_dict())
        iter(second)  # it reads its state where a pass begins
        assert before + observe(again, second) == passes(KINDS[kind](), 3)


def loaders_of_scripts():
    """Loaders that a script gives to `sync.epoch`, by what they draw; those of torchdata where it is installed."""
    batches = torch.utils.data.BatchSampler(range(SAMPLES), 8, drop_last=False)
    made = {"imitated": lambda workers: StatefulLoader(batches, ahead=2 * workers)}
    if len(MAKERS) == 1:
        return made
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def loader(workers, **settings):
        return StatefulDataLoader(NUMBERS, batch_size=8, num_workers=workers, **settings)

    def dealt(workers):
        return loader(workers, sampler=StatefulDistributedSampler(NUMBERS, num_replicas=1, rank=0, seed=4))

    return made | {"in order": loader, "shuffled": lambda workers: loader(workers, shuffle=True), "dealt": dealt}


SCRIPTS = loaders_of_scripts()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", SCRIPTS)
@workers_of
@pytest.mark.parametrize("stop_after", [1, 5, 7, 9])
def test_an_epoch_of_rounds_goes_on_behind_the_last_batch_that_was_trained(kind, workers, stop_after):
    """`sync.epoch(loader)` asks the loader for its place, as part of `sync.state_dict()`: none twice, none left out."""

    def live(taken, state=None, until=None):
        model = torch.nn.Linear(1, 1)
        sync = paceline.FullSync(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        first, loader = 0, SCRIPTS[kind](workers)
        if state is not None:
            first = state["epoch"]
            model.load_state_dict(state["model"])
            sync.load_state_dict(state["sync"])
        with sync:
            for epoch in range(first, 3):
                for batch in sync.epoch(loader):
                    taken[epoch] += numbers_of(batch)
                    model(torch.tensor(numbers_of(batch)).float().unsqueeze(1)).mean().backward()
                    sync.step()
                    if sync.version == until:
                        state = {"sync": sync.state_dict(), "model": model.state_dict(), "epoch": epoch}
                        return saved(state)
        return None

    taken = [[], [], []]
    live(taken, live(taken, until=stop_after))
    assert [sorted(each) for each in taken] == [list(range(SAMPLES))] * 3


@loaders
@workers_of
def test_batches_of_ranks_in_rounds_refuse_a_loader_that_keeps_its_own_place(make, workers):
    loader = make(TakenBatches(SAMPLES, SampleCounter(HashStore()), lambda: 8, whole=8), workers)

    def train_and_save():
        next(iter(loader))
        loader.state_dict()

    with pytest.raises(ValueError, match=r"part of sync\.state_dict\(\)"):
        train_and_save()
