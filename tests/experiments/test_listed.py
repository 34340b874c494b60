"""Laws of every experiment that is listed, which need no run."""

from __future__ import annotations

import importlib
import json

import pytest

from experiments.core.story import Size
from paceline.data import DATASETS
from paceline.terminal import WIDTH
from tests.experiments.telling import EXPERIMENTS

CORES, MOST_MINUTES = 2, 10
PAPERS = [name for name, each in EXPERIMENTS.items() if each.of == "papers"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_described_in_a_line_and_its_jobs_can_be_sent_to_a_process(name):
    experiment = EXPERIMENTS[name]
    assert len(experiment.question) < WIDTH
    assert set(experiment.data) <= set(DATASETS)
    if experiment.of == "papers":
        assert experiment.source
        assert experiment.full_hours
    for size in ("toy", "laboratory", "full") if experiment.of != "timings" else ():
        seeds = tuple(range(200, 200 + experiment.seeds))
        seconds = {}
        for key, job in experiment.jobs(Size(size, seeds)).items():
            hash(key)
            for seed in seeds:
                text = json.dumps(dict(job.of(seed)), allow_nan=False)
                assert json.loads(text) == dict(job.of(seed))
                seconds[text] = job.seconds
            assert getattr(importlib.import_module(job.run.__module__), job.run.__qualname__) is job.run
            assert job.seconds > 0
        if size == "laboratory" and experiment.of == "papers":
            estimate = sum(seconds.values()) / 60 / (1 if experiment.timed else CORES)
            assert estimate <= MOST_MINUTES
            assert experiment.minutes <= MOST_MINUTES


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("size", ["laboratory", "full"])
def test_the_data_that_jobs_train_on_are_declared(name, size):
    """Else they are neither checked before a run nor part of what an outcome is known by."""
    experiment, asked = EXPERIMENTS[name], Size(size)
    text = json.dumps([dict(job.of(200)) for job in experiment.jobs(asked).values()])
    used = {data for data in ("cifar10", "cifar100", "fashion-mnist") if f'"{data}"' in text}
    assert used <= set(experiment.data_for(asked))
