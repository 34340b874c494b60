"""`paceline export`: a run for other tools, as one file.

The file is JSON in Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing open; `reports/perfetto.py`
says what is in it. It holds names of hosts and reasons that workers gave, and nothing of the data or the model.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.cli.options import UsageError, argument, debug_option, json_option, option
from paceline.cli.output import existing_folder, note
from paceline.files import write_file
from paceline.quantities import size_text

FILE = "perfetto.json"
MOST_DIGITS = 15


@dataclass(frozen=True)
class ExportOptions:
    """Write a run as a trace for Perfetto or chrome://tracing."""

    run: str = argument("RUN", "the folder of a run")
    out: str = option("", "the file; packed where its name ends in .gz", metavar="FILE", shown=f"RUN/{FILE}")
    strategy: str = option("", "which run of a race", metavar="NAME", shown="the only one")
    rounds: str = option(
        "", "rounds A to B - 1, or steps of a watched script; 100: is from 100 on", metavar="A:B", shown="all that fit"
    )
    json: bool = json_option()
    debug: bool = debug_option()


def export(options: ExportOptions, overrides: dict[str, str]) -> None:
    from paceline.reports.perfetto import perfetto_trace
    from paceline.traces.recorded_run import read_run

    folder, rounds = existing_folder(options.run), parsed_rounds(options.rounds)
    out = Path(options.out) if options.out else folder / FILE
    if out.is_dir():
        raise UsageError(f"{out} is a folder; give --out a file, such as {out / FILE}")
    found = perfetto_trace(read_run(folder, strategy=options.strategy), rounds=rounds)
    text = json.dumps(found.document(title=folder.name), separators=(",", ":"), allow_nan=False)
    content = gzip.compress(text.encode(), mtime=0) if out.suffix == ".gz" else text.encode()
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, content)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}; give another --out") from None
    if options.json:
        document = {"file": str(out), "bytes": len(content), "events": len(found.events), "notes": list(found.notes)}
        print(json.dumps(document, indent=2))
    console = Console(stderr=True)
    for sentence in found.notes:
        note(console, f"note: {sentence}")
    note(console, f"trace: {out} ({size_text(len(content))}); open it at https://ui.perfetto.dev")


def parsed_rounds(text: str) -> tuple[int | None, int | None]:
    """Return the first round and the one behind the last; None where the text leaves an end open.

    >>> parsed_rounds("100:200"), parsed_rounds(":50"), parsed_rounds("")
    ((100, 200), (None, 50), (None, None))
    >>> parsed_rounds("7")
    Traceback (most recent call last):
    paceline.cli.options.UsageError: --rounds must be A:B with whole numbers from 0 on, A below B, such as 100:200 ...
    """
    if not text:
        return None, None
    found = re.fullmatch(rf"(\d{{0,{MOST_DIGITS}}}):(\d{{0,{MOST_DIGITS}}})", text, re.ASCII)
    first, behind = (int(part) if part else None for part in found.groups()) if found else (None, None)
    empty = first is not None and behind is not None and first >= behind
    if not found or empty or behind == 0:
        raise UsageError(
            "--rounds must be A:B with whole numbers from 0 on, A below B, such as 100:200 or 100: "
            f"(rounds={text!r:.40})"
        )
    return first, behind
