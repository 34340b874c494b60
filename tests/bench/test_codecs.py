"""What the codec bench says, held against what can be worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import tables
from paceline.bench.codecs import Bias, CodecMeasurement, CodecVariant, measure, measure_bias, steps, variants
from paceline.bench.gradients import SampleGradient, real_gradient
from paceline.bench.tables import RATES, exchanges
from paceline.codecs import CODECS
from paceline.reports.codec_page import ACROSS, CodecPoint, codec_chart
from paceline.terminal import scatter

pytestmark = pytest.mark.slow


def gradient_of(vector: torch.Tensor) -> SampleGradient:
    return SampleGradient(vector=vector, shapes=(vector.shape,), description="made up")


def measured(label: str = "half", **changes: object) -> CodecMeasurement:
    half = CodecMeasurement(
        label="half", name="half", elements=1_000_000, payload_bytes=2_000_000, encode_seconds=0.004,
        decode_seconds=0.006, copy_seconds=0.005, error=0.002, bias=Bias(seen=0.002),
    )  # fmt: skip
    return replace(half, label=label, **changes)


# -- the bias -----------------------------------------------------------------------------------------------------


class Shifted:
    """What is decoded is the vector, plus noise of deviation 1 in each element, plus a shift."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def make(self, shapes):
        return self

    def encode(self, vector, generator):
        return vector + torch.randn(vector.numel(), generator=generator) + self.shift

    def decode(self, payload, *, expected_length):
        return payload


@pytest.mark.parametrize("shift", [0.3, 1.0])
def test_a_bias_is_seen_through_noise_that_is_larger(shift) -> None:
    bias = measure_bias(Shifted(shift), gradient_of(torch.ones(4000)))
    assert bias.seen == pytest.approx(shift, rel=0.1)  # the length of the shift over that of the vector


def test_noise_without_bias_is_not_called_a_bias() -> None:
    bias = measure_bias(Shifted(0.0), gradient_of(torch.ones(4000)))
    assert bias.seen is None
    assert bias.below < 0.1 < 1 / 64**0.5  # the length of (mean of 64 - vector) would say 1/8


@pytest.mark.parametrize(("text", "biased"), [("qsgd", False), ("sparsifier", False), ("power-sgd", True)])
def test_stochastic_codecs_of_the_table(text, biased) -> None:
    bias = measure_bias(CodecVariant(text), real_gradient(4000))
    assert (bias.seen is not None) == biased


def test_a_codec_without_chance_is_left_to_its_error() -> None:
    assert measure_bias(CodecVariant("one-bit"), real_gradient(2000)) is None


@given(st.floats(1e-9, 1e3))
def test_a_limit_is_never_understated(below) -> None:
    written = float(str(Bias(below=below))[1:])
    assert below <= written <= 2.01 * below


# -- measuring ----------------------------------------------------------------------------------------------------


def test_every_codec_of_the_table_is_measured_with_no_line_here() -> None:
    assert list(dict.fromkeys(variant.name for variant in variants())) == list(CODECS)
    labels = [variant.label for variant in variants()]
    assert len(set(labels)) == len(labels)


def test_what_is_measured() -> None:
    gradient, told = real_gradient(5000), []
    chosen = [CodecVariant(text) for text in ("identity", "bfloat16", "one-bit", "qsgd")]
    exact, half, sign, grid = measure(gradient, gradient, chosen, repeats=2, on_step=told.append)
    assert len(told) == steps(chosen, 2)
    assert (exact.error, exact.bias.seen) == (0.0, 0.0)
    assert exact.payload_bytes == 4 * 5000 + 16
    assert 0 < half.error < 2**-8  # half of the last of eight bits
    assert 0.1 < sign.error < 1  # a projection: never longer than the vector
    assert sign.bias.seen == sign.error
    assert half.error < grid.error < sign.error
    assert all(one.encode_seconds > 0 and one.decode_seconds > 0 and one.copy_seconds > 0 for one in (exact, grid))


def test_repeats_are_checked_before_the_first() -> None:
    with pytest.raises(ValueError, match=r"repeats must be between 1 and 1000 \(repeats=0\)"):
        measure(real_gradient(10), real_gradient(10), [CodecVariant("identity")], repeats=0)


