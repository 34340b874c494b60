"""How averaging scales without a server: scale efficiency of the whole family, at 4 to 1,024 simulated workers.

    scale efficiency = samples per second of N workers / (N * samples per second of one worker alone)

Only times are simulated; nothing is trained. The figures to compare with are those of the HPSGD paper's figure 5a. The
settings, and what the paper's numbers imply, are those of `hpsgd-5a`.
"""

from __future__ import annotations

from experiments.core.claims import figure, percent, within
from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.papers.hpsgd.scaling import ALONE, HARDWARE, SAME, cells_of, efficiencies, implied_told, scale_job
from experiments.papers.published import HPSGD_FIGURE_5A
from paceline.reports.table import PlainTable
from paceline.strategies.averaging import AVERAGING

ROUNDS = 200


@experiment(
    "scale",
    source="HPSGD, figure 5a",
    question="scale efficiency of averaging at 4 to 1,024 simulated workers",
    minutes=0.5,
)
def scale(size: Size) -> Telling:
    sizes = size.pick((4, 16), (4, 8, 16, 64, 1024))
    rounds = size.pick(10, ROUNDS)
    cells = cells_of(AVERAGING, sizes)
    jobs = {cell: scale_job(cell, rounds, seconds=cell[2] * rounds / 100_000) for cell in cells}
    runs = yield {ALONE: scale_job(ALONE, ROUNDS, seconds=0.1), **jobs}
    found = efficiencies(runs)
    for name, hardware in HARDWARE.items():
        rows = []
        for member in AVERAGING:
            own = [found.get((name, member, workers)) for workers in sizes]
            rows.append((member, *("-" if each is None else percent(each) for each in own)))
        rows.append(("ring / mean step", *(f"{hardware.ring_in_steps(workers):.2f}" for workers in sizes)))
        yield PlainTable(
            title=f"Scale efficiency, {name}",
            headings=("member", *(f"{workers:,}" for workers in sizes)),
            rows=rows,
            caption=f"{rounds} rounds; local-sgd and bmuf average every {AVERAGING['local-sgd'].period} steps, diloco "
            f"every {AVERAGING['diloco'].period}.\n100 %: N workers are N times as fast as one alone.",
        )
        for workers, over, gain in HPSGD_FIGURE_5A:
            ratio = found[name, "hpsgd", workers] / found[name, over, workers]
            text = f"hpsgd / {over}, {workers} workers, {name}"
            if gain:
                yield within(text, ratio, least=1 + gain, kind="bar", write=figure)
            else:
                yield within(f"{text}, off 1 by", abs(ratio - 1), most=SAME, kind="bar", write=percent)
    yield from implied_told()
    yield Numbers(
        {
            "alone_batches_per_second": runs.mean("batches_per_second")[ALONE],
            "efficiency": {
                f"{hardware}, {member}, {workers}": each for (hardware, member, workers), each in found.items()
            },
        }
    )
