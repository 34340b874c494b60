"""One rank of the benchmark `links`: `python -m benchmarks.links_rank FOLDER RANK PLAN`; PLAN is a `Plan` as JSON.

Lane after lane in the same two processes: a new model, DistributedDataParallel, a hook, steps. Rank 0 writes a line for
each lane to FOLDER/lanes.jsonl: the seconds of its steps, and what went out of its network interface, by the kernel's
count, so that headers, acknowledgements and padding are in it and no hook is believed about itself.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import QSGD, BFloat16, Codec, ErrorFeedback, Identity, OneBit, PowerSGD, Sparsifier, TopK
from paceline.drivers.ddp import compress

WARM_UP_STEPS = 4  # DDP makes its buckets anew after the first, PyTorch's power-sgd begins with the third
TIMEOUT = datetime.timedelta(seconds=60)
ONE_BUCKET_MB = 1000.0

OURS: dict[str, Callable[[], Codec]] = {
    "identity": Identity,
    "bfloat16": BFloat16,
    "one-bit + error feedback": lambda: ErrorFeedback(OneBit()),
    "qsgd, 7 levels": lambda: QSGD(levels=7),
    "qsgd, 7 levels, entropy": lambda: QSGD(levels=7, lossless="entropy"),
    "qsgd, 1 level, elias": lambda: QSGD(levels=1, lossless="elias"),
    "sparsifier": Sparsifier,
    "top-k, 1 % + error feedback": lambda: ErrorFeedback(TopK(fraction=0.01)),
    "power-sgd, rank 1 + error feedback": lambda: ErrorFeedback(PowerSGD(rank=1)),
    "power-sgd, rank 4 + error feedback": lambda: ErrorFeedback(PowerSGD(rank=4)),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do."""

    lanes: list[str]
    widths: list[int]
    batch: int
    steps: int


def network(widths: list[int]) -> nn.Sequential:
    """Fully connected layers: many parameters for their computing, so that the link is what is measured."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def hooked(lane: str, module: nn.Module) -> DistributedDataParallel:
    """The model with the lane's hook; PyTorch's power-sgd needs one bucket on gloo, the others have DDP's own."""
    if lane.startswith("torch: power-sgd"):
        model = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB)
        rank = int(lane.rpartition(" ")[2])
        model.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2), powerSGD_hook
        )
        return model
    model = DistributedDataParallel(module)
    if lane == "torch: fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif lane != "torch: no hook":
        compress(model, OURS[lane](), timeout_seconds=TIMEOUT.total_seconds())
    return model


def sent_bytes() -> int:
    """What went out of this host's interfaces, the loopback apart."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    counts = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counts.items() if name != "lo")


def one_lane(lane: str, plan: Plan) -> dict[str, Any]:
    """Train for some steps: random inputs, and classes that depend on them."""
    torch.manual_seed(0)
    model = hooked(lane, network(plan.widths))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    teacher = torch.randn(plan.widths[0], plan.widths[-1])
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    seconds, before = [], 0
    for step in range(WARM_UP_STEPS + plan.steps):
        inputs = torch.randn(plan.batch, plan.widths[0], generator=draws)
        if step == WARM_UP_STEPS:
            dist.barrier()
            before = sent_bytes()
        started = time.perf_counter()
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), (inputs @ teacher).argmax(1)).backward()
        optimiser.step()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    sent = (sent_bytes() - before) / plan.steps
    return {"lane": lane, "seconds": seconds[WARM_UP_STEPS:], "sent_bytes": sent}


def main(folder: Path, rank: int, plan: Plan) -> None:
    """All lanes."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=TIMEOUT)
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for lane in plan.lanes:
            lines.write(json.dumps(one_lane(lane, plan)) + "\n")
    dist.destroy_process_group()


def plan_text(plan: Plan) -> str:
    """A plan as the command line takes it."""
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
