"""The examples for slow networks: fewer bytes than DDP, training that learns, and replicas that are equal."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess

import pytest
import torch

from experiments.core.hosts import why_not
from tests.docs.commands import commands_of
from tests.docs.pages import blocks
from tests.examples.scripts import EXAMPLES, run

SENT = r"a rank sends ([\d,]+) bytes a step, plain DDP ([\d,]+)"


def test_a_codec_sends_an_eighth_of_the_bytes_and_learns_as_plain_ddp_does():
    arguments = ("--epochs", "3")
    plain, quiet = run("ddp_codec.py", "--codec", "none", *arguments, ranks=2)
    coded, _ = run("ddp_codec.py", "--codec", "qsgd levels=7", *arguments, ranks=2)
    assert "epoch" not in quiet, "only the first rank prints"
    without, sent = (_numbers(SENT, text)[0] for text in (plain, coded))
    assert without[0] == without[1] == sent[1]
    assert 7.5 * sent[0] < sent[1] < 8 * sent[0]
    losses = [_losses(text) for text in (plain, coded)]
    assert len(losses[0]) == len(losses[1]) == 4  # the last epoch is without an exchange
    assert losses[0][2] < 0.3 * losses[0][0]
    assert losses[1][2] < 1.1 * losses[0][2]


def test_four_ranks_send_an_eighth_of_the_ring_of_ddp_each():
    sent, ring = _numbers(SENT, run("ddp_codec.py", "--epochs", "1", ranks=4)[0])[0]
    assert ring == 2 * 3 / 4 * 4 * (64 * 512 + 512 * 512 + 512 * 10 + 512 + 512 + 10)
    assert 7.5 * sent < ring < 8 * sent, "and no probe of the link is in it"


def test_the_slow_loopback_of_the_guide_shows_what_a_codec_saves():
    """The guide's own commands: those for the link in a network namespace, those for torchrun on ranks in it."""
    if reason := why_not():
        pytest.skip(reason)
    (block,) = (each for each in blocks("guides/slow-network.md", "sh") if "tbf" in each)
    first, *lines, last = (shlex.split(line, comments=True) for line in commands_of(block))
    assert (first, last) == (["sudo", "unshare", "--net"], ["exit"])
    prefix, times = ["torchrun", "--nproc-per-node", "2", "examples/ddp_codec.py"], []
    with slow_network([line for line in lines if line[0] != "torchrun"]) as network:
        for line in lines:
            if line[0] == "torchrun":
                assert line[:4] == prefix
                text = run("ddp_codec.py", *line[4:], ranks=2, network=network)[0]
                times.append([float(each) for each in re.findall(r"(\d+\.\d) ms a step", text)])
    plain, coded = times
    assert coded[1] < plain[1] / 2, "the second epoch, without the loading of kernels"


@contextlib.contextmanager
def slow_network(commands):
    """A network namespace in which these commands were run; its name."""
    name = f"pe{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for command in commands:
            subprocess.run(["ip", "netns", "exec", name, *command], check=True, timeout=20)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def test_hpsgd_goes_on_from_the_last_epoch_that_all_ranks_have_saved(tmp_path):
    arguments = ("--folder", tmp_path, "--codec", "qsgd levels=7")
    first, _ = run("hpsgd_torchrun.py", *arguments, "--epochs", "2", ranks=2)
    assert [epoch for epoch, _, _ in _epochs(first)] == [1, 2]
    (tmp_path / "epoch-2-rank-1.pt").unlink()  # as if this rank had died before it saved
    then, _ = run("hpsgd_torchrun.py", *arguments, "--epochs", "4", ranks=2)
    assert [(epoch, steps) for epoch, steps, _ in _epochs(then)] == [(2, 48), (3, 72), (4, 96)]
    assert _epochs(then)[-1][2] > 70
    states = [torch.load(tmp_path / f"epoch-4-rank-{rank}.pt", weights_only=True) for rank in range(2)]
    weights = [torch.cat([each.flatten() for each in state["model"].values()]) for state in states]
    assert torch.equal(*weights)
    assert {path.name for path in tmp_path.iterdir()} == {f"epoch-{e}-rank-{r}.pt" for e in (3, 4) for r in (0, 1)}


