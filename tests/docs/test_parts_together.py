"""Which parts go together: the tables of docs/which-part.md, cell by cell where no launch is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import paceline
from paceline import Recipe, simulate
from paceline.drivers.rounds.preparation import refuse_collective_sampler
from paceline.recipes import RecipeError

PAGE = Path(__file__).parents[2] / "docs" / "which-part.md"
STRATEGIES = ("full", "fastest-k", "lgc", "async", "full@ranks", "fastest-k@ranks", "lgc@ranks")
AVERAGING = ("ssgd", "local-sgd", "bmuf", "diloco", "hpsgd")


@pytest.mark.parametrize("label", [*STRATEGIES, *AVERAGING])
def test_every_strategy_of_a_recipe_goes_with_codec_lars_and_pruning(label):
    name, _, place = label.partition("@")
    recipe = Recipe(rounds=10, evaluate_every=10).with_settings(
        data={"split": "iid"},
        cluster={"workers": 3, "late_work": "partial"},
        strategy={"name": name, "on": place or "server", "k": 2},
        codec={"name": "qsgd"},
        optimizer={"name": "lars", "lr": 2.0},
        pruning={"name": "info-batch"},
        worker={"batch_size": 128},
    )
    result = simulate(recipe)
    assert result.rounds >= recipe.rounds
    assert result.loss is not None
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model_and_lars():
    model = nn.Linear(4, 3)
    return model, paceline.LARS(model.parameters(), lr=0.1, weight_decay=0)


@pytest.mark.usefixtures("one_rank")
def test_two_parts_that_would_average_twice_are_refused_as_the_page_says():
    model, optimizer = _model_and_lars()
    with paceline.LGCSync(model, optimizer, k=1):
        _refused("this optimizer has an averaging or rounds already", paceline.HPSGD, model, optimizer)
    wrapped = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = paceline.LARS(wrapped.parameters(), lr=0.1, weight_decay=0)
    _refused("do not wrap the model in DistributedDataParallel", paceline.HPSGD, wrapped, optimizer)
    _refused("do not wrap the model in DistributedDataParallel", paceline.LGCSync, wrapped, optimizer, k=1)
    model, optimizer = _model_and_lars()
    settings = {"normalize": True, "codec": "one-bit"}
    _refused("normalize does not go with error feedback", paceline.HPSGD, model, optimizer, **settings)


@pytest.mark.usefixtures("one_rank")
def test_accumulate_goes_with_averaging_and_blocks_take_its_place_in_rounds():
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
    model, optimizer = _model_and_lars()
    accumulate = paceline.Accumulate(model, steps=2)
    steps = 0
    with paceline.LocalSGD(model, optimizer, period=1):
        for inputs, targets in accumulate(batches):
            accumulate.backward(nn.functional.cross_entropy(model(inputs), targets))
            if accumulate.ready:
                steps += 1
                optimizer.step()
                optimizer.zero_grad()
    assert steps == 2
    model, optimizer = _model_and_lars()
    with paceline.LGCSync(model, optimizer, k=1, blocks=4) as sync:
        for inputs, targets in sync.epoch(batches):
            blocks = [
                nn.functional.cross_entropy(model(x), y).backward() or len(x) for x, y in sync.blocks(inputs, targets)
            ]
            assert blocks == [2, 2, 2, 2]
            sync.step()
        assert sync.version == 4


@pytest.mark.parametrize("kind", [paceline.InfoBatch, paceline.FinePruning])
def test_in_rounds_a_rank_prunes_alone(kind):
    together = DataLoader(range(8), batch_sampler=kind(8, batch_size=4, epochs=40))
    _refused("agrees with all ranks at the end of an epoch", refuse_collective_sampler, together, 2)
    with pytest.raises(ValueError, match=r"Give each rank a Subset of its own .* draw the same batches"):
        refuse_collective_sampler(together, 2)
    refuse_collective_sampler(together, 1)
    alone = DataLoader(range(8), batch_sampler=kind(8, batch_size=4, epochs=40, rank=0, world_size=1))
    refuse_collective_sampler(alone, 2)
    with pytest.raises(ValueError, match="agrees with all ranks"):  # a framework that deals out its batches
        refuse_collective_sampler(alone, 2, even_alone=True)


def test_a_pipeline_has_no_pruning_and_async_no_ranks(tmp_path):
    pipeline = Recipe(rounds=2).with_settings(strategy={"name": "full"}, pipeline={"stages": 2})
    pruned = pipeline.with_settings(pruning={"name": "info-batch"})
    _refused("pruning asks for the loss of each sample", paceline.train, pruned, out=tmp_path / "run")
    _refused(
        "async has no rounds that ranks could add up", Recipe().with_settings, strategy={"name": "async", "on": "ranks"}
    )


def _refused(says, call, *arguments, **settings):
    """The call is refused, and the page quotes the beginning of the error."""
    with pytest.raises((ValueError, RecipeError), match=re.escape(says)):
        call(*arguments, **settings)
    assert says in " ".join(PAGE.read_text(encoding="utf-8").split())
