"""`paceline.Worker` and `paceline.serve` in one process: a user's own loop against a real server on loopback."""

import asyncio
import copy
import html
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import paceline
from paceline.codecs import CODECS
from paceline.drivers.served.connection import ServerUnreachableError, WorkerRefused
from paceline.drivers.served.messages import PROTOCOL, Welcome, encode, model_signature
from paceline.drivers.served.settings import Limits
from paceline.traces.journal import Refused, WorkerLeft
from paceline.traces.journal_files import read_journal
from tests.waiting import until, until_there

DEADLINE_SECONDS = 60.0
LIMITS = Limits(silence_seconds=5.0, gather_seconds=30.0)


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def batches(count, size=8):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        inputs = torch.randn(size, 4, generator=generator)
        yield inputs, inputs[:, :3].argmax(1)


@contextmanager
def serving(model, folder, **options):
    """A server in a thread; gives the address, and how it ended once it has."""
    opened, ended = queue.Queue(), []
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"workers": 1, "rounds": 10, "blocks": 4, "limits": LIMITS} | options

    def run():
        try:
            ended.append(
                paceline.serve(
                    model, optimizer, listen="127.0.0.1:0", out=folder / "run", on_open=opened.put, **options
                )
            )
        except BaseException as error:
            ended.append(error)
            opened.put(0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    port = opened.get(timeout=DEADLINE_SECONDS)
    try:
        yield f"127.0.0.1:{port}", ended
    finally:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "the server did not end"


def work(worker, model, source, *, zero=False):
    while worker.running():
        inputs, targets = next(source)
        for x, y in worker.blocks(inputs, targets):
            if zero:
                model.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(x), y).backward()
        worker.send()


