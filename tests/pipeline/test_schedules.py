"""Schedules are torch's orders, follow the laws of a pipeline, and are drawn as they are."""

import logging
import re
import subprocess
import sys
from collections import Counter

import pytest

from paceline.pipeline import schedules
from paceline.pipeline.schedules import SCHEDULES, Action, counted_idle, in_flight, lecture_idle, orders, why_not
from paceline.pipeline.timing import PieceCost, slot_timeline, slots, timeline

CASES = [
    (name, stages, microbatches, chunks)
    for name, entry in SCHEDULES.items()
    for stages in range(1, 6)
    for microbatches in (1, 2, 3, 4, 5, 7, 8, 10)
    for chunks in ((2, 3) if entry.takes_chunks else (1,))
]
NUMBERS = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 17)]
POSSIBLE = [case for case in CASES if why_not(*case) is None]
PICTURE = re.compile(
    r"^    (\S+), (\d+) stages, (\d+) micro-batches(?:, (\d+) chunks)?.*\n((?:      device .*\n)+)", re.M
)


class ListeningStage:
    """In place of torch's PipelineStage: no module, no neighbours; it writes down what it is told to compute."""

    submod = None

    def __init__(self, piece, stages, chunks, heard):
        self.stage_index, self.num_stages, self.heard = piece, stages * chunks, heard
        self.group_rank, self.group_size = piece % stages, stages
        self.is_first, self.is_last = piece == 0, piece == stages * chunks - 1

    def _nothing(self, *_, **__):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = _nothing
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing

    def forward_one_chunk(self, microbatch, *_, **__):
        self.heard.append(Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch, *, full_backward=True, **_):
        self.heard.append(Action(self.stage_index, "B" if full_backward else "I", microbatch))

    def backward_weight_one_chunk(self, microbatch, **_):
        self.heard.append(Action(self.stage_index, "W", microbatch))


def torchs_order(name, stages, microbatches, chunks, device):
    """What torch's own schedule makes a device compute in a step: (as carried out, as its table says)."""
    from torch.distributed import pipelining

    makes = {
        "gpipe": lambda parts: pipelining.ScheduleGPipe(parts[0], microbatches),
        "1f1b": lambda parts: pipelining.Schedule1F1B(parts[0], microbatches),
        "interleaved": lambda parts: pipelining.ScheduleInterleaved1F1B(parts, microbatches),
        "zero-bubble": lambda parts: pipelining.ScheduleInterleavedZeroBubble(parts, microbatches),
    }
    heard = []
    pieces = range(device, stages * chunks, stages)
    schedule = makes[name]([ListeningStage(piece, stages, chunks, heard) for piece in pieces])
    schedule._initialize_stage = schedule._initialize_stages = lambda *_, **__: (
        None
    )  # would ask the neighbours for shapes
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    actions = [action for action in schedule.pipeline_order[device] if action and action.microbatch_index is not None]
    letters = {"FULL_BACKWARD": "B"}
    kinds = [letters.get(action.computation_type.value, action.computation_type.value) for action in actions]
    table = [Action(a.stage_index, kind, a.microbatch_index) for a, kind in zip(actions, kinds, strict=True)]
    return tuple(heard), tuple(table)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_orders_are_those_in_which_torch_computes():
    for name, stages, microbatches, chunks in POSSIBLE:
        for device, order in enumerate(orders(name, stages, microbatches, chunks)):
            carried_out, table = torchs_order(name, stages, microbatches, chunks, device)
            assert order == carried_out, (name, stages, microbatches, chunks, device)
            if name != "1f1b" or device < stages - 1:  # torch's table of 1f1b's last rank begins with micro-batch 1
                assert order == table, (name, stages, microbatches, chunks, device)


def test_what_torch_refuses_is_refused_and_nothing_else():
    refused = [case for case in CASES if case not in POSSIBLE]
    assert {case[0] for case in refused} == {"1f1b", "interleaved", "zero-bubble"}
    for case in refused:
        with pytest.raises(ValueError):
            torchs_order(*case, device=0)
        with pytest.raises(ValueError, match=re.escape(why_not(*case))):
            orders(*case)


def test_a_refusal_says_what_would_do():
    for name, stages, microbatches, chunks in CASES:
        reason = why_not(name, stages, microbatches, chunks)
        if reason is not None:
            instead = [int(number) for number in re.findall(r"\d+", reason.split("; take ")[1].split(", or ")[0])]
            assert instead
            assert all(why_not(name, stages, number, chunks) is None for number in instead)
            assert why_not(reason.split(", or ")[1], stages, microbatches) is None or microbatches < stages


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("gpipe", 0, 4), r"stages must be at least 1 \(stages=0\)"),
        (("gpipe", 4, 0), r"microbatches must be at least 1 \(microbatches=0\)"),
        (("interleaved", 4, 4, 0), r"chunks must be at least 1 \(chunks=0\)"),
        (("zero-bubble", 4, 4, 2), r"one piece on each device \(chunks=2\); for more take interleaved"),
        (("gpip", 4, 4), "did you mean 'gpipe'"),
    ],
)
def test_bad_numbers_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        orders(*numbers)


def test_each_device_does_each_of_its_actions_once():
    for name, stages, microbatches, chunks in POSSIBLE:
        kinds = "FIW" if SCHEDULES[name].splits_backward else "FB"
        for device, order in enumerate(orders(name, stages, microbatches, chunks)):
            every = [
                Action(piece, kind, microbatch)
                for piece in range(device, stages * chunks, stages)
                for kind in kinds
                for microbatch in range(microbatches)
            ]
            assert Counter(order) == Counter(every)


