"""The page of a diagnosis: the verdict, where the time of each went, all of them over time, and who was late when.

Lanes are ranks or workers. In DDP the moment at which all go on is one for all, and everything is drawn from there:

    rank 0   iiffffbbbbb.......~~|o      i input  f forward  b backward  . waiting for others  ~ wire  o optimiser
    rank 2   iifffffffffffbbbbb~~|o

A long run is drawn in bins: a bar is then the sum of a phase over all rounds of its bin. The worst rounds follow, each
as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.diagnosis import Diagnosis, Timings, evidence, verdict
from paceline.diagnosis.lateness import excesses, levels
from paceline.diagnosis.words import OWN_WORK, PART_NAMES
from paceline.quantities import UNKNOWN, count_text, counted, duration_text, percent_text, seconds_text, time_unit
from paceline.reports.chart import PAGE_COLOURS, Chart, Json, Key, Scheme, axis, layout, plot_text, thinned
from paceline.reports.page import Tile, page_html
from paceline.reports.table import PlainTable

MOST_BARS = 9_000  # a browser draws so many within a second
MOST_BINS = 60
MOST_LANES = 24
MOST_PART_LANES = 64
MOST_LINES = 6
MOST_LATENESS_POINTS = 600
MOST_ROWS = 100
WORST_ROUNDS = 12
LEAST_SHARE = 0.005  # of the run's time: smaller parts have no column
LANE_PIXELS = 24

COLOURS: dict[str, tuple[str, str]] = {
    "input": ("#b8568f", "#e39bc3"),
    "forward": ("#0072b2", "#56a9e4"),
    "backward": ("#1f9e89", "#4fd1b5"),
    "optimiser": ("#6a51a3", "#b3a2e0"),
    "computing": ("#0072b2", "#56a9e4"),
    "wire": ("#e8a317", "#f2b844"),
    "server": ("#8a4b38", "#d39b86"),
    "warm-up": ("#b4bdc9", "#4a5666"),
    "unexplained": ("#7d8794", "#8894a3"),
}
"""Part -> its colour in the light and in the dark scheme; those of the others are the page's own."""
HATCH: Json = {"shape": "/", "size": 6, "solidity": 0.12, "fillmode": "overlay", "fgcolor": "soft", "fgopacity": 0.8}
LINES = (("#c4452f", "#e8705a"), ("#0072b2", "#56a9e4"), ("#d98e00", "#f0b23e"), ("#00886a", "#2cc79b"),
         ("#6a51a3", "#b3a2e0"), ("#4d4d4d", "#c0c0c0"))  # fmt: skip


def diagnosis_page(found: Diagnosis, timings: Timings) -> str:
    """Return the page as text; the same record gives the same text."""
    sentences = verdict(found)
    charts = [parts_chart(found), *timeline_charts(found, timings), lateness_chart(found, timings)]
    return page_html(
        "diagnosis.html",
        title=f"paceline diagnose: {found.run}",
        headline=headline(found),
        sentences=[*sentences, *evidence(found)],
        conditions=list(_conditions(found)),
        figures=[chart for chart in charts if chart is not None],
        colours=_colours(),
        tiles=list(_tiles(found)),
        table=time_table(found),
        extras=[table for table in (_link_table(found), _learning_table(found)) if table is not None],
        verdicts=len(sentences),
        parts_shown=[*COLOURS, "waiting", "gone"],
    )


def _colours() -> dict[Scheme, dict[str, str]]:
    return {
        scheme: {
            **PAGE_COLOURS[scheme],
            **{name: pair[column] for name, pair in COLOURS.items()},
            **{f"s{index}": pair[column] for index, pair in enumerate(LINES)},
        }
        for column, scheme in enumerate(PAGE_COLOURS)
    }


def headline(found: Diagnosis) -> str:
    """Return the verdict in a few words."""
    noun = found.noun
    if found.status == "slow":
        slow = [each for each in found.suspects if each.matters and each.pattern != "once"]
        first, more = slow[0], len(slow) - 1
        name = f"Host {first.host}" if first.whole_host else f"{noun.capitalize()} {first.members[0]}"
        over = all(each.until_step is not None for each in slow)
        verb = ("were" if more else "was") if over else ("are" if more else "is")
        also = f" and {counted(more, 'other')} {verb}" if more else f" {verb}"
        cost = f"{duration_text(found.saved_seconds)} of {duration_text(found.run_seconds)}"
        return f"{name}{also} slow, and cost{'' if more or over else 's'} {cost}"
    if found.status == "once":
        return f"Nobody is slow as a rule, but single pauses cost {duration_text(found.saved_seconds)}"
    if found.status == "link":
        link = next(link for link in found.links if link.slow)
        return f"The link from {noun} {link.source} to {noun} {link.target} is slow"
    if found.status in ("small", "harmless"):
        first = found.suspects[0]
        name = f"Host {first.host}" if first.whole_host else f"{noun.capitalize()} {first.members[0]}"
        verb, cost = ("is", "costs") if first.until_step is None else ("was", "cost")
        return f"{name} {verb} slow, and {cost} {'little' if found.status == 'small' else 'the others nothing'}"
    return "Nobody is slow" if found.status == "nobody" else "Cannot tell who is slow"