@pytest.mark.parametrize("size", [8, 7, 1], ids=["four blocks", "one block: seven is prime", "one sample"])
def test_one_worker_trains_as_a_plain_loop_does(tmp_path, size):
    served, plain = network(), network()
    model = copy.deepcopy(served)
    with serving(served, tmp_path) as (address, ended), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100, size))
    assert ended[0].finished
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches(10, size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    for found, expected in zip(served.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_with_bfloat16_on_the_wire_it_trains_nearly_so(tmp_path):
    exact, rounded = network(), network()
    for index, (served, codec) in enumerate(((exact, "identity"), (rounded, "bfloat16"))):
        model = network()
        with (
            serving(served, tmp_path / str(index), codec=codec) as (address, _),
            paceline.Worker(address, model) as worker,
        ):
            work(worker, model, batches(100))
    pairs = list(zip(exact.parameters(), rounded.parameters(), strict=True))
    assert any(not torch.equal(one, other) for one, other in pairs)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


WORDS = [*CODECS, "qsgd lossless=entropy", "qsgd error-feedback", "bfloat16 error-feedback"]
WORDS += ["one-bit error-feedback=false"]


@pytest.mark.parametrize("codec", ["identity", "qsgd", "qsgd levels=1", "top-k fraction=0.3 error-feedback"])
def test_workers_of_async_follow_a_model_that_others_move(tmp_path, codec):
    """It is sent only to whoever delivered, so a worker gets several changes at once, and works with the last."""
    served = network()
    options = {"codec": codec, "strategy": paceline.Async(), "workers": 3, "rounds": 12}
    with serving(served, tmp_path, **options) as (address, ended), ThreadPoolExecutor(3) as pool:

        def follow(number):
            model = copy.deepcopy(served)
            with paceline.Worker(address, model) as worker:
                work(worker, model, batches(200, 8))

        for done in [pool.submit(follow, number) for number in range(3)]:
            done.result(DEADLINE_SECONDS)
    assert ended[0].finished
    records = read_journal(tmp_path / "run" / "trace.jsonl").records
    assert not [record for record in records if isinstance(record, Refused)]


def test_a_worker_that_needs_a_hundred_rounds_for_a_batch_is_never_refused_and_its_late_work_is_dropped(tmp_path):
    """Of 500 rounds: each of its gradients is of a version that the server sent a hundred models ago."""
    served, rounds = network(), threading.Semaphore(0)
    options = {"strategy": paceline.LGC(k=1), "workers": 2, "rounds": 500, "blocks": 1}
    with serving(served, tmp_path, **options) as (address, ended), ThreadPoolExecutor(1) as pool:

        def hurry():
            model = copy.deepcopy(served)
            with paceline.Worker(address, model, wish=0) as worker:
                while worker.running():
                    inputs, targets = next(batches(1))
                    for x, y in worker.blocks(inputs, targets):
                        nn.functional.cross_entropy(model(x), y).backward()
                    worker.send()
                    rounds.release()
            rounds.release(100)

        model = copy.deepcopy(served)
        with paceline.Worker(address, model, wish=1) as worker:
            hurrying = pool.submit(hurry)
            while worker.running():
                inputs, targets = next(batches(1))
                for x, y in worker.blocks(inputs, targets):
                    assert all(rounds.acquire(timeout=DEADLINE_SECONDS) for _ in range(100))
                    nn.functional.cross_entropy(model(x), y).backward()
                worker.send()
        hurrying.result(DEADLINE_SECONDS)
    assert ended[0].finished
    records = read_journal(tmp_path / "run" / "trace.jsonl").records
    assert not [record for record in records if isinstance(record, Refused | WorkerLeft)]
    dropped = [each for record in records for each in getattr(record, "dropped", ()) if each.worker == 1]
    assert {each.reason for each in dropped} == {"it missed the round after its own too"}
    assert len({each.version for each in dropped}) >= 3


def test_a_worker_whose_block_takes_longer_than_it_may_is_told_what_to_do_and_named_in_the_report(tmp_path):
    served, model = network(), network()
    limits = Limits(silence_seconds=5.0, gather_seconds=30.0, stall_seconds=0.5)
    with serving(served, tmp_path, limits=limits, blocks=1) as (address, ended):

        def stall(worker):
            for inputs, targets in batches(6):
                assert worker.running()
                for x, y in worker.blocks(inputs, targets):
                    until(lambda: worker._connection.end is not None, "the server hangs up", every_seconds=0.05)
                    nn.functional.cross_entropy(model(x), y).backward()
                assert not worker.send()

        why = r"3 times in a row it got no further for 0\.5 s, .* raise server\.stall_seconds"
        with paceline.Worker(address, model, wish=0) as worker, pytest.raises(WorkerRefused, match=why):
            stall(worker)
        model = network()
        with paceline.Worker(address, model, wish=0) as other:
            work(other, model, batches(100))
    assert ended[0].finished
    records = read_journal(tmp_path / "run" / "trace.jsonl").records
    left = [record.reason for record in records if isinstance(record, WorkerLeft)]
    assert left[:2] == 2 * ["no progress for 0.5 s (server.stall_seconds)"]
    (refused,) = (record for record in records if isinstance(record, Refused))
    assert (refused.worker, refused.reason) == (0, left[2])
    assert refused.reason in html.unescape((tmp_path / "run" / "report.html").read_text())


def test_one_batch_that_is_not_finite_ends_nothing_where_one_worker_is_alive(tmp_path):
    served, model, sent = network(), network(), []
    with serving(served, tmp_path) as (address, ended), paceline.Worker(address, model) as worker:
        for number, (inputs, targets) in enumerate(batches(100)):
            if not worker.running():
                break
            for x, y in worker.blocks(inputs * (float("nan") if number in (0, 5, 6) else 1.0), targets):
                nn.functional.cross_entropy(model(x), y).backward()
            sent.append(worker.send())
    assert (ended[0].finished, ended[0].diverged, ended[0].reason) == (True, False, "all rounds are done")
    assert [number for number, went_out in enumerate(sent) if not went_out] == [0, 5, 6]
    assert len(sent) == 13
    records = read_journal(tmp_path / "run" / "trace.jsonl").records
    assert [record.reason for record in records if isinstance(record, Refused)] == 3 * ["not finite"]


def test_a_run_is_not_resumed_with_another_codec(tmp_path):
    served = network()
    model = copy.deepcopy(served)
    with serving(served, tmp_path, codec="qsgd") as (address, _), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100, 8))
    with serving(network(), tmp_path, codec="one-bit", resume=True) as (_, ended):
        pass
    assert "is of a run with codec 'qsgd' (this one has 'one-bit')" in str(ended[0])


@pytest.mark.parametrize("codec", WORDS)
def test_a_script_takes_any_codec_by_its_words_and_leaves_no_thread_behind(tmp_path, codec):
    """A thread that added up a change while the interpreter ended aborted its process."""
    served = network()
    model, before = copy.deepcopy(served), copy.deepcopy(served)
    with serving(served, tmp_path, codec=codec) as (address, ended), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100, 8))
    assert ended[0].finished
    moved = [not torch.equal(*pair) for pair in zip(served.parameters(), before.parameters(), strict=True)]
    assert any(moved)
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-")]
    assert not [
        name for name in ours if not name.startswith("paceline-codec")
    ]  # those wait for the next, and compute not


def test_a_gradient_that_was_taken_off_its_parameter_is_found_again(tmp_path):
    served, model = network(), network()
    with serving(served, tmp_path, blocks=1) as (address, ended), paceline.Worker(address, model) as worker:
        while worker.running():
            inputs, targets = next(batches(1))
            for x, y in worker.blocks(inputs, targets):
                model.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(model(x), y).backward()
            worker.send()
    assert ended[0].finished
    assert not torch.equal(next(served.parameters()), next(network().parameters()))


