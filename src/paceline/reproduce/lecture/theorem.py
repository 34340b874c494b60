"""The convergence theorem bounds SGD on convex functions, here with plain and with quantised gradients.

    E f(mean of w_1 .. w_t) - f*  <=  sqrt(2) R sigma / sqrt(t) + beta R^2 / t        at the rate that it prescribes

The bound is loose, and up to some thousand steps it is above f(w0) - f*: who stays at the start is below it as well.
There it is not judged, but for a gap that is above it all the same. What says more:

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, figure, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lecture.quantising import UNQUANTISED, moment_bound

if TYPE_CHECKING:
    import torch

RIDGE = 0.01
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


def theorem_levels(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the levels of the quantised gradients, the plain ones first."""
    return (UNQUANTISED, 1) if plan.toy else (UNQUANTISED, 16, 4, 1)


def horizons_of(plan: ExperimentPlan) -> dict[int, int]:
    """Return the numbers of steps after which the bound is looked at, and the runs of each."""
    runs: dict[int, int] = plan.choose(
        toy={10: 2, 30: 2},
        laboratory={10: 10, 100: 10, 1000: 10, 10_000: 1},  # the longest takes half of the time
        full={10: 100, 100: 100, 1000: 100, 10_000: 10},
    )
    return runs


def name_of(levels: int) -> str:
    """Return the name of gradients with so many levels, as tables show it."""
    return f"s = {levels}" if levels else "plain"


def jobs_of_theorem(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(
            name=f"s = {levels}, seed {seed}",
            run=run_theorem,
            settings={
                "levels": levels,
                "seed": seed,
                "batch": 1,
                "horizons": list(horizons_of(plan)),
                "runs": list(horizons_of(plan).values()),
                "full_steps": plan.choose(toy=500, laboratory=4000, full=20_000),
            },
            seconds=plan.choose(toy=0.5, laboratory=14.0, full=140.0),
        )
        for seed in plan.seeds
        for levels in theorem_levels(plan)
    ]


def theorem_bound(found: Outcome, horizon: int) -> float:
    """Return the lecture's bound on E f(mean iterate) - f*."""
    beta, radius, sigma = found["beta"], found["radius"], max(found["sigma"], found["sigma_visited"])
    return float(math.sqrt(2) * radius * sigma / math.sqrt(horizon) + beta * radius**2 / horizon)


