"""paceline.watch in scripts that end: by themselves, with an error, with a rank that is killed or leaves early."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.traces.recorded_run import read_run
from tests import warm
from tests.examples.scripts import ROOT
from tests.integrations.ranks import Network
from tests.launches import free_port, place, run_all

SCRIPT = textwrap.dedent("""
    import os, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import paceline
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sys.argv[2] == "no shared disk" and dist.get_rank() == 1:
        import paceline.drivers.watching.folder as folders
        folders.sees = lambda *place: False
    watch = paceline.watch(model, out=sys.argv[1])
    for step in range(70 if sys.argv[2].startswith("one fails") else 20):
        if sys.argv[2] == f"one fails in {step}" and dist.get_rank() == 1:
            raise SystemExit(3)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    if sys.argv[2] == "destroyed":
        dist.destroy_process_group()
""")
IN_A_MAIN = "def main():\n" + textwrap.indent(SCRIPT, "    ") + "main()\n"  # so the model is gone before the end


def launch(folder, how, network=None):
    """Run the script on two ranks, from nothing to the interpreter's end; return exit codes and what was printed."""
    port, folder = free_port() if network is None else 29500, Path(folder)
    folder.mkdir()
    where = ["ip", "netns", "exec", network.name] if network is not None else []

    def start(rank):
        script = IN_A_MAIN if how == "in a main" else SCRIPT
        command = [*where, sys.executable, "-c", script, str(folder / "run"), how]
        with (folder / f"{rank}.log").open("wb") as log:
            return warm.Popen(command, cwd=ROOT, env=os.environ | place(rank, 2, port), stdout=log, stderr=log)

    began = time.monotonic()
    processes = run_all([functools.partial(start, rank) for rank in range(2)], 60.0)
    texts = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(2)]
    return [process.returncode for process in processes], texts, time.monotonic() - began


@pytest.mark.parametrize("how", ["left open", "destroyed", "no shared disk", "in a main"])
def test_a_script_that_ends_without_closing_its_watch_ends_well(tmp_path, how):
    codes, texts, _ = launch(tmp_path / "launch", how)
    assert codes == [0, 0], texts
    assert texts[0] == f"paceline watches 2 ranks: {tmp_path}/launch/run\n"
    assert texts[1] == ""
    for times in read_run(tmp_path / "launch" / "run").times["rank"].values():
        reason = "the model was deleted" if how == "in a main" else "the script ended"
        assert (len(times.steps), times.ended.reason) == (20, reason)
        assert all(len(each.buckets) == 1 for each in times.steps)
        assert len(times.links) == 2  # at once, and after ten steps


@pytest.mark.parametrize("step", [10, 65])  # the buckets of the one are timed, of the other not
def test_where_a_rank_leaves_the_other_gets_ddps_error_and_nobody_aborts(tmp_path, step):
    codes, texts, _ = launch(tmp_path / "launch", f"one fails in {step}")
    assert codes == [1, 3], texts
    assert "RuntimeError" in texts[0]
    times = read_run(tmp_path / "launch" / "run").times["rank"]
    assert [len(each.steps) for each in times.values()] == [step, step]


def test_a_slow_link_is_timed_at_its_rate(tmp_path):
    with Network() as network:
        shape = ["tc", "-n", network.name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "100mbit"]
        done = subprocess.run([*shape, "burst", "128kb", "latency", "1s"], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"tc tbf: {done.stderr.decode()}")
        codes, texts, _ = launch(tmp_path / "launch", "left open", network)
    assert codes == [0, 0], texts
    for times in read_run(tmp_path / "launch" / "run").times["rank"].values():
        assert 40e6 < times.links[0].bits_per_second < 200e6  # a busy machine is slower; without a limit, thousands
