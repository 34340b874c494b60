"""What the benchmarks `links` and `plans` make of their figures, and that a switch is gone when it is left."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import links, plans
from benchmarks.cable import Switch, why_not
from benchmarks.links_lanes import FP16, NO_HOOK


def _turn(lane: str, seconds: float, wire_bytes: float = 1e6, told: float | None = None) -> links.Row:
    return {
        "lane": lane,
        "seconds": [seconds],
        "wire_bytes": wire_bytes,
        "packets": 100,
        "reported_bytes": told,
        "processor_seconds": 0.0,
    }


def _verdicts(turns: list[links.Row]) -> dict[str, str]:
    return {what: bar.verdict(figure) for what, bar, figure in links.judged({8: links.rows_of(turns)})}


def test_links_are_judged_by_speed_and_bytes() -> None:
    lanes = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn("torch: power-sgd, rank 4", 0.5)]
    lanes += [_turn("bfloat16", 2.1), _turn("qsgd, 7 levels", 0.4, 0.3e6, 0.29e6)]
    verdicts = _verdicts(lanes)
    assert set(verdicts.values()) == {"PASS"}
    assert any("qsgd" in what and "torch: power-sgd, rank 4" in what for what in verdicts)

    slower = _verdicts([*lanes[:3], _turn("bfloat16", 2.2), _turn("qsgd, 7 levels", 2.5, 0.5e6, 0.4e6)])
    assert set(slower.values()) == {"MISS"}


def test_bytes_that_no_lane_tells_are_a_miss() -> None:
    lanes = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn("bfloat16", 2.0), _turn("qsgd, 7 levels", 1.0, 0.3e6)]
    assert [what for what, verdict in _verdicts(lanes).items() if verdict == "MISS"] == [
        "8 ranks: bytes as told against the interface's, the worst"
    ]


def test_a_choice_of_several_plans_is_judged_by_its_own_turns() -> None:
    turn = {"kind": "turn", "rate": 50e6, "codec": "qsgd, 7 levels"}
    lines = [{"kind": "choice", "codec": "qsgd, 7 levels", "plans": ["two-step", "gather"]}]
    lines += [turn | {"plan": plan, "seconds": [seconds]} for plan, seconds in (("gather", 2.0), ("auto", 1.5))]
    (cell,) = plans.cells_of(lines, 4)
    assert (cell["choice"], cell["of_best"]) == ("gather + two-step", 1.0)


def test_costs_are_found_again() -> None:
    lines = {}
    for ranks in (2, 4, 8):
        line: plans.Row = {"kind": "collectives", "rate": 200e6}
        share = (ranks - 1) / ranks * plans.LARGE_BYTES / 24e6
        for name, hops, moved in (
            ("all_reduce", 2 * (ranks - 1), 2),
            ("all_gather", ranks - 1, 1),
            ("all_to_all", 0, 1),
        ):
            line[f"tiny_{name}_seconds"] = 1e-3 + 2e-4 * hops
            line[f"large_{name}_seconds"] = 1e-3 + 2e-4 * hops + moved * share
        lines[ranks] = [line]
    lines[8][0]["tiny_all_reduce_seconds"] += 1.0  # ranks that wait for the processor
    costs = plans.fitted(lines, cores=4)
    assert costs["collective_seconds"] == pytest.approx(1e-3)
    assert costs["hop_seconds"] == pytest.approx(2e-4)
    assert costs["bytes_per_second"] == {"200 Mbit/s": pytest.approx(24e6)}


def test_nothing_of_a_switch_is_left_after_an_error() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    switch = Switch(3)

    def fail_inside() -> None:
        with switch:
            switch.shape(200e6)
            assert _namespaces().issuperset(switch.hosts)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not any(name.startswith(f"pl{switch.number}") for name in _namespaces())


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
