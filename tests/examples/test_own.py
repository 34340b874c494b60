"""The examples for own data, for a cluster that does not exist yet, and for all parts in one script."""

from __future__ import annotations

import re

import pytest
import torch

from tests.examples.scripts import run


def test_own_data_race_ends_in_a_table_a_page_and_a_model(tmp_path):
    (text,) = run("own_data_race.py", "--rounds", "60", "--out", tmp_path / "own")
    rows = {cells[0]: cells for cells in map(str.split, text.splitlines()) if cells[1:2] == ["60"]}
    seconds = {name: float(cells[2]) for name, cells in rows.items()}
    assert seconds["lgc"] < 0.5 * seconds["full"], "two of ten workers are four times slower, and lgc waits for neither"
    to_target = {name: cells[cells.index("%") + 1 if "%" in cells[:5] else 4] for name, cells in rows.items()}
    reached = {name: float(text) for name, text in to_target.items() if text != "-"}
    assert min(reached, key=reached.get) == "lgc"
    page = (tmp_path / "own" / "report.html").read_text(encoding="utf-8")
    assert "A motor" in page
    state = torch.load(tmp_path / "own" / "model.pt", weights_only=True)
    assert sum(tensor.numel() for tensor in state.values()) == 16 * 9 + 16 + 16 * 16 * 9 + 16 + 64 * 5 + 5


def test_predicted_hours_are_those_of_the_ring(tmp_path):
    """Without jitter a round of ssgd is a step and a ring all-reduce: the table can be computed by hand."""
    (text,) = run("predict_cluster.py", "--step", "0.1", folder=tmp_path)
    (coded,) = run("predict_cluster.py", "--step", "0.1", "--codec", "qsgd", folder=tmp_path)
    bits = 32 * (784 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10)
    rows, fewer_bytes = _predictions(text), _predictions(coded)
    assert len(rows) == 8
    for (link, workers), (ssgd, lgc, hpsgd) in rows.items():
        ring = 2 * (workers - 1) * (0.0005 + bits / workers / (link * 1e9))
        assert ssgd == pytest.approx((0.1 + ring) * 50e6 / (workers * 32) / 3600, abs=0.05, rel=0.01)
        assert hpsgd < lgc
        assert fewer_bytes[link, workers][0] < ssgd


def test_a_step_is_measured_where_none_is_given(tmp_path):
    (text,) = run("predict_cluster.py", folder=tmp_path)
    assert float(re.search(r"step ([\d.]+) ms", text)[1]) > 0
    rows = _predictions(text)
    assert all(rows[1, workers][0] > rows[10, workers][0] for workers in (4, 8, 16, 32)), "the faster link is faster"


def _predictions(text):
    """Return the hours of each strategy by link (in Gbit/s) and workers."""
    found = re.findall(r"^(\d+) Gbit/s +(\d+) +(.*)$", text, re.MULTILINE)
    return {(int(link), int(n)): [float(hours) for hours in re.findall(r"([\d.]+) h", rest)] for link, n, rest in found}


def test_everything_at_once_learns_with_equal_replicas_and_fewer_bytes():
    texts = run("everything_at_once.py", "--rounds", "90", "--k", "1", ranks=2)
    text, other = texts
    assert "accuracy" not in other, "rank 0 alone prints"
    assert float(re.search(r"accuracy ([\d.]+)%", text)[1]) > 70
    assert "replicas equal: True" in text
    sent, plain = map(float, re.search(r"sent ([\d.]+) MB .* ring: ([\d.]+) MB", text).groups())
    assert sent < plain / 3
    fast, slow = _outcomes(text)
    assert fast["used"] + slow["used"] == 90, "one gradient closes a round"
    assert slow["used"] < fast["used"], "the last rank is five times slower"
    assert slow["late"] >= 10, "and its work is not thrown away: 89 gradients are late if nothing disturbs the ranks"
    assert fast["sat out"] > slow["sat out"], "batches cut short are not judged"


def test_everything_at_once_takes_few_rounds_too():
    text, _ = run("everything_at_once.py", "--rounds", "5", "--k", "2", ranks=2)
    assert [each["used"] for each in _outcomes(text)] == [5, 5], "with k=2 both ranks are in every round"


def _outcomes(text):
    """Return what became of each rank's gradients, and the percentage of its samples that sat out."""
    lines = re.findall(r"rank \d: +(\d+) used, +(\d+) late, +(\d+) dropped; (\d+)% of its samples", text)
    return [dict(zip(("used", "late", "dropped", "sat out"), map(int, each), strict=True)) for each in lines]
