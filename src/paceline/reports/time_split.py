"""Where the time went: for each strategy one bar, as long as its run, of computing, network and waiting.

full       |###########~~~~.....................|        per worker, and the mean over seeds
lgc        |###########~~~~...|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.quantities import percent_text, seconds_text
from paceline.reports.chart import Chart, Json, Key, axis, layout, plot_text
from paceline.reports.results import TraceGroup
from paceline.reports.sentences import clock_words
from paceline.traces.time_split import time_split

BAR_PIXELS = 34
LEAST_WRITTEN = 0.08  # of the longest bar: a smaller part has no room for its percentage
PARTS = (("computing", "used"), ("network", "split-network"), ("waiting", "waiting"))  # and their swatches
COLOURS = {"computing": "used", "network": "flight", "waiting": "waiting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSplit:
    """The seconds of one worker of a group, a mean over workers and seeds, and the stretch of the run they are of.

    >>> MeanSplit(label="lgc", parts=(4.0, 1.0, 0.5), whole=True).seconds
    5.5
    """

    label: str
    parts: tuple[float, float, float]
    whole: bool

    @property
    def seconds(self) -> float:
        """The seconds of the stretch."""
        return sum(self.parts)


def mean_splits(groups: Sequence[TraceGroup]) -> list[MeanSplit]:
    """Return the split of each group whose runs all say what their workers did.

    >>> mean_splits([])
    []
    """
    found = []
    for group in groups:
        splits = [split for split in map(time_split, group.traces) if split is not None]
        if splits and len(splits) == len(group.traces):
            found.append(
                MeanSplit(
                    label=group.label,
                    parts=(
                        fmean(split.compute_seconds / split.workers for split in splits),
                        fmean(split.network_seconds / split.workers for split in splits),
                        fmean(split.waiting_seconds / split.workers for split in splits),
                    ),
                    whole=all(split.whole for split in splits),
                )
            )
    return found


def time_split_chart(groups: Sequence[TraceGroup], *, wide: bool = True) -> Chart | None:
    """Return a bar for each strategy, cut into computing, network and waiting; None where no work was recorded.

    >>> from paceline.traces import Trace, Work
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=2, used=1, works=(work,))
    >>> chart = time_split_chart([TraceGroup(label="full", strategy="full", traces=(trace,))])
    >>> [(part["name"], part["x"], part["text"]) for part in chart.data]
    [('computing', [1.0], ['50 %']), ('network', [0.0], ['']), ('waiting', [1.0], ['50 %'])]
    """
    splits = mean_splits(groups)
    if not splits:
        return None
    clock = clock_words([trace for group in groups for trace in group.traces])
    longest = max(split.seconds for split in splits)
    places = list(range(len(splits)))[::-1]  # the first on top
    return Chart(
        name="time-split",
        title="Where the time went",
        caption=_caption(splits),
        data=[_part(index, splits, places, longest) for index in range(len(PARTS))],
        layout=layout(
            height=len(splits) * BAR_PIXELS + 80,
            barmode="stack",
            bargap=0.35,
            xaxis=axis(f"{clock}, of a worker", rangemode="tozero"),
            yaxis=axis(
                tickvals=places,
                ticktext=[plot_text(split.label) for split in splits],
                range=[-0.6, len(splits) - 0.4],
                showgrid=False,
                fixedrange=True,
            ),
        ),
        wide=wide,
        keys=tuple(Key(text=name, swatch=swatch) for name, swatch in PARTS),
    )


def _part(index: int, splits: Sequence[MeanSplit], places: Sequence[int], longest: float) -> Json:
    name = PARTS[index][0]
    seconds = [split.parts[index] for split in splits]
    shares = [part / (split.seconds or 1.0) for part, split in zip(seconds, splits, strict=True)]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [float(f"{part:.6g}") for part in seconds],
        "y": list(places),
        "marker": {"color": COLOURS[name]},
        "text": [
            percent_text(share) if part >= LEAST_WRITTEN * longest else ""
            for part, share in zip(seconds, shares, strict=True)
        ],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 11, "color": "card" if name == "computing" else "ink"},
        "hovertext": [
            f"<b>{plot_text(split.label)}</b>, {name}<br>{seconds_text(part)} s of {seconds_text(split.seconds)} s, "
            f"{percent_text(share, 1)}"
            for split, part, share in zip(splits, seconds, shares, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _caption(splits: Sequence[MeanSplit]) -> str:
    text = (
        "The mean worker. Network: its gradient or its next model was on the way and it computed nothing; what travels "
        "while it computes costs nothing. Waiting: for others, and while it was away."
    )
    cut = [split for split in splits if not split.whole]
    if cut:
        which = "; ".join(f"{split.label}, {seconds_text(split.seconds)} s" for split in cut)
        text += f" Of these only the first seconds are recorded in full: {which}."
    return text