def _conditions(found: Diagnosis) -> Iterator[str]:
    kinds = {"watched": "a script that is watched", "server": "a parameter server", "rounds": "rounds without a server"}
    of_ranks = {"averaging": "averages of all ranks", "rounds": "rounds without a server"}
    if found.kind == "watched" and found.strategy in of_ranks:  # its trace is written at the end
        yield f"{of_ranks[found.strategy]}, of which no end is recorded: killed, or still at work"
    else:
        yield kinds.get(found.kind, "simulated" if found.kind == "simulated" else of_ranks["averaging"])
    if found.strategy:
        yield found.strategy
    yield counted(found.workers, found.noun)
    yield counted(found.steps, "step" if found.kind == "watched" else "round")


def _tiles(found: Diagnosis) -> Iterator[Tile]:
    run = found.run_seconds or 1.0
    yield Tile(name="The run took", number=seconds_text(found.run_seconds), unit="s", share=1.0, series="ink")
    if found.status in ("slow", "once", "link"):
        saved = found.saved_seconds or max(link.saved_seconds for link in found.links)
        modelled = ("modelled",) if found.status == "link" else ("computed from the recorded times",)
        yield Tile(
            name="Without it",
            number=seconds_text(run - saved),
            unit="s",
            pace=f"{percent_text(saved / run)} sooner",
            facts=modelled,
            share=1 - saved / run,
            series="forward",
        )
    own = sum(found.total.get(name, 0.0) for name in OWN_WORK)
    for name, seconds, token in (
        ("Computing", own, "forward"),
        ("Waiting for others", found.total.get("waiting", 0.0), "soft"),
        ("Wire", found.total.get("wire", 0.0), "wire"),
    ):
        facts = (f"{duration_text(seconds)} of each {found.noun}",)
        share = min(1.0, seconds / run)
        yield Tile(name=name, number=percent_text(share)[:-2], unit="%", facts=facts, share=share, series=token)


# -- where the time went -----------------------------------------------------------------------------------------------


def _shown_parts(found: Diagnosis) -> list[str]:
    least = LEAST_SHARE * found.run_seconds
    return [
        name
        for name in PART_NAMES
        if any(worker.parts.get(name, 0.0) >= max(least, 1e-9) for worker in found.by_worker)
    ]


def parts_chart(found: Diagnosis) -> Chart:
    """Draw where the seconds of each went, one bar each."""
    rows = _chosen(found, MOST_PART_LANES)
    workers = [found.by_worker[row] for row in rows]
    unit, scale = time_unit(found.run_seconds)
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PART_NAMES[name],
            "x": [round(worker.parts.get(name, 0.0) / scale, 6) for worker in workers],
            "y": list(range(len(workers))),
            "marker": _marker(name),
            "customdata": [worker.number for worker in workers],
            "hovertemplate": f"{found.noun} %{{customdata}}: %{{x:.4g}} {unit} {PART_NAMES[name]}<extra></extra>",
        }
        for name in _shown_parts(found)
    ]
    few = f" The {len(rows)} that stand out most of {found.workers:,}." if len(rows) < len(found.by_worker) else ""
    return Chart(
        name="parts",
        title="Where the time went",
        caption=f"Each bar is the whole run of one {found.noun}.{few}",
        data=data,
        layout=layout(
            height=60 + LANE_PIXELS * len(rows),
            barmode="stack",
            xaxis=axis(unit),
            yaxis=_lanes(found, rows),
        ),
        keys=_keys(_shown_parts(found)),
        wide=True,
    )


