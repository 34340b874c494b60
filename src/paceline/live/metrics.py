"""The state of a run in the text format of Prometheus, version 0.0.4.

    # HELP paceline_round Rounds that the model is the result of.
    # TYPE paceline_round gauge
    paceline_round 40

What is not known is left out, and never 0. Counters may go back when a run goes on from a checkpoint, which Prometheus
takes for a restart; `paceline_rounds_total` counts rounds that are done again once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from paceline.live.folder import STATES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample: TypeAlias = tuple[Mapping[str, str], float | None]
_FIGURES = {
    "paceline_round": ("gauge", "round", "Rounds that the model is the result of."),
    "paceline_rounds_asked": ("gauge", "rounds", "Rounds that the run is to have."),
    "paceline_seconds": ("gauge", "seconds", "Seconds since the run began, on its own clock."),
    "paceline_rounds_per_second": ("gauge", "rounds_per_second", "Rounds a second, of the last ten seconds."),
    "paceline_steps": ("gauge", "steps", "Steps of the rank that has taken most."),
    "paceline_steps_per_second": ("gauge", "steps_per_second", "Steps a second of the slowest rank."),
    "paceline_loss": ("gauge", "loss", "Training loss, as it was measured last."),
    "paceline_accuracy": ("gauge", "accuracy", "Accuracy on the test data, as it was measured last, from 0 to 1."),
    "paceline_test_loss": ("gauge", "test_loss", "Mean loss on the test data, as it was measured last."),
    "paceline_k": ("gauge", "k", "Gradients that the last round waited for."),
    "paceline_sent_bytes_total": ("counter", "sent_bytes", "Bytes that the server or the ranks have sent."),
    "paceline_received_bytes_total": ("counter", "received_bytes", "Bytes that the server or the ranks have received."),
    "paceline_workers_here": ("gauge", "here", "Workers or ranks that are there."),
    "paceline_workers_asked": ("gauge", "workers", "Workers or ranks that the run began with."),
}


def metrics_text(document: Mapping[str, Any]) -> str:
    r"""Return the metrics of a state (`FollowedRun.document`).

    >>> print(metrics_text({"name": "m\"ine", "kind": "server", "strategy": "lgc", "noun": "worker",
    ...     "state": "running", "figures": {"round": 4}, "rows": []}).splitlines()[2])
    paceline_run_info{name="m\"ine",kind="server",strategy="lgc"} 1
    """
    return "".join(_lines(document))


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    figures, rows, noun = document["figures"], document["rows"], document["noun"]
    about = {name: document[name] for name in ("name", "kind", "strategy")}
    yield from _family("paceline_run_info", "gauge", "The run that is followed.", [(about, 1.0)])
    states = [({"state": state}, float(state == document["state"])) for state in STATES]
    yield from _family("paceline_run_state", "gauge", "1 for the state that the run is in.", states)
    for name, (kind, key, text) in _FIGURES.items():
        yield from _family(name, kind, text, [({}, figures.get(key))])
    closed = document.get("rounds_closed")
    text = "Rounds that were closed, also those that a restart made void."
    yield from _family("paceline_rounds_total", "counter", text, [({}, closed)])
    counted = [row for row in rows if "used" in row]
    yield from _family(
        "paceline_worker_gradients_total",
        "counter",
        "Gradients of a worker: used in time, late, or dropped.",
        [({noun: str(row["number"]), "outcome": word}, row[word]) for row in counted for word in _OUTCOMES],
    )
    there = [({noun: str(row["number"])}, float(row["state"] not in _ABSENT)) for row in rows]
    yield from _family("paceline_worker_alive", "gauge", "Whether a worker or rank is there.", there)
    timed = [row for row in rows if row.get("times")]
    yield from _family(
        "paceline_worker_steps",
        "gauge",
        "Steps of a worker or rank, by its own times.",
        [({noun: str(row["number"])}, row["steps"]) for row in timed],
    )
    yield from _family(
        "paceline_worker_phase_seconds",
        "gauge",
        "Mean seconds of a step and of its phases, of the last steps.",
        [
            ({noun: str(row["number"]), "phase": phase}, seconds)
            for row in timed
            for phase, seconds in row["times"].items()
        ],
    )


_OUTCOMES = ("used", "late", "dropped")
_ABSENT = ("gone", "ended", "quiet", "killed")


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        yield f"# HELP {name} {_escaped(text, quotes=False)}\n# TYPE {name} {kind}\n"
    for labels, value in known:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inner}}} {_number(value)}\n" if inner else f"{name} {_number(value)}\n"


def _escaped(text: str, *, quotes: bool = True) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
