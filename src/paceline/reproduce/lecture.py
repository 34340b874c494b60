"""The lecture on scaling distributed training: its examples, bounds and formulas.

    lecture-one-bit      the example vector of 1-bit SGD
    lecture-sparsifier   quantised SGD with one level: P1 (unbiased), P2 (second moment), P3 (sparse), its bits
    lecture-qsgd         s levels: second moment and bits
    lecture-tradeoff     iterations against bits, each codec at its best rate
    lecture-theorem      the bound on convex SGD, with plain and with quantised gradients
    lecture-idle         loss factors of a pipeline
    lecture-placement    layers onto devices
    lecture-trends       the table of ImageNet runs

Gradients are those of the small network on digits, n = 26,122, where nothing else is said. Bits are those of payloads
without their header, which is beside the theory; levels are coded as Elias gaps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.quantities import percent_text
from paceline.recipes import Recipe
from paceline.reports.figures import Series, bar_chart, line_chart, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, figure, percent, within
from paceline.reproduce.experiment import Claim, Experiment, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import LECTURE_ONE_BIT, LECTURE_TRENDS

if TYPE_CHECKING:
    import torch

FLOAT_BITS = 32
EXAMPLE: Mapping[str, Any] = LECTURE_ONE_BIT
BESIDE = "The payload's header of 16 bytes is not counted, nor the bits that fill up its last byte."


# -- 1-bit SGD ---------------------------------------------------------------------------------------------------------


def run_one_bit(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a vector with one-bit; return what is decoded, and the bits sent.

    >>> run_one_bit({"vector": [1.0, 3.0, -1.0]})["decoded"]
    [2.0, 2.0, -1.0]
    """
    import torch

    from paceline.codecs import OneBit
    from paceline.codecs.payload import HEADER_BYTES

    codec = OneBit()
    payload = codec.encode(torch.tensor(settings["vector"]))
    return {"decoded": codec.decode(payload).tolist(), "bits": 8 * (payload.numel() - HEADER_BYTES)}


def jobs_of_one_bit(plan: ExperimentPlan) -> list[Job]:
    return [Job(name="example", run=run_one_bit, settings={"vector": list(EXAMPLE["vector"])}, seconds=0.1)]


