"""The timeline is what a plain simulation of the same rules comes to."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pipeline.schedules import SCHEDULES, Action, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, slot_timeline, slots, timeline

EVERY = [
    (name, stages, microbatches)
    for name in SCHEDULES
    for stages in range(1, 7)
    for microbatches in range(1, 13)
    if why_not(name, stages, microbatches) is None
]
SECONDS = st.integers(0, 9).map(float)  # whole numbers, so that sums are exact
COSTS = st.builds(PieceCost, forward_seconds=SECONDS, input_seconds=SECONDS, weight_seconds=SECONDS)
LINKS = st.builds(MessageCost, forward_seconds=SECONDS, gradient_seconds=SECONDS)


@st.composite
def plans(draw):
    """A schedule's orders, costs of its pieces and of its messages."""
    name, stages, microbatches = draw(st.sampled_from(EVERY))
    schedule = orders(name, stages, microbatches)
    pieces = stages * SCHEDULES[name].chunks
    costs = draw(st.lists(COSTS, min_size=pieces, max_size=pieces))
    return schedule, costs, draw(st.lists(LINKS, min_size=pieces - 1, max_size=pieces - 1))


def plain_begins(schedule, costs, links):
    """When each action begins: every rule applied to all actions, again and again, until nothing moves."""
    devices, last = len(schedule), len(costs) - 1
    seconds = {
        action: {
            "F": costs[action.piece].forward_seconds,
            "B": costs[action.piece].input_seconds + costs[action.piece].weight_seconds,
            "I": costs[action.piece].input_seconds,
            "W": costs[action.piece].weight_seconds,
        }[action.kind]
        for order in schedule
        for action in order
    }
    begins = dict.fromkeys(seconds, 0.0)
    while True:
        after, arrived, link_free = {}, {}, {}
        for device, order in enumerate(schedule):
            for action in order:
                if action.kind == "W":
                    continue
                other = action.piece + 1 if action.kind == "F" else action.piece - 1
                if not 0 <= other <= last:
                    continue
                made = begins[action] + seconds[action]
                if other % devices != device:
                    link = links[min(other, action.piece)]
                    takes = link.forward_seconds if action.kind == "F" else link.gradient_seconds
                    made = max(made, link_free.get((device, other % devices), 0.0)) + takes
                    link_free[device, other % devices] = made
                arrived[other, "F" if action.kind == "F" else "B", action.microbatch] = made
        for order in schedule:
            free = 0.0
            for action in order:
                own = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
                needs = [free, arrived.get((action.piece, action.kind.replace("I", "B"), action.microbatch), 0.0)]
                if own is not None:
                    earlier = action._replace(kind=own)
                    needs.append(begins[earlier] + seconds[earlier])
                after[action] = max(needs)
                free = after[action] + seconds[action]
        if after == begins:
            return begins
        begins = after


@given(plans())
def test_timeline_is_what_the_plain_simulation_gives(plan):
    begins = plain_begins(*plan)
    found = {Action(span.piece, span.kind, span.microbatch): span.begin for span in timeline(*plan).spans}
    assert found == begins


@settings(max_examples=25)
@given(plans())
def test_a_device_does_one_thing_at_a_time_in_its_order(plan):
    schedule, costs, _ = plan
    step = timeline(*plan)
    for device, (order, row) in enumerate(zip(schedule, step.rows, strict=True)):
        assert tuple(Action(span.piece, span.kind, span.microbatch) for span in row) == order
        assert all(span.device == device for span in row)
        assert all(one.end <= other.begin for one, other in pairwise(row))
    assert step.busy_seconds == tuple(
        sum(cost.seconds for cost in costs[device :: len(schedule)]) * len({a.microbatch for a in order})
        for device, order in enumerate(schedule)
    )


@settings(max_examples=25)
@given(plans(), st.sampled_from([0.25, 2.0, 64.0]))
def test_scaling_all_costs_scales_the_step(plan, factor):
    schedule, costs, links = plan
    dearer = [PieceCost(**{name: value * factor for name, value in vars(cost).items()}) for cost in costs]
    slower = [MessageCost(**{name: value * factor for name, value in vars(link).items()}) for link in links]
    step, scaled = timeline(schedule, costs, links), timeline(schedule, dearer, slower)
    assert scaled.step_seconds == factor * step.step_seconds
    assert scaled.idle == pytest.approx(step.idle)


@settings(max_examples=25)
@given(plans())
def test_idle_is_the_share_of_all_devices_time(plan):
    step = timeline(*plan)
    available = step.devices * step.step_seconds
    if available:
        assert step.idle == pytest.approx(1 - sum(step.busy_seconds) / available)
        assert step.step_seconds >= max(step.busy_seconds)
    else:
        assert step.idle == 0.0