def conclude_theorem(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, numbers = [], list[Claim](), dict[str, Any]()
    measured: dict[str, list[tuple[float, float | None]]] = {}
    bounds: dict[str, list[tuple[float, float | None]]] = {}
    gaps: dict[str, list[float]] = {}
    shares, idle_shares = list[float](), list[float]()  # of the bound, in all rows, and where not moving would meet it
    horizons = list(horizons_of(plan))
    for levels in theorem_levels(plan):
        name = name_of(levels)
        found = [outcomes[f"s = {levels}, seed {seed}"] for seed in plan.seeds]
        measured[name], bounds[name], gaps[name] = [], [], []
        for horizon in horizons:
            gap = statistics.mean(each["gaps"][str(horizon)] for each in found)
            bound = min(theorem_bound(each, horizon) for each in found)
            rows.append((f"{name}, t = {horizon:,}", f"<= {figure(bound)}", figure(gap), percent(gap / bound)))
            shares.append(gap / bound)
            if bound < min(each["start"] for each in found):
                claims.append(within(f"below the bound, {name}, t = {horizon:,}", gap, most=bound))
            else:
                idle_shares.append(gap / bound)
            gaps[name].append(gap)
            measured[name].append((horizon, gap))
            bounds[name].append((horizon, bound))
        numbers[name] = {**found[0], "bounds": [bound for _, bound in bounds[name]]}
    if idle_shares:
        worst = max(idle_shares)
        claims.append(
            within(
                f"below the bound where not moving is below it too, {len(idle_shares)} of {len(rows)} rows: "
                "the largest share of the bound",
                worst,
                most=1.0,
                write=percent,
                judged=worst > 1,  # such a bound can be missed, but it is no merit to meet it
            )
        )
    claims += _shape_claims(plan, outcomes, gaps)
    claims.append(
        within("how loose: the bound over the gap, the least of all rows", 1 / max(shares), least=1.0, judged=False)
    )
    plain = outcomes[f"s = {UNQUANTISED}, seed {plan.seeds[0]}"]
    sigmas = ", ".join(
        f"{name_of(levels)} {figure(outcomes[f's = {levels}, seed {plan.seeds[0]}']['sigma_visited'])}"
        for levels in theorem_levels(plan)
    )
    return Findings(
        tables=(
            PlainTable(
                title="The gap, f(mean iterate) - f*, of logistic regression on digits",
                headings=("gradients, steps", "paper:\nbound", "ours", "of the\nbound"),
                rows=rows,
                caption=f"beta {figure(plain['beta'])}, R {figure(plain['radius'])}, f(w0) - f* "
                f"{figure(plain['start'])}; sigma: {sigmas}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "theorem",
                "f(mean iterate) - f*, and its bound",
                "Dashed: the bound.",
                [
                    *(Series(name=name, points=points) for name, points in measured.items()),
                    *(Series(name=f"{name}, bound", points=points, dashed=True) for name, points in bounds.items()),
                ],
                x="steps",
                y="f(mean iterate) - f*",
                log_x=True,
                log_y=True,
            ),
        ),
        series=(*measured, *(f"{name}, bound" for name in bounds)),
        remarks=(
            f"f is a cross entropy with a ridge of {RIDGE}, so that there is a minimiser. Gradients are of single "
            "samples, in float64, and quantised ones in float32. beta is an upper bound, R is the distance from the "
            "start to the minimiser, and sigma is the largest of the start, the minimiser, eight random points of the "
            "ball, and every run's last iterate; that of quantised gradients follows from the bound on their second "
            "moment.",
            "The lecture writes the rate with t: here it is constant within a run of t steps, as the proof has it.",
            "A bound above f(w0) - f* is not judged: not moving would meet it. The theorem itself says nothing of how "
            "the gap falls, nor that it is in proportion to sigma; the bound is, and the lecture concludes as much for "
            "iterations. The limits, a factor of two and a tenth, are ours, and were set after a pilot. The prescribed "
            "rate falls with sigma, so quantised runs are slower by their rate already.",
            "In the laboratory the gap at t = 10,000 is that of one run, every other one the mean of ten.",
        ),
        numbers=numbers,
    )


def _shape_claims(
    plan: ExperimentPlan, outcomes: Mapping[str, Outcome], gaps: Mapping[str, Sequence[float]]
) -> list[Claim]:
    """Return what the bound suggests of the gaps at the last t: who is ahead, in which proportion, how they fall."""
    before, last = list(horizons_of(plan))[-2:]
    sigmas = {
        name_of(levels): statistics.mean(outcomes[f"s = {levels}, seed {seed}"]["sigma_visited"] for seed in plan.seeds)
        for levels in theorem_levels(plan)
    }
    plain, *quantised = gaps
    coarse = quantised[-1]
    claims = [
        ahead(
            f"the larger the variance, the slower: plain before {coarse} at t = {last:,}",
            {plain: gaps[plain][-1], coarse: gaps[coarse][-1]},
            best="low",
        )
    ]
    for name in quantised:
        expected = sigmas[name] / sigmas[plain]
        claims.append(
            within(
                f"in proportion to sigma, to a factor of two: {name} over plain, t = {last:,}",
                gaps[name][-1] / gaps[plain][-1],
                least=expected / PROPORTIONAL,
                most=expected * PROPORTIONAL,
                kind="shape",
            )
        )
    for name, found in gaps.items():
        claims.append(
            within(
                f"falls as 1/sqrt(t) or faster, to a tenth: {name}, t = {before:,} over t = {last:,}",
                found[-2] / found[-1],
                least=(1 - SAME) * math.sqrt(last / before),
                kind="shape",
            )
        )
    return claims