def _chosen(found: Diagnosis, most: int) -> list[int]:
    """Return which workers are drawn: all, or the suspects and those that made others wait most, in their order."""
    if len(found.by_worker) <= most:
        return list(range(len(found.by_worker)))
    named = {number for each in found.suspects for number in each.members}
    order = sorted(
        range(len(found.by_worker)),
        key=lambda row: (found.by_worker[row].number not in named, -found.by_worker[row].late_seconds),
    )
    return sorted(order[:most])


def _lanes(found: Diagnosis, rows: Sequence[int]) -> Json:
    named = {number for each in found.suspects if each.matters for number in each.members}
    names = [f"{found.noun} {found.by_worker[row].number}" for row in rows]
    texts = [
        f"<b>{plot_text(name)}</b>" if found.by_worker[row].number in named else plot_text(name)
        for name, row in zip(names, rows, strict=True)
    ]
    every = 1 if len(rows) <= 32 else 4
    return axis(
        tickvals=list(range(len(rows)))[::every],
        ticktext=texts[::every],
        range=[len(rows) - 0.45, -0.55],
        showgrid=False,
        fixedrange=True,
    )


def _marker(name: str) -> Json:
    marker: Json = {"color": name, "line": {"width": 0.5, "color": "card"}}
    if name == "waiting":  # what the pale colour says, once more
        marker["pattern"] = HATCH
    return marker


def _keys(parts: Sequence[str]) -> tuple[Key, ...]:
    return tuple(Key(text=PART_NAMES[name], swatch=f"part-{name}") for name in parts)


# -- all of them over time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    lane: int
    begin: float
    seconds: float
    step: int


