"""Pictures of a step: what they show, and that they fit."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pipeline.schedules import SCHEDULES, orders
from paceline.pipeline.text import draw
from paceline.pipeline.timing import MessageCost, PieceCost, Span, Timeline, slot_timeline, timeline


def rows(text):
    """The cells of each device's line."""
    lines = text.split("\n\n")[0].splitlines()[1:]
    return [re.fullmatch(r" *\d+  (\S+)  [ \d]+ %", line)[1] for line in lines]


def legend(text):
    return text.split("\n\n")[1]


def one_row(*spans):
    return Timeline(rows=(tuple(Span(0, 0, kind, number, begin, end) for kind, number, begin, end in spans),))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_regular_picture_has_every_span_at_its_place(name):
    step = slot_timeline(name, 3, 6)
    drawn = rows(draw(step, ascii_only=True, unit="slots"))
    per_slot = len(drawn[0]) / step.step_seconds
    assert per_slot == round(per_slot)
    for line, row in zip(drawn, step.rows, strict=True):
        expected = ["."] * len(line)
        for span in row:
            mark = str(span.microbatch) if span.kind == "F" else {"B": "#", "I": "#", "W": "-"}[span.kind]
            expected[round(span.begin * per_slot) : round(span.end * per_slot)] = mark * round(span.seconds * per_slot)
        assert line == "".join(expected)


def test_equal_spans_at_odd_times_are_scaled_to_the_whole_width():
    """Messages of 0.3 put spans of one second where no regular picture has them; none may fall off its end."""
    link = MessageCost(forward_seconds=0.3, gradient_seconds=0.3)
    step = timeline(orders("gpipe", 2, 2), [PieceCost(forward_seconds=1.0, input_seconds=1.0)] * 2, [link])
    first, second = rows(draw(step, ascii_only=True))
    assert len(first) == len(second) == 65
    assert re.fullmatch(r"0+1+\.+#+", first)
    assert re.fullmatch(r"\.+0+1+#+\.+", second)


SECONDS = st.floats(0, 1e3, allow_subnormal=False)


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    microbatches=st.sampled_from([4, 8, 100]),
    seconds=st.lists(SECONDS, min_size=12, max_size=12),
    width=st.integers(40, 120),
    colour=st.booleans(),
    ascii_only=st.booleans(),
)
def test_never_wider_than_asked(name, microbatches, seconds, width, colour, ascii_only):
    pieces = 2 * SCHEDULES[name].chunks
    costs = [
        PieceCost(forward_seconds=f, input_seconds=i, weight_seconds=w)
        for f, i, w in zip(seconds[:pieces], seconds[4 : 4 + pieces], seconds[8 : 8 + pieces], strict=True)
    ]
    step = timeline(orders(name, 2, microbatches), costs)
    text = draw(step, width, colour, ascii_only=ascii_only)
    plain = re.sub(r"\x1b\[\d*m", "", text)
    assert max(map(len, plain.splitlines())) <= width
    assert plain == draw(step, width, ascii_only=ascii_only)
    assert len({len(line) for line in rows(plain)}) == 1
    assert (plain != text) == colour
    if ascii_only:
        assert plain.isascii()
    else:
        assert all(ord(character) < 0x2600 for character in plain)  # nothing that a terminal draws two columns wide


def test_a_cell_shows_what_fills_most_of_it():
    """A thousand spans in some sixty cells: forward has most in the first third, backward then, and then nobody."""
    spans = [
        Span(0, 0, kind, number, number + begin, number + end)
        for number in range(900)
        for kind, begin, end in (
            [("F", 0.0, 0.6), ("B", 0.6, 0.9)],
            [("F", 0.0, 0.3), ("B", 0.3, 0.9)],
            [("F", 0.0, 0.2), ("B", 0.2, 0.4)],
        )[number // 300]
    ]
    (line,) = rows(draw(Timeline(rows=(tuple(spans),)), ascii_only=True))
    third = len(line) // 3
    assert re.fullmatch(r"\d+#+\.+", line)
    assert abs(line.index("#") - third) <= 1
    assert abs(line.index(".") - 2 * third) <= 2


def test_forwards_are_weighed_together_before_one_of_them_is_shown():
    """In each of 65 cells, forwards fill 0.29 and 0.31 and a backward 0.4: it is a cell of forward."""
    spans = [
        (kind, number, cell + begin, cell + end)
        for cell in range(650)
        for kind, number, begin, end in (("F", 1, 0.0, 0.29), ("F", 2, 0.29, 0.6), ("B", 3, 0.6, 1.0))
    ]
    (line,) = rows(draw(one_row(*spans), ascii_only=True))
    assert line == 65 * "2"


def test_the_idle_share_stands_at_the_end_of_each_line():
    costs = [PieceCost(forward_seconds=1.0, input_seconds=2.0), PieceCost(forward_seconds=2.0, input_seconds=2.0)]
    step = timeline(orders("gpipe", 2, 4), costs)
    shown = re.findall(r"(\d+) %$", draw(step), re.M)
    assert shown == [f"{100 * share:.0f}" for share in step.idle_shares]


def test_the_legend_names_what_occurs():
    assert "weights" not in legend(draw(slot_timeline("1f1b", 2, 4)))
    assert "░ of weights" in legend(draw(slot_timeline("zero-bubble", 2, 4)))
    assert "fills most" not in legend(draw(slot_timeline("1f1b", 2, 4)))
    assert "a cell shows what fills most of it" in legend(draw(slot_timeline("1f1b", 2, 100)))
    assert "last digit" in legend(draw(slot_timeline("1f1b", 2, 11)))
    assert "last digit" not in legend(draw(slot_timeline("1f1b", 2, 10)))


@pytest.mark.parametrize(
    ("seconds", "told"), [(2.0, "4 s"), (0.0123, "24.6 ms"), (2e-6, "4 us"), (600.0, "1200 s"), (0.0, "0 us")]
)
def test_the_axis_ends_with_the_step(seconds, told):
    text = draw(one_row(("F", 0, 0.0, seconds), ("B", 0, seconds, 2 * seconds)), ascii_only=True)
    assert re.search(rf"(^| ){told}  idle$", text.splitlines()[0])


def test_bad_values_are_refused():
    step = slot_timeline("gpipe", 2, 2)
    with pytest.raises(ValueError, match=r"at least 40 columns \(width=39\)"):
        draw(step, width=39)
    with pytest.raises(ValueError, match="seconds, slots"):
        draw(step, unit="hours")
