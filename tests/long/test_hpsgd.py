"""Networks that experiments name by their place are found in the processes that train them."""

from __future__ import annotations

import pytest

from experiments.core.running import run_experiment
from tests.experiments.telling import EXPERIMENTS, TOY


@pytest.mark.parametrize("name", ["hpsgd-6b", "averaging-accuracy"])
def test_a_process_that_is_spawned_finds_the_network(name, tmp_path):
    done = []
    run_experiment(EXPERIMENTS[name], TOY, tmp_path, processes=1, on_job=lambda job, seconds, total: done.append(job))
    assert len(done) == len(EXPERIMENTS[name].jobs(TOY))