def conclude_one_bit(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    vector: tuple[float, ...] = EXAMPLE["vector"]
    decoded, bits = outcomes["example"]["decoded"], outcomes["example"]["bits"]
    paper = [EXAMPLE["upper" if value >= 0 else "lower"] for value in vector]
    formula = len(vector) + 2 * FLOAT_BITS
    off = max(abs(one - other) for one, other in zip(decoded, paper, strict=True))
    return Findings(
        tables=(
            PlainTable(
                title="The lecture's example of 1-bit SGD",
                headings=("element", "paper", "ours"),
                rows=[
                    *((f"{g:g}", f"{q:g}", f"{d:g}") for g, q, d in zip(vector, paper, decoded, strict=True)),
                    ("bits, n + 2F", str(formula), str(bits)),
                    ("bits without a code, Fn", str(FLOAT_BITS * len(vector)), str(FLOAT_BITS * len(vector))),
                ],
            ),
        ),
        claims=(
            within("the means 8.8875 and -0.711: the largest difference", off, most=1e-5),
            within("n + 2F bits, and up to 7 that fill a byte", bits, least=formula, most=formula + 7),
            ahead(
                "fewer bits than without a code",
                {"one-bit": bits, "none": FLOAT_BITS * len(vector)},
                best="low",
            ),
        ),
        charts=(
            bar_chart(
                "elements",
                "A vector, and what is decoded",
                "",
                [f"element {place}" for place in range(1, len(vector) + 1)],
                {"element": list(vector), "paper": paper, "ours": decoded},
                y="value",
            ),
        ),
        series=("element", "paper", "ours"),
        remarks=("The lecture prints five of the six decoded elements.", "The payload's header is not counted."),
        numbers={"decoded": decoded, "bits": bits},
    )


# -- quantised gradients: moments and bits -----------------------------------------------------------------------------


def example_vector(kind: str) -> torch.Tensor:
    """Return a vector to quantise: a gradient, or one of normal elements, or one of equal magnitudes.

    Of all vectors those of equal magnitudes have the most elements other than zero, and the largest second moment.
    """
    import torch

    if kind != "gradient":
        drawn = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        return drawn.sign() if kind == "equal" else drawn
    from paceline.data import load_dataset
    from paceline.models import build_model

    digits = load_dataset("digits")
    model = build_model("mlp", input_shape=digits.input_shape, classes=10)
    inputs, targets = digits.train.first(64)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    return torch.cat([gradient.reshape(-1) for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def run_quantised(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Quantise a vector many times; return means, and the standard error of each.

    `moment` is the second moment over the vector's own square; `distance` that of the mean of all draws from the
    vector, over what the draws' number explains.

    >>> found = run_quantised({"vector": "equal", "levels": 1, "draws": 20})
    >>> 0.8 < found["nonzero"][0] / 100 < 1.2
    True
    """
    import torch

    from paceline.codecs import QSGD
    from paceline.codecs.payload import HEADER_BYTES

    vector = example_vector(settings["vector"])
    codec = QSGD(levels=settings["levels"], bucket=0, norm="l2", lossless="elias")
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    square = vector.double().square().sum().item()
    found: dict[str, list[float]] = {"moment": [], "nonzero": [], "bits": []}
    total = torch.zeros_like(vector, dtype=torch.float64)
    for _ in range(settings["draws"]):
        payload = codec.encode(vector, generator)
        decoded = codec.decode(payload).double()
        total += decoded
        found["moment"].append(decoded.square().sum().item() / square)
        found["nonzero"].append(int(decoded.count_nonzero()))
        found["bits"].append(8 * (payload.numel() - HEADER_BYTES) - 7)
    draws = settings["draws"]
    figures = {
        name: (statistics.mean(values), statistics.stdev(values) / math.sqrt(draws)) for name, values in found.items()
    }
    off = (total / draws - vector).square().sum().item() / square
    explained = max(figures["moment"][0] - 1, 1e-12) / draws
    plain = {name: list(pair) for name, pair in figures.items()}
    return {"elements": vector.numel(), "distance": math.sqrt(off / explained), **plain}


def moment_bound(elements: int, levels: int) -> float:
    """Return the lecture's factor on the second moment.

    >>> moment_bound(10_000, 1)
    101.0
    """
    return 1 + min(elements / levels**2, math.sqrt(elements) / levels)


def bits_bound(elements: int, levels: int, nonzero: float) -> float:
    """Return the bits for s levels, if at most so many elements are expected to be other than zero."""
    return nonzero * (1.5 * math.log2(2 * (levels**2 + elements) / nonzero) + 3) + FLOAT_BITS


VECTORS = {"gradient": "a gradient", "normal": "normal elements", "equal": "equal magnitudes"}


def jobs_of_sparsifier(plan: ExperimentPlan) -> list[Job]:
    draws = plan.choose(toy=30, laboratory=1000, full=10_000)
    return [
        Job(name=kind, run=run_quantised, settings={"vector": kind, "levels": 1, "draws": draws}, seconds=draws / 300)
        for kind in VECTORS
    ]


def _below(text: str, pair: tuple[float, float], bound: float, *, kind: Any = "value") -> Claim:
    """Return the claim that an expectation is below a bound, with three standard errors of its mean to spare."""
    return within(text, pair[0], most=bound + 3 * pair[1], kind=kind)


def conclude_sparsifier(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims = [], list[Claim]()
    bars: dict[str, list[float]] = {"bound": [], "measured": []}
    for kind, text in VECTORS.items():
        found = outcomes[kind]
        n = found["elements"]
        root = math.sqrt(n)
        most_bits = root * (math.log2(n) + math.log2(2 * math.e)) + FLOAT_BITS
        rows += [
            (f"{text}, n = {n:,}: P1, distance", "1", f"{found['distance']:.3f}"),
            ("  P2, second moment / square", f"<= {root:.1f}", f"{found['moment'][0]:.1f}"),
            ("  P3, elements other than zero", f"<= {root:.1f}", f"{found['nonzero'][0]:.1f}"),
            ("  bits", f"<= {most_bits:,.0f}", f"{found['bits'][0]:,.0f}"),
        ]
        claims += [
            within(f"P1: the mean is off by what the draws explain, {text}", found["distance"], least=0.8, most=1.2),
            _below(f"P2: second moment below the root of n, {text}", found["moment"], root),
            _below(f"P3: non-zeros below the root of n, {text}", found["nonzero"], root),
            _below(f"bits below the bound, {text}", found["bits"], most_bits),
        ]
        bars["bound"].append(most_bits)
        bars["measured"].append(found["bits"][0])
    return Findings(
        tables=(
            PlainTable(
                title="Quantised SGD with one level",
                headings=("", "paper", "ours"),
                rows=rows,
                caption="distance: of the mean of all draws from the vector, over what their number explains.\n"
                "Bits without a code: 32 n.",
            ),
        ),
        claims=tuple(claims),
        charts=(bar_chart("bits", "Bits of a vector", "", list(VECTORS.values()), bars, y="bits"),),
        series=("bound", "measured"),
        remarks=(
            BESIDE,
            "An expectation may be above its bound by three standard errors: with equal magnitudes it is the bound.",
        ),
        numbers={kind: dict(outcomes[kind]) for kind in VECTORS},
    )


def levels_of(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of levels; the last is the root of n."""
    return (1, 16, 162) if plan.toy else (1, 4, 16, 64, 162)


def jobs_of_qsgd(plan: ExperimentPlan) -> list[Job]:
    draws = plan.choose(toy=5, laboratory=100, full=1000)
    return [
        Job(
            name=f"s = {levels}",
            run=run_quantised,
            settings={"vector": "gradient", "levels": levels, "draws": draws},
            seconds=draws / 50,
        )
        for levels in levels_of(plan)
    ]


def conclude_qsgd(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, numbers = [], list[Claim](), dict[str, Any]()
    n = outcomes["s = 1"]["elements"]
    root = math.sqrt(n)
    moments, bits = list[float](), list[float]()
    for levels in levels_of(plan):
        found = outcomes[f"s = {levels}"]
        bound = moment_bound(n, levels)
        lecture = bits_bound(n, levels, levels**2 + root)
        alistarh = bits_bound(n, levels, levels * (levels + root))
        moments.append(found["moment"][0])
        bits.append(found["bits"][0])
        rows.append(
            (
                f"s = {levels}",
                f"<= {bound:.2f}",
                f"{found['moment'][0]:.2f}",
                f"<= {lecture:,.0f}",
                f"<= {alistarh:,.0f}",
                f"{found['bits'][0]:,.0f}",
            )
        )
        claims += [
            _below(f"second moment below the bound, s = {levels}", found["moment"], bound),
            _below(f"bits below the lecture's bound, s = {levels}", found["bits"], lecture),
        ]
        numbers[f"s = {levels}"] = dict(found) | {"moment_bound": bound, "bits_bound": lecture}
    claims += [
        falling("the larger s, the smaller the second moment", moments),
        falling("the larger s, the more bits", bits, rising=True),
    ]
    return Findings(
        tables=(
            PlainTable(
                title=f"Quantised SGD with s levels, a gradient of n = {n:,}",
                headings=("", "moment:\npaper", "moment:\nours", "bits:\npaper", "bits:\nQSGD", "bits:\nours"),
                rows=rows,
                caption=f"Second moment over the gradient's square; bits without a code: {FLOAT_BITS * n:,}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            point_chart(
                "moment-bits",
                "Second moment against bits",
                "Labels are levels.",
                [
                    Series(
                        name="measured",
                        points=list(zip(bits, moments, strict=True)),
                        labels=[f"s={levels}" for levels in levels_of(plan)],
                    )
                ],
                x="bits of a gradient",
                y="second moment",
                log_x=True,
                log_y=True,
            ),
        ),
        series=("measured",),
        remarks=(
            BESIDE,
            "The lecture prints s^2 + sqrt(n) where QSGD (Alistarh et al., 2017) has s (s + sqrt(n)): for s between 1 "
            "and sqrt(n) that is too few, and below the entropy of the levels of normal elements for s = 4 and 16.",
        ),
        numbers=numbers,
    )


# -- iterations against bits -------------------------------------------------------------------------------------------

RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TARGET_LOSS = 0.3
UNQUANTISED = 0  # levels of no codec


def run_to_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train until the training loss is at the target; return the rounds, or None, and a gradient's mean bits."""
    from paceline.runs.simulation import make_run

    recipe = Recipe.from_document(settings["recipe"])
    run = make_run(recipe)
    rounds = None
    for progress in run:
        if progress.loss is not None and progress.loss <= settings["target"]:
            rounds = progress.round
            break
    trace = run.trace
    gradients = max(1, trace.used)
    return {"rounds": rounds, "bits": 8 * trace.received_bytes / gradients, "seen": trace.rounds_done}


def tradeoff_levels(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the levels that are compared, the fewest bits first."""
    return (1, UNQUANTISED) if plan.toy else (1, 4, 16, 64, UNQUANTISED)


def tradeoff_rates(plan: ExperimentPlan) -> tuple[float, ...]:
    """Return the rates among which each codec has its best."""
    return (0.1, 0.5) if plan.toy else RATES


def jobs_of_tradeoff(plan: ExperimentPlan) -> list[Job]:
    rounds = plan.choose(toy=6, laboratory=600, full=3000)
    base = Recipe(rounds=rounds, evaluate_every=1, evaluation_samples=1500, target_loss=None).with_settings(
        data={"split": "iid"},
        optimizer={"momentum": 0.0, "weight_decay": 0.0},
        cluster={"workers": 2},
        strategy={"name": "full"},
    )
    jobs = []
    for seed in plan.seeds:
        for levels in tradeoff_levels(plan):
            codec = {"name": "identity"}
            if levels:
                codec = {"name": "qsgd", "levels": levels, "bucket": 0, "norm": "l2", "lossless": "elias"}  # type: ignore[dict-item]
            for rate in tradeoff_rates(plan):
                recipe = base.with_seed(seed).with_settings(codec=codec, optimizer={"lr": rate})
                jobs.append(
                    Job(
                        name=f"s = {levels}, rate {rate:g}, seed {seed}",
                        run=run_to_loss,
                        settings={"recipe": recipe.to_document(), "target": TARGET_LOSS},
                        seconds=plan.choose(toy=0.3, laboratory=2.0, full=10.0),
                    )
                )
    return jobs


def conclude_tradeoff(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, least, sizes, moments = [], list[float | None](), list[float](), list[float]()
    names = ["none" if not levels else f"s = {levels}" for levels in tradeoff_levels(plan)]
    for levels, name in zip(tradeoff_levels(plan), names, strict=True):
        by_rate: dict[float, float | None] = {}
        for rate in tradeoff_rates(plan):
            found = [outcomes[f"s = {levels}, rate {rate:g}, seed {seed}"]["rounds"] for seed in plan.seeds]
            by_rate[rate] = None if None in found else statistics.mean(found)
        reached = {rate: rounds for rate, rounds in by_rate.items() if rounds is not None}
        best = min(reached, key=lambda rate: reached[rate]) if reached else None
        size = statistics.mean(
            outcomes[f"s = {levels}, rate {best or tradeoff_rates(plan)[0]:g}, seed {seed}"]["bits"]
            for seed in plan.seeds
        )
        least.append(None if best is None else reached[best])
        sizes.append(size)
        moments.append(moment_bound(26_122, levels) if levels else 1.0)
        rows.append(
            (
                name,
                f"{size:,.0f}",
                "none" if best is None else f"{best:g}",
                f"<= {moments[-1]:.1f}",
                "never" if best is None else f"{reached[best]:.0f}",
                "-" if best is None else f"{size * reached[best] / 8e6:.2f}",
            )
        )
    none = least[-1]
    ratios = [None if value is None or not none else value / none for value in least]
    return Findings(
        tables=(
            PlainTable(
                title=f"Iterations to a training loss of {TARGET_LOSS}, each codec at its best rate",
                headings=("levels", "bits a\ngradient", "best\nrate", "moment:\npaper", "ours:\nrounds", "MB in\nall"),
                rows=rows,
                caption="MB in all: of one worker.",
            ),
        ),
        claims=(
            falling("fewer bits, more iterations", least, slack=0.05 * (none or 0.0)),
            ahead(
                "no free lunch: s = 1 needs more iterations than no quantisation",
                {"none": none, "s = 1": least[0]},
                best="low",
            ),
            within(
                "iterations in proportion to the bound on the second moment, s = 1: to a factor of two",
                ratios[0],
                least=moments[0] / 2,
                most=2 * moments[0],
                kind="shape",
            ),
        ),
        charts=(
            point_chart(
                "tradeoff",
                "Iterations against bits",
                f"To a training loss of {TARGET_LOSS}, each codec at the best of {len(tradeoff_rates(plan))} rates.",
                [Series(name="measured", points=list(zip(sizes, least, strict=True)), labels=names)],
                x="bits of a gradient",
                y="iterations",
                log_x=True,
                log_y=True,
            ),
        ),
        series=("measured",),
        remarks=(
            "Two workers, digits, the small network, plain SGD. At a rate that is too small for all of them, every s "
            "needs the same iterations, so each has its own.",
            "The lecture's curve is not readable. Its proportion is one of upper bounds, on convex functions.",
        ),
        numbers={name: {"rounds": value, "bits": size} for name, value, size in zip(names, least, sizes, strict=True)},
    )


# -- the convergence theorem -------------------------------------------------------------------------------------------

RIDGE = 0.01
HORIZONS = (10, 100, 1000)


def run_theorem(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run projected SGD on logistic regression, for several horizons; return f(mean iterate) - f*, and the constants.

        f(w) = mean cross entropy of softmax(W x + b) + ridge/2 |w|^2        convex, in float64, with a minimiser w*
        beta = half the largest eigenvalue of mean x x^T, + ridge            the softmax's Hessian is at most half of 1
        R = |w* - w0|, and W the ball of that radius                         w0 = 0; iterates are projected onto it
        sigma^2 = the largest variance of a batch's gradient                 at w0, w*, random points of W, and iterates
        quantised: sigma^2 = the largest of (1 + min(n/s^2, sqrt(n)/s)) E|g|^2 - |grad f|^2

    The rate is constant in a run, 1 / (beta + sigma sqrt(t) / (R sqrt 2)), with t its horizon.
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
    for horizon in settings["horizons"]:
        rate, found = 1 / (beta + sigma * math.sqrt(horizon / 2) / radius), []
        for _ in range(settings["runs"]):
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


def horizons_of(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of steps after which the bound is looked at."""
    return (10, 30) if plan.toy else HORIZONS


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
                "runs": plan.choose(toy=2, laboratory=10, full=100),
                "full_steps": plan.choose(toy=500, laboratory=4000, full=20_000),
            },
            seconds=plan.choose(toy=0.5, laboratory=8.0, full=80.0),
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
    for levels in theorem_levels(plan):
        name = f"s = {levels}" if levels else "plain"
        found = [outcomes[f"s = {levels}, seed {seed}"] for seed in plan.seeds]
        measured[name], bounds[name] = [], []
        for horizon in horizons_of(plan):
            gap = statistics.mean(each["gaps"][str(horizon)] for each in found)
            bound = min(theorem_bound(each, horizon) for each in found)
            rows.append((f"{name}, t = {horizon:,}", f"<= {figure(bound)}", figure(gap), percent(gap / bound)))
            claims.append(within(f"below the bound, {name}, t = {horizon:,}", gap, most=bound))
            measured[name].append((horizon, gap))
            bounds[name].append((horizon, bound))
        numbers[name] = {**found[0], "bounds": [bound for _, bound in bounds[name]]}
    plain = outcomes[f"s = {UNQUANTISED}, seed {plan.seeds[0]}"]
    coarse = f"s = {theorem_levels(plan)[-1]}"
    claims.append(
        ahead(
            f"the larger the variance, the slower: plain before {coarse} at t = {horizons_of(plan)[-1]:,}",
            {"plain": measured["plain"][-1][1], coarse: measured[coarse][-1][1]},
            best="low",
        )
    )
    sigmas = ", ".join(
        f"{'s = ' + str(levels) if levels else 'plain'} "
        f"{figure(outcomes[f's = {levels}, seed {plan.seeds[0]}']['sigma_visited'])}"
        for levels in theorem_levels(plan)
    )
    return Findings(
        tables=(
            PlainTable(
                title="f(mean iterate) - f* of logistic regression on digits",
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
            f"Cross entropy with a ridge of {RIDGE}, so that there is a minimiser; single samples; float64, quantised "
            "gradients in float32. beta is an upper bound, R the distance from the start to the minimiser, sigma the "
            "largest of the start, the minimiser, eight random points of the ball, and every run's last iterate; with "
            "quantised gradients by the bound on their second moment.",
            "The lecture writes the rate with t: here it is constant within a run of t steps, as the proof has it.",
        ),
        numbers=numbers,
    )


# -- pipelines ---------------------------------------------------------------------------------------------------------


def run_idle(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model of equal stages; return for each number of micro-batches gpipe's idle share as predicted."""
    from paceline.pipeline.schedules import orders
    from paceline.pipeline.timing import timeline
    from paceline.reproduce.pipelines import ALIKE, Subject, measured

    stages = settings["stages"]
    subject = Subject(
        model=ALIKE, microbatch=settings["samples"], stages=stages, wide=settings["wide"], depth=settings["depth"]
    )
    found = measured(subject, repeats=settings["repeats"])
    costs = found.plan(subject.cuts(), stages=stages, microbatches=4 * stages, schedule="1f1b").costs
    return {
        "stage_seconds": [cost.seconds for cost in costs],
        "idle": {str(m): timeline(orders("gpipe", stages, m), costs).idle for m in settings["microbatches"]},
    }


def microbatches_of(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of micro-batches; with one there is no pipelining."""
    return (1, 4) if plan.toy else (1, 2, 4, 8, 16)


def measured_stages(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of stages whose layers are measured."""
    return (2,) if plan.toy else (2, 4)


def counted_stages(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of stages whose idle slots are counted."""
    return (2, 4) if plan.toy else (2, 4, 8, 64)


def jobs_of_idle(plan: ExperimentPlan) -> list[Job]:
    size = plan.choose(
        toy={"samples": 8, "wide": 16, "depth": 1, "repeats": 3},
        laboratory={"samples": 64, "wide": 256, "depth": 8, "repeats": 5},
        full={"samples": 256, "wide": 512, "depth": 40, "repeats": 5},
    )
    return [
        Job(
            name=f"{stages} stages",
            run=run_idle,
            settings={"stages": stages, "microbatches": list(microbatches_of(plan)), **size},
            seconds=plan.choose(toy=0.5, laboratory=5.0, full=60.0),
        )
        for stages in measured_stages(plan)
    ]


def conclude_idle(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    from paceline.pipeline.schedules import lecture_idle
    from paceline.pipeline.timing import slot_timeline

    rows, claims = [], list[Claim]()
    lines: dict[str, list[tuple[float, float | None]]] = {}
    ratios, worst_off = list[float](), list[float]()
    for stages in counted_stages(plan):
        idle = outcomes[f"{stages} stages"]["idle"] if stages in measured_stages(plan) else {}
        for m in microbatches_of(plan):
            formula, count = lecture_idle(stages, m), slot_timeline("gpipe", stages, m).idle
            predicted = idle.get(str(m))
            shown = "-" if predicted is None else percent(predicted)
            rows.append((f"{stages} devices, {m} micro-batches", percent(formula), percent(count), shown))
            ratios.append(count / formula)
            if predicted is not None:
                worst_off.append(abs(predicted - count))
            if stages == measured_stages(plan)[-1]:
                for name, value in (("formula", formula), ("count", count), ("predicted", predicted)):
                    lines.setdefault(name, []).append((m, value))
    shares = [slot_timeline("gpipe", measured_stages(plan)[-1], m).idle for m in microbatches_of(plan)]
    last = counted_stages(plan)[-1]
    worst_ratio = max(ratios, key=lambda ratio: abs(ratio - 1))
    claims += [
        within("idle slots are as many as the formula says: count / formula", worst_ratio, least=0.99, most=1.01),
        within(
            f"about 50 % is lost with many machines: {last} devices, no pipelining",
            slot_timeline("gpipe", last, 1).idle,
            least=0.4,
            most=0.55,
            write=percent,
        ),
        falling("more micro-batches, less idle time", shares, write=percent, judged=False),
        within(
            "predicted from measured layers within 5 points of the count",
            max(worst_off),
            most=0.05,
            write=percent,
            judged=False,
        ),
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Idle share of a pipeline of equal stages",
                headings=("", "paper:\nformula", "ours:\ncounted", "ours:\npredicted"),
                rows=rows,
                caption="formula: (1/2) (1 - m/(k-1+m)). predicted: gpipe's timeline with measured layers.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "idle",
                f"Idle share, {measured_stages(plan)[-1]} devices",
                "",
                [Series(name=name, points=points, dashed=name == "formula") for name, points in lines.items()],
                x="micro-batches",
                y="idle share",
                log_x=True,
                percent=True,
            ),
        ),
        series=tuple(lines),
        remarks=(
            "The lecture counts the idle slots before a device's work in each half of a step, and not those after it: "
            "counting both gives twice as much, (k-1)/(k-1+m), which is GPipe's known figure.",
            "No step is run here: layers are measured one by one in one process, and links cost nothing.",
        ),
        numbers={name: dict(found) for name, found in outcomes.items()},
    )


def run_placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model's layers, cut it in three ways, and time the pieces; seconds are those of the slowest stage."""
    from paceline.reproduce.pipelines import Subject, measured, prepared, run_in_turns, three_cuts

    subject = Subject(model=settings["model"], microbatch=settings["samples"], side=settings["side"])
    found = measured(subject, repeats=settings["repeats"])
    where = three_cuts(found, settings["stages"], microbatches=4)
    cuts = [prepared(found, method, places) for method, places in where.items()]
    run_in_turns(cuts, settings["turns"])
    return {
        "layers": len(found.profile.layers),
        "cuts": {
            cut.method: {"at": list(cut.cuts), "predicted": cut.predicted_seconds, "measured": cut.best} for cut in cuts
        },
    }


def placements_of(plan: ExperimentPlan) -> tuple[tuple[str, int], ...]:
    """Return networks, and the devices that each is cut for."""
    return (("lenet", 2),) if plan.toy else (("googlenet", 2), ("googlenet", 4))


def jobs_of_placement(plan: ExperimentPlan) -> list[Job]:
    size = plan.choose(
        toy={"samples": 2, "side": 16, "repeats": 3, "turns": 1},
        laboratory={"samples": 2, "side": 32, "repeats": 3, "turns": 3},
        full={"samples": 8, "side": 32, "repeats": 9, "turns": 5},
    )
    return [
        Job(
            name=f"{model}, {stages} stages",
            run=run_placement,
            settings={"model": model, "stages": stages, **size},
            seconds=plan.choose(toy=1.0, laboratory=25.0, full=120.0),
        )
        for model, stages in placements_of(plan)
    ]


def conclude_placement(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims = [], list[Claim]()
    bars: dict[str, list[float | None]] = {"predicted": [], "measured": []}
    groups: list[str] = []
    for name, found in outcomes.items():
        cuts = found["cuts"]
        ours = cuts["ours"]
        for method, cut in cuts.items():
            rows.append(
                (
                    f"{name.removesuffix(' stages')}: {method}",
                    ", ".join(map(str, cut["at"])),
                    f"{1000 * cut['predicted']:.1f}",
                    f"{1000 * cut['measured']:.1f}",
                    f"{cut['measured'] / ours['measured']:.2f}",
                    "-",
                )
            )
            groups.append(f"{name}: {method}")
            for side in bars:
                bars[side].append(1000 * cut[side])
        for side in bars:
            claims.append(
                ahead(
                    f"the exact cut before equal counts, ms of the slowest stage, {side}, {name}",
                    {method: 1000 * cuts[method][side] for method in ("ours", "equal counts")},
                    best="low",
                    by=0.02 * 1000 * ours[side],
                    strictly=False,
                    judged=side == "measured",  # by the costs that it was cut by, the exact cut cannot lose
                )
            )
    return Findings(
        tables=(
            PlainTable(
                title="The slowest stage, ms for a micro-batch",
                headings=(
                    "network, stages",
                    "at\nlayer",
                    "ours:\npredicted",
                    "ours:\nmeasured",
                    "over the\nexact cut",
                    "paper",
                ),
                rows=rows,
                caption="ours (a row): the exact cut. paper: its figure is not readable.",
            ),
        ),
        claims=tuple(claims),
        charts=(bar_chart("slowest", "The slowest stage", "", groups, bars, y="ms for a micro-batch"),),
        series=tuple(bars),
        remarks=(
            "The lecture calls placement a hard problem and points to reinforcement learning; its figure is not "
            "readable, so nothing of it is compared. Layers in a row are cut exactly here, by dynamic programming; "
            "the comparison is with what people do by hand, and with torchgpipe's block partition.",
            "Pieces are timed one by one in one process, in CPU seconds; 2 % more than another counts as the same.",
        ),
        numbers={name: dict(found) for name, found in outcomes.items()},
    )


# -- trends ------------------------------------------------------------------------------------------------------------


def conclude_trends(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    _, workers, _, minutes, _, _ = LECTURE_TRENDS[0]
    rows, ours = [], list[float]()
    for who, count, batch, taken, speedup, accuracy in LECTURE_TRENDS:
        ours.append(minutes / taken)
        efficiency = minutes / taken / (count / workers)
        rows.append(
            (who, f"{count:,}", f"{batch:,}", f"{taken:,}", f"{speedup:g}", f"{ours[-1]:.1f}", percent_text(efficiency),
             f"{accuracy}")
        )  # fmt: skip
    printed = [row[4] for row in LECTURE_TRENDS]
    return Findings(
        tables=(
            PlainTable(
                title="ImageNet in ever fewer minutes",
                headings=(
                    "who",
                    "\nworkers",
                    "\nbatch",
                    "\nminutes",
                    "speed-up:\npaper",
                    "speed-up:\nours",
                    "effi-\nciency",
                    "top-1\n(%)",
                ),
                rows=rows,
                caption="ours: by the minutes. efficiency: the speed-up over that of the workers, 8 being 1.",
            ),
        ),
        claims=(
            within(
                "the printed speed-ups are those of the minutes: the largest difference",
                max(abs(one - other) for one, other in zip(ours, printed, strict=True)),
                most=0.5,
            ),
            falling("ever more speed-up, by the minutes", ours, rising=True),
        ),
        charts=(
            point_chart(
                "trends",
                "Speed-up against workers",
                "As printed in the lecture.",
                [
                    Series(
                        name="speed-up",
                        points=[(float(row[1]), float(row[4])) for row in LECTURE_TRENDS],
                        labels=[row[0] for row in LECTURE_TRENDS],
                    )
                ],
                x="workers",
                y="speed-up",
                log_x=True,
                log_y=True,
            ),
        ),
        series=("speed-up",),
        remarks=("Nothing is run: these are other people's runs, on other people's machines.",),
        numbers={"speedup": ours},
    )


def _no_jobs(plan: ExperimentPlan) -> list[Job]:
    return []


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="lecture-one-bit",
            source="lecture, 1-bit SGD",
            question="the example vector: its two means, its bits",
            minutes=0.1,
            full_hours=0.01,
            jobs=jobs_of_one_bit,
            conclude=conclude_one_bit,
        ),
        Experiment(
            name="lecture-sparsifier",
            source="lecture, quantised SGD",
            question="one level: unbiased, second moment, sparsity, bits",
            minutes=0.3,
            full_hours=0.05,
            jobs=jobs_of_sparsifier,
            conclude=conclude_sparsifier,
        ),
        Experiment(
            name="lecture-qsgd",
            source="lecture, controllable quantisation",
            question="s levels: second moment and bits against their bounds",
            minutes=0.2,
            full_hours=0.05,
            jobs=jobs_of_qsgd,
            conclude=conclude_qsgd,
        ),
        Experiment(
            name="lecture-tradeoff",
            source="lecture, iteration-communication trade-off",
            question="iterations against bits, each codec at its best rate",
            minutes=1,
            full_hours=0.2,
            jobs=jobs_of_tradeoff,
            conclude=conclude_tradeoff,
        ),
        Experiment(
            name="lecture-theorem",
            source="lecture, SGD convergence theorem",
            question="convex SGD below its bound, plain and quantised",
            minutes=0.5,
            full_hours=0.2,
            jobs=jobs_of_theorem,
            conclude=conclude_theorem,
        ),
        Experiment(
            name="lecture-idle",
            source="lecture, loss factor",
            question="idle share of a pipeline: formula, count, prediction",
            minutes=0.3,
            full_hours=0.1,
            jobs=jobs_of_idle,
            conclude=conclude_idle,
            timed=True,
        ),
        Experiment(
            name="lecture-placement",
            source="lecture, device placement",
            question="the slowest stage: equal counts, torchgpipe, the exact cut",
            minutes=1,
            full_hours=0.2,
            jobs=jobs_of_placement,
            conclude=conclude_placement,
            timed=True,
        ),
        Experiment(
            name="lecture-trends",
            source="lecture, ImageNet competition trends",
            question="the printed speed-ups, and those of the minutes",
            minutes=0.1,
            full_hours=0.01,
            jobs=_no_jobs,
            conclude=conclude_trends,
        ),
    )
}
