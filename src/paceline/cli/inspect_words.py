"""What `paceline inspect` found, in words, as a table, as bars and as one document. Only what was computed is said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.optim.ratio_table import AS_IT_IS, local_rate, number, ratio_lines
from paceline.recipes import Recipe
from paceline.reports.plain_table import PlainTable
from paceline.reports.ratio_chart import RatioBar

if TYPE_CHECKING:
    from paceline.analysis.layer_ratios import Inspection
    from paceline.optim.ratios import LayerRatio, LayerRatios

STEPS_BY_THE_GRADIENT = ("sgd",)


def lines(inspection: Inspection) -> list[str]:
    """The table of the terminal, the limiting layer marked with a `>`."""
    first, last = inspection.first, inspection.last
    if last is first:
        heading = first.ratios.rate_heading
        return ratio_lines(first.ratios.rows, limiting=inspection.limiting(), rate_heading=heading)
    heading = f"step {last.step}"
    return ratio_lines(
        first.ratios.rows,
        limiting=inspection.limiting(),
        later={row.name: row.ratio for row in last.ratios},
        later_heading=heading if len(heading) <= 9 else "at last",
    )


def headline(inspection: Inspection) -> str:
    """Which layer it is."""
    limiting = inspection.limiting()
    if limiting is None:
        return "No layer limits the learning rate: no ratio is positive and finite"
    return f"{limiting.name} limits the learning rate: |w| / |gradient| is {number(limiting.ratio)}"


def sentences(recipe: Recipe, inspection: Inspection) -> list[str]:
    """What follows."""
    found, limiting = list[str](), inspection.limiting()
    if limiting is not None and limiting.ratio is not None:
        found.append(_what_it_bears(inspection, limiting, limiting.ratio))
        found.append(_what_the_recipe_does(recipe, inspection, limiting, limiting.ratio))
    at_zero = sum(row.ratio == 0 for row in inspection.first.ratios)
    if at_zero:
        found.append(
            f"{at_zero} of {len(inspection.first.ratios)} parameters start at 0. They have no size that a step could "
            "exceed, and are not counted."
        )
    if inspection.last is not inspection.first and limiting is not None:
        found.append(_what_became_of_it(inspection, limiting))
    if inspection.diverged:
        found.append(f"Training diverged: after {inspection.last.step:,} steps the loss is no longer finite.")
    return [sentence for sentence in found if sentence]


def _what_it_bears(inspection: Inspection, limiting: LayerRatio, ratio: float) -> str:
    said = f"A plain gradient step at a rate above {number(ratio)} moves it by more than its own length."
    # A bias before a normalisation has a gradient of rounding errors alone: only weights are worth comparing with.
    weights = inspection.first.ratios.only("weight")
    low, high = weights.limiting, max((row.ratio or 0.0 for row in weights if row.counts), default=0.0)
    if low is None or low.ratio is None:
        return said
    if limiting.kind != "weight":
        said += f" Among the weights {low.name} has the smallest ratio, {number(low.ratio)}."
    if high == low.ratio:
        return said
    largest = next(row for row in weights if row.ratio == high)
    return f"{said} {largest.name} bears {number(high)}, {number(high / low.ratio)} times as much."


def _what_the_recipe_does(recipe: Recipe, inspection: Inspection, limiting: LayerRatio, ratio: float) -> str:
    rate, name = inspection.first.rate, recipe.optimizer.name
    if name in STEPS_BY_THE_GRADIENT:
        moved = rate / ratio
        share = f"{100 * moved:.2g} %" if moved < 1 else f"{number(moved)} times"
        return (
            f"The recipe's rate at the first step, {rate:g}, moves {limiting.name} by {share} of its length "
            "(momentum and weight decay not counted)."
        )
    if name == "lars":
        return f"{_what_lars_does(inspection, limiting)}{_how_far_lars_goes(recipe, inspection)}"
    return f"The recipe's optimiser, {name}, does not step by the gradient itself: its rate is no rate to compare."


def _what_lars_does(inspection: Inspection, limiting: LayerRatio) -> str:
    ratios, local = inspection.first.ratios, number(limiting.local_rate)
    if not limiting.scaled:
        said = f"leaves {limiting.name} out: it takes the rate as it is, {inspection.first.rate:g} at the first step"
    elif ratios.clip:
        said = f"holds the rate of {limiting.name} to at most {local}"
    else:
        said = f"multiplies the rate of {limiting.name} by {local}"
    others = [row for row in ratios if row.name != limiting.name and row.local_rate is not None]
    own = sum(row.scaled for row in others)
    return (
        f"The recipe's LARS {said}. Other parameters: {own} with a {'limit' if ratios.clip else 'factor'} of their "
        f"own, {len(others) - own} that take the rate as it is."
    )


def _how_far_lars_goes(recipe: Recipe, inspection: Inspection) -> str:
    """LARS with a rate of SGD's kind hardly moves, and looks as if it did not learn."""
    if recipe.optimizer.clip:
        return ""
    share = 100 * recipe.optimizer.lr * inspection.first.ratios.trust
    return (
        f" A layer that is scaled moves by about lr x trust = {share:.2g} % of its length per step "
        f"at the rate {recipe.optimizer.lr:g} (momentum not counted)."
    )


