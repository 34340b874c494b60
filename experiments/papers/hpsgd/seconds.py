"""hpsgd-5b, hpsgd-6a and hpsgd-6b, the paper's figures: where the seconds go, in an epoch and up to an accuracy.

The paper says that HPSGD computes about as long as SSGD to an accuracy, that Local SGD computes longer, and that Local
SGD is still sooner than SSGD in all; its bars are not readable. What measurements can tell of this is in `reached`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from experiments.core.claims import ahead, percent, within
from experiments.core.recipes import SPLIT
from experiments.core.story import NAN, Claim, Numbers, Size, Telling, experiment
from experiments.papers.hpsgd.reached import (
    BETWEEN,
    Reached,
    alike,
    guesses,
    reached_of,
    sooner,
    undecided_remark,
)
from experiments.papers.hpsgd.setting import (
    LANES,
    OURS,
    PAPER,
    REBASED,
    SMALL_NETWORK,
    TARGETS,
    TOY_SECONDS,
    WITHOUT_PSGD,
    Case,
    by_lane,
    full_case,
    jobs_of,
    paper_cases,
    setting_remarks,
)
from paceline.quantities import percent_text
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable


def cases_of_figure_6a(size: Size) -> list[Case]:
    """Return the paper's rate, and one that is five times as high."""
    if size.name == "full":
        return [full_case("resnet101"), full_case("resnet101", rate=0.05)]
    if size.toy:
        return [
            Case(network="mlp", rate=rate, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS) for rate in (0.01, 0.05)
        ]
    return [
        Case(network="mlp", rate=0.01, rounds=400, job_seconds=4.0),
        Case(network="lenet", rate=0.05, rounds=200, job_seconds=3.5),
    ]


def written(seconds: float) -> str:
    """Write the seconds to a target.

    >>> written(22.84), written(math.nan)
    ('22.8', 'never')
    """
    return "never" if math.isnan(seconds) else f"{seconds:.1f}"


# -- figure 5b ---------------------------------------------------------------------------------------------------------


@experiment(
    "hpsgd-5b",
    source="HPSGD, figure 5b",
    question="seconds of an epoch: ssgd, local-sgd, hpsgd, psgd",
    minutes=0.8,
    full_hours=1000,
    full_data=("cifar10",),
    seeds=3,
)
def figure_5b(size: Size) -> Telling:
    case = cases_of_figure_6a(size)[0]
    runs = yield {lane: case.job(lane) for lane in LANES}
    rounds = runs.mean("rounds")

    def of_an_epoch(*path: str) -> dict[str, float]:
        found = runs.mean(*path)
        return {lane: found[lane] / rounds[lane] * case.rounds_of_an_epoch if rounds[lane] else NAN for lane in LANES}

    total = of_an_epoch("seconds")
    split = {part: of_an_epoch("split", part) for part in SPLIT}
    hpsgd, psgd = total[PAPER], total["psgd"]
    yield ahead(
        "an epoch of HPSGD is shorter than one of Local SGD, and that than one of SSGD",
        {lane: total[lane] for lane in (PAPER, "local-sgd", "ssgd")},
        best="low",
        write=written,
    )
    yield ahead("PSGD is the lower bound", {"psgd": psgd, PAPER: hpsgd}, best="low", strictly=False, write=written)
    yield within("HPSGD at most 5 % above PSGD", hpsgd / psgd - 1, most=0.05, kind="shape", write=percent)
    place = {"psgd": 1, PAPER: 2, REBASED: 2, "local-sgd": 3, "ssgd": 4}
    yield PlainTable(
        title="Seconds of an epoch",
        headings=("method", "ours", *(f"of which\n{part}" for part in SPLIT), "paper:\nplace"),
        rows=[
            (lane, written(total[lane]), *(written(split[part][lane]) for part in SPLIT), str(place[lane]))
            for lane in LANES
        ],
        caption=f"{case.title}, {case.workers} workers. The paper's bars are not readable; PSGD is its lower bound.",
    )
    yield bar_chart(
        "epoch",
        "Seconds of an epoch",
        "Means over the workers. What goes on beside computing costs nothing.",
        list(LANES),
        {part: list(split[part].values()) for part in SPLIT},
        y="seconds",
    )
    yield from setting_remarks(size)
    yield Numbers({"seconds": total, "split": split})


# -- figure 6a ---------------------------------------------------------------------------------------------------------

WORDS = {"ssgd": "-", "local-sgd": "< ssgd", PAPER: "least", REBASED: "-", "psgd": "not in it"}
WORDS_ON_COMPUTING = {"local-sgd": "> ssgd", PAPER: "= ssgd"}


