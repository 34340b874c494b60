"""Figures 5b, 6a and 6b show where the seconds go: in an epoch, and up to an accuracy.

The paper says that HPSGD computes about as long as SSGD to an accuracy, that Local SGD computes longer, and that Local
SGD is still sooner than SSGD in all; its bars are not readable. What measurements can tell of this is in `reached`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.quantities import percent_text
from paceline.reports.chart import Chart
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.hpsgd.lanes import (
    LANES,
    PAPER,
    REBASE,
    REBASED,
    SHOWN,
    SMALL_NETWORK,
    TARGETS,
    TOY_SECONDS,
    WITHOUT_PSGD,
    Case,
    full_case,
    jobs_of,
    mean_of,
    reached_of,
    setting_remarks,
)
from paceline.reproduce.hpsgd.reached import Reached, alike, guesses, sooner, undecided_remark
from paceline.reproduce.recipe_runs import SPLIT

BETWEEN = (
    "A target is reached on the straight line between two measurements, the last one below it and the first one at it. "
    "local-sgd has a model to measure only after its averages, every 8 steps. A claim is judged where it comes out the "
    "same wherever between its two measurements each lane reached the target; else it is reported, with both of them."
)


def cases_of_figure_6a(plan: ExperimentPlan) -> list[Case]:
    """Return the paper's rate, and one that is five times as high."""
    if plan.size == "full":
        return [full_case("resnet101"), full_case("resnet101", rate=0.05)]
    if plan.toy:
        return [
            Case(network="mlp", rate=rate, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS) for rate in (0.01, 0.05)
        ]
    return [
        Case(network="mlp", rate=0.01, rounds=400, job_seconds=4.0),
        Case(network="lenet", rate=0.05, rounds=200, job_seconds=3.5),
    ]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


# -- figure 5b ---------------------------------------------------------------------------------------------------------


def cases_of_figure_5b(plan: ExperimentPlan) -> list[Case]:
    return cases_of_figure_6a(plan)[:1]


def jobs_of_figure_5b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_5b(plan), tuple(LANES), plan.seeds)


def conclude_figure_5b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    case = cases_of_figure_5b(plan)[0]

    def of_an_epoch(lane: str, *path: str) -> float | None:
        found = mean_of(plan, outcomes, case, lane, *path)
        rounds = mean_of(plan, outcomes, case, lane, "rounds")
        return None if found is None or not rounds else found / rounds * case.rounds_of_an_epoch

    total = {lane: of_an_epoch(lane, "seconds") for lane in LANES}
    split = {part: [of_an_epoch(lane, "split", part) for lane in LANES] for part in SPLIT}
    place = {lane: index + 1 for index, lane in enumerate(("psgd", "hpsgd", "local-sgd", "ssgd"))}
    hpsgd, psgd = total[PAPER], total["psgd"]
    behind = None if hpsgd is None or not psgd else hpsgd / psgd - 1
    return Findings(
        tables=(
            PlainTable(
                title="Seconds of an epoch",
                headings=("method", "ours", *(f"of which\n{part}" for part in SPLIT), "paper:\nplace"),
                rows=[
                    (
                        lane,
                        _seconds(total[lane]),
                        *(_seconds(split[part][index]) for part in SPLIT),
                        str(place["hpsgd" if lane in (PAPER, REBASED) else lane]),
                    )
                    for index, lane in enumerate(LANES)
                ],
                caption=f"{case.title}, {case.workers} workers. The paper's bars are not readable; PSGD is its lower "
                "bound.",
            ),
        ),
        claims=(
            ahead(
                "an epoch of HPSGD is shorter than one of Local SGD, and that than one of SSGD",
                {PAPER: total[PAPER], "local-sgd": total["local-sgd"], "ssgd": total["ssgd"]},
                best="low",
                write=_seconds,
            ),
            ahead(
                "PSGD is the lower bound",
                {"psgd": psgd, PAPER: hpsgd},
                best="low",
                strictly=False,
                write=_seconds,
            ),
            within("HPSGD at most 5 % above PSGD", behind, most=0.05, kind="shape", write=percent),
        ),
        charts=(
            bar_chart(
                "epoch",
                "Seconds of an epoch",
                "Means over the workers. What goes on beside computing costs nothing.",
                list(LANES),
                split,
                y="seconds",
            ),
        ),
        series=SPLIT,
        remarks=(*setting_remarks(plan), REBASE),
        numbers={"seconds": total, "split": {part: dict(zip(LANES, split[part], strict=True)) for part in SPLIT}},
    )


# -- figure 6a ---------------------------------------------------------------------------------------------------------


def jobs_of_figure_6a(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_6a(plan), tuple(LANES), plan.seeds)


PAPER_WORDS = {
    "ssgd": "-",
    "local-sgd": "< ssgd",
    PAPER: "least",
    REBASED: "-",
    "psgd": "not in it",
}
PAPER_COMPUTING = {"local-sgd": "> ssgd", PAPER: "= ssgd"}


