"""`paceline bench codecs`: measurements of this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.cli.options import debug_option, json_option, option, out_option
from paceline.cli.output import ResultsNotKept, new_folder, note, write_result
from paceline.cli.progress import step_bar
from paceline.files import write_file

if TYPE_CHECKING:
    from paceline.bench.codecs import CodecMeasurement
    from paceline.bench.gradients import SampleGradient

SMALL = 26_122  # elements on which the bias is estimated: all of the MLP's


@dataclass(frozen=True)
class BenchCodecsOptions:
    """Measure speed, size and error of every codec."""

    size: int = option(11_000_000, "elements of the gradient")
    codecs: str = option(
        "",
        'those to measure, with commas between, such as "one-bit, qsgd levels=3, top-k error-feedback"',
        metavar="LIST",
        shown="all",
    )
    repeats: int = option(7, "how often each is timed; the best counts")
    out: str = out_option("report.html and results.json", "runs/bench-codecs")
    json: bool = json_option()
    debug: bool = debug_option()


def bench_codecs(options: BenchCodecsOptions, overrides: dict[str, str]) -> None:
    notes = Console(stderr=True)
    with notes.status("loading torch"):
        from paceline.bench.codecs import check_repeats, measure, steps, variants
        from paceline.bench.gradients import check_size, real_gradient
    chosen = variants(name.strip() for name in options.codecs.split(",") if name.strip())
    check_size(options.size)
    check_repeats(options.repeats)
    out = new_folder(options.out, "bench-codecs")
    with notes.status("training a network for a gradient to measure on"):
        gradient, small = real_gradient(options.size), real_gradient(min(options.size, SMALL))
    with step_bar(notes, "codecs", total=steps(chosen, options.repeats)) as update:
        measured = measure(
            gradient, small, chosen, repeats=options.repeats, on_step=lambda name: update(description=name, advance=1)
        )
    _show(options, measured, gradient, out, notes)


def _show(
    options: BenchCodecsOptions, measured: list[CodecMeasurement], gradient: SampleGradient, out: Path, notes: Console
) -> None:
    import torch

    from paceline.bench import tables

    results = tables.CodecResults(
        measured=tuple(measured),
        gradient=gradient.description,
        threads=torch.get_num_threads(),
        repeats=options.repeats,
    )
    document = json.dumps(results.document(), indent=2, allow_nan=False)
    if options.json:
        print(document)
    else:
        console = Console(highlight=False)
        for table in (tables.codecs_table(results, letters=True), tables.links_table(tables.exchanges(measured))):
            console.print(table.rich(), "")
        console.print("\n".join(tables.scatter_lines(measured)), markup=False)
    try:
        write_result(out, "results.json", document + "\n")
        message = f"report: {write_file(out / 'report.html', tables.page(results))}"
    except OSError as error:
        raise ResultsNotKept(out, error) from error
    note(notes, message)
