"""The lanes of the benchmarks `links` and `plans`: one network, trained by DistributedDataParallel under one hook each.

The network is fully connected and computes little on one sample; what an accelerator would compute is time asleep, in
forward and in backward, layer by layer, so that buckets of gradients have something to travel behind and that eight
ranks on two cores do not measure the cores.

    forward    asleep, layer 1     asleep, layer 2   ...
    backward   layer 2, asleep     layer 1, asleep        a bucket leaves as soon as its layers are through
"""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import CODECS
from paceline.drivers.ddp import compress

NO_HOOK, FP16 = "torch: no hook", "torch: fp16"
PEERS = (NO_HOOK, FP16, "torch: power-sgd, rank 1", "torch: power-sgd, rank 4", "epfml: power-sgd, rank 4")
CODEC_WORDS = {  # biased codecs have error feedback, as `compress` gives it
    "identity": "identity",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8-sum": "int8-sum",
    "one-bit + error feedback": "one-bit",
    "qsgd, 7 levels": "qsgd levels=7",
    "sparsifier": "sparsifier",
    "top-k, 1 % + error feedback": "top-k fraction=0.01",
    "power-sgd, rank 1 + error feedback": "power-sgd rank=1",
    "power-sgd, rank 4 + error feedback": "power-sgd rank=4",
}
OURS = {lane: words for lane, words in CODEC_WORDS.items() if words.split()[0] in CODECS}
WARM_UP_STEPS = 6  # DDP makes its buckets anew, PyTorch's power-sgd begins with the third, ours looks at the link
ONE_BUCKET_MB = 1000.0
TIMEOUT_SECONDS = 120.0


def peers_at_hand() -> tuple[str, ...]:
    """Return the lanes of others that can run here: epfml's package `powersgd` is measured where it is installed."""
    return PEERS if importlib.util.find_spec("powersgd") else PEERS[:-1]


def short(lane: str) -> str:
    """Return a lane's name as tables have room for it.

    >>> short("one-bit + error feedback")
    'one-bit + EF'
    """
    return lane.replace("error feedback", "EF")


def parameters_of(widths: Sequence[int]) -> int:
    """Return how many parameters the network has.

    >>> parameters_of([512, 1024, 1024, 1024, 256])
    2886912
    """
    return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(widths))


class Asleep(nn.Module):
    """A layer that sleeps: so long in forward, and twice as long in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, later."""
        return _Sleep.apply(inputs, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient, None


def network(widths: Sequence[int], sleep_seconds: float) -> nn.Sequential:
    """Return fully connected layers, each of which sleeps."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [Asleep(sleep_seconds), nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Lane:
    """A network, its hook, and steps with it; `plan` names how a codec's payloads are exchanged, if that is said."""

    def __init__(
        self, hook: str, *, widths: Sequence[int], sleep_seconds: float, bucket_mb: float, plan: str | None = None
    ) -> None:
        torch.manual_seed(0)
        self.module = module = network(widths, sleep_seconds)
        self._teacher = torch.randn(widths[0], widths[-1])
        self._draws = torch.Generator().manual_seed(1 + dist.get_rank())
        self._optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
        self._aggregator: Any = None
        self._model: nn.Module = module
        self.compression: Any = None
        if hook.startswith("epfml"):
            self._aggregator = _epfml(module, rank=int(hook.rpartition(" ")[2]))
        elif hook.startswith("torch: power-sgd"):  # it hangs on gloo with more than one bucket
            self._model = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB)
            rank = int(hook.rpartition(" ")[2])
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self._model.register_comm_hook(state, powerSGD_hook)
        else:
            self._model = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
            if hook == FP16:
                self._model.register_comm_hook(None, fp16_compress_hook)
            elif hook != NO_HOOK:
                named = {} if plan is None or not takes_plan() else {"plan": plan}
                self.compression = compress(self._model, OURS[hook], timeout_seconds=TIMEOUT_SECONDS, **named)

    def step(self) -> float:
        """Take a step on a sample of this rank's own; return its seconds."""
        inputs = torch.randn(1, len(self._teacher), generator=self._draws)
        targets = (inputs @ self._teacher).argmax(1)
        started = time.perf_counter()
        if self._aggregator is None:
            self._optimiser.zero_grad()
        F.cross_entropy(self._model(inputs), targets).backward()
        if self._aggregator is None:
            self._optimiser.step()
        else:  # it keeps what it holds back where the next gradient is added
            from powersgd import optimizer_step

            optimizer_step(self._optimiser, self._aggregator)
        return time.perf_counter() - started

    @property
    def reported_bytes(self) -> int | None:
        """What `compress` says that this rank has given to the network so far; None where it does not say."""
        return getattr(self.compression, "sent_bytes", None)


def write_figures(folder: Path, rank: int, ranks: int, figures: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Meet the other ranks, and write a line to FOLDER/lanes-RANK.jsonl for each figure."""
    torch.set_num_threads(1)
    timeout, store = datetime.timedelta(seconds=TIMEOUT_SECONDS), f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for line in figures():
            lines.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def takes_plan() -> bool:
    """Whether `compress` can be told the plan."""
    return "plan" in inspect.signature(compress).parameters


def _epfml(module: nn.Module, rank: int) -> Any:
    from powersgd import Config, PowerSGD

    return PowerSGD(list(module.parameters()), Config(rank=rank, start_compressing_after_num_steps=0))


def interface_counts() -> tuple[int, int]:
    """Return the bytes and packets that left this host by its interfaces, the loopback apart, as the kernel counts."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    counts = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    sent = [(int(fields[8]), int(fields[9])) for name, fields in counts.items() if name != "lo"]
    return sum(size for size, _ in sent), sum(packets for _, packets in sent)


def turn(lane: Lane, steps: int, warm_up_steps: int) -> dict[str, Any]:
    """Take some steps; return their seconds, and the bytes and processor time of one, the mean of all ranks."""
    for _ in range(warm_up_steps):
        lane.step()
    dist.barrier()
    before, reported = _counts(lane), lane.reported_bytes
    seconds = [lane.step() for _ in range(steps)]
    dist.barrier()
    spent = _counts(lane) - before
    dist.all_reduce(spent)
    wire_bytes, packets, reported_bytes, processor_seconds = (spent / steps / dist.get_world_size()).tolist()
    return {
        "seconds": seconds,
        "wire_bytes": wire_bytes,
        "packets": packets,
        "reported_bytes": None if reported is None else reported_bytes,
        "processor_seconds": processor_seconds,
    }


def _counts(lane: Lane) -> torch.Tensor:
    return torch.tensor([*interface_counts(), lane.reported_bytes or 0, time.process_time()], dtype=torch.float64)


def goodput(bits_per_second: float) -> float:
    """Send some megabytes from rank 0 to rank 1; return which share of the rate they had, on rank 1."""
    sent, answer = torch.zeros(round(bits_per_second / 8 / 4)), torch.zeros(1)  # what takes a second
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(sent, 1)
    elif dist.get_rank() == 1:
        dist.recv(sent, 0)
        answer[0] = 1 / (time.perf_counter() - started)
    dist.broadcast(answer, 1)
    return float(answer)
