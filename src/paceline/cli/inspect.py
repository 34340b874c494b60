"""`paceline inspect rates`: which layer limits a recipe's learning rate.

What was found is shown as a table and sentences in the terminal, as a page and as one JSON document; only what was
computed is stated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from paceline.cli.options import (
    RECIPE_FILE,
    argument,
    debug_option,
    given_recipe,
    json_option,
    option,
    out_option,
    trust_option,
)
from paceline.cli.output import ResultsNotKept, new_folder, note, write_result
from paceline.cli.progress import step_bar
from paceline.decoding import DecodingError, decode, parse_object
from paceline.files import write_file
from paceline.quantities import number_text
from paceline.recipes import Recipe
from paceline.terminal import WIDTH, printable

if TYPE_CHECKING:
    from paceline.analysis.layer_ratios import Inspection
    from paceline.optim.ratios import LayerRatio, LayerRatios
    from paceline.reports.ratio_page import RatioBar
    from paceline.reports.table import PlainTable

PAGE = "inspect.html"
BAR_AFTER_SECONDS = 2.0
STEPS_BY_THE_GRADIENT = ("sgd",)


@dataclass(frozen=True)
class InspectRatesOptions:
    """Show which layer limits the learning rate.

    Weights are shown beside their gradients, layer by layer.
    """

    recipe_file: str = argument("[RECIPE]", RECIPE_FILE, default="")
    steps: int = option(0, "train so many steps, and show the ratios after them as well")
    batch: int = option(0, "samples of a gradient", shown="the recipe's worker.batch_size")
    out: str = out_option("inspect.html and results.json", "runs/inspect")
    trust: bool = trust_option()
    json: bool = json_option()
    debug: bool = debug_option()


def inspect_rates(options: InspectRatesOptions, overrides: dict[str, str]) -> None:
    from paceline.analysis.layer_ratios import check, inspect_recipe

    recipe = given_recipe(options.recipe_file, overrides, trust=options.trust)
    check(recipe, steps=options.steps, batch=options.batch)
    notes, out = Console(stderr=True), new_folder(options.out, "inspect")
    with notes.status(f"loading torch, {recipe.data.name} and {recipe.model.name}"):
        import paceline.optim.ratios
        import paceline.training  # noqa: F401 - it takes seconds, and somebody is watching
    with step_bar(notes, "steps", total=options.steps + 1, after_seconds=BAR_AFTER_SECONDS) as update:
        inspection = inspect_recipe(
            recipe, steps=options.steps, batch=options.batch, on_step=lambda done: update(completed=done)
        )
    _show(recipe, inspection, out, notes, as_json=options.json)


def _show(recipe: Recipe, inspection: Inspection, out: Path, notes: Console, *, as_json: bool) -> None:
    found = json.dumps(document(recipe, inspection), indent=2, allow_nan=False)
    if as_json:
        print(found)
    else:
        _print(recipe, inspection)
    try:
        write_result(out, "results.json", found + "\n")
        message = f"report: {write_file(out / PAGE, page(*from_document(parse_object(found.encode()))))}"
    except OSError as error:
        raise ResultsNotKept(out, error) from error
    note(notes, message)


def page(recipe: Recipe, inspection: Inspection) -> str:
    """Return the page as text."""
    from paceline.reports.ratio_page import ratio_page

    return ratio_page(
        bars(inspection),
        table(inspection),
        title=f"paceline inspect rates: {recipe.data.name}, {recipe.model.name}",
        headline=headline(inspection),
        sentences=sentences(recipe, inspection),
        conditions=conditions(recipe, inspection),
        rate=comparable_rate(recipe, inspection),
    )


def _print(recipe: Recipe, inspection: Inspection) -> None:
    console = Console(highlight=False, markup=False)
    for line in lines(inspection):
        style = "bold red" if line.startswith(">") else ""
        console.print(printable(line, console.encoding), style=style, soft_wrap=True)
    console.print()
    width = min(console.width, WIDTH)
    console.print(f"{headline(inspection)}.", style="bold", width=width)
    for sentence in sentences(recipe, inspection):
        console.print(sentence, width=width)


# -- in words ----------------------------------------------------------------------------------------------------------


def lines(inspection: Inspection) -> list[str]:
    """Return the table of the terminal, the limiting layer marked with a `>`."""
    from paceline.optim.ratios import ratio_lines

    ratios, last, limiting = inspection.first.ratios, inspection.last, inspection.limiting()
    if last is inspection.first:
        return ratio_lines(ratios.rows, limiting=limiting, rate_heading=ratios.rate_heading)
    heading, later = f"step {last.step}", {row.name: row.ratio for row in last.ratios}
    return ratio_lines(
        ratios.rows, limiting=limiting, later=later, later_heading=heading if len(heading) <= 9 else "at last"
    )


def headline(inspection: Inspection) -> str:
    """Name the layer that limits the rate."""
    limiting = inspection.limiting()
    if limiting is None:
        return "No layer limits the learning rate: no ratio is positive and finite"
    return f"{limiting.name} limits the learning rate: |w| / |gradient| is {number_text(limiting.ratio)}"


def sentences(recipe: Recipe, inspection: Inspection) -> list[str]:
    """Return what follows for the rate, a sentence for each point."""
    found, limiting = list[str](), inspection.limiting()
    if limiting is not None and limiting.ratio is not None:
        found.append(_largest_rates(inspection, limiting, limiting.ratio))
        found.append(_first_step(recipe, inspection, limiting, limiting.ratio))
    at_zero = sum(row.ratio == 0 for row in inspection.first.ratios)
    if at_zero:
        found.append(
            f"{at_zero} of {len(inspection.first.ratios)} parameters start at 0. They have no size that a step could "
            "exceed, and are not counted."
        )
    if inspection.last is not inspection.first and limiting is not None:
        found.append(_after_training(inspection, limiting))
    if inspection.diverged:
        found.append(f"Training diverged: after {inspection.last.step:,} steps the loss is no longer finite.")
    return [sentence for sentence in found if sentence]


def _largest_rates(inspection: Inspection, limiting: LayerRatio, ratio: float) -> str:
    words = f"A plain gradient step at a rate above {number_text(ratio)} moves it by more than its own length."
    # A bias before a normalisation has a gradient of rounding errors alone: only weights are worth comparing with.
    weights = inspection.first.ratios.only("weight")
    low, high = weights.limiting, max((row.ratio or 0.0 for row in weights if row.counts), default=0.0)
    if low is None or low.ratio is None:
        return words
    if limiting.kind != "weight":
        words += f" Among the weights {low.name} has the smallest ratio, {number_text(low.ratio)}."
    if high == low.ratio:
        return words
    largest = next(row for row in weights if row.ratio == high)
    return f"{words} {largest.name} bears {number_text(high)}, {number_text(high / low.ratio)} times as much."


def _first_step(recipe: Recipe, inspection: Inspection, limiting: LayerRatio, ratio: float) -> str:
    rate, name = inspection.first.rate, recipe.optimizer.name
    if name in STEPS_BY_THE_GRADIENT:
        moved = rate / ratio
        share = f"{100 * moved:.2g} %" if moved < 1 else f"{number_text(moved)} times"
        return (
            f"The recipe's rate at the first step, {rate:g}, moves {limiting.name} by {share} of its length "
            "(momentum and weight decay not counted)."
        )
    if name == "lars":
        return f"{_lars_rates(inspection, limiting)}{_lars_step_length(recipe, inspection)}"
    return f"The recipe's optimiser, {name}, does not step by the gradient itself: its rate is no rate to compare."


def _lars_rates(inspection: Inspection, limiting: LayerRatio) -> str:
    ratios, local = inspection.first.ratios, number_text(limiting.local_rate)
    if not limiting.scaled:
        words = f"leaves {limiting.name} out: it takes the rate as it is, {inspection.first.rate:g} at the first step"
    elif ratios.clip:
        words = f"holds the rate of {limiting.name} to at most {local}"
    else:
        words = f"multiplies the rate of {limiting.name} by {local}"
    others = [row for row in ratios if row.name != limiting.name and row.local_rate is not None]
    own = sum(row.scaled for row in others)
    return (
        f"The recipe's LARS {words}. Other parameters: {own} with a {'limit' if ratios.clip else 'factor'} of their "
        f"own, {len(others) - own} that take the rate as it is."
    )


def _lars_step_length(recipe: Recipe, inspection: Inspection) -> str:
    """Say how far a layer moves: LARS with a rate of SGD's kind hardly moves, and looks as if it did not learn."""
    if recipe.optimizer.clip:
        return ""
    share = 100 * recipe.optimizer.lr * inspection.first.ratios.trust_coefficient
    return (
        f" A layer that is scaled moves by about lr x trust = {share:.2g} % of its length per step "
        f"at the rate {recipe.optimizer.lr:g} (momentum not counted)."
    )