def test_hpsgd_overwrites_no_checkpoint_of_another_number_of_ranks(tmp_path):
    for rank in range(2):
        torch.save({}, tmp_path / f"epoch-7-rank-{rank}.pt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    texts = run("hpsgd_torchrun.py", "--folder", tmp_path, "--epochs", "1", ranks=3, ends_with=1)
    assert all("has no checkpoint of rank 2: begin anew in another --folder" in text for text in texts)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_ranks_hold_one_model_with_its_buffers_and_an_evaluation_changes_none(tmp_path):
    text = (EXAMPLES / "hpsgd_torchrun.py").read_text(encoding="utf-8")
    layers = "torch.nn.BatchNorm1d(512), torch.nn.ReLU(), torch.nn.Dropout(0.3), "
    for line, others in {
        "torch.nn.ReLU(), ": layers,
        "        with torch.inference_mode():\n": "        kept = [each.clone() for each in model.buffers()]\n{}",
        "        if rank == 0:\n": "        assert all(map(torch.equal, kept, model.buffers()))\n{}",
    }.items():
        assert text.count(line) == 1
        text = text.replace(line, others.format(line))
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    run(tmp_path / "own.py", "--epochs", "1", "--folder", tmp_path, ranks=2)
    one, other = (torch.load(tmp_path / f"epoch-1-rank-{r}.pt", weights_only=True)["model"] for r in (0, 1))
    assert one["1.num_batches_tracked"] > 0
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sites_share_buffers_and_bear_weights_without_a_gradient(tmp_path):
    plain = (EXAMPLES / "diloco_two_sites.py").read_text(encoding="utf-8")
    layers = "torch.nn.BatchNorm1d(512), torch.nn.ReLU(), "
    frozen = "model[0].bias.requires_grad_(False)\n"
    unused = 'model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))\n'
    changed = plain.replace("torch.nn.ReLU(), ", layers).replace("\noptimizer = ", f"\n{frozen}{unused}optimizer = ")
    (tmp_path / "own.py").write_text(changed, encoding="utf-8")
    text, *_ = run(tmp_path / "own.py", "--ranks-per-site", "2", "--period", "5", "--windows", "2", ranks=4)
    assert "largest difference between two ranks: 0.0\n" in text
    assert _losses(text)[-1] < _losses(text)[0]


def test_two_sites_of_two_ranks_train_one_model_and_meet_once_in_a_window():
    text, *others = run("diloco_two_sites.py", "--ranks-per-site", "2", "--period", "10", "--windows", "6", ranks=4)
    assert not any("loss" in each for each in others), "only the first rank prints"
    losses = _losses(text)
    assert len(losses) == 7
    assert losses[-1] < 0.3 * losses[0]
    assert "largest difference between two ranks: 0.0\n" in text
    sent = _numbers(r"sent to the other site ([\d,]+) bytes", text)[-1][0]
    [[plain]] = _numbers(r"DDP would have sent ([\d,]+) bytes", text)
    assert 0 < 10 * sent < plain


def _losses(text):
    return [float(each) for each in re.findall(r"loss (\d+\.\d+)", text)]


def _epochs(text):
    found = re.findall(r"epoch (\d+): accuracy (\d+\.\d)%, (\d+) steps", text)
    return [(int(epoch), int(steps), float(accuracy)) for epoch, accuracy, steps in found]


def _numbers(pattern, text):
    """Return the numbers of each match, as whole numbers."""
    found = [match.groups() for match in re.finditer(pattern, text)]
    assert found, text
    return [[int(each.replace(",", "")) for each in groups] for groups in found]