def test_batch_norm_statistics_reach_the_server(tmp_path):
    served = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = copy.deepcopy(served)
    with serving(served, tmp_path) as (address, _), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100))
    assert int(served[1].num_batches_tracked) == 10 * 4
    assert not torch.equal(served[1].running_mean, torch.zeros(3))


def test_the_server_measures_and_resumes(tmp_path):
    seen = []

    def evaluate(module):
        seen.append(module.training)
        return 0.5, 0.25

    first, model = network(), network()
    with serving(first, tmp_path, evaluate=evaluate) as (address, _), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100))
    assert seen
    assert not any(seen)
    again, model = network(), network()
    with (
        serving(again, tmp_path, rounds=15, resume=True) as (address, ended),
        paceline.Worker(address, model) as worker,
    ):
        assert worker.draw == 10
        work(worker, model, batches(100))
    assert ended[0].finished


def test_another_model_is_refused_in_one_line_and_the_server_goes_on(tmp_path):
    served, model = network(), network()
    with serving(served, tmp_path) as (address, ended):
        first = r"parameter 2\.weight \(5, 8\) float32 here, parameter 2\.weight \(3, 8\) float32 there"
        with (
            pytest.raises(ValueError, match=f"trains another model: the first difference is {first}"),
            paceline.Worker(address, network(outputs=5)),
        ):
            pass
        with paceline.Worker(address, model) as worker:
            work(worker, model, batches(100))
    assert ended[0].finished


def test_misuse_is_told(tmp_path):
    served, model = network(), network()
    with serving(served, tmp_path, rounds=1) as (address, _), paceline.Worker(address, model) as worker:
        with pytest.raises(RuntimeError, match=r"send\(\) comes after a batch"):
            worker.send()
        with pytest.raises(ValueError, match="at least one sample"):
            next(worker.blocks(torch.zeros(0, 4)))
        with pytest.raises(ValueError, match="tensors of one length"):
            next(worker.blocks(torch.zeros(4, 4), torch.zeros(3)))
        work(worker, model, batches(100))


def test_a_worker_without_a_server_gives_up_and_names_it():
    with pytest.raises(ConnectionError, match=r"no server at 127\.0\.0\.1:9 for 0\.5 s"):
        paceline.Worker("127.0.0.1:9", network(), patience_seconds=0.5).__enter__()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    model = network()
    with serving(network(), tmp_path, rounds=1) as (address, _), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100))
    before = (tmp_path / "run" / "trace.jsonl").read_bytes()
    other = network()
    with pytest.raises(ValueError, match="holds a run"):
        paceline.serve(
            other, torch.optim.SGD(other.parameters(), lr=0.1), workers=1, listen="127.0.0.1:0", out=tmp_path / "run"
        )
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == before


def test_a_schedule_that_fails_ends_the_run_with_its_own_error(tmp_path):
    served, model = network(), network()
    optimizer = torch.optim.SGD(served.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    with serving(served, tmp_path, optimizer=optimizer, schedule=schedule) as (address, ended):
        worker = paceline.Worker(address, model, patience_seconds=1.0)
        with pytest.raises(ConnectionError), worker:
            work(worker, model, batches(100))
    assert isinstance(ended[0], ValueError)
    assert "number of total steps is 5" in str(ended[0])


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_run(tmp_path):
    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self):
            return {"odd": {1, 2}}

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"schedule\.odd is a set"):
        paceline.serve(model, optimizer, workers=1, listen="127.0.0.1:0", out=tmp_path, schedule=Odd(optimizer))


def test_a_loop_that_is_left_early_is_told_and_not_sent(tmp_path):
    served, model = network(), network()
    with serving(served, tmp_path, rounds=1) as (address, _), paceline.Worker(address, model) as worker:
        assert worker.running()
        for x, y in worker.blocks(*next(batches(1))):
            nn.functional.cross_entropy(model(x), y).backward()
            break
        worker.block_done()
        with pytest.raises(RuntimeError, match="left early"):
            worker.send()
        work(worker, model, batches(100))


