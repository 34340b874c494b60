"""Files that were damaged or forged: thousands of random corruptions of everything that paceline reads back.

    python -m tests.long.corrupt [--cases 10000] [--seed 0] [--only KINDS]

    bytes     flipped bits, other bytes, cut off, inserted, taken out, repeated parts
    lines     deleted, doubled, swapped, moved: each as it was written
    JSON      numbers that are huge, negative or text, keys that are missing or renamed, deep nests
    tensors   NaN, other types and shapes; then sealed again, as anybody can

What is allowed is an error of one line (a PacelineError, ValueError or OSError), or

    same      exactly what was written: where there are checksums, nothing else can be told from it
    valid     another state that can be gone on with: after a step of it nothing is wrong. Only where nobody can tell:
              hand-written files, journals and checkpoints that were sealed again

A journal may also be the beginning of what was written, as a crash leaves it. Never anything else: no other error, no
more than 1 GB of memory, no more than 10 s. Each case follows from the seed, its kind and its number.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.cli.progress import step_bar
from paceline.errors import PacelineError
from paceline.reports.table import PlainTable
from tests.long.corrupt_files import KINDS, Kind, record

CORRUPTIONS = 10_000
MOST_BYTES, MOST_SECONDS = 2**30, 10.0
AT_ONCE = 100  # cases of one process
DIED_AFTER_SECONDS = 300.0


@dataclass(kw_only=True)
class Tally:
    """What became of the corruptions of one kind."""

    refused: int = 0
    same: int = 0
    valid: int = 0
    slowest_seconds: float = 0.0
    most_bytes: int = 0
    breaches: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """All of them."""
        return self.refused + self.same + self.valid + len(self.breaches)

    def add(self, other: Tally) -> None:
        """Add what another process counted."""
        self.refused, self.same, self.valid = (
            self.refused + other.refused, self.same + other.same, self.valid + other.valid
        )  # fmt: skip
        self.slowest_seconds = max(self.slowest_seconds, other.slowest_seconds)
        self.most_bytes = max(self.most_bytes, other.most_bytes)
        self.breaches += other.breaches


class _TooLong(BaseException):
    """Not an Exception: nobody may take it for an error of the file."""


def try_cases(kind: Kind, recorded: Path, numbers: range, seed: int) -> Tally:
    """Corrupt what was recorded, once for each number, and read it; run in a process of its own."""
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="paceline-corrupt-") as folder,
        kind.opened(recorded, Path(folder)) as target,
    ):
        target.read()  # what is loaded and compiled for the first time is not the file's doing
        has_bytes = _address_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (has_bytes + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.signal(signal.SIGALRM, _too_long)
        for number in numbers:
            dice = random.Random(f"{seed}/{kind.name}/{number}")
            what = target.corrupt(dice)
            before, began = _resident_bytes(), time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
            outcome = _outcome(target.read)
            signal.setitimer(signal.ITIMER_REAL, 0)
            tally.slowest_seconds = max(tally.slowest_seconds, time.perf_counter() - began)
            tally.most_bytes = max(tally.most_bytes, _resident_bytes() - before)
            if outcome in ("refused", "same") or (outcome == "valid" and kind.may_be_valid):
                setattr(tally, outcome, getattr(tally, outcome) + 1)
            else:
                tally.breaches.append(f"case {number} ({what}): {outcome}")
    return tally


def _outcome(read: Callable[[], str]) -> str:
    try:
        return read()
    except (PacelineError, ValueError, OSError) as error:
        return "refused" if str(error).strip() and "\n" not in str(error) else f"not one line: {error!r:.300}"
    except _TooLong:
        return f"more than {MOST_SECONDS:g} s"
    except MemoryError:
        return "more than 1 GB"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.300}"


def _too_long(number: int, frame: Any) -> None:
    raise _TooLong


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- processes ---------------------------------------------------------------------------------------------------------


def _in_child(call: Callable[[], Any]) -> Any:
    """Call a function in a forked process and return what it returns; RuntimeError if the process dies."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            answer = json.dumps(call()).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
        except BaseException as error:
            print(f"corrupt: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status or not answer:
        raise RuntimeError(f"the process ended with status {status}")
    return json.loads(answer)


def _tallied(kind: Kind, recorded: Path, numbers: range, seed: int) -> Tally:
    try:
        return Tally(**_in_child(lambda: asdict(try_cases(kind, recorded, numbers, seed))))
    except RuntimeError as error:
        if len(numbers) == 1:
            return Tally(breaches=[f"case {numbers[0]}: {error}"])
        tally = Tally()  # one of them took the process down: which?
        for number in numbers:
            tally.add(_tallied(kind, recorded, range(number, number + 1), seed))
        return tally


def corrupt_all(
    corruptions: int, seed: int = 0, only: str = "", on_batch: Callable[[int], None] = lambda done: None
) -> dict[str, Tally]:
    """Corrupt every kind of file, so many times in all, and return what became of it; `only` leaves kinds out."""
    known = [kind.name.replace(",", "") for kind in KINDS]
    names = [name.strip() for name in only.split(",") if name.strip()] or known
    for name in names:
        if name not in known:
            raise ValueError(f"unknown file {name!r}; choose from {', '.join(known)}")
    logging.disable(logging.CRITICAL)  # every refusal would be a line
    torch.set_num_threads(1)  # a process that has computed with several must not fork
    tallies: dict[str, Tally] = {}
    folder = Path(tempfile.mkdtemp(prefix="paceline-corrupt-"))
    try:
        _in_child(lambda: record(folder))
        every = sum(kind.share for kind in KINDS)
        for kind in (kind for kind in KINDS if kind.name.replace(",", "") in names):
            tally = tallies[kind.name] = Tally()
            cases = max(1, round(corruptions * kind.share / every))
            for first in range(0, cases, AT_ONCE):
                numbers = range(first, min(first + AT_ONCE, cases))
                tally.add(_tallied(kind, folder, numbers, seed))
                on_batch(len(numbers))
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    return tallies


def main() -> int:
    """Corrupt files of every kind; 1 if one of them was neither refused nor read as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.long.corrupt")
    parser.add_argument("--cases", type=int, default=CORRUPTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds of files, with commas between, none in their names")
    asked = parser.parse_args()
    began = time.perf_counter()
    with step_bar(Console(stderr=True), "corrupt", total=asked.cases) as update:
        tallies = corrupt_all(asked.cases, asked.seed, asked.only, lambda done: update(advance=done))
    tell(tallies, time.perf_counter() - began)
    return 1 if any(tally.breaches for tally in tallies.values()) else 0


def tell(tallies: dict[str, Tally], seconds: float) -> None:
    """Print what became of each kind."""
    allowed = {kind.name: kind.may_be_valid for kind in KINDS}
    rows = [
        (name, f"{t.cases:,}", f"{t.refused:,}", f"{t.same:,}", f"{t.valid:,}" if allowed[name] else "-",
         f"{1000 * t.slowest_seconds:.0f}", f"{t.most_bytes / 1e6:.0f}", f"{len(t.breaches):,}")
        for name, t in tallies.items()
    ]  # fmt: skip
    total = sum(t.cases for t in tallies.values())
    table = PlainTable(
        title=f"{total:,} corruptions in {seconds:.0f} s: each refused in a line or read, within 10 s and 1 GB",
        headings=("file", "cases", "refused", "same", "valid", "slowest\nms", "most\nMB", "breaches"),
        rows=rows,
        caption="same: as it was written; a journal also its beginning. valid (-: not allowed): a state that can be "
        "gone on with, where nothing tells: hand-written, or sealed again after the change.",
    )
    console = Console(width=100, highlight=False)
    console.print(table.rich())
    for name, tally in tallies.items():
        for breach in tally.breaches[:5]:
            console.print(f"{name}: {breach}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
