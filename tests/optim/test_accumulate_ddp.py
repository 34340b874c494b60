"""Accumulation under DistributedDataParallel: two real processes on gloo, for all of these tests.

Each rank is `python -m tests.optim.test_accumulate_ddp FOLDER RANK`: it does all that is asked about below, writes what
it found to FOLDER, and ends.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.optim.accumulate import Accumulate
from tests import warm

pytestmark = pytest.mark.xdist_group("accumulate")  # one pair for all of them

ROOT, WORLD, DEADLINE_SECONDS = Path(__file__).parents[2], 2, 90
SIZES = [[3, 1, 2, 4, 1], [2, 5, 1, 1, 3]]  # of each rank's parts: no two groups are alike, the last is of two
STEPS = 3
KINDS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "scaled": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


# -- the test's side ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.optim.test_accumulate_ddp", str(folder)]
    with contextlib.ExitStack() as files:
        logs = [files.enter_context((folder / f"{rank}.log").open("wb")) for rank in range(WORLD)]
        ranks = [
            warm.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=logs[rank], stderr=logs[rank])
            for rank in range(WORLD)
        ]
        try:
            codes = [process.wait(DEADLINE_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait(10)
    told = "\n".join((folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(WORLD))
    assert codes == [0] * WORLD, told
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_parts_is_what_ddp_makes_of_the_batch_at_once(found, kind):
    """The ranks' parts and batches differ in size; under `unused` some parts leave out what others of a group touch."""
    for rank in found:
        assert len(rank[kind]["apart"]) == 2
        assert max(rank[kind]["apart"]) < 1e-12
        assert min(rank[kind]["sizes"]) > 0.01  # of the gradients that are compared
    assert found[0][kind]["gradients"] == pytest.approx(found[1][kind]["gradients"], rel=1e-12)


def test_ranks_talk_once_for_each_group(found):
    for rank in found:
        assert rank["talks"] == [0, 0, 1, 1, 2]  # after each part's backward


def test_a_loop_that_is_left_lets_the_model_average_again(found):
    for rank in found:
        assert rank["left"] == {"inside": [False] * 2, "after": [True] * 2, "apart": pytest.approx(0, abs=1e-12)}


def test_ssgd_averages_what_was_accumulated(found):
    for rank in found:
        assert rank["ssgd"]["apart"] < 1e-6
        assert rank["ssgd"]["moved"] > 0.01


# -- a rank's side ------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Samples of a positive first feature go through both of its halves, others through one."""

    def __init__(self, *, skips, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.skips = skips
        self.all, self.some = (nn.Linear(2, 2, dtype=dtype) for _ in range(2))

    def forward(self, inputs):
        outputs, rare = self.all(inputs).tanh(), inputs[:, 0] > 0
        return outputs + rare[:, None] * self.some(inputs) if rare.any() or not self.skips else outputs


def parts_of(rank, dtype=torch.float64):
    """A first feature is positive in the first part of a group alone, and in the second group on rank 0 alone."""
    generator = torch.Generator().manual_seed(rank)
    parts = [torch.randn(size, 2, generator=generator, dtype=dtype) for size in SIZES[rank]]
    for number, part in enumerate(parts):
        touches = number == 0 or (number == STEPS and rank == 0)
        part[:, 0] = part[:, 0].abs() if touches else -part[:, 0].abs()
    return parts


def groups_of(parts):
    return [torch.cat(parts[first : first + STEPS]) for first in range(0, len(parts), STEPS)]


def loss_of(model, inputs):
    return (model(inputs) - 0.5).square().mean()


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()


def at_once(rank, options):
    """The gradient of each group, by DDP alone."""
    model, gradients = DistributedDataParallel(Halves(skips=False), **options), []
    for batch in groups_of(parts_of(rank)):
        model.zero_grad()
        loss_of(model, batch).backward()
        gradients.append(gradient_of(model))
    return gradients


def in_parts(rank, kind):
    options = KINDS[kind]
    model = DistributedDataParallel(Halves(skips="find_unused_parameters" in options), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaled")
    accumulate, gradients = Accumulate(model, STEPS), []
    for inputs in accumulate(parts_of(rank)):
        accumulate.backward(scaler.scale(loss_of(model, inputs)))
        if accumulate.ready:
            scaler.unscale_(optimizer)
            gradients.append(gradient_of(model))
            scaler.update()
            optimizer.zero_grad()
    wanted = at_once(rank, options)
    return {
        "apart": [(one - other).abs().max().item() for one, other in zip(gradients, wanted, strict=True)],
        "sizes": [part.abs().max().item() for one in wanted for part in one.chunk(2)],
        "gradients": torch.cat(gradients).tolist(),
    }


def talks(rank):
    """How often gradients have travelled, after each part."""
    model, calls, counts = DistributedDataParallel(Halves(skips=False)), [], []

    def counting(state, bucket):
        calls.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / WORLD)

    model.register_comm_hook(None, counting)
    accumulate = Accumulate(model, STEPS)
    for inputs in accumulate(parts_of(rank)):
        accumulate.backward(loss_of(model, inputs))
        counts.append(len(calls))
        if accumulate.ready:
            model.zero_grad()
    return counts


def left(rank):
    """Loops that are left by a break and by an error, in the middle of a group; then one that is not."""
    model, inside, after = DistributedDataParallel(Halves(skips=False)), [], []
    accumulate = Accumulate(model, STEPS)
    for error in (False, True):
        with contextlib.suppress(ZeroDivisionError):
            for inputs in accumulate(parts_of(rank)):
                accumulate.backward(loss_of(model, inputs))
                inside.append(model.require_backward_grad_sync)
                if not error:
                    break
                _ = 1 / 0
        after.append(model.require_backward_grad_sync)
        accumulate.forget()
    for inputs in accumulate(parts_of(rank)[:STEPS]):
        accumulate.backward(loss_of(model, inputs))
    apart = (gradient_of(model) - at_once(rank, {})[0]).abs().max().item()
    return {"inside": inside, "after": after, "apart": apart}


def ssgd(rank):
    """One epoch with SSGD in parts, and with DDP at once."""
    from paceline import SSGD

    start, model = Halves(skips=False, dtype=torch.float32), Halves(skips=True, dtype=torch.float32)
    whole = DistributedDataParallel(Halves(skips=False, dtype=torch.float32))
    parts, settings = parts_of(rank, torch.float32), {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(whole.parameters(), **settings)
    for batch in groups_of(parts):
        loss_of(whole, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    accumulate = Accumulate(model, STEPS)
    with SSGD(model, optimizer, timeout_seconds=30, silence_seconds=20):
        for inputs in accumulate(parts):
            accumulate.backward(loss_of(model, inputs))
            if accumulate.ready:
                optimizer.step()
                optimizer.zero_grad()
    flat = [nn.utils.parameters_to_vector(one.parameters()).detach() for one in (start, whole, model)]
    return {"apart": (flat[1] - flat[2]).abs().max().item(), "moved": (flat[1] - flat[0]).abs().max().item()}


def main(folder, rank):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timeout)
    found = {kind: in_parts(rank, kind) for kind in KINDS}
    found |= {"talks": talks(rank), "left": left(rank), "ssgd": ssgd(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
