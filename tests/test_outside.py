"""What comes from outside has limits: files of any kind and size under every reader, and numbers everywhere."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from paceline.cli.main import main
from paceline.data.mnist import read_idx
from paceline.data.reading import read_file, read_members
from paceline.decoding import Between, DecodingError
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.served.messages import PROTOCOL, Hello, ProtocolError, decode, encode
from paceline.drivers.served.security import server_credentials
from paceline.drivers.simulated.delays import read_recorded
from paceline.files import open_plain, read_plain
from paceline.optim import OptimizerSettings
from paceline.pipeline.plan import Plan
from paceline.processes import check_processes
from paceline.recipes.reading import read_recipe
from paceline.recipes.recipe import Recipe
from paceline.runs.ranks import read_recipe_of
from paceline.settings import Rule
from paceline.traces.checked_lines import checked_line, checksum_of
from paceline.traces.journal import KINDS, MOST_THREADS, WorkerJoined, line_of
from paceline.traces.journal_files import read_journal
from paceline.traces.pruning_record import PRUNING, read_pruning
from paceline.traces.trace_files import TRACES, read_traces


def launch_of(path: Path) -> str:
    checkpoints = RankCheckpoints(path.parent, 0)
    checkpoints.folder = path.parent
    return checkpoints.launch


pytestmark = pytest.mark.timeout(30)  # a pipe would be waited for

READERS = {
    "recipe.toml": read_recipe,
    "plan.json": Plan.load,
    "trace.jsonl": read_journal,
    "delays.csv": read_recorded,
    "recipe.json": lambda path: read_recipe_of(path.parent),
    PRUNING: lambda path: read_pruning(path.parent),
    TRACES: lambda path: read_traces(path.parent),
    "server.crt": lambda path: server_credentials(path.with_suffix("")),
    "launch": launch_of,
    "data_batch_1.bin": lambda path: read_file(path, largest_bytes=1000),
    "archive.tar.gz": lambda path: read_members(path, ["a"], largest_member_bytes=10, largest_bytes=1000),
    "labels": lambda path: read_idx(path, dimensions=1),
    "labels.gz": lambda path: read_idx(path, dimensions=1),
}


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        os.truncate(file.fileno(), 17 * 2**30)  # takes no room on the disk


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS_OF_FILES = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
    "a large file": make_large,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_at_once_what_is_no_plain_file_of_its_size(name, kind, tmp_path):
    path = tmp_path / name
    KINDS_OF_FILES[kind](path)
    if (name, kind) == ("launch", "a link to nothing"):
        assert READERS[name](path) == "", "no launch has been here"
        return
    with pytest.raises((ValueError, OSError)) as refused:
        READERS[name](path)
    assert "\n" not in str(refused.value)
    assert path.name in str(refused.value)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 20)
    real = os.fstat

    def small(descriptor):
        found = list(real(descriptor))
        found[6] = 5
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", small)
    with pytest.raises(OSError, match="more than the 10 bytes") as refused:
        read_plain(path, most_bytes=10)
    assert refused.value.errno == errno.EFBIG


def test_what_a_shell_has_opened_is_a_recipe_and_nothing_else(tmp_path):
    """`paceline simulate <(command)` and `/dev/stdin` name pipes of this process."""
    reading, writing = os.pipe()
    os.write(writing, b"rounds = 7\n")
    os.close(writing)
    assert read_recipe(f"/dev/fd/{reading}").rounds == 7
    with pytest.raises(OSError, match="it is a pipe"):
        open_plain(f"/dev/fd/{reading}", most_bytes=10)
    (tmp_path / "fifo").symlink_to(f"/dev/fd/{reading}")
    with pytest.raises(ValueError, match="it is a pipe"):
        read_recipe(tmp_path / "fifo")
    os.close(reading)


# -- time and memory ---------------------------------------------------------------------------------------------------

GOLDEN_PLAN = json.loads(Path(__file__, "..", "golden", "plan", "plan.json").resolve().read_text(encoding="utf-8"))


def plan_with(**changes):
    return {**GOLDEN_PLAN, **changes}


PLANS = {
    "stages x micro-batches": plan_with(
        microbatches=2**40, batch={**GOLDEN_PLAN["batch"], "samples": 2**40 * GOLDEN_PLAN["batch"]["shapes"][0][0]}
    ),
    "chunks": plan_with(chunks=10**9, schedule="interleaved"),
    "between 1 and 3,000 layers": plan_with(
        profile={**GOLDEN_PLAN["profile"], "layers": GOLDEN_PLAN["profile"]["layers"] * 3000}
    ),
    "states must be a number between": plan_with(states=10**400),
    "cuts must be a list": plan_with(cuts=5),
    "devices must be a list": plan_with(devices={}),
    "links must be a list of at least 1": plan_with(links=[], one_link=True),
    "more than can be counted": plan_with(
        profile={**GOLDEN_PLAN["profile"], "weights": [{"name": "w", "bytes": 2**50, "layers": [0]}] * 4096}
    ),
    "forward_seconds must be a number between 0": plan_with(
        profile={**GOLDEN_PLAN["profile"], "layers": [{"name": "a", "forward_seconds": -5}]}
    ),
}


@pytest.mark.parametrize("why", PLANS)
def test_a_plan_that_would_take_long_or_much_is_refused_before_it_is_built(why, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLANS[why]), encoding="utf-8")
    with pytest.raises(ValueError, match=why):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 30_000) + "=1",
        "[" + ".".join(["a"] * 30_000) + "]",
        "x={" + " . ".join(['"a"'] * 10_000) + "=1}",
        "".join(f"k{number}=1\n" for number in range(7000)),
        "".join(f"[k{number}]\n" for number in range(7000)),
        "a" * 60_000,
        "a." * 30_000,
    ],
    ids=["dotted", "heading", "inline", "keys", "sections", "word", "dots"],
)
def test_a_recipe_that_would_take_long_to_read_is_refused_at_once(text, tmp_path):
    (tmp_path / "my.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"my\.toml"):
        read_recipe(tmp_path / "my.toml")


def test_a_file_of_delays_has_a_limit_of_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.drivers.simulated.delays.MOST_RECORDED", 10)
    (tmp_path / "delays.csv").write_text("1,2,3\n" * 4)
    with pytest.raises(ValueError, match="at most 10 numbers"):
        read_recorded(tmp_path / "delays.csv")


# -- numbers -----------------------------------------------------------------------------------------------------------


def is_number(hint: object) -> bool:
    return bool({int, float} & {hint, *get_args(hint)})


def has_bounds(hint: object) -> bool:
    return isinstance(hint, Between) or any(map(has_bounds, get_args(hint) + getattr(hint, "__metadata__", ())))


def test_every_number_of_a_recipe_has_a_least_and_a_most():
    kinds = [Recipe, *(hint for hint in get_type_hints(Recipe).values() if dataclasses.is_dataclass(hint))]
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if is_number(hints[field.name]):
                rule: Rule = field.metadata["rule"]
                limits = (rule.least if rule.above is None else rule.above, rule.most)
                assert None not in limits, f"{kind.__name__}.{field.name} has no limit"


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308, -1e308])
def test_no_number_of_a_recipe_is_too_large_for_a_clear_refusal(value):
    for section, settings in Recipe().to_dict().items():
        for name, now in settings.items() if isinstance(settings, dict) else [(None, settings)]:
            if isinstance(now, int | float) and not isinstance(now, bool):
                with pytest.raises(ValueError, match=name or section):
                    Recipe.from_document({section: value if name is None else {name: value}})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('rounds = "3"', "expected a whole number, got '3'"),
        ('[optimizer]\nlr = "0.1"', "expected a number, got '0.1'"),
        ('[data]\naugment = "yes"', "expected true or false or 'extended', got 'yes'"),
        ('[optimizer]\ndecay_at = "0.5,0.75"', "expected a list of numbers"),
        ('[strategy]\nk = "3"', "expected a whole number or 'auto' or 'none', got '3'"),
    ],
)
def test_text_in_a_file_is_no_number_and_on_the_command_line_it_is(line, says, tmp_path):
    (tmp_path / "my.toml").write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        read_recipe(tmp_path / "my.toml")
    *heading, assignment = line.split("\n")
    name, value = assignment.replace('"', "").split(" = ")
    section = heading[0].strip("[]") + "." if heading else ""
    read_recipe(overrides={f"{section}{name}": value})


def test_text_among_numbers_is_refused_in_python_too():
    assert OptimizerSettings(decay_at=(0.5, 1)).decay_at == (0.5, 1)
    with pytest.raises(ValueError, match=r"decay_at must be a list of numbers \(decay_at=\(0.5, '0.75'\)\)"):
        OptimizerSettings(decay_at=(0.5, "0.75"))


def test_a_text_may_still_stand_for_none_and_auto(tmp_path):
    (tmp_path / "my.toml").write_text('target_loss = "none"\n[strategy]\nk = "auto"\n', encoding="utf-8")
    recipe = read_recipe(tmp_path / "my.toml")
    assert recipe.target_loss is None
    assert recipe.strategy.k == "auto"


def test_threads_have_a_limit_in_messages_and_in_journals():
    most = Hello(protocol=PROTOCOL, wish=None, threads=MOST_THREADS, host="a")
    assert decode(encode(most))[0] == most
    with pytest.raises(ProtocolError, match="threads must be a whole number between 1 and 1024, not 100000"):
        decode(encode(dataclasses.replace(most, threads=100_000)))
    joined = WorkerJoined(at_seconds=0.0, worker=0, shard=0, first_draw=0, threads=0, host="")
    with pytest.raises(DecodingError, match="threads must be a whole number between 1 and 1024, not 0"):
        line_of(joined)


def test_every_whole_number_of_a_journal_has_a_most():
    for kind in KINDS.values():
        for field in dataclasses.fields(kind):
            declared = get_type_hints(kind, include_extras=True)[field.name]
            if is_number(get_type_hints(kind)[field.name]) and not has_bounds(declared):
                assert field.name in ("loss", "accuracy", "test_loss"), f"{kind.__name__}.{field.name} has no limit"


def test_a_machine_is_not_asked_for_a_million_processes():
    check_processes(1024)
    with pytest.raises(ValueError, match=r"1,000,000 processes are too many .*at most 1,024"):
        check_processes(1_000_000)


# -- journals that fit no run ------------------------------------------------------------------------------------------

SERVED = Path(__file__).parent / "golden" / "served"


def altered(folder: Path, kind: str, change) -> Path:
    """Return a copy of a golden run whose first record of a kind is changed; its lines are sealed again, as forged."""
    done, before = False, 0
    with (folder / "trace.jsonl").open("wb") as journal:
        for line in (SERVED / "trace.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            del record["crc"]
            if record["kind"] == kind and not done:
                change(record)
                done = True
            sealed = checked_line(record, before)
            before = checksum_of(sealed)
            journal.write(sealed)
    return folder


JOURNALS = {
    "has shard 999, and the run has shards 0 to 2": ("worker_joined", lambda record: record.update(shard=999)),
    "threads must be a whole number between 1 and 1024, not 0": (
        "worker_joined",
        lambda record: record.update(threads=0),
    ),
    "computed with 900 threads": ("worker_joined", lambda record: record.update(threads=900)),
    "a gradient of version 50 arrived when the model is at version 0": (
        "stepped",
        lambda record: record["arrivals"][0].__setitem__(1, 50),
    ),
    "worker must be a whole number between 0 and 1000000": (
        "stepped",
        lambda record: record["arrivals"][0].__setitem__(0, 10**400),
    ),
    "equal blocks": ("stepped", lambda record: record["arrivals"][0].__setitem__(slice(3, 5), [7, 7])),
    "'rounds' ": ("run_began", lambda record: record.update(recipe=[["rounds", 3]])),
    "'strategy' is a section": ("run_began", lambda record: record["recipe"].update(strategy=[1])),
}


@pytest.mark.parametrize("why", JOURNALS)
def test_a_journal_that_fits_no_run_is_refused_in_one_line(why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paceline.drivers.replayed.served_run.can_start", lambda threads: threads < 900)
    folder = altered(tmp_path, *JOURNALS[why])
    assert main(["replay", str(folder), "--model", "tests.golden.network:tiny"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: error: ")]
    assert len(told) == 1
    assert why.strip("' ") in told[0]
