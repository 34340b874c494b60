"""Step times of a run with a server: they add up, agree with the journal, and tell a slow link from slow computing."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline import Full, Worker
from paceline.drivers.served.messages import Gradient
from paceline.drivers.served.run import open_run
from paceline.drivers.served.settings import ServerSettings
from paceline.drivers.served.times import RunTimes, bounded
from paceline.traces.journal import TRACE, StepRecord
from paceline.traces.journal_files import read_journal
from paceline.traces.recorded_run import read_run
from paceline.traces.step_clock import StepClock, register_clock
from paceline.traces.step_times import ServerTimes, StepTimes, read_times, times_path
from tests.slow_proxy import SlowLink

PARAMETERS = 80_000  # 320 kB each way
ROUNDING = 5e-6  # some durations, each rounded to a microsecond
PAUSE_SECONDS = 0.02
LINK_SECONDS = 0.1  # of a model, or a gradient, on the slow link
GIVE_UP_SECONDS = 60.0
NOTHING, IN_INPUT, IN_FORWARD, IN_BACKWARD, ON_SLOW_LINK = range(5)


class _Sleeps(torch.autograd.Function):
    """Sleeps in its backward pass."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE_SECONDS)
        return gradient


class Network(nn.Module):
    """One layer; slow where it is told to be."""

    def __init__(self, slow: int = NOTHING) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(PARAMETERS, 1, bias=False), slow

    def forward(self, inputs):
        if self.slow == IN_FORWARD:
            time.sleep(PAUSE_SECONDS)
        outputs = self.layer(inputs)
        return {"logits": [_Sleeps.apply(outputs) if self.slow == IN_BACKWARD else outputs]}


def work(address: str, slow: int, ended: dict[int, tuple[Network, list[StepTimes]]]) -> None:
    """Train until it is over, watched as a script would be; leave the model and what its clock has seen in `ended`."""
    model, seen = Network(slow), list[StepTimes]()
    clock = StepClock(seen.append)
    register_clock(model, clock)
    with Worker(address, model, patience_seconds=20.0, wish=slow, local=slow == NOTHING) as worker:
        while worker.running():
            if slow == IN_INPUT:
                time.sleep(PAUSE_SECONDS)
            for inputs in worker.blocks(torch.ones(4, PARAMETERS)):  # two of two samples
                model(inputs)["logits"][0].mean().backward()
            worker.send()
            clock.end_step()
    ended[slow] = model, seen