@settings(max_examples=25)
@given(plans())
def test_messages_can_only_delay(plan):
    schedule, costs, _ = plan
    assert timeline(schedule, costs).step_seconds <= timeline(*plan).step_seconds


def test_messages_of_one_direction_go_one_after_another():
    quick = [PieceCost(forward_seconds=1.0), PieceCost()]
    step = timeline(orders("gpipe", 2, 3), quick, [MessageCost(forward_seconds=10.0)])
    assert [span.begin for span in step.rows[1] if span.kind == "F"] == [11.0, 21.0, 31.0]


def test_two_devices_share_a_direction_whatever_they_send():
    """With two devices, forward messages of piece 0 and gradients of piece 2 both go from device 0 to device 1."""
    costs = [PieceCost(forward_seconds=1.0, input_seconds=1.0)] * 4
    links = [MessageCost(), MessageCost(gradient_seconds=50.0), MessageCost()]
    step = timeline(orders("interleaved", 2, 4), costs, links)
    spans = {Action(span.piece, span.kind, span.microbatch): span for span in step.spans}
    made, gradient = spans[Action(0, "F", 3)].end, spans[Action(2, "B", 0)].end
    assert made >= gradient
    assert spans[Action(1, "F", 3)].begin >= gradient + 50.0  # takes no time itself, but waits behind that gradient


def test_one_device_sends_itself_nothing():
    costs = [PieceCost(forward_seconds=1.0, input_seconds=1.0)] * 2
    slow = [MessageCost(forward_seconds=100.0, gradient_seconds=100.0)]
    assert timeline(orders("interleaved", 1, 3), costs, slow).step_seconds == 12.0


def test_gpipe_and_1f1b_take_the_same_slots():
    for name, stages, microbatches in EVERY:
        if name == "1f1b":
            assert slots(name, stages, microbatches) == slots("gpipe", stages, microbatches)


def test_interleaved_and_zero_bubble_are_never_more_idle_than_1f1b():
    saved = {"interleaved": 0, "zero-bubble": 0}
    for name, stages, microbatches in EVERY:
        if name in saved and why_not("1f1b", stages, microbatches) is None:
            usual, found = (
                slot_timeline("1f1b", stages, microbatches).idle,
                slot_timeline(name, stages, microbatches).idle,
            )
            assert found <= usual + 1e-12
            saved[name] += found < usual - 1e-12
    assert all(saved.values())


def test_orders_that_wait_for_each_other_are_refused_by_name():
    first, second = orders("1f1b", 2, 2)
    costs = [PieceCost(forward_seconds=1.0)] * 2
    with pytest.raises(ValueError, match="device 0 waits for ever to begin B of micro-batch 1 through piece 0"):
        timeline((first[::-1], second), costs)
    with pytest.raises(ValueError, match="device 1 waits for ever to begin B of micro-batch 1 through piece 1"):
        timeline((first, second[::-1]), costs)  # device 0 waits as well, but only from its first backward on


@pytest.mark.parametrize("name", ["gpipe", "zero-bubble"])
@pytest.mark.parametrize("device", [0, 1])
def test_an_order_with_an_action_missing_or_twice_is_refused(name, device):
    whole = orders(name, 2, 2)
    costs = [PieceCost(forward_seconds=1.0)] * 2
    for at, action in enumerate(whole[device]):
        missing, twice = list(whole), list(whole)
        missing[device] = whole[device][:at] + whole[device][at + 1 :]
        twice[device] = whole[device][: at + 1] + whole[device][at:]
        left_out = action.kind == "W" or (action.kind == "B" and device == 0)  # for these nobody waits
        with pytest.raises(ValueError, match=f"leave out {action}" if left_out else "the orders are stuck"):
            timeline(tuple(missing), costs)
        with pytest.raises(ValueError, match="the orders are stuck"):
            timeline(tuple(twice), costs)


def test_bad_plans_are_refused():
    schedule, cost = orders("gpipe", 2, 2), PieceCost()
    with pytest.raises(ValueError, match=r"pieces=3, devices=2"):
        timeline(schedule, [cost] * 3)
    with pytest.raises(ValueError, match=r"links=2, pieces=2"):
        timeline(schedule, [cost] * 2, [MessageCost()] * 2)
    with pytest.raises(ValueError, match="device 0 cannot do F of micro-batch 0 through piece 1"):
        timeline(schedule[::-1], [cost] * 2)
    with pytest.raises(ValueError, match=r"forward_seconds must be .* \(forward_seconds=-1\)"):
        PieceCost(forward_seconds=-1)
    with pytest.raises(ValueError, match="gradient_seconds must be a finite number"):
        MessageCost(gradient_seconds=float("nan"))