def _after_training(inspection: Inspection, limiting: LayerRatio) -> str:
    last = inspection.last
    then, now = limiting.ratio, last.ratios[limiting.name].ratio
    smallest = inspection.limiting(last)
    if now is None or then is None or smallest is None or not 0 < now < math.inf:
        return ""
    change = (
        f"{number_text(now / then)} times what it was" if now >= then else f"1/{number_text(then / now)} of what it was"
    )
    after = f"After {last.step:,} step{'s' if last.step > 1 else ''}"
    words = f"{after} the ratio of {limiting.name} is {number_text(now)}, {change}"
    if smallest.name == limiting.name:
        return f"{words}, and still the smallest."
    return f"{words}; the smallest is then that of {smallest.name}, {number_text(smallest.ratio)}."


def conditions(recipe: Recipe, inspection: Inspection) -> list[str]:
    """Return what was computed: model, data, batch, settings."""
    ratios = inspection.first.ratios
    words = [
        f"{recipe.model.name} on {recipe.data.name}",
        f"batch of {inspection.batch:,} from all training data",
        f"{len(ratios)} parameters, {sum(row.count for row in ratios):,} numbers",
        f"LARS: trust {ratios.trust_coefficient:g}, weight decay {ratios.weight_decay:g}"
        f"{', clip' if ratios.clip else ''}",
        f"seed {recipe.seed}",
    ]
    if inspection.last is not inspection.first:
        words.insert(2, f"{inspection.last.step:,} steps of {recipe.optimizer.name}, rate {inspection.first.rate:g}")
    return words


