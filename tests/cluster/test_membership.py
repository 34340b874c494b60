"""Workers that come late, are more than the shards, or leave politely; and a cluster made by a user's own script."""

from __future__ import annotations

import re
import sys

from paceline.drivers.served.worker import Worker
from paceline.recipes.assembly import load_data, make_training
from paceline.runs.cluster import WorkerOptions, trusted_recipe
from paceline.traces.journal import Evaluated, WorkerJoined, WorkerLeft
from paceline.traces.journal_files import read_journal
from paceline.training import Batches
from paceline.workers.gradients import accumulate
from tests import warm
from tests.cluster.harness import Cluster
from tests.cluster.test_faults import PACED, assert_every_gradient_ended, assert_stops_and_replays, lines


def work_and_leave(address, *, batches, reason):
    """What a worker of a recipe does, for a few batches."""
    with Worker(address, None) as worker:
        recipe = trusted_recipe(worker.welcome.recipe, WorkerOptions())
        training = make_training(recipe, load_data(recipe))
        worker.hold(training.module)
        worker.ready()
        own = Batches(training)
        for _ in range(batches):
            assert worker.running()
            batch = own.assignment(worker=worker.number, shard=worker.shard, draw=worker.draw, blocks_done=4)
            worker.begin_batch(training.blocks)
            losses, _ = accumulate(
                training.module, batch, training.loss, parts=4, go_on=lambda done: worker.block_done()
            )
            worker.send(losses)
        worker.leave(reason)
        return worker.number, worker.shard


def test_workers_that_come_half_way_share_a_shard_or_leave_politely(tmp_path):
    gather = (("server.gather-seconds", 1),)
    with Cluster(tmp_path, workers=3, k=2, start=2, settings=(*PACED, *gather)) as cluster:
        cluster.until_log("begins with [12] of 3 workers")
        cluster.until_alive({0, 1})
        cluster.until_goes_on()

        spare = cluster.prepare_workers([3])
        cluster.add_workers([2])
        cluster.until_alive({0, 1, 2})
        cluster.until_delivers(2)

        # One more than there are shards: it shares one.
        number, shard = work_and_leave(cluster.address, batches=3, reason="enough for today")
        assert (number, shard) == (3, 0)
        cluster.until_alive({0, 1, 2})
        assert cluster.until_log(r"^worker 3 left: it left \(enough for today\)$")
        (left,) = cluster.events(WorkerLeft)
        assert left.reason == "it left (enough for today)"
        assert cluster.delivered(3) == 3

        # The next one with that number goes on with its batches.
        cluster.let_join(spare)
        cluster.until_alive({0, 1, 2, 3})
        cluster.until_delivers(3)
        assert [(each.shard, each.first_draw) for each in cluster.events(WorkerJoined) if each.worker == 3] == [
            (0, 0),
            (0, 3),
        ]
        assert not lines(cluster, "no worker is left")
        assert_stops_and_replays(cluster)
        assert_every_gradient_ended(cluster)


SCRIPT = """
import os, sys
import torch
import paceline

torch.manual_seed(int(sys.argv[2]))  # the server's parameters count, whatever a worker begins with
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
truth = torch.linspace(-1, 1, 8)


def batch(generator):
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, (inputs @ truth)[:, None]


def loss_of(model):
    inputs, targets = batch(torch.Generator().manual_seed(99))
    return torch.nn.functional.mse_loss(model(inputs), targets).item(), 0.0


def work(port, seed):
    generator = torch.Generator().manual_seed(seed)
    with paceline.Worker(f"127.0.0.1:{port}", model) as worker:
        while worker.running():
            inputs, targets = batch(generator)
            for x, y in worker.blocks(inputs, targets):
                torch.nn.functional.mse_loss(model(x), y).backward()
            worker.send()
    print(f"worker {worker.number} ends with loss {loss_of(model)[0]:.6f}", flush=True)


def serve(folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outcome = paceline.serve(
        model, optimizer, strategy=paceline.LGC(k=2), workers=3, rounds=60, listen="127.0.0.1:0", out=folder,
        evaluate=loss_of, on_open=lambda port: [os.write(opened, b"%d\\n" % port) for _, opened in pipes],
    )
    print(f"server ends: {outcome.reason}, loss {loss_of(model)[0]:.6f}", flush=True)


pipes, children = [os.pipe() for _ in range(3)], []
for seed, (ports, _) in enumerate(pipes):  # processes of their own; no thread has begun
    children.append(os.fork())
    if not children[-1]:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        work(int(os.fdopen(ports).readline()), seed)
        os._exit(0)
serve(sys.argv[1])
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_a_script_with_serve_and_workers_trains_to_a_falling_loss(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    found = warm.run(
        [sys.executable, str(script), str(folder), "5"], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    assert len(re.findall(r"worker [012] ends", found.stdout)) == 3
    (loss,) = re.findall(r"server ends: all rounds are done, loss (0\.\d{6})", found.stdout)
    measured = [record.loss for record in read_journal(folder / "trace.jsonl").records if isinstance(record, Evaluated)]
    assert measured[-1] < 0.1 * measured[0]
    assert float(loss) < 0.1 * measured[0]
