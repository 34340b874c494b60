"""The courses and the replicas of the averaging family against reference_averaging.py, on random windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Asked, Averaged, Begin, Merge, Standing, Stepped
from paceline.strategies.averaging import AveragingState, make_averaging
from paceline.training.replica import Replica
from tests.oracles import averaging as reference

some = settings(max_examples=15)
LR = 0.25
numbers = st.integers(-8, 8).map(float)
LEAVING = Asked(standing=Standing.LEAVING)


def gradient_of(targets):
    """Every worker is drawn to a target of its own, and pulled by its neighbour coordinate."""

    def gradient(worker, place):
        first, second = place
        return [first - targets[worker][0] + 0.25 * second, 0.5 * (second - targets[worker][1])]

    return gradient


@st.composite
def problems(draw, *, least=0, windows=1):
    """Targets for 2 to 4 workers, a start, and how many steps each takes in each window."""
    workers = draw(st.integers(2, 4))
    targets = draw(st.lists(st.tuples(numbers, numbers), min_size=workers, max_size=workers))
    row = st.lists(st.integers(least, 4), min_size=workers, max_size=workers)
    return targets, draw(st.tuples(numbers, numbers)), draw(st.lists(row, max_size=windows, min_size=1))


class Worker:
    """One worker with plain SGD, moved by its course as a driver would move it."""

    def __init__(self, member, workers, worker, start, gradient):
        self.parameters = torch.tensor(start, dtype=torch.float64)
        self.replica = Replica([self.parameters], [], member, workers=workers)
        self.course = AveragingState(member, workers)
        self.message = torch.empty(self.replica.size, dtype=torch.float64)
        self.under_way = None
        self._worker, self._gradient = worker, gradient
        self._begun = self._total = None

    def train(self, steps):
        for _ in range(steps):
            place = self.parameters.tolist()
            self.parameters -= LR * torch.tensor(self._gradient(self._worker, place), dtype=torch.float64)
            self.obey(Stepped())

    def obey(self, event):
        for order in self.course.handle(event):
            if isinstance(order, Begin):
                self.replica.pack_change(self.message, scale=order.scale, brings=order.window.brought > 0)
                self._begun = order.window
            elif isinstance(order, Merge):
                self.replica.merge(self._total, weight=order.weight, open_steps=order.open_steps)
        self.replica.catch_up()

    def window(self):
        window, self._begun = self._begun, None
        return window

    def average_done(self, number, windows, total):
        self.under_way, self._total = Averaged(number=number, windows=windows), total

    def hear(self):
        if self.under_way is not None:
            event, self.under_way = self.under_way, None
            self.obey(event)


def run(member, targets, start, windows, *, merge_first):
    """All windows; one that waits hears of an average before it trains on, any other where its next window ends."""
    workers = len(targets)
    team = [Worker(member, workers, worker, start, gradient_of(targets)) for worker in range(workers)]
    for number in range(len(windows) + 1):  # the last one says that all are done
        for worker, one in enumerate(team):
            if merge_first:
                one.hear()
            steps = windows[number][worker] if number < len(windows) else 0
            one.train(steps)
            if number >= len(windows) - 1 and not one.course.finished and one.course.standing is Standing.TRAINING:
                one.obey(LEAVING)
            one.hear()
        if any(one.course.finished for one in team):
            break
        said = tuple(one.window() for one in team)
        assert None not in said
        total = sum(one.message for one in team)
        for one in team:
            one.average_done(number, said, total.clone())
    for one in team:
        one.hear()
    assert all(one.course.finished for one in team)
    assert all(torch.equal(one.parameters, team[0].parameters) for one in team)
    return team[0].parameters.tolist()


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
@pytest.mark.parametrize("rebase", [False, True], ids=["paper", "rebase"])
@some
@given(problem=problems(least=2, windows=4), period=st.integers(1, 2))
def test_hpsgd(rebase, normalize, problem, period):
    """The first average begins as soon as it can, and so with a period's steps; after that each takes its time."""
    targets, start, windows = problem
    windows = [[period] * len(targets), *windows]
    member = make_averaging("hpsgd", period=period, rebase=rebase, normalize=normalize)
    expected = reference.hpsgd(start, gradient_of(targets), windows, lr=LR, rebase=rebase, normalize=normalize)
    assert run(member, targets, start, windows, merge_first=False) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["local-sgd", "bmuf", "diloco"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalize"])
@some
@given(problem=problems(), period=st.integers(1, 4), many=st.integers(0, 4))
def test_members_that_wait(name, normalize, problem, period, many):
    """Whole windows of a period, and at the end whatever each worker has left of one."""
    targets, start, (last, *_) = problem
    workers = len(targets)
    left = [steps % period for steps in last]
    windows = [[period] * workers for _ in range(many)] + [left]
    member = make_averaging(name, period=period, normalize=normalize)
    outer = {
        "rate": member.outer.rate,
        "momentum": member.outer.momentum_of(workers),
        "nesterov": member.outer.nesterov,
    }
    written = windows if any(left) else windows[:-1]  # an average in which nobody brings anything moves nothing
    expected = reference.local_sgd(start, gradient_of(targets), written, lr=LR, normalize=normalize, **outer)
    assert run(member, targets, start, windows, merge_first=True) == pytest.approx(expected, abs=1e-9)


def test_a_merge_in_an_open_window_moves_the_replica_and_keeps_what_is_open():
    member = make_averaging("diloco", period=9, overlap=True, rebase=False, outer_rate=1.0, outer_momentum=0.0)
    weight = torch.zeros(1)
    replica = Replica([weight], [], member, workers=2)
    weight += 1.0
    replica.merge(torch.tensor([8.0]), weight=0.5, open_steps=1)
    replica.catch_up()
    assert (replica.shared.item(), weight.item()) == (4.0, 5.0)
    message = torch.empty(1)
    replica.pack_change(message, scale=1.0, brings=True)
    assert (message.item(), weight.item()) == (1.0, 4.0)