def timeline_charts(found: Diagnosis, timings: Timings) -> Iterator[Chart]:
    """Draw who did what when: the whole run, in bins if it is long, and then its worst rounds as they were."""
    lanes = _chosen(found, MOST_LANES)
    parts = 2 + len(timings.phases)
    most = max(10, MOST_BARS // (len(lanes) * parts))
    rows = len(timings.step)
    per_bin = 1 if rows <= most else -(-rows // min(most, MOST_BINS))
    unit = "step" if found.kind == "watched" else "round"
    worst = int(np.nan_to_num(timings.wait).sum(axis=1).argmax())
    first = max(0, min(worst - WORST_ROUNDS // 2, rows - WORST_ROUNDS))
    shown, caption = None, "Drag to zoom, double-click to see all again."
    if per_bin == 1 and rows > 2 * WORST_ROUNDS and timings.coupling != "none":
        last = min(rows, first + WORST_ROUNDS) - 1
        shown = (float(timings.start[first]), float(timings.start[last] + timings.seconds[last]))
        caption = f"The {unit}s around the worst. Double-click to see the whole run, drag to zoom."
    if per_bin > 1:
        caption = f"Drag to zoom. A bar is the sum of {per_bin:,} {unit}s, so that the whole run can be seen."
    if timings.coupling == "none":
        caption = "Drag to zoom. Nobody waits for anybody, so each goes on at its own pace."
    if len(lanes) < len(timings.numbers):
        caption += f" The {len(lanes)} that stand out most of {len(timings.numbers):,}."
    title = "All of them over time"
    whole = binned(timings, per_bin)
    yield _timeline(found, whole, lanes, name="timeline", title=title, caption=caption, shown=shown)
    if per_bin > 1:
        chosen = _rows(timings, slice(first, first + WORST_ROUNDS))
        yield _timeline(
            found,
            chosen,
            lanes,
            name="worst",
            title=f"The {unit}s around the worst",
            caption=f"Most was waited in {unit} {int(timings.step[worst]):,}: here with its neighbours, as they were.",
        )


def _rows(timings: Timings, which: slice) -> Timings:
    names = ("step", "steps", "start", "seconds", "arrival", "present", "k", "wait", "wire")
    return replace(
        timings,
        **{name: getattr(timings, name)[which] for name in names},
        phases={name: values[which] for name, values in timings.phases.items()},
        processor=None,
    )


def binned(timings: Timings, per_bin: int) -> Timings:
    """Return the timings with so many rounds in a row summed into one."""
    if per_bin <= 1:
        return timings
    edges = np.arange(0, len(timings.step), per_bin)

    def summed(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.nan_to_num(values), edges, axis=0)

    return replace(
        timings,
        step=timings.step[edges],
        steps=summed(timings.steps),
        start=timings.start[edges],
        seconds=summed(timings.seconds),
        arrival=summed(timings.arrival),
        present=np.logical_or.reduceat(timings.present, edges, axis=0),
        k=timings.k[edges],
        wait=summed(timings.wait),
        wire=summed(timings.wire),
        phases={name: summed(values) for name, values in timings.phases.items()},
        processor=None,
    )


def bars(timings: Timings, lanes: Sequence[int]) -> dict[str, list[_Bar]]:
    """Return the bars of each part: what each did in each round, one after the other.

    All that precedes the moment at which all go on is drawn backwards from it, the optimiser after it.
    """
    order = [name for name in ("input", "forward", "backward", "computing") if name in timings.phases]
    found: dict[str, list[_Bar]] = {name: [] for name in PART_NAMES}
    together = timings.coupling != "none"
    own_end = np.zeros(len(timings.numbers))
    served = "transfer" in timings.phases
    after = np.nan_to_num(timings.phases.get("optimiser", np.zeros_like(timings.arrival)))
    middle = np.median(after, axis=1) if after.size else after.sum(axis=1)
    for row in range(len(timings.step)):
        step = int(timings.step[row])
        going_on = float(timings.start[row] + timings.seconds[row] - middle[row])
        for lane, column in enumerate(lanes):
            if not timings.present[row, column]:
                continue
            pieces = [(name, float(np.nan_to_num(timings.phases[name][row, column]))) for name in order]
            wait, wire = (
                float(np.nan_to_num(timings.wait[row, column])),
                float(np.nan_to_num(timings.wire[row, column])),
            )
            pieces += [("wire", wire), ("waiting", wait)] if served else [("waiting", wait), ("wire", wire)]
            whole = sum(seconds for _, seconds in pieces)
            begin = (
                going_on - whole
                if together and not served
                else float(timings.start[row])
                if together
                else own_end[column]
            )
            for name, seconds in [*pieces, ("optimiser", float(after[row, column]))]:
                if seconds > 0:
                    found[name].append(_Bar(lane=lane, begin=begin, seconds=seconds, step=step))
                begin += seconds
            own_end[column] = begin
    return {name: its for name, its in found.items() if its}


def _timeline(
    found: Diagnosis,
    timings: Timings,
    lanes: Sequence[int],
    *,
    name: str,
    title: str,
    caption: str,
    shown: tuple[float, float] | None = None,
) -> Chart:
    drawn = bars(timings, lanes)
    first = min((bar.begin for its in drawn.values() for bar in its), default=0.0)
    last = max((bar.begin + bar.seconds for its in drawn.values() for bar in its), default=1.0)
    unit, scale = time_unit(last - first)
    begin, end = shown or (first, last)
    numbers = [int(timings.numbers[column]) for column in lanes]
    what = "step" if found.kind == "watched" else "round"
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PART_NAMES[part],
            "base": [_rounded(bar.begin / scale) for bar in its],
            "x": [_rounded(bar.seconds / scale) for bar in its],
            "y": [bar.lane for bar in its],
            "width": 0.8,
            "marker": {**_marker(part), "line": {"width": 0}},
            "customdata": [[numbers[bar.lane], bar.step] for bar in its],
            "hovertemplate": f"<b>{PART_NAMES[part]}</b>, %{{x:.4g}} {unit}<br>{found.noun} %{{customdata[0]}}, {what} "
            "%{customdata[1]}<extra></extra>",
        }
        for part, its in drawn.items()
    ]
    return Chart(
        name=name,
        title=title,
        caption=caption,
        data=data,
        layout=layout(
            height=70 + LANE_PIXELS * len(lanes),
            barmode="overlay",
            xaxis=axis(f"{unit} since the begin of the run", range=[_rounded(begin / scale), _rounded(end / scale)]),
            yaxis=_lanes(found, lanes),
        ),
        keys=_keys(list(drawn)),
        wide=True,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _rounded_or_none(value: float) -> float | None:
    return None if np.isnan(value) else _rounded(value)


# -- who was late when -------------------------------------------------------------------------------------------------


def lateness_chart(found: Diagnosis, timings: Timings) -> Chart | None:
    """Draw how much later than the others each came, over time, with the levels at which its lateness changed."""
    if len(timings.numbers) < 2:
        return None
    late = excesses(timings.arrival) / timings.steps[:, None]
    named = [number for each in found.suspects for number in each.members]
    others = sorted(found.by_worker, key=lambda worker: -worker.late_seconds)
    chosen = list(dict.fromkeys([*named, *(worker.number for worker in others)]))[:MOST_LINES]
    column = {number: index for index, number in enumerate(timings.numbers)}
    unit, scale = time_unit(float(np.nan_to_num(np.abs(late[:, [column[number] for number in chosen]])).max()))
    points = thinned(range(len(timings.step)), MOST_LATENESS_POINTS)
    what = "step" if found.kind == "watched" else "round"
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{found.noun} {number}",
            "legendgroup": f"s{index}",
            "x": [int(timings.step[point]) for point in points],
            "y": [_rounded_or_none(late[point, column[number]] / scale) for point in points],
            "line": {"color": f"s{index}", "width": 1.6 if number in named else 1.0},
            "hovertemplate": f"{found.noun} {number}, {what} %{{x}}: %{{y:.3g}} {unit}<extra></extra>",
        }
        for index, number in enumerate(chosen)
    ]
    shapes: list[Json] = []
    for index, number in enumerate(chosen):
        if number not in named:
            continue
        there = np.flatnonzero(~np.isnan(late[:, column[number]]))
        for span in levels(late[there, column[number]]):
            x = [int(timings.step[there[span.first]]), int(timings.step[there[span.last]])]
            y = _rounded(span.level_seconds / scale)
            line = {"color": f"s{index}", "width": 3, "dash": "dot"}
            shapes.append({"type": "line", "x0": x[0], "x1": x[1], "y0": y, "y1": y, "line": line})
            if span.first:
                line = {"color": "soft", "width": 1, "dash": "dash"}
                shapes.append({"type": "line", "x0": x[0], "x1": x[0], "yref": "paper", "y0": 0, "y1": 1, "line": line})
    return Chart(
        name="lateness",
        title="Who came late, and when",
        caption="How much later than the median of the others each was ready. Dotted: the level of a stretch.",
        data=data,
        layout=layout(
            height=320, xaxis=axis(what), yaxis=axis(unit, zeroline=True, zerolinecolor="line"), shapes=shapes
        ),
        keys=tuple(Key(text=f"{found.noun} {number}", series=f"s{index}") for index, number in enumerate(chosen)),
        wide=True,
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def time_table(found: Diagnosis, *, most_rows: int = MOST_ROWS, narrow: bool = False) -> PlainTable:
    """Return where the seconds of each went, and what others waited for it; `narrow` makes it fit 80 columns."""
    parts = _shown_parts(found)
    rows = _chosen(found, most_rows)
    named = {number for each in found.suspects if each.matters for number in each.members}
    short = {"waiting": "waited"}
    if narrow:
        short |= {"unexplained": "unex-\nplained", "optimiser": "opti-\nmiser"}
    few = (
        f" The {len(rows)} that stand out most of {len(found.by_worker):,}." if len(rows) < len(found.by_worker) else ""
    )
    return PlainTable(
        title="Where the time went, in seconds",
        headings=(
            found.noun.capitalize(),
            *(short.get(name, name) for name in parts),
            "others\nwaited" if narrow else "others waited",
        ),
        rows=[
            [
                str(found.by_worker[row].number),
                *(seconds_text(found.by_worker[row].parts.get(name, 0.0)) for name in parts),
                seconds_text(found.by_worker[row].charged_seconds),
            ]
            for row in rows
        ],
        caption=f"others waited: for this {found.noun}, all of them added up.{few}",
        warned=frozenset(index for index, row in enumerate(rows) if found.by_worker[row].number in named),
    )


def _link_table(found: Diagnosis) -> PlainTable | None:
    if not found.links:
        return None
    links = found.links[:MOST_ROWS]
    return PlainTable(
        title="Links, the slowest first",
        headings=("From", "To", "Mbit/s", "Latency"),
        rows=[
            [
                str(link.source),
                str(link.target),
                f"{link.bits_per_second / 1e6:,.1f}",
                duration_text(link.latency_seconds),
            ]
            for link in links
        ],
        caption="As probed while the script ran.",
        warned=frozenset(index for index, link in enumerate(links) if link.slow),
    )


def _learning_table(found: Diagnosis) -> PlainTable | None:
    counts = [each for each in found.learning if each.gradients]
    if not any(each.late or each.dropped for each in counts):
        return None
    shown = sorted(counts, key=lambda each: (-each.dropped, -each.late, each.worker))[:MOST_ROWS]
    return PlainTable(
        title="What became of each one's gradients",
        headings=(found.noun.capitalize(), "used", "late", "dropped", "samples in no update"),
        rows=[
            [
                str(each.worker),
                count_text(each.used),
                count_text(each.late),
                count_text(each.dropped),
                count_text(each.samples_dropped) if each.samples_used else UNKNOWN,
            ]
            for each in shown
        ],
        caption="Late work is in the update of the next round; dropped work is in none.",
    )
