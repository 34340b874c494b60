"""In a notebook the thread of a cell runs an event loop: training and serving work there as they do in a script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import pytest
import torch
from torch import nn

import paceline
from paceline import Recipe
from paceline.drivers.served.settings import EvaluateError
from paceline.runs.event_loops import run_to_end
from paceline.traces.checkpoints import read_newest

DEADLINE_SECONDS = 60.0
SMALL = Recipe(rounds=6).with_strategy("full").with_settings(
    cluster={"workers": 1}, data={"split": "iid"}, evaluate_every=6, target_loss=None
)  # fmt: skip


def in_a_cell(call):
    """Call a function where a loop runs, as a notebook does."""

    async def cell():
        return call()

    return asyncio.run(cell())


def net(input_shape, classes):
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), classes))


def network():
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def work(address):
    model = network()
    with contextlib.suppress(ConnectionError), paceline.Worker(address, model, patience_seconds=10.0) as worker:
        while worker.running():
            for inputs in worker.blocks(torch.ones(4, 3)):
                (model(inputs) - 1).square().mean().backward()
            worker.send()


def serve(tmp_path, **options):
    model, threads = network(), []

    def opened(port):
        threads.append(threading.Thread(target=work, args=(f"127.0.0.1:{port}",), daemon=True))
        threads[0].start()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"workers": 1, "rounds": 5, "listen": "127.0.0.1:0", "out": tmp_path / "run", "on_open": opened} | options
    try:
        return paceline.serve(model, optimizer, **options), model.weight.detach().clone()
    finally:
        for thread in threads:
            thread.join(20)


def test_training_in_a_notebook_comes_to_what_it_comes_to_in_a_script(tmp_path):
    script = paceline.train(SMALL, model=net, out=tmp_path / "script")
    notebook = in_a_cell(lambda: paceline.train(SMALL, model=net, out=tmp_path / "notebook"))
    assert notebook.outcome.finished
    assert torch.equal(script.result.parameters, notebook.result.parameters)
    assert (tmp_path / "notebook" / "report.html").is_file()


def test_so_does_serving(tmp_path):
    script, weight = serve(tmp_path / "script")
    notebook, other = in_a_cell(lambda: serve(tmp_path / "notebook"))
    assert script.finished
    assert notebook.finished
    assert torch.equal(weight, other)


def test_what_is_raised_is_raised_in_the_cell(tmp_path):
    def evaluate(model):
        raise ZeroDivisionError("mine")

    with pytest.raises(EvaluateError, match="ZeroDivisionError: mine"):
        in_a_cell(lambda: serve(tmp_path, evaluate=evaluate, rounds=100_000))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_cell_stops_the_run_with_a_checkpoint_and_gives_signals_back(number, tmp_path):
    sent = []

    def stop(status):
        if status.round >= 2 and not sent:
            sent.append(os.kill(os.getpid(), number))

    before = signal.getsignal(number)
    endless = SMALL.with_settings(rounds=1_000_000)
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {number.name}"):
        in_a_cell(lambda: paceline.train(endless, model=net, out=tmp_path / "run", on_standing=stop))
    assert read_newest(tmp_path / "run")[0].version >= 2
    assert signal.getsignal(number) == before


def test_a_second_interrupt_waits_for_nothing_and_cancels_the_run():
    cancelled = threading.Event()

    async def deaf(reason):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while reason() is None:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(DEADLINE_SECONDS)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_to_end(deaf))
    assert cancelled.wait(DEADLINE_SECONDS)