def conclude_figure_6a(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    tables, claims, charts = [], list[Claim](), list[Chart]()
    numbers: dict[str, Any] = {}
    for case in cases_of_figure_6a(plan):
        for target in TARGETS:
            where = f"{percent_text(target)}, {case.title}"
            found = {
                part: {lane: reached_of(plan, outcomes, case, lane, target, part) for lane in LANES}
                for part in ("seconds", *SPLIT)
            }
            shown = {part: guesses(lanes) for part, lanes in found.items()}
            tables.append(
                PlainTable(
                    title=f"Seconds to {percent_text(target)} accuracy: {case.title}",
                    headings=(
                        "method",
                        "ours",
                        "measured\nbetween",
                        *(f"of which\n{part}" for part in SPLIT),
                        "paper",
                        "paper,\ncomputing",
                    ),
                    rows=[
                        (
                            lane,
                            _seconds(shown["seconds"][lane]),
                            "-" if reached is None else reached.written,
                            *(_seconds(shown[part][lane]) for part in SPLIT),
                            PAPER_WORDS[lane],
                            PAPER_COMPUTING.get(lane, "-"),
                        )
                        for lane, reached in found["seconds"].items()
                    ],
                )
            )
            claims += _figure_6a_claims(where, found)
            charts.append(
                bar_chart(
                    f"to-{len(charts)}",
                    f"Seconds to {percent_text(target)} accuracy: {case.title}",
                    "",
                    list(LANES),
                    {part: list(shown[part].values()) for part in SPLIT},
                    y="seconds",
                    wide=False,
                )
            )
            numbers[f"{case.title}, {target:g}"] = {
                lane: {
                    **{part: shown[part][lane] for part in shown},
                    "measured_between": None if reached is None else [reached.after, reached.by],
                }
                for lane, reached in found["seconds"].items()
            }
    return Findings(
        tables=tuple(tables),
        claims=tuple(claims),
        charts=tuple(charts),
        series=SPLIT,
        remarks=(*setting_remarks(plan), REBASE, BETWEEN, undecided_remark(claims)),
        numbers=numbers,
    )


def _figure_6a_claims(where: str, found: Mapping[str, Mapping[str, Reached | None]]) -> list[Claim]:
    seconds, computing = found["seconds"], found["computing"]
    total, waiting, network = (found[part][PAPER] for part in ("seconds", "waiting", "network"))
    rest = (waiting.at + network.at) / total.at if total and total.at and waiting and network else None
    return [
        sooner(
            f"HPSGD before Local SGD: {where}",
            {lane: seconds[lane] for lane in (PAPER, "local-sgd")},
            write=_seconds,
        ),
        sooner(
            f"Local SGD before SSGD: {where}",
            {lane: seconds[lane] for lane in ("local-sgd", "ssgd")},
            write=_seconds,
        ),
        sooner(
            f"HPSGD before SSGD: {where}",
            {lane: seconds[lane] for lane in (PAPER, "ssgd")},
            write=_seconds,
        ),
        alike(
            f"HPSGD computes as long as SSGD, to 10 %: {where}",
            {lane: computing[lane] for lane in (PAPER, "ssgd")},
            least=0.9,
            most=1.1,
        ),
        sooner(
            f"Local SGD computes longer than SSGD: {where}",
            {lane: computing[lane] for lane in ("ssgd", "local-sgd")},
            write=_seconds,
        ),
        within(
            f"HPSGD's share of time besides computing: {where}",
            rest,
            most=0.05,
            kind="shape",
            write=percent,
            judged=False,  # the simulated one never waits: it could not fail
        ),
        ahead(
            f"hpsgd with rebase before Local SGD before SSGD: {where}",
            guesses({lane: seconds[lane] for lane in (REBASED, "local-sgd", "ssgd")}),
            best="low",
            write=_seconds,
            judged=False,
        ),
    ]


# -- figure 6b ---------------------------------------------------------------------------------------------------------


def cases_of_figure_6b(plan: ExperimentPlan) -> list[Case]:
    if plan.size == "full":
        return [full_case(network) for network in ("resnet101", "densenet121", "mobilenetv2", "googlenet")]
    if plan.toy:
        return [Case(network=SMALL_NETWORK, rate=0.01, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS)]
    return [*cases_of_figure_6a(plan), Case(network=SMALL_NETWORK, rate=0.01, rounds=400, job_seconds=6.0)]


def jobs_of_figure_6b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_6b(plan), WITHOUT_PSGD, plan.seeds)


def conclude_figure_6b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, cells = [], list[Claim](), dict[tuple[str, float], dict[str, float | None]]()
    for case in cases_of_figure_6b(plan):
        for target in TARGETS:
            found = {lane: reached_of(plan, outcomes, case, lane, target) for lane in WITHOUT_PSGD}
            shown = guesses(found)
            cells[case.title, target] = shown
            rows.append(
                (
                    f"{case.title}, {percent_text(target)}",
                    *(_seconds(shown[lane]) for lane in WITHOUT_PSGD),
                    "hpsgd soonest",
                )
            )
            for other in ("local-sgd", "ssgd"):
                claims.append(
                    sooner(
                        f"HPSGD before {other} at {percent_text(target)}, {case.title}",
                        {PAPER: found[PAPER], other: found[other]},
                        write=_seconds,
                    )
                )
            claims.append(
                ahead(
                    f"hpsgd with rebase before both at {percent_text(target)}, {case.title}",
                    {lane: shown[lane] for lane in (REBASED, "local-sgd", "ssgd")},
                    best="low",
                    write=_seconds,
                    judged=False,
                )
            )
    return Findings(
        tables=(
            PlainTable(
                title="Seconds to an accuracy",
                headings=("network, target", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=rows,
                caption="The paper's bars are not readable.",
            ),
        ),
        claims=tuple(claims),
        charts=tuple(
            bar_chart(
                f"to-{100 * target:.0f}",
                f"Seconds to {percent_text(target)} accuracy",
                "",
                [case.title for case in cases_of_figure_6b(plan)],
                {lane: [cells[case.title, target][lane] for case in cases_of_figure_6b(plan)] for lane in WITHOUT_PSGD},
                y="seconds",
                wide=False,
            )
            for target in TARGETS
        ),
        series=WITHOUT_PSGD,
        remarks=(*setting_remarks(plan), REBASE, BETWEEN, undecided_remark(claims)),
        numbers={f"{title}, {target:g}": found for (title, target), found in cells.items()},
    )