def serve(folder: Path, *, rounds: int, resume: bool = False) -> dict[int, tuple[Network, list[StepTimes]]]:
    """Train to the end with five workers, of whom four are slow, each for a reason of its own."""
    model = Network()
    settings = ServerSettings(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        schedule=None,
        strategy=Full(),
        rounds=rounds,
        workers=5,
        folder=folder,
        blocks=2,
    )
    ended: dict[int, tuple[Network, list[StepTimes]]] = {}
    threads: list[threading.Thread] = []
    links: list[SlowLink] = []

    def opened(port: int) -> None:
        links.append(SlowLink(f"127.0.0.1:{port}", bytes_per_second=4 * PARAMETERS / LINK_SECONDS))
        for slow in range(5):
            address = links[0].address if slow == ON_SLOW_LINK else f"127.0.0.1:{port}"
            threads.append(threading.Thread(target=work, args=(address, slow, ended), daemon=True))
            threads[-1].start()

    async def run() -> None:
        served = open_run(settings, resume=resume)
        asyncio.get_running_loop().call_later(GIVE_UP_SECONDS, served.stop, "it took too long")
        outcome = await served.serve(("127.0.0.1", 0), open=True, on_open=opened)
        assert outcome.finished, outcome

    try:
        asyncio.run(run())
    finally:
        for thread in threads:
            thread.join(20)
        for link in links:
            link.close()
    return ended


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of six rounds that went on to nine: its folder, and the workers of its second life."""
    folder = tmp_path_factory.mktemp("served")
    serve(folder, rounds=6)
    return folder, serve(folder, rounds=9, resume=True)


@pytest.fixture(scope="module")
def folder(ran):
    return ran[0]


pytestmark = pytest.mark.xdist_group("served_times")  # one run for all of them


def test_every_gradient_of_the_journal_has_its_times_and_they_add_up(folder):
    run = read_run(folder)
    arrivals = {
        (arrival.worker, arrival.draw): arrival
        for record in read_journal(folder / TRACE).records
        if isinstance(record, StepRecord)
        for arrival in record.arrivals
    }
    found = {(worker, step.step): step for worker, times in run.times["worker"].items() for step in times.steps}
    assert found.keys() == arrivals.keys()
    assert len(found) == 5 * 9
    for key, step in found.items():
        arrival, trip = arrivals[key], step.trip
        assert step.version == arrival.version
        assert step.started_seconds + step.seconds == pytest.approx(arrival.at_seconds, abs=ROUNDING)
        assert step.seconds - trip.held_seconds == pytest.approx(arrival.transfer_seconds, abs=ROUNDING)
        assert step.computing_seconds + step.wait_seconds <= step.seconds + ROUNDING
        assert step.computing_seconds + trip.behind_seconds <= trip.held_seconds + ROUNDING
        assert trip.down_seconds + trip.up_seconds + trip.decode_seconds <= arrival.transfer_seconds + ROUNDING
        assert step.processor_seconds > 0
    assert all(times.ended.reason == "all rounds are done" for times in run.times["worker"].values())


def test_the_server_s_own_time_lies_between_the_closing_gradient_and_the_next_model(folder):
    run = read_run(folder)
    server = {step.version: step for step in run.times["server"][0].server}
    closed = {r.version: r.at_seconds for r in read_journal(folder / TRACE).records if isinstance(r, StepRecord)}
    assert {version: step.closed_seconds for version, step in server.items()} == closed
    handed = 0
    for times in run.times["worker"].values():
        for step in times.steps:
            before = server.get(step.version - 1)
            if before is None or step.version == 6:  # workers join anew
                continue
            stepped = before.closed_seconds + before.step_seconds
            assert stepped - ROUNDING <= step.started_seconds <= stepped + before.send_seconds + ROUNDING
            handed += 1
    assert handed == 5 * 7
    assert all(step.step_seconds > 0 and step.decode_seconds > 0 for step in server.values())


def test_what_is_slow_shows_in_its_phase_and_a_slow_link_in_none(folder):
    times = read_run(folder).times["worker"]

    def least(slow: int, of) -> float:
        return min(of(step) for step in times[slow].steps)

    assert least(IN_INPUT, lambda step: step.input_seconds) >= PAUSE_SECONDS
    assert least(IN_FORWARD, lambda step: step.forward_seconds) >= 2 * PAUSE_SECONDS  # in each of two blocks
    assert least(IN_BACKWARD, lambda step: step.backward_seconds) >= 2 * PAUSE_SECONDS
    for way in ("down", "up"):
        on_link = least(ON_SLOW_LINK, lambda step, way=way: getattr(step.trip, f"{way}_seconds"))
        assert on_link >= LINK_SECONDS / 3  # the first slice comes at once
        assert least(IN_INPUT, lambda step, way=way: getattr(step.trip, f"{way}_seconds")) < on_link
        assert least(ON_SLOW_LINK, lambda step, way=way: getattr(step.trip, f"{way}_bytes")) >= 4 * PARAMETERS
        assert least(NOTHING, lambda step, way=way: getattr(step.trip, f"{way}_bytes")) == 0  # in shared memory
    assert least(ON_SLOW_LINK, lambda step: step.wait_seconds) >= 2 * LINK_SECONDS / 3
    assert least(ON_SLOW_LINK, lambda step: step.computing_seconds) < PAUSE_SECONDS


def test_a_watched_worker_waits_for_its_server_and_has_no_hooks_left(ran):
    """All wait for the one on the slow link, whose own way is as long."""
    _, workers = ran
    assert sorted(workers) == list(range(5))
    for model, steps in workers.values():
        assert len(steps) == 3
        assert sum(step.wait_seconds for step in steps) >= LINK_SECONDS
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_links_have_a_rate_each_way_where_there_is_a_wire(folder):
    run = read_run(folder)
    down = [link for link in run.times["server"][0].links if link.to == ON_SLOW_LINK]
    up = run.times["worker"][ON_SLOW_LINK].links
    assert len(down) == len(up) > 0
    most = 3 * 8 * 4 * PARAMETERS / LINK_SECONDS
    assert all(0 < link.bits_per_second <= most for link in (*down, *up))
    assert all(0 <= link.latency_seconds <= link.seconds for link in (*down, *up))
    assert not run.times["worker"][NOTHING].links
    assert "shared memory" in run.times["worker"][NOTHING].began.notes[0]


# -- what a worker claims --------------------------------------------------------------------------------------------

seconds = st.floats(0, 1e9)


@given(
    claim=st.builds(
        Gradient,
        version=st.just(3),
        draw=st.just(7),
        blocks_done=st.just(1),
        blocks=st.just(1),
        work_seconds=seconds,
        held_seconds=seconds,
        samples=st.just(0),
        loss_mean=st.none(),
        loss_variance=st.none(),
        payload_bytes=st.just(4),
        buffer_bytes=st.just(0),
        input_seconds=seconds,
        forward_seconds=seconds,
        backward_seconds=seconds,
        behind_seconds=seconds,
        processor_seconds=st.none() | seconds,
        down_seconds=seconds,
        down_bytes=st.integers(0, 2**53),
    ),
    seen=st.floats(0, 1e6),
)
def test_no_claim_of_a_worker_goes_beyond_what_the_server_has_seen(claim, seen):
    times = bounded(claim, seconds=seen, most_down_bytes=1000)
    slack = 1e-9 * max(1.0, seen)
    assert times.seconds == seen
    assert times.computing_seconds + times.wait_seconds <= seen + slack
    assert times.computing_seconds + times.trip.behind_seconds <= times.trip.held_seconds + slack
    assert 0 <= times.trip.down_seconds <= seen - times.trip.held_seconds
    assert times.trip.down_bytes <= 1000
    assert times.wait_seconds == pytest.approx(seen - times.trip.held_seconds + times.trip.behind_seconds)


# -- the disk ----------------------------------------------------------------------------------------------------------


def write_some(times: RunTimes, first: int, count: int) -> None:
    for number in range(first, first + count):
        step = StepTimes(step=number, version=number, started_seconds=float(number), seconds=1.0)
        times.gradient(0, step, arrived_seconds=number + 1.0, least_round_trip_seconds=lambda: None)
        server = ServerTimes(
            version=number, closed_seconds=number + 1.0, step_seconds=0.1, send_seconds=0.1, decode_seconds=0.1
        )
        times.stepped(server)


def test_a_killed_server_s_files_are_read_and_its_successor_goes_on_with_them(tmp_path):
    killed, path = RunTimes(tmp_path, workers=1), times_path(tmp_path, "worker", 0)
    killed.joined(0, host="node-7 pid 4", local=False)
    write_some(killed, 0, 5)  # and nothing is closed
    path.write_bytes(path.read_bytes()[:-7])
    before = read_times(path)
    assert (before.torn, [step.step for step in before.steps], before.began.host) == (True, [0, 1, 2, 3], "node-7")
    again = RunTimes(tmp_path, workers=1)
    again.joined(0, host="node-8 pid 4", local=False)
    write_some(again, 3, 3)
    again.close(9.0, "all rounds are done")
    after, server = read_times(path), read_times(times_path(tmp_path, "server"))
    assert [step.step for step in after.steps] == [0, 1, 2, 3, 4, 5]
    assert [step.version for step in server.server] == [0, 1, 2, 3, 4, 5]
    assert after.ended is not None
    assert not after.torn


def test_a_disk_that_refuses_is_noted_and_nothing_is_raised(tmp_path):
    (tmp_path / "times").write_text("a file is in the way")
    times = RunTimes(tmp_path, workers=1)
    times.joined(0, host="node-7", local=False)
    write_some(times, 0, 3)
    assert "cannot write" in times.error
    times.close(1.0, "all rounds are done")


def test_a_worker_that_comes_again_adds_no_line_and_holds_no_file_while_it_is_away(tmp_path):
    times = RunTimes(tmp_path, workers=1)
    path = times_path(tmp_path, "worker", 0)
    for step in range(3):
        times.joined(0, host="node-7", local=False)
        times.gradient(
            0,
            StepTimes(step=step, started_seconds=float(step), seconds=1.0),
            arrived_seconds=step + 1.0,
            least_round_trip_seconds=lambda: None,
        )
        times.left(0)
        assert times._writers["worker", 0]._file == -1
    times.joined(0, host="node-8", local=False)
    times.close(4.0, "over")
    assert path.read_bytes().count(b"times_began") == 2
    assert [each.step for each in read_times(path).steps] == [0, 1, 2]
    assert read_times(path).began.host == "node-8"
