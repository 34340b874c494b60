"""Figures of every part reach Lightning's loggers by themselves; LARS and its schedule go on where they were."""

from __future__ import annotations

import pytest

from tests.integrations.ranks import launch

JOB = "tests.integrations.lightning.logging_job"
NAMES = {
    "compression": {"sent_bytes", "payload_bytes", "gradient_bytes", "wait_seconds", "steps"},
    "averaging": {"sent_bytes", "averages", "wait_seconds", "steps"},
    "pruning": {"pruned_share", "pruned_share_of_all", "epoch"},
}


@pytest.mark.parametrize("which", NAMES)
def test_figures_reach_the_loggers_by_themselves(tmp_path, which):
    in_files, _ = launch(JOB, {"part": "figures", "folder": str(tmp_path), "which": which})
    for found in in_files:
        assert {f"paceline/{name}" for name in NAMES[which]} <= set(found)
        for values in found.values():
            steps = [step for step, _ in values]
            assert len(steps) > 2
            assert all((step + 1) % 3 == 0 for step in steps), "at log_every_n_steps, as Lightning counts them"
    if which != "pruning":
        assert in_files[0]["paceline/sent_bytes"][0][1] < in_files[0]["paceline/sent_bytes"][-1][1]
        assert [each for _, each in in_files[0]["paceline/steps"]] == [3, 6, 9, 12, 15, 18, 21, 24]


def test_lars_and_its_schedule_go_on_where_they_were(tmp_path):
    whole = launch(JOB, {"part": "lars", "folder": str(tmp_path / "whole")})
    again = launch(JOB, {"part": "lars", "folder": str(tmp_path / "again"), "ckpt": f"{tmp_path}/whole/step=10.ckpt"})
    assert whole[0] == [whole[1][0], 0.0, 16], "warm-up and decay are over after 16 steps"
    assert [each[:2] for each in again] == [each[:2] for each in whole]
    assert [each[2] for each in again] == [6, 6]