def _what_became_of_it(inspection: Inspection, limiting: LayerRatio) -> str:
    last = inspection.last
    then, now = limiting.ratio, last.ratios[limiting.name].ratio
    smallest = inspection.limiting(last)
    if now is None or then is None or smallest is None or not 0 < now < math.inf:
        return ""
    change = f"{number(now / then)} times what it was" if now >= then else f"1/{number(then / now)} of what it was"
    after = f"After {last.step:,} step{'s' if last.step > 1 else ''}"
    said = f"{after} the ratio of {limiting.name} is {number(now)}, {change}"
    if smallest.name == limiting.name:
        return f"{said}, and still the smallest."
    return f"{said}; the smallest is then that of {smallest.name}, {number(smallest.ratio)}."


def conditions(recipe: Recipe, inspection: Inspection) -> list[str]:
    """What it was computed on."""
    ratios = inspection.first.ratios
    said = [
        f"{recipe.model.name} on {recipe.data.name}",
        f"batch of {inspection.batch:,} from all training data",
        f"{len(ratios)} parameters, {sum(row.count for row in ratios):,} numbers",
        f"LARS: trust {ratios.trust:g}, weight decay {ratios.weight_decay:g}{', clip' if ratios.clip else ''}",
        f"seed {recipe.seed}",
    ]
    if inspection.last is not inspection.first:
        said.insert(2, f"{inspection.last.step:,} steps of {recipe.optimizer.name}, rate {inspection.first.rate:g}")
    return said


def comparable_rate(recipe: Recipe, inspection: Inspection) -> float | None:
    """The learning rate, where it is one that a ratio can be compared with."""
    rate = inspection.first.rate
    return rate if recipe.optimizer.name in STEPS_BY_THE_GRADIENT and rate > 0 else None


def bars(inspection: Inspection) -> list[RatioBar]:
    """The layers as the page draws them."""
    limiting = inspection.limiting()
    courses: dict[str, list[tuple[int, float | None]]] = {row.name: [] for row in inspection.first.ratios}
    for moment in inspection.moments if len(inspection.moments) > 1 else ():
        for row in moment.ratios:
            courses[row.name].append((moment.step, row.ratio))
    return [
        RatioBar(
            name=row.name,
            kind=row.kind,
            ratio=row.ratio,
            remark=row.remark,
            limiting=limiting is not None and row.name == limiting.name,
            course=tuple(courses[row.name]),
            facts=f"{shape(row.shape)}, |w| {number(row.weight_norm)}, |gradient| {number(row.gradient_norm)}",
        )
        for row in inspection.first.ratios
    ]


def table(inspection: Inspection) -> PlainTable:
    """All rows, for the page."""
    first, last = inspection.first, inspection.last
    headings = ["layer", "kind", "shape", "|w|", "|gradient|", "|w| / |gradient|", first.ratios.rate_heading]
    later = {} if last is first else {row.name: row for row in last.ratios}
    if later:
        headings.append(f"ratio after {last.step:,} steps")
    limiting = inspection.limiting()
    at = next((index for index, row in enumerate(first.ratios) if limiting and row.name == limiting.name), -1)
    rows = [
        [row.name, row.kind, shape(row.shape), *map(number, (row.weight_norm, row.gradient_norm, row.ratio)),
         local_rate(row), *([number(later[row.name].ratio)] if later else []),
         "limits the rate" if index == at else row.remark]
        for index, row in enumerate(first.ratios)
    ]  # fmt: skip
    return PlainTable(
        title="Layers before the first step",
        headings=[*headings, ""],
        rows=rows,
        caption=f"|...|: Euclidean length. {_what_the_rates_are(first.ratios)} Bold: the layer that limits the rate.",
        marked=frozenset((at, column) for column in (5, len(headings))),
    )


def _what_the_rates_are(ratios: LayerRatios) -> str:
    what = "the most that LARS lets a layer's rate be" if ratios.clip else "what LARS multiplies the learning rate by"
    left_out = "biases, normalisation and " if ratios.exclude_bias_and_norm else ""
    return (
        f"{ratios.rate_heading}: {what}, trust |w| / (|gradient| + weight decay |w|), with trust {ratios.trust:g} and "
        f"weight decay {ratios.weight_decay:g}; {AS_IT_IS}: {left_out}what has a length of 0 take the rate so."
    )


def shape(sizes: Sequence[int]) -> str:
    """A shape in short.

    >>> shape((64, 3, 3, 3)), shape(())
    ('64x3x3x3', '1')
    """
    return "x".join(map(str, sizes)) or "1"


def document(recipe: Recipe, inspection: Inspection) -> dict[str, Any]:
    """One JSON document; what is not finite is null."""
    limiting = inspection.limiting()
    return {
        "recipe": recipe.to_document(),
        "batch": inspection.batch,
        "diverged": inspection.diverged,
        "limiting": limiting and limiting.name,
        "spread": inspection.first.ratios.spread,
        "layers": [_layer(row) for row in inspection.first.ratios],
        "moments": [
            {
                "step": moment.step,
                "rate": moment.rate,
                "loss": _finite(moment.loss),
                "ratios": {row.name: _finite(row.ratio) for row in moment.ratios},
            }
            for moment in inspection.moments
        ],
    }


def _layer(row: LayerRatio) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "shape": list(row.shape),
        "weight_norm": _finite(row.weight_norm),
        "gradient_norm": _finite(row.gradient_norm),
        "ratio": _finite(row.ratio),
        "local_rate": _finite(row.local_rate),
        "scaled": row.scaled,
        "remark": row.remark,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
