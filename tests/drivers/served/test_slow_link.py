"""A link so slow that a body takes longer than silence and stall limits: rounds are done, and nobody is given up."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from paceline import Full, Worker
from paceline.drivers.served.run import open_run
from paceline.drivers.served.settings import Limits, ServerSettings
from paceline.traces.journal import TRACE, StepRecord, WorkerJoined, WorkerLeft
from paceline.traces.journal_files import read_journal
from tests.slow_proxy import SlowLink

pytestmark = pytest.mark.slow  # it waits for eight seconds
PARAMETERS, BODY_SECONDS = 40_000, 4.0
LIMITS = Limits(silence_seconds=1.0, stall_seconds=3.0)  # 64 KiB take 1.6 s
GIVE_UP_SECONDS = 40.0


def work(address: str) -> None:
    model = nn.Linear(PARAMETERS, 1, bias=False)
    with Worker(address, model, patience_seconds=20.0, local=False) as worker:
        while worker.running():
            for inputs in worker.blocks(torch.ones(1, PARAMETERS)):
                model(inputs).sum().backward()
            worker.send()


def kinds_of_a_run(folder) -> tuple[list[type], list[int]]:
    """Return the kinds of a run's records, and how often each worker connected."""
    model = nn.Linear(PARAMETERS, 1, bias=False)
    settings = ServerSettings(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=None,
        strategy=Full(),
        rounds=1,
        workers=2,
        folder=folder,
        limits=LIMITS,
    )
    links: list[SlowLink] = []
    workers: list[threading.Thread] = []

    def opened(port: int) -> None:
        for _ in range(2):
            rate = 4 * PARAMETERS / BODY_SECONDS
            links.append(SlowLink(f"127.0.0.1:{port}", bytes_per_second=rate))
            workers.append(threading.Thread(target=work, args=(links[-1].address,), daemon=True))
            workers[-1].start()

    async def run() -> None:
        served = open_run(settings)
        asyncio.get_running_loop().call_later(GIVE_UP_SECONDS, served.stop, "it took too long")
        await served.serve(("127.0.0.1", 0), open=True, on_open=opened)

    try:
        asyncio.run(run())
    finally:
        for link in links:
            link.bytes_per_second = 1e9
        for worker in workers:
            worker.join(10)
        for link in links:
            link.close()
    return [type(record) for record in read_journal(folder / TRACE).records], [link.connections for link in links]


def test_a_body_that_takes_longer_than_every_limit_arrives_and_nobody_reconnects(tmp_path) -> None:
    for attempt in range(3):  # beside other work a thread may rest for seconds, and then a limit is right to end it
        folder = tmp_path / str(attempt)
        folder.mkdir()
        kinds, connections = kinds_of_a_run(folder)
        assert kinds.count(StepRecord) == 1
        if connections == [1, 1]:
            break
    assert connections == [1, 1]
    assert kinds.count(WorkerJoined) == 2
    assert WorkerLeft not in kinds
