"""The second moment and the bits of quantised gradients are held against the lecture's bounds.

    one level    P1 unbiased, P2 second moment at most sqrt(n) |g|^2, P3 at most sqrt(n) elements other than zero
    s levels     second moment at most (1 + min(n/s^2, sqrt(n)/s)) |g|^2

Gradients are those of the small network on digits, n = 26,122, where nothing else is said. Bits are those of payloads
without their header, which is beside the theory; levels are coded as Elias gaps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.reports.figures import Series, bar_chart, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import falling, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome

if TYPE_CHECKING:
    import torch

FLOAT_BITS = 32
UNQUANTISED = 0  # levels of no codec
BESIDE = "The payload's header of 16 bytes is not counted, nor the bits that fill up its last byte."


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


# -- one level ---------------------------------------------------------------------------------------------------------

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


# -- s levels ----------------------------------------------------------------------------------------------------------


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