def comparable_rate(recipe: Recipe, inspection: Inspection) -> float | None:
    """Return the learning rate, where it is one that a ratio can be compared with."""
    rate = inspection.first.rate
    return rate if recipe.optimizer.name in STEPS_BY_THE_GRADIENT and rate > 0 else None


def bars(inspection: Inspection) -> list[RatioBar]:
    """Return the layers as the page draws them."""
    from paceline.reports.ratio_page import RatioBar

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
            facts=f"{shape(row.shape)}, |w| {number_text(row.weight_norm)}, "
            f"|gradient| {number_text(row.gradient_norm)}",
        )
        for row in inspection.first.ratios
    ]


def table(inspection: Inspection) -> PlainTable:
    """Return all rows as the table of the page."""
    from paceline.reports.table import PlainTable

    first, last = inspection.first, inspection.last
    headings = ["layer", "kind", "shape", "|w|", "|gradient|", "|w| / |gradient|", first.ratios.rate_heading]
    later = {} if last is first else {row.name: row for row in last.ratios}
    if later:
        headings.append(f"ratio after {last.step:,} steps")
    limiting = inspection.limiting()
    at = next((index for index, row in enumerate(first.ratios) if limiting and row.name == limiting.name), -1)
    rows = [
        [row.name, row.kind, shape(row.shape), *map(number_text, (row.weight_norm, row.gradient_norm, row.ratio)),
         row.local_rate_text, *([number_text(later[row.name].ratio)] if later else []),
         "limits the rate" if index == at else row.remark]
        for index, row in enumerate(first.ratios)
    ]  # fmt: skip
    return PlainTable(
        title="Layers before the first step",
        headings=[*headings, ""],
        rows=rows,
        caption=f"|...|: Euclidean length. {_rates_explained(first.ratios)} Bold: the layer that limits the rate.",
        marked=frozenset((at, column) for column in (5, len(headings))),
    )


