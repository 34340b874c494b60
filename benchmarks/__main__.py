"""`python -m benchmarks`: lists the benchmarks, or runs those named."""

from __future__ import annotations

import sys

import tyro
from rich.table import Table

from benchmarks.catalogue import BENCHMARKS
from benchmarks.options import Options
from benchmarks.output import tables


def main() -> int:
    """Run what the command line names; 0 if it ran, whatever the figures, 2 if it was asked for wrongly."""
    options = tyro.cli(Options, prog="python -m benchmarks", config=(tyro.conf.FlagCreatePairsOff,))
    if not options.names:
        _list()
        return 0
    names = list(BENCHMARKS) if "all" in options.names else list(dict.fromkeys(options.names))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}, all", file=sys.stderr)
        return 2
    try:
        for name in names:
            BENCHMARKS[name].load()(options)
            print(f"raw numbers: {options.out}/{name}.json", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def _list() -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, benchmark in BENCHMARKS.items():
        table.add_row(name, benchmark.description)
    console = tables()
    console.print(table)
    console.print(
        '\nrun: python -m benchmarks NAME ...   or: make bench ARGS="NAME ..."   (all: all; --quick: seconds)'
    )


if __name__ == "__main__":
    sys.exit(main())
