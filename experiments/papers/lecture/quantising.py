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

from experiments.core.claims import falling, within
from experiments.core.story import NAN, Claim, Job, Numbers, Outcome, Runs, Size, Telling, experiment
from paceline.reports.figures import Series, bar_chart, point_chart
from paceline.reports.table import PlainTable

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


# -- what is found -----------------------------------------------------------------------------------------------------


def pair_of(found: Outcome, figure: str) -> tuple[float, float]:
    """Return a mean and its standard error; a missing one is NaN.

    >>> pair_of({"bits": [80.0, None]}, "bits")
    (80.0, nan)
    """
    mean, error = (NAN if value is None else value for value in found[figure])
    return mean, error


def below(text: str, pair: tuple[float, float], bound: float) -> Claim:
    """Return the claim that an expectation is below a bound, with three standard errors of its mean to spare."""
    return within(text, pair[0], most=bound + 3 * pair[1])


VECTORS = {"gradient": "a gradient", "normal": "normal elements", "equal": "equal magnitudes"}


@experiment(
    "lecture-sparsifier",
    source="lecture, quantised SGD",
    question="one level: unbiased, second moment, sparsity, bits",
    minutes=0.3,
    full_hours=0.05,
)
def sparsifier(size: Size) -> Telling:
    draws = size.pick(30, 1000, 10_000)
    runs: Runs = yield {
        kind: Job(run_quantised, {"vector": kind, "levels": 1, "draws": draws}, draws / 300) for kind in VECTORS
    }
    distances, rows = runs.mean("distance"), []
    bars: dict[str, list[float]] = {"bound": [], "measured": []}
    for kind, text in VECTORS.items():
        found = runs[kind][0]
        n, distance = found["elements"], distances[kind]
        moment, nonzero, bits = (pair_of(found, figure) for figure in ("moment", "nonzero", "bits"))
        root = math.sqrt(n)
        most_bits = root * (math.log2(n) + math.log2(2 * math.e)) + FLOAT_BITS
        rows += [
            (f"{text}, n = {n:,}: P1, distance", "1", f"{distance:.3f}"),
            ("  P2, second moment / square", f"<= {root:.1f}", f"{moment[0]:.1f}"),
            ("  P3, elements other than zero", f"<= {root:.1f}", f"{nonzero[0]:.1f}"),
            ("  bits", f"<= {most_bits:,.0f}", f"{bits[0]:,.0f}"),
        ]
        yield within(f"P1: the mean is off by what the draws explain, {text}", distance, least=0.8, most=1.2)
        yield below(f"P2: second moment below the root of n, {text}", moment, root)
        yield below(f"P3: non-zeros below the root of n, {text}", nonzero, root)
        yield below(f"bits below the bound, {text}", bits, most_bits)
        bars["bound"].append(most_bits)
        bars["measured"].append(bits[0])
    yield PlainTable(
        title="Quantised SGD with one level",
        headings=("", "paper", "ours"),
        rows=rows,
        caption="distance: of the mean of all draws from the vector, over what their number explains.\n"
        "Bits without a code: 32 n.",
    )
    yield bar_chart("bits", "Bits of a vector", "", list(VECTORS.values()), bars, y="bits")
    yield BESIDE
    yield "An expectation may be above its bound by three standard errors: with equal magnitudes it is the bound."
    yield Numbers({kind: outcomes[0] for kind, outcomes in runs.items()})


@experiment(
    "lecture-qsgd",
    source="lecture, controllable quantisation",
    question="s levels: second moment and bits against their bounds",
    minutes=0.2,
    full_hours=0.05,
)
def qsgd(size: Size) -> Telling:
    draws = size.pick(5, 100, 1000)
    several = size.pick((1, 16, 162), (1, 4, 16, 64, 162))  # the last is the root of n
    runs: Runs = yield {
        levels: Job(run_quantised, {"vector": "gradient", "levels": levels, "draws": draws}, draws / 50)
        for levels in several
    }
    n = runs[1][0]["elements"]
    rows, moments, bits = [], list[float](), list[float]()
    for levels in several:
        found = runs[levels][0]
        moment, size_in_bits = pair_of(found, "moment"), pair_of(found, "bits")
        bound, root = moment_bound(n, levels), math.sqrt(n)
        lecture = bits_bound(n, levels, levels**2 + root)
        alistarh = bits_bound(n, levels, levels * (levels + root))
        moments.append(moment[0])
        bits.append(size_in_bits[0])
        rows.append(
            (
                f"s = {levels}",
                f"<= {bound:.2f}",
                f"{moment[0]:.2f}",
                f"<= {lecture:,.0f}",
                f"<= {alistarh:,.0f}",
                f"{size_in_bits[0]:,.0f}",
            )
        )
        yield below(f"second moment below the bound, s = {levels}", moment, bound)
        yield below(f"bits below the lecture's bound, s = {levels}", size_in_bits, lecture)
        yield Numbers({f"s = {levels}": {**found, "moment_bound": bound, "bits_bound": lecture}})
    yield falling("the larger s, the smaller the second moment", moments)
    yield falling("the larger s, the more bits", bits, rising=True)
    yield PlainTable(
        title=f"Quantised SGD with s levels, a gradient of n = {n:,}",
        headings=("", "moment:\npaper", "moment:\nours", "bits:\npaper", "bits:\nQSGD", "bits:\nours"),
        rows=rows,
        caption=f"Second moment over the gradient's square; bits without a code: {FLOAT_BITS * n:,}.",
    )
    labels = [f"s={levels}" for levels in several]
    yield point_chart(
        "moment-bits",
        "Second moment against bits",
        "Labels are levels.",
        [Series(name="measured", points=list(zip(bits, moments, strict=True)), labels=labels)],
        x="bits of a gradient",
        y="second moment",
        log_x=True,
        log_y=True,
    )
    yield BESIDE
    yield (
        "The lecture prints s^2 + sqrt(n) where QSGD (Alistarh et al., 2017) has s (s + sqrt(n)): for s between 1 "
        "and sqrt(n) that is too few, and below the entropy of the levels of normal elements for s = 4 and 16."
    )