def test_forward_comes_before_backward_and_inputs_before_weights():
    for case in POSSIBLE:
        for order in orders(*case):
            place = {action: at for at, action in enumerate(order)}
            for action, at in place.items():
                before = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
                assert before is None or place[action._replace(kind=before)] < at


def test_a_piece_goes_forward_after_the_piece_before_it():
    for case in POSSIBLE:
        spans = {(span.kind, span.piece, span.microbatch): span for span in slot_timeline(*case).spans}
        for (kind, piece, microbatch), span in spans.items():
            if kind == "F" and piece > 0:
                assert spans["F", piece - 1, microbatch].end <= span.begin
            if kind in "BI" and (kind, piece + 1, microbatch) in spans:
                assert spans[kind, piece + 1, microbatch].end <= span.begin


def test_1f1b_holds_no_more_than_the_pieces_that_follow():
    for _, stages, microbatches, _ in (case for case in POSSIBLE if case[0] == "1f1b"):
        assert in_flight("1f1b", stages, microbatches) == tuple(min(stages - p, microbatches) for p in range(stages))
        assert in_flight("gpipe", stages, microbatches) == (microbatches,) * stages


def test_what_is_held_is_counted_from_the_order():
    for case in POSSIBLE:
        _, stages, _, chunks = case
        assert len(in_flight(*case)) == stages * chunks
        for piece, most in enumerate(in_flight(*case)):
            actions = [action for action in orders(*case)[piece % stages] if action.piece == piece]
            begun = [sum(a.kind == "F" for a in actions[: at + 1]) for at in range(len(actions))]
            ended = [sum(a.kind in "BW" for a in actions[: at + 1]) for at in range(len(actions))]
            assert most == max(b - e for b, e in zip(begun, ended, strict=True))


def picture(name, stages, microbatches, chunks, slot_width):
    """The lines of a schedule as schedules.py draws them."""
    timeline = slot_timeline(name, stages, microbatches, chunks)
    lines = []
    for device, row in enumerate(timeline.rows):
        line = "." * round(timeline.step_seconds * slot_width)
        for span in row:
            letter = span.kind if span.piece < stages else span.kind.lower()
            begin, end = round(span.begin * slot_width), round(span.end * slot_width)
            line = line[:begin] + f"{letter}{span.microbatch}".ljust(end - begin, "=") + line[end:]
        lines.append(f"      device {device}  |{line}|\n")
    return "".join(lines)


def test_the_drawings_show_the_schedules():
    found = PICTURE.findall(schedules.__doc__)
    assert [name for name, *_ in found] == list(SCHEDULES)
    for name, stages, microbatches, chunks, drawn in found:
        slot_width = 4 if SCHEDULES[name].splits_backward else 2
        assert drawn == picture(name, int(stages), int(microbatches), int(chunks or 1), slot_width)


def test_planning_and_its_text_need_no_torch():
    modules = "advice, costs, devices, placement, plan, plan_file, profile, schedules, text, timing"
    code = f"import sys; from paceline.pipeline import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# -- idle time by formula ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_count_is_that_of_the_slots(name):
    for stages, microbatches in NUMBERS:
        if why_not(name, stages, microbatches) is None:
            step = slot_timeline(name, stages, microbatches)
            assert step.idle == pytest.approx(counted_idle(stages, microbatches))
            assert step.idle_shares == pytest.approx([counted_idle(stages, microbatches)] * stages)
            assert slots(name, stages, microbatches) == 2 * (stages - 1 + microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seconds", [(1.0, 0.0, 0.0), (1.0, 1.5, 0.5), (3.0, 0.25, 0.5)])
def test_the_count_holds_for_any_equal_costs(name, seconds):
    forward, inputs, weights = seconds
    cost = PieceCost(forward_seconds=forward, input_seconds=inputs, weight_seconds=weights)
    for stages, microbatches in NUMBERS:
        if why_not(name, stages, microbatches) is None:
            idle = timeline(orders(name, stages, microbatches), [cost] * stages).idle
            assert idle == pytest.approx(counted_idle(stages, microbatches))


def test_the_lecture_counts_one_of_two_triangles():
    """Its own sums: 2 (b/m) (1 + 2 + ... + k-1) idle slots of 2 (b + (k-1) b/m) k."""
    for stages, microbatches in NUMBERS:
        triangle = sum(range(stages))
        printed = 2 / microbatches * triangle / (2 * (1 + (stages - 1) / microbatches) * stages)
        assert lecture_idle(stages, microbatches) == pytest.approx(printed)
        assert 2 * lecture_idle(stages, microbatches) == pytest.approx(counted_idle(stages, microbatches))
        assert lecture_idle(stages, 1) == pytest.approx(2 * triangle / (2 * stages**2))


def test_without_pipelining_is_with_one_microbatch():
    for stages in range(1, 9):
        assert counted_idle(stages, 1) == pytest.approx(1 - 1 / stages)
        assert counted_idle(stages, 1) == pytest.approx(slot_timeline("gpipe", stages, 1).idle)
        assert lecture_idle(stages, 1) == pytest.approx((1 - 1 / stages) / 2)


def test_numbers_below_one_are_refused():
    for formula in (lecture_idle, counted_idle):
        with pytest.raises(ValueError, match=r"stages must be at least 1 \(stages=0\)"):
            formula(0, 1)
        with pytest.raises(ValueError, match=r"microbatches must be at least 1 \(microbatches=0\)"):
            formula(1, 0)
        with pytest.raises(ValueError, match=r"stages=-1"):
            formula(-1, 1)