def _rates_explained(ratios: LayerRatios) -> str:
    from paceline.optim.ratios import AS_IT_IS

    what = "the most that LARS lets a layer's rate be" if ratios.clip else "what LARS multiplies the learning rate by"
    left_out = "biases, normalisation and " if ratios.exclude_bias_and_norm else ""
    return (
        f"{ratios.rate_heading}: {what}, trust |w| / (|gradient| + weight decay |w|), with trust "
        f"{ratios.trust_coefficient:g} and "
        f"weight decay {ratios.weight_decay:g}; {AS_IT_IS}: {left_out}what has a length of 0 take the rate so."
    )


def shape(sizes: Sequence[int]) -> str:
    """Return a shape in short.

    >>> shape((64, 3, 3, 3)), shape(())
    ('64x3x3x3', '1')
    """
    return "x".join(map(str, sizes)) or "1"


def document(recipe: Recipe, inspection: Inspection) -> dict[str, Any]:
    """Return all numbers as one JSON document; what is not finite is null."""
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


@dataclass(frozen=True, kw_only=True)
class _StoredLayer:
    name: str
    kind: Literal["weight", "bias", "norm"]
    shape: tuple[int, ...]
    weight_norm: float | None
    gradient_norm: float | None
    ratio: float | None
    local_rate: float | None
    scaled: bool
    remark: str

    def ratios(self) -> LayerRatio:
        """Return the row of before; what is not finite there is null in JSON, and follows from the rest."""
        from paceline.optim.ratios import LayerRatio

        beside = {} if self.remark != "not finite" else {"gradient_norm": math.nan}
        if self.remark == "gradient is 0":
            beside["ratio"] = math.inf
        if self.local_rate is None and self.remark not in ("frozen", "no gradient", "not finite"):
            beside["local_rate"] = math.inf
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["weight_norm"] = math.nan if self.weight_norm is None else self.weight_norm
        return LayerRatio(**given | {name: value for name, value in beside.items() if given[name] is None})


@dataclass(frozen=True, kw_only=True)
class _StoredMoment:
    step: int
    rate: float
    loss: float | None
    ratios: dict[str, float | None]


def from_document(values: Mapping[str, Any]) -> tuple[Recipe, Inspection]:
    """Return the recipe and the inspection that `document` has written; DecodingError if that is not what it is.

    Of moments after the first only the ratios are stored, and only they are shown.
    """
    from paceline.analysis.layer_ratios import Inspection, Moment
    from paceline.optim.ratios import LayerRatios

    stored = decode(STORED, dict(values))
    recipe, rows = Recipe.from_document(stored["recipe"]), [layer.ratios() for layer in stored["layers"]]
    names = [row.name for row in rows]
    if not rows or not stored["moments"] or any([*moment.ratios] != names for moment in stored["moments"]):
        raise DecodingError("moments must be one or more, each with the ratio of every layer")
    moments = [
        Moment(
            step=moment.step,
            rate=moment.rate,
            loss=math.nan if moment.loss is None else moment.loss,
            ratios=LayerRatios(
                rows=tuple(row if place == 0 else replace(row, ratio=moment.ratios[row.name]) for row in rows),
                trust_coefficient=recipe.optimizer.trust_coefficient,
                weight_decay=recipe.optimizer.weight_decay,
                exclude_bias_and_norm=recipe.optimizer.exclude_bias_and_norm,
                clip=recipe.optimizer.clip,
            ),
        )
        for place, moment in enumerate(stored["moments"])
    ]
    return recipe, Inspection(batch=stored["batch"], moments=tuple(moments), diverged=stored["diverged"])


STORED = {
    "recipe": dict[str, Any],
    "batch": int,
    "diverged": bool,
    "limiting": str | None,
    "spread": float | None,
    "layers": tuple[_StoredLayer, ...],
    "moments": tuple[_StoredMoment, ...],
}
"""The fields of results.json."""


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
