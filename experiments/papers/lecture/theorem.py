"""The convergence theorem bounds SGD on convex functions, here with plain and with quantised gradients.

    E f(mean of w_1 .. w_t) - f*  <=  sqrt(2) R sigma / sqrt(t) + beta R^2 / t        at the rate that it prescribes

The bound is loose, and up to some thousand steps it is above f(w0) - f*: an iterate that stays at the start is below it
as well. There it is not judged, but for a gap that is above it all the same. What says more:

    the bound at a t where it is below f(w0) - f*, which takes 10,000 steps; with one level, which has the largest
    sigma, even these are too few
    the gap in proportion to sigma, as the bound's first term is; from this the lecture concludes that iterations are
    in proportion to the variance
    the gap falling as 1/sqrt(t) or faster: one that fell more slowly would be above the bound in the end

Limits are those of other experiments here: a factor of two where the lecture says "proportional", and a tenth. They
were set when the gaps of one run each on seed 100 were known, and those on seed 200 up to t = 1,000.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.core.claims import ahead, figure, percent, within
from experiments.core.story import Job, Numbers, Runs, Size, Telling, experiment
from experiments.papers.lecture.quantising import UNQUANTISED, moment_bound
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

if TYPE_CHECKING:
    import torch

RIDGE = 0.01
CONSTANTS = ("beta", "radius", "sigma", "sigma_visited", "start")
SAME, PROPORTIONAL = 0.10, 2.0  # a share, and a factor


def run_theorem(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run projected SGD on logistic regression, for several horizons; return f(mean iterate) - f*, and the constants.

        f(w) = mean cross entropy of softmax(W x + b) + ridge/2 |w|^2        convex, in float64, with a minimiser w*
        beta = half the largest eigenvalue of mean x x^T, + ridge            the softmax's Hessian is at most half of 1
        R = |w* - w0|, and W the ball of that radius                         w0 = 0; iterates are projected onto it
        sigma^2 = the largest variance of a batch's gradient                 at w0, w*, random points of W, and iterates
        quantised: sigma^2 = the largest of (1 + min(n/s^2, sqrt(n)/s)) E|g|^2 - |grad f|^2

    The rate is constant in a run, 1 / (beta + sigma sqrt(t) / (R sqrt 2)), with t its horizon. A gap is the mean over
    as many runs as `runs` has for its horizon.
    """
    import torch

    from paceline.codecs import QSGD
    from paceline.data import load_dataset

    train = load_dataset("digits").train
    inputs = train.inputs.double().reshape(len(train), -1)
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
    labels = torch.nn.functional.one_hot(train.targets, 10).double()
    samples, batch, levels = len(inputs), settings["batch"], settings["levels"]
    draws = torch.Generator().manual_seed(settings["seed"])

    def objective(weights: torch.Tensor) -> float:
        loss = -(torch.log_softmax(inputs @ weights, dim=1) * labels).sum(dim=1).mean()
        return float(loss + RIDGE / 2 * weights.square().sum())

    def gradient(weights: torch.Tensor, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        wrong = torch.softmax(inputs[rows] @ weights, dim=1) - labels[rows]
        return inputs[rows].T @ wrong / len(wrong) + RIDGE * weights

    start = torch.zeros(inputs.shape[1], 10, dtype=torch.float64)
    beta = torch.linalg.eigvalsh(inputs.T @ inputs / samples)[-1].item() / 2 + RIDGE
    best = _minimiser(gradient, start, beta, settings["full_steps"])
    radius = best.norm().item()
    factor = moment_bound(start.numel(), levels) if levels else 1.0

    def noise(weights: torch.Tensor) -> float:
        """Return E|g - grad f|^2, or its bound if g is quantised: of a batch that is drawn with replacement."""
        wrong = torch.softmax(inputs @ weights, dim=1) - labels
        squares = inputs.square().sum(dim=1) * wrong.square().sum(dim=1)  # of each sample's own gradient
        mean = inputs.T @ wrong / samples
        variance = (squares.mean() - mean.square().sum()).item() / batch
        square = gradient(weights).square().sum().item()
        return float(factor * (variance + square) - square)

    somewhere = [torch.randn(start.shape, generator=draws, dtype=torch.float64) for _ in range(8)]
    points = [start, best, *(radius * point / point.norm() for point in somewhere)]
    sigma = math.sqrt(max(noise(point) for point in points))
    codec = QSGD(levels=levels, bucket=0, norm="l2") if levels else None
    least, gaps = objective(best), {}
    for horizon, runs in zip(settings["horizons"], settings["runs"], strict=True):
        rate, found = 1 / (beta + sigma * math.sqrt(horizon / 2) / radius), []
        for _ in range(runs):
            weights, total = start.clone(), torch.zeros_like(start)
            for _ in range(horizon):
                rows = torch.randint(samples, (batch,), generator=draws)
                step = gradient(weights, rows)
                if codec is not None:
                    step = codec.decode(codec.encode(step, draws)).double().view_as(step)
                weights = weights - rate * step
                weights = weights * min(1.0, radius / max(weights.norm().item(), 1e-300))
                total += weights
            found.append(objective(total / horizon) - least)
            points.append(weights)
        gaps[str(horizon)] = statistics.mean(found)
    visited = math.sqrt(max(noise(point) for point in points))
    return {
        "beta": beta, "radius": radius, "sigma": sigma, "sigma_visited": visited, "least": least,
        "start": objective(start) - least, "gaps": gaps,
    }  # fmt: skip


def _minimiser(gradient: Any, start: torch.Tensor, beta: float, steps: int) -> torch.Tensor:
    """Return where Nesterov's method ends on a strongly convex function."""
    root = math.sqrt(RIDGE / beta)
    momentum, here, before = (1 - root) / (1 + root), start, start
    for _ in range(steps):
        ahead_of = here + momentum * (here - before)
        before, here = here, ahead_of - gradient(ahead_of) / beta
    return here


@experiment(
    "lecture-theorem",
    source="lecture, SGD convergence theorem",
    question="convex SGD against its bound, plain and quantised",
    minutes=0.8,
    full_hours=0.2,
)
def theorem(size: Size) -> Telling:
    several = size.pick((UNQUANTISED, 1), (UNQUANTISED, 16, 4, 1))  # levels of the gradients, plain ones first
    names = {levels: f"s = {levels}" if levels else "plain" for levels in several}
    runs_of: dict[int, int] = size.pick(  # steps after which the bound is looked at -> runs
        {10: 2, 30: 2},
        {10: 10, 100: 10, 1000: 10, 10_000: 1},  # the longest takes half of the time
        {10: 100, 100: 100, 1000: 100, 10_000: 10},
    )
    horizons = list(runs_of)
    fixed = {
        "batch": 1,
        "horizons": horizons,
        "runs": list(runs_of.values()),
        "full_steps": size.pick(500, 4000, 20_000),
    }

    def job(levels: int) -> Job:
        return Job(
            run_theorem, lambda seed: {"levels": levels, "seed": seed, **fixed}, seconds=size.pick(0.5, 14.0, 140.0)
        )

    runs: Runs = yield {levels: job(levels) for levels in several}
    gap = {(levels, t): mean for t in horizons for levels, mean in runs.mean("gaps", str(t)).items()}
    constants = {name: runs.each(name) for name in CONSTANTS}

    def bound_of(levels: int, t: int) -> float:
        """Return the lecture's bound on E f(mean iterate) - f*, the least of the seeds'."""
        beta, radius, sigma, visited = (np.array(constants[name][levels]) for name in CONSTANTS[:4])
        first = math.sqrt(2) * radius * np.maximum(sigma, visited) / math.sqrt(t)
        return float(np.min(first + beta * radius**2 / t))

    bound = {cell: bound_of(*cell) for cell in product(several, horizons)}
    share = {cell: gap[cell] / bound[cell] for cell in bound}
    rows = []
    for levels, t in bound:
        shown = (f"<= {figure(bound[levels, t])}", figure(gap[levels, t]), percent(share[levels, t]))
        rows.append((f"{names[levels]}, t = {t:,}", *shown))
    judged = {cell for cell in bound if not bound[cell] >= np.min(constants["start"][cell[0]])}
    for levels, t in bound:
        if (levels, t) in judged:
            text = f"below the bound, {names[levels]}, t = {t:,}"
            yield within(text, gap[levels, t], most=bound[levels, t])
    idle_shares = [share[cell] for cell in bound if cell not in judged]
    if idle_shares:
        worst = float(np.max(idle_shares))
        yield within(
            f"below the bound where not moving is below it too, {len(idle_shares)} of {len(rows)} rows: "
            "the largest share of the bound",
            worst,
            most=1.0,
            write=percent,
            judged=not worst <= 1,  # such a bound can be missed, but it is no merit to meet it
        )

    # What the bound suggests of the gaps: which is ahead at the last t, in which proportion, and how they fall.
    before, last = horizons[-2:]
    coarse = several[-1]
    yield ahead(
        f"the larger the variance, the slower: plain before {names[coarse]} at t = {last:,}",
        {names[levels]: gap[levels, last] for levels in (UNQUANTISED, coarse)},
        best="low",
    )
    sigma = runs.mean("sigma_visited")
    for levels in several[1:]:
        expected = sigma[levels] / sigma[UNQUANTISED]
        yield within(
            f"in proportion to sigma, to a factor of two: {names[levels]} over plain, t = {last:,}",
            gap[levels, last] / gap[UNQUANTISED, last],
            least=expected / PROPORTIONAL,
            most=expected * PROPORTIONAL,
            kind="shape",
        )
    for levels in several:
        yield within(
            f"falls as 1/sqrt(t) or faster, to a tenth: {names[levels]}, t = {before:,} over t = {last:,}",
            gap[levels, before] / gap[levels, last],
            least=(1 - SAME) * math.sqrt(last / before),
            kind="shape",
        )
    text = "how loose: the bound over the gap, the least of all rows"
    yield within(text, 1 / float(np.max(list(share.values()))), least=1.0, judged=False)

    first = {name: each[UNQUANTISED][0] for name, each in constants.items()}
    sigmas = ", ".join(f"{names[levels]} {figure(constants['sigma_visited'][levels][0])}" for levels in several)
    yield PlainTable(
        title="The gap, f(mean iterate) - f*, of logistic regression on digits",
        headings=("gradients, steps", "paper:\nbound", "ours", "of the\nbound"),
        rows=rows,
        caption=f"beta {figure(first['beta'])}, R {figure(first['radius'])}, f(w0) - f* {figure(first['start'])}; "
        f"sigma: {sigmas}.",
    )
    lines = [
        *(Series(name=names[each], points=[(t, gap[each, t]) for t in horizons]) for each in several),
        *(
            Series(name=f"{names[each]}, bound", points=[(t, bound[each, t]) for t in horizons], dashed=True)
            for each in several
        ),
    ]
    yield line_chart(
        "theorem",
        "f(mean iterate) - f*, and its bound",
        "Dashed: the bound.",
        lines,
        x="steps",
        y="f(mean iterate) - f*",
        log_x=True,
        log_y=True,
    )
    yield (
        f"f is a cross entropy with a ridge of {RIDGE}, so that there is a minimiser. Gradients are of single "
        "samples, in float64, and quantised ones in float32. beta is an upper bound, R is the distance from the "
        "start to the minimiser, and sigma is the largest of the start, the minimiser, eight random points of the "
        "ball, and every run's last iterate; that of quantised gradients follows from the bound on their second "
        "moment."
    )
    yield "The lecture writes the rate with t: here it is constant within a run of t steps, as the proof has it."
    yield (
        "A bound above f(w0) - f* is not judged: not moving would meet it. The theorem itself says nothing of how "
        "the gap falls, nor that it is in proportion to sigma; the bound is, and the lecture concludes as much for "
        "iterations. The limits, a factor of two and a tenth, are ours, and were set after a pilot. The prescribed "
        "rate falls with sigma, so quantised runs are slower by their rate already."
    )
    yield "In the laboratory the gap at t = 10,000 is that of one run, every other one the mean of ten."
    for levels in several:
        yield Numbers({names[levels]: {**runs[levels][0], "bounds": [bound[levels, t] for t in horizons]}})
