"""What the plans of codecs cost in learning: losses of four real ranks, beside those of no codec after the same steps.

A small CNN on digits with SGD, and a small transformer on text with AdamW; four ranks on gloo, 16 samples each. Every
codec by the plan that is taken among many ranks: two-step, or all-reduce for those that are added up on their way. The
CNN has two beginnings: after 150 steps without a codec, and from the very first step, where error feedback sends late
what it holds back. Nothing is tuned for a codec: learning rate, steps and batches are those of the run without one,
seed by seed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.codec_losses_rank import PLAIN, Job, job_text
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured

CODECS = ["qsgd", "one-bit", "top-k", "power-sgd", "int8-sum", "bfloat16"]
SEEDS = 3
FIRST_SEED = 20
FULL = Job(codecs=[PLAIN, *CODECS], seeds=[], ranks=4, warm=150, steps=300)
QUICK = Job(codecs=[PLAIN, "qsgd", "one-bit"], seeds=[], ranks=3, warm=2, steps=3)
GPT_STEPS = 400
NEAR = Bar(sign="<=", limit=1.05)


def run(options: Options) -> None:
    """`python -m benchmarks codec-losses`."""
    seeds = options.seeds or (1 if options.quick else SEEDS)
    job = replace(QUICK if options.quick else FULL, seeds=list(range(FIRST_SEED, FIRST_SEED + seeds)))
    console, kept = tables(), {}
    beginnings = (
        ("after a beginning without a codec", job),
        ("from the first step", replace(job, warm=0)),
        ("AdamW, from the first step", replace(job, warm=0, task="gpt", steps=GPT_STEPS)),
    )
    for name, begun in beginnings[:1] if options.quick else beginnings:
        lines = _measured(name, begun)
        rows = rows_of(lines)
        kept[name] = {"rows": rows, "lines": lines}
        console.print(_table(rows, begun, name, quick=options.quick))
        far = [row["codec"] for row in rows if NEAR.verdict(row["mean"]) == "MISS"]
        verdict = coloured("MISS" if far else "PASS")
        console.print(f"Every codec's mean, bar {NEAR}: {verdict}{': ' + ', '.join(far) if far else ''}")
    save(options, "codec-losses", kept)


def _measured(name: str, job: Job) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-codec-losses-"))
    labels = [f"{codec}, seed {seed}" for seed, codec in job.runs]
    try:
        with ended_by_signals():
            return measured(
                f"codec-losses {name}",
                "benchmarks.codec_losses_rank",
                job_text(job),
                labels,
                None,
                folder,
                ranks_per_host=job.ranks,
            )
    finally:
        shutil.rmtree(folder)


def rows_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each codec's loss over that of no codec, seed by seed.

    >>> lines = [{"seed": 0, "codec": "none", "loss": 0.5, "plans": []}]
    >>> rows_of([*lines, {"seed": 0, "codec": "qsgd", "loss": 0.51, "plans": ["two-step"]}])
    [{'codec': 'qsgd', 'plans': 'two-step', 'ratios': [1.02], 'mean': 1.02}]
    """
    plain = {line["seed"]: line["loss"] for line in lines if line["codec"] == PLAIN}
    rows = []
    for codec in dict.fromkeys(line["codec"] for line in lines if line["codec"] != PLAIN):
        own = [line for line in lines if line["codec"] == codec]
        ratios = [line["loss"] / plain[line["seed"]] for line in own]
        rows.append({"codec": codec, "plans": ", ".join(own[0]["plans"]), "ratios": ratios, "mean": mean(ratios)})
    return rows


def _table(rows: Sequence[dict[str, Any]], job: Job, name: str, *, quick: bool) -> Table:
    title = f"Loss over the loss without a codec, {job.ranks} ranks, {job.steps} steps, {name}"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("codec", "plan"):
        table.add_column(column, no_wrap=True)
    for column in ("lowest", "mean", "highest"):
        table.add_column(column, justify="right")
    table.add_column(f"mean {NEAR}", no_wrap=True)
    for row in rows:
        figures = (min(row["ratios"]), row["mean"], max(row["ratios"]))
        verdict = coloured(NEAR.verdict(row["mean"]))
        table.add_row(row["codec"], row["plans"], *(f"{figure:.2f}" for figure in figures), verdict)
    return table