@pytest.mark.parametrize("elements", [1, 8192, 8193, 8320, 8321, 10_000, 26_122])
def test_shapes_hold_just_the_elements(elements) -> None:
    gradient = real_gradient(elements)
    assert sum(shape.numel() for shape in gradient.shapes) == gradient.vector.numel() == elements
    assert torch.equal(gradient.vector, real_gradient(26_122).vector[:elements])


def test_a_codec_that_is_named_twice_is_measured_once() -> None:
    assert len(variants(["qsgd", "qsgd levels=7", "qsgd levels=1"])) == len(variants(["qsgd"]))


# -- links --------------------------------------------------------------------------------------------------------


def test_an_exchange_is_encoding_sending_and_decoding() -> None:
    plain, half = exchanges([measured()])
    assert plain.seconds == pytest.approx([0.32, 0.032, 0.0032, 0.00032])
    assert half.seconds == pytest.approx([0.17, 0.026, 0.0116, 0.01016])
    assert half.shortest == (True, True, False, False)
    assert plain.shortest == (False, False, True, True)


def test_the_shortest_is_marked_and_so_is_the_shortest_that_is_better_than_nothing() -> None:
    rows = exchanges([measured(), measured("wild", payload_bytes=100, error=30.0)])
    marks = {row.label: (row.shortest[0], row.shortest_sound[0]) for row in rows}
    assert marks == {"no codec": (False, False), "half": (False, True), "wild": (True, False)}
    cells = {row[0]: row[1][-1] for row in tables.links_table(rows).rows}
    assert cells == {"no codec": " ", "half": "+", "wild": "*"}


@given(st.lists(st.tuples(st.integers(16, 10**7), st.floats(1e-6, 1.0), st.floats(0, 50)), min_size=1, max_size=8))
def test_there_is_one_shortest_for_each_rate_and_none_is_shorter(codecs) -> None:
    rows = exchanges(
        [
            measured(f"c{index}", payload_bytes=size, encode_seconds=seconds, error=error)
            for index, (size, seconds, error) in enumerate(codecs)
        ]
    )
    for column in range(len(RATES)):
        best = [row.seconds[column] for row in rows if row.shortest[column]]
        sound = [row for row in rows if row.shortest_sound[column]]
        assert best
        assert all(row.seconds[column] >= best[0] for row in rows)
        assert sound
        assert all(row.error < 1 for row in sound)


# -- how it is shown ----------------------------------------------------------------------------------------------


def test_a_scatter_plot_has_every_letter_even_of_equal_points() -> None:
    drawn = "".join(
        scatter([("A", 32, 0.0), ("B", 4, 0.5), ("C", 4, 0.5), ("D", 4.01, 0.5)], x_name="bits", y_name="error")
    )
    assert [drawn.count(letter) for letter in "ABCD"] == [1, 1, 1, 1]


def test_a_scatter_plot_of_one_point_is_drawn() -> None:
    assert any("|q" in line for line in scatter([("q", 32, 0.0)], x_name="bits", y_name="error"))


def test_labels_of_the_chart_do_not_lie_on_each_other() -> None:
    points = [CodecPoint(label=f"qsgd levels={7 + n}", family="qsgd", bits=4 + n / 50, error=0.2) for n in range(8)]
    drawn = codec_chart(points).layout
    low, high = drawn["xaxis"]["range"]
    boxes = []
    for note in drawn["annotations"]:
        width = 6.5 * len(note["text"])
        left = (note["x"] - low) / (high - low) * ACROSS + note["ax"]
        left -= width * {"left": 0, "center": 0.5, "right": 1}[note["xanchor"]]
        boxes.append((left, left + width, note["ay"]))  # all points are at one height
    for one, other in itertools.combinations(boxes, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= 14, (one, other)


def test_an_error_of_zero_has_a_place_on_the_logarithmic_axis() -> None:
    exact, half = (CodecPoint(label=f"c{error}", family="c", bits=8.0, error=error) for error in (0.0, 0.01))
    drawn = codec_chart([exact, half]).data[0]["y"]
    assert 0 < drawn[0] < drawn[1]