@experiment(
    "hpsgd-6a",
    source="HPSGD, figure 6a",
    question="seconds to 40 % and to 80 %: computing, waiting, network",
    minutes=1.5,
    full_hours=2000,
    full_data=("cifar10",),
    seeds=3,
)
def figure_6a(size: Size) -> Telling:
    cases, claims = cases_of_figure_6a(size), list[Claim]()
    runs = yield jobs_of(cases, LANES)
    for number, (case, target) in enumerate(product(cases, TARGETS)):
        found = {part: by_lane(reached_of(runs, target, part), case.title) for part in ("seconds", *SPLIT)}
        shown = {part: guesses(lanes) for part, lanes in found.items()}
        title = f"Seconds to {percent_text(target)} accuracy: {case.title}"
        yield PlainTable(
            title=title,
            headings=(
                *("method", "ours", "measured\nbetween"),
                *(f"of which\n{part}" for part in SPLIT),
                *("paper", "paper,\ncomputing"),
            ),
            rows=[
                (
                    lane,
                    written(shown["seconds"][lane]),
                    reached.written,
                    *(written(shown[part][lane]) for part in SPLIT),
                    WORDS[lane],
                    WORDS_ON_COMPUTING.get(lane, "-"),
                )
                for lane, reached in found["seconds"].items()
            ],
        )
        claims += claims_of_figure_6a(f"{percent_text(target)}, {case.title}", found)
        bars = {part: list(shown[part].values()) for part in SPLIT}
        yield bar_chart(f"to-{number}", title, "", list(LANES), bars, y="seconds", wide=False)
        numbers: dict[str, Any] = {}
        for lane, reached in found["seconds"].items():
            between = [reached.after, reached.by] if reached.known else None
            numbers[lane] = {**{part: shown[part][lane] for part in shown}, "measured_between": between}
        yield Numbers({f"{case.title}, {target:g}": numbers})
    yield from claims
    yield from setting_remarks(size)
    yield BETWEEN
    yield undecided_remark(claims)


def claims_of_figure_6a(where: str, found: Mapping[str, Mapping[str, Reached]]) -> Iterator[Claim]:
    """Yield the claims on one case and target, from the seconds of each part and lane."""
    seconds, computing = found["seconds"], found["computing"]
    for text, lanes in (
        ("HPSGD before Local SGD", (PAPER, "local-sgd")),
        ("Local SGD before SSGD", ("local-sgd", "ssgd")),
        ("HPSGD before SSGD", (PAPER, "ssgd")),
    ):
        yield sooner(f"{text}: {where}", {lane: seconds[lane] for lane in lanes}, write=written)
    both = {lane: computing[lane] for lane in (PAPER, "ssgd")}
    yield alike(f"HPSGD computes as long as SSGD, to 10 %: {where}", both, least=0.9, most=1.1)
    both = {lane: computing[lane] for lane in ("ssgd", "local-sgd")}
    yield sooner(f"Local SGD computes longer than SSGD: {where}", both, write=written)
    hpsgd = {part: guesses(lanes)[PAPER] for part, lanes in found.items()}
    rest = (hpsgd["waiting"] + hpsgd["network"]) / hpsgd["seconds"] if hpsgd["seconds"] else NAN
    text = f"HPSGD's share of time besides computing: {where}"
    # Not judged, for the simulated one never waits: it could not fail.
    yield within(text, rest, most=0.05, kind="shape", write=percent, judged=False)
    three = guesses({lane: seconds[lane] for lane in (REBASED, "local-sgd", "ssgd")})
    text = f"hpsgd with rebase before Local SGD before SSGD: {where}"
    yield ahead(text, three, best="low", write=written, judged=False)


# -- figure 6b ---------------------------------------------------------------------------------------------------------


def cases_of_figure_6b(size: Size) -> list[Case]:
    if size.name == "full":
        return paper_cases()
    if size.toy:
        return [Case(network=SMALL_NETWORK, rate=0.01, rounds=8, evaluate_every=4, job_seconds=TOY_SECONDS)]
    return [*cases_of_figure_6a(size), Case(network=SMALL_NETWORK, rate=0.01, rounds=400, job_seconds=6.0)]


@experiment(
    "hpsgd-6b",
    source="HPSGD, figure 6b",
    question="seconds to 40 % and to 80 % on several networks",
    minutes=2.0,
    full_hours=4000,
    full_data=("cifar10",),
    seeds=3,
)
def figure_6b(size: Size) -> Telling:
    cases, claims, rows = cases_of_figure_6b(size), list[Claim](), []
    shown: dict[tuple[str, float], dict[str, float]] = {}
    runs = yield jobs_of(cases, WITHOUT_PSGD)
    for case, target in product(cases, TARGETS):
        found = by_lane(reached_of(runs, target), case.title)
        seconds = shown[case.title, target] = guesses(found)
        rows.append((f"{case.title}, {percent_text(target)}", *map(written, seconds.values()), "hpsgd soonest"))
        where = f"at {percent_text(target)}, {case.title}"
        for other in ("local-sgd", "ssgd"):
            both = {lane: found[lane] for lane in (PAPER, other)}
            claims.append(sooner(f"HPSGD before {other} {where}", both, write=written))
        three = {lane: seconds[lane] for lane in (REBASED, "local-sgd", "ssgd")}
        text = f"hpsgd with rebase before both {where}"
        claims.append(ahead(text, three, best="low", write=written, judged=False))
    yield from claims
    yield PlainTable(
        title="Seconds to an accuracy",
        headings=("network, target", *OURS, "paper"),
        rows=rows,
        caption="The paper's bars are not readable.",
    )
    for target in TARGETS:
        yield bar_chart(
            f"to-{100 * target:.0f}",
            f"Seconds to {percent_text(target)} accuracy",
            "",
            [case.title for case in cases],
            {lane: [shown[case.title, target][lane] for case in cases] for lane in WITHOUT_PSGD},
            y="seconds",
            wide=False,
        )
    yield from setting_remarks(size)
    yield BETWEEN
    yield undecided_remark(claims)
    yield Numbers({f"{title}, {target:g}": found for (title, target), found in shown.items()})
