"""Loops of one's own with Accelerate: prepare leaves out DDP alone, and averaging and rounds hook what is prepared."""

from __future__ import annotations

import functools

import accelerate
import pytest
import torch

from paceline.huggingface import prepare
from tests.integrations.ranks import JobError, launch

JOB = "tests.integrations.huggingface.accelerate_job"


def test_local_sgd_of_every_step_is_what_ddp_computes_with_the_same_schedule():
    ddp, _ = launch(JOB, {"kind": "ddp", "accumulation": 2})
    first, second = launch(JOB, {"kind": "local", "accumulation": 2})
    assert ddp["ddp"]
    assert not first["ddp"]
    assert first["kind"] == "AcceleratedOptimizer"
    assert first["steps"] == 3  # six batches of each rank, two of them in a step
    assert first["weights"] == pytest.approx(ddp["weights"], abs=1e-5)
    assert first["rate"] == ddp["rate"]  # AcceleratedScheduler: as many steps as there are ranks in each
    assert first["digest"] == second["digest"]


def test_hpsgd_and_rounds_take_what_is_prepared():
    for kind in ("hpsgd", "rounds"):
        first, second = launch(JOB, {"kind": kind})
        assert first["digest"] == second["digest"]
        assert first["steps"] == second["steps"] == 6
        assert (first["optimizer"] == second["optimizer"]) == (kind == "rounds")


def test_prepare_leaves_what_somebody_has_put_in_the_place_of_a_method():
    """average() puts a prepare_model there that makes no DistributedDataParallel."""
    accelerator = accelerate.Accelerator(cpu=True)
    theirs = functools.partial(accelerator.prepare_model, evaluation_mode=True)
    accelerator.prepare_model = theirs
    model = torch.nn.Linear(2, 1)
    prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.prepare_model is theirs


def test_a_model_that_accelerate_has_wrapped_is_refused_with_the_remedy():
    for answer in launch(JOB, {"kind": "refused"}, check=False):
        assert isinstance(answer, JobError)
        assert "do not wrap the model in DistributedDataParallel" in str(answer)
        assert "paceline.huggingface.prepare" in str(answer)