def test_frozen_weights_must_be_the_same_on_both_sides(tmp_path):
    def half_frozen(value):
        model = network()
        model[0].requires_grad_(False)
        model[0].weight.data.fill_(value)
        return model

    served, model = half_frozen(1.0), half_frozen(1.0)
    with serving(served, tmp_path) as (address, ended):
        same_shapes = "trains another model: the values of its frozen parameters differ"
        with pytest.raises(ValueError, match=same_shapes), paceline.Worker(address, half_frozen(2.0)):
            pass
        with paceline.Worker(address, model) as worker:
            work(worker, model, batches(100))
    assert ended[0].finished
    other = half_frozen(2.0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is of another model"):
        paceline.serve(other, optimizer, workers=1, listen="127.0.0.1:0", out=tmp_path / "run", resume=True)


def test_a_second_server_on_one_run_is_refused(tmp_path):
    served, model, other = network(), network(), network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with serving(served, tmp_path, checkpoint_every=1) as (address, ended), paceline.Worker(address, model) as worker:
        assert worker.running()
        until_there(tmp_path / "run" / "checkpoint-00000000" / "manifest.json")
        with pytest.raises(ValueError, match="another process writes it"):
            paceline.serve(other, optimizer, workers=1, listen="127.0.0.1:0", out=tmp_path / "run", resume=True)
        work(worker, model, batches(100))
    assert ended[0].finished


def test_a_batch_longer_than_the_silence_allowed_is_no_silence(tmp_path):
    served, model = network(), network()
    limits = Limits(silence_seconds=1.0, gather_seconds=30.0)
    once = {"rounds": 1, "blocks": 1, "limits": limits}
    with serving(served, tmp_path, **once) as (address, ended), paceline.Worker(address, model) as worker:
        assert worker.running()
        for x, y in worker.blocks(*next(batches(1))):
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(2.0)  # computing that takes twice as long as silence may last
        worker.send()
        assert not worker.running()
    assert ended[0].finished


def test_a_port_that_is_taken_is_told(tmp_path):
    served, model, other = network(), network(), network()
    with serving(served, tmp_path, rounds=1) as (address, _), paceline.Worker(address, model) as worker:
        with pytest.raises(OSError, match="cannot listen on"):
            paceline.serve(
                other, torch.optim.SGD(other.parameters(), lr=0.1), workers=1, listen=address, out=tmp_path / "other"
            )
        work(worker, model, batches(100))


@contextmanager
def serving_badly(*, welcomes):
    """A server that welcomes so many, and loses every connection; gives its address, and a list of its connections."""
    connections = []
    welcome = Welcome(
        protocol=PROTOCOL, worker=0, shard=0, first_draw=0, blocks=4, codec="identity", seed=0,
        signature=model_signature(network()), silence_seconds=15.0, recipe={},
    )  # fmt: skip

    async def serve_badly(reader, writer):
        connections.append(writer)
        await reader.readexactly(9)
        if len(connections) <= welcomes:
            writer.write(encode(welcome))
            await writer.drain()
        writer.close()

    def listen(ready, stop):
        async def run():
            server = await asyncio.start_server(serve_badly, "127.0.0.1", 0)
            ready.put(server.sockets[0].getsockname()[1])
            while not stop.is_set():
                await asyncio.sleep(0.02)
            server.close()

        asyncio.run(run())

    ready, stop = queue.Queue(), threading.Event()
    thread = threading.Thread(target=listen, args=(ready, stop), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{ready.get(timeout=10)}", connections
    finally:
        stop.set()
        thread.join(DEADLINE_SECONDS)


def test_patience_counts_from_the_last_progress_and_not_from_the_last_connection():
    """A server that welcomes, and loses every connection before a model comes, is given up all the same."""
    with serving_badly(welcomes=1000) as (address, connections):
        worker = paceline.Worker(address, network(), patience_seconds=1.0)
        with pytest.raises(ServerUnreachableError, match=r"no model from the server at .* for 1 s"), worker:
            worker.running()
        assert len(connections) > 2


def test_only_a_server_that_was_never_met_is_suspected_to_want_keys():
    with serving_badly(welcomes=0) as (address, _):
        stranger = paceline.Worker(address, network(), patience_seconds=0.5)
        with pytest.raises(ServerUnreachableError, match=r"it hung up: does the server want TLS keys\?$"), stranger:
            pass
    with serving_badly(welcomes=1) as (address, _):
        worker = paceline.Worker(address, network(), patience_seconds=0.5)
        with pytest.raises(ServerUnreachableError, match=r"it hung up before it answered$"), worker:
            worker.running()


def test_more_workers_than_shards_share_them_up_to_the_most(tmp_path):
    model = network()
    with (
        serving(network(), tmp_path, workers=1, rounds=2) as (address, ended),
        paceline.Worker(address, model) as first,
        paceline.Worker(address, network()) as second,
    ):
        assert [(each.number, each.shard) for each in (first, second)] == [(0, 0), (1, 0)]
        third = paceline.Worker(address, network(), patience_seconds=0.3)
        with pytest.raises(ServerUnreachableError, match=r"2 workers are here, and that is the most"), third:
            pass
        second.leave()
        work(first, model, batches(100))
    assert ended[0].finished


@pytest.mark.parametrize(
    ("address", "model"), [(torch.nn.Linear(2, 1), "127.0.0.1:29400"), (("127.0.0.1", 29400), torch.nn.Linear(2, 1))]
)
def test_arguments_in_another_order_are_told_apart(address, model):
    with pytest.raises(
        ValueError, match=r"the address comes first, then the model: Worker\('host:29400', model\), not"
    ):
        paceline.Worker(address, model)
