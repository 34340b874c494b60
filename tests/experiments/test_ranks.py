"""Lines that ranks write: all of them are waited for, a rank that ends badly or falls silent is an error."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from experiments.core import ranks
from experiments.core.cut_models import ALIKE, Subject
from experiments.core.ranks import Lane, lines_of, pipeline_steps
from experiments.core.running import ExperimentError
from experiments.core.story import Step


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(ranks, "LOOK_SECONDS", 0.0)


def _processes(*codes):
    return [SimpleNamespace(poll=lambda code=code: code) for code in codes]


def _write(folder, rank, lines):
    with (folder / f"lines-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _returned(generator):
    steps = []
    while True:
        try:
            steps.append(next(generator))
        except StopIteration as end:
            return steps, end.value


def test_lines_of_all_ranks_are_read_and_each_is_said_before_it_comes(tmp_path):
    for rank in range(2):
        _write(tmp_path, rank, [{"rank": rank, "line": line} for line in range(3)])
    steps, lines = _returned(lines_of(_processes(None, None), tmp_path, ["a", "b", "c"], total=7))
    assert steps == [Step("a", 7), Step("b", 7), Step("c", 7)]
    assert [[line["line"] for line in each] for each in lines] == [[0, 1, 2]] * 2


def test_a_line_that_one_rank_has_not_written_yet_is_waited_for(tmp_path):
    for rank, count in enumerate((3, 1)):
        _write(tmp_path, rank, [{"line": line} for line in range(count)])
    reading = lines_of(_processes(None, None), tmp_path, ["a", "b", "c"])
    assert [next(reading).label for _ in range(2)] == ["a", "b"]
    _write(tmp_path, 1, [{"line": 1}, {"line": 2}])
    steps, lines = _returned(reading)
    assert [step.label for step in steps] == ["c"]
    assert [len(each) for each in lines] == [3, 3]


def test_half_a_line_is_none(tmp_path, monkeypatch):
    (tmp_path / "lines-0.jsonl").write_text('{"line": 0}\n{"li', encoding="utf-8")
    (tmp_path / "rank-0.log").write_text("still at it", encoding="utf-8")
    monkeypatch.setattr(ranks, "LINE_SECONDS", 0.05)
    with pytest.raises(ExperimentError, match="none for 'b':\nstill at it"):
        _returned(lines_of(_processes(None), tmp_path, ["a", "b"]))


def test_only_the_writers_are_waited_for(tmp_path):
    _write(tmp_path, 0, [{"line": 0}])
    _, lines = _returned(lines_of(_processes(None, None), tmp_path, ["a"], writers=1))
    assert lines == [[{"line": 0}]]


def test_a_rank_that_ends_badly_is_told_with_its_last_words(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").write_text(f"words of {rank}", encoding="utf-8")
    with pytest.raises(ExperimentError, match="words of 1"):
        _returned(lines_of(_processes(None, 1), tmp_path, ["a"]))


def test_no_rank_outlives_its_block(tmp_path):
    (tmp_path / "lines-0.jsonl").touch()
    with pytest.raises(KeyboardInterrupt), ranks.started("http.server", tmp_path, 1) as processes:
        raise KeyboardInterrupt
    assert processes[0].poll() is not None


def test_the_first_turn_of_a_pipeline_warms_up_and_is_not_among_the_steps(monkeypatch):
    """Two ranks take three turns of two lanes; a step's spans begin at 100 and last as long as its number."""
    lanes = [Lane(plan="gpipe", microbatches=1), Lane(plan="1f1b", microbatches=2)]
    asked = []

    def lines_of(processes, folder, labels, *, total):
        yield from (Step(label, total) for label in labels)
        return [
            [{"spans": [[rank, rank, "F", 0, 100.0 + rank, 100.0 + rank + number]]} for number in range(1, 7)]
            for rank in range(2)
        ]

    class Started:
        def __init__(self, module, folder, count):
            asked.append((module, count, json.loads((folder / "job.json").read_text(encoding="utf-8"))))

        def __enter__(self):
            return []

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(ranks, "started", Started)
    monkeypatch.setattr(ranks, "lines_of", lines_of)
    plan = SimpleNamespace(stages=2, save=lambda file: file.touch())
    subject = Subject(model=ALIKE, microbatch=4)
    steps, taken = _returned(pipeline_steps(subject, {"gpipe": plan, "1f1b": plan}, lanes, turns=2))
    assert [step.label for step in steps] == ["gpipe, 1 micro-batches", "1f1b, 2 micro-batches"] * 3
    assert [[step.busy_seconds for step in each] for each in taken] == [
        [(3.0, 3.0), (5.0, 5.0)],
        [(4.0, 4.0), (6.0, 6.0)],
    ]
    assert taken[0][0].step_seconds == 4.0  # from the first begin, though the clock was at 100
    ((module, count, job),) = asked
    assert (module, count, job["turns"]) == ("experiments.core.ranks", 2, 3)
    assert Subject(**job["subject"]) == subject
