"""A pipeline of one process: how it joins a launch, what it says without one, and which backwards are taken apart."""

from __future__ import annotations

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.distributed.agreement import MOST_CHARACTERS, decode_row, encode_row, plain_text, refusal_text
from paceline.drivers.pipelining import torch_internals
from paceline.drivers.pipelining.batches import sums_of
from paceline.drivers.pipelining.gradients import GradientAverager
from paceline.drivers.pipelining.ranks import FailurePropagation
from paceline.drivers.pipelining.torch_internals import can_split
from paceline.pipeline.graph import ModelGraph, cut_piece
from tests.launches import free_port

pytestmark = pytest.mark.xdist_group("pipeline alone")


def model_and_plan(stages=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    graph = ModelGraph(model, (torch.ones(2, 3),))
    return model, SimpleNamespace(
        schedule="gpipe", stages=stages, chunks=1, microbatches=2, cuts=tuple(range(1, stages)), batch_size=4,
        shapes=((2, 3),), dtypes=(torch.float32,), fingerprint=graph.fingerprint, evaluates=True,
    )  # fmt: skip


def test_without_a_launch_it_says_how_to_start_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PACELINE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(paceline.PipelineError, match=r"torchrun --nproc-per-node 3 script\.py"):
        paceline.Pipeline(*model_and_plan(stages=3))


@pytest.fixture
def launch(monkeypatch):
    """What torchrun tells one process."""
    launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)


def test_it_joins_the_launch_that_it_finds_and_leaves_it(launch):
    model, plan = model_and_plan()
    inputs, targets = torch.randn(5, 3), torch.randn(5, 2)
    with paceline.Pipeline(model, plan, timeout_seconds=20.0) as pipe:
        loss = pipe.step(inputs, targets, nn.functional.mse_loss)
        ours = [weight.grad for weight in pipe.parameters()]
        assert torch.equal(pipe.predict(inputs), pipe.predict(inputs))
        for weight in model.parameters():
            weight.grad = None
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert loss.item() == pytest.approx(nn.functional.mse_loss(model(inputs), targets).item())
        for gradient, weight in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, weight.grad)
        assert sorted(pipe.full_state_dict()) == sorted(model.state_dict())
    assert not dist.is_initialized()


def test_a_torch_whose_stages_are_made_otherwise_is_refused_by_name(launch, monkeypatch):
    monkeypatch.setattr(torch_internals, "USED", (*torch_internals.USED, "no_such_part"))
    with pytest.raises(paceline.PipelineError, match=rf"torch {re.escape(torch.__version__)} .* has no no_such_part"):
        paceline.Pipeline(*model_and_plan(), timeout_seconds=20.0)
    assert not dist.is_initialized()


def test_what_a_loss_adds_up_over_is_seen_through_partials_and_methods():
    partial, cross_entropy = functools.partial, nn.functional.cross_entropy
    summed = partial(cross_entropy, reduction="sum")
    assert sums_of(partial(summed, label_smoothing=0.1))
    assert not sums_of(partial(summed, reduction="mean"))
    assert sums_of(nn.MSELoss(reduction="sum").forward)
    assert sums_of(partial(nn.MSELoss(reduction="sum")))
    assert not sums_of(partial(cross_entropy, label_smoothing=0.1))
    with pytest.raises(paceline.PipelineError, match="reduction='none'"):
        sums_of(partial(partial(cross_entropy, reduction="none"), label_smoothing=0.1))


@given(st.text() | st.text('\x1b[31m\\"\0\n', min_size=300), st.integers(1, MOST_CHARACTERS))
def test_words_are_no_longer_than_they_may_be_whatever_is_in_them(text, most):
    assert len(json.dumps(plain_text(text, most))) <= most + 2  # and quotes
    assert decode_row(encode_row({"refusal": refusal_text(text), "doing": "take a step"}))["refusal"] == refusal_text(
        text
    )


def test_of_many_ranks_that_are_gone_only_some_are_named():
    def who(place):
        return f"stage {place} (rank {place})"

    gone = FailurePropagation(range(500), 0, store=None, group=None, name=who, timeout_seconds=1.0).are_gone
    assert gone([3]) == "stage 3 (rank 3) is gone"
    assert gone([3, 4]) == "stage 3 (rank 3) and stage 4 (rank 4) are gone"
    assert re.fullmatch(r"stage 1 \(rank 1\) and .* and 495 more are gone", gone(range(1, 500)))
    assert len(gone(range(1, 500))) < MOST_CHARACTERS


def test_a_deadline_must_be_one():
    with pytest.raises(ValueError, match=r"timeout_seconds must be above 0 and finite \(timeout_seconds=0\)"):
        paceline.Pipeline(*model_and_plan(), timeout_seconds=0)


class Late(nn.Module):
    """An output of the first layers that depends on weights and ids alone."""

    def __init__(self):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(3, 3), nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x, ids):
        x = torch.tanh(self.first(x))
        late = self.table(ids)
        return self.last(torch.relu(x) + late)


def test_backward_is_taken_apart_only_where_every_weight_meets_the_path_of_the_inputs_once():
    graph = ModelGraph(Late(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    names = [layer.name for layer in graph.layers]
    table, relu = names.index("table"), names.index("relu")
    assert not can_split(cut_piece(graph, 1, relu))  # the table's output leaves beside the path of what came in
    assert can_split(cut_piece(graph, table, len(names)))  # there it meets it
    assert can_split(cut_piece(graph, relu, len(names)))
    row = ModelGraph(nn.Sequential(nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)), (torch.ones(2, 3),))
    assert not can_split(cut_piece(row, 1, 3))  # nothing that comes in has a gradient
    assert can_split(cut_piece(row, 2, 3))


def test_replicas_refuse_a_codec_that_would_round_doubles():
    weights = SimpleNamespace(trained=lambda shared: {"weight": torch.nn.Parameter(torch.ones(3, dtype=torch.float64))})
    ranks = SimpleNamespace(replicas=2, replica=0, rank=0)
    GradientAverager("identity", weights, ranks, seed=0)
    with pytest.raises(ValueError, match="codecs carry float32, and this model has float64 parameters"):
        GradientAverager("qsgd", weights, ranks, seed=0)
