"""A training step at 2, 4 and 8 ranks, a link of 200 Mbit/s for each: DistributedDataParallel with and without codecs.

    host 0: rank 0 ---- 200 Mbit/s ---- switch ---- 200 Mbit/s ---- rank 1: host 1    network namespaces; needs root
    host 2: rank 2 ----            ----        ----            ---- rank 3: host 3    and iproute2

The network is fully connected, has 2.9 million parameters and computes little on one sample; what an accelerator would
compute is time asleep, 30 ms a step, in forward and in backward, layer by layer, so that buckets of gradients have
something to travel behind and that eight ranks on two cores do not measure the cores:

    forward    asleep, layer 1     asleep, layer 2   ...
    backward   layer 2, asleep     layer 1, asleep        a bucket leaves as soon as its layers are through

So these figures say what codecs save where the link is what one waits for. In a model that computes more they save
less. Ranks are on gloo, with one thread; epfml's power-sgd is a lane where its package `powersgd` is installed.

All lanes are in the same processes and take turns, pass after pass; a lane's time is the median step of its best pass.
Bytes are what a rank sends in a step: what the kernel counted at its interface, headers and acknowledgements among
them, and beside it what the lane itself says.

What is judged, at every number of ranks: our best is the quickest of all; each codec that the docs recommend is quicker
than PyTorch's fp16, and bfloat16 takes at most 5 % longer; told bytes are those of the interface, but for headers. And
at 8 ranks qsgd sends at most 0.45 of what fp16 sends.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from experiments.core.claims import percent
from experiments.core.hosts import Switch, why_not
from experiments.core.ranks import TIMEOUT_SECONDS, ended_by_signals, told_by_ranks, write_lines
from experiments.core.story import NAN, Claim, Numbers, Size, Skipped, Telling, experiment
from experiments.core.turns import bar
from paceline.drivers.ddp import compress
from paceline.exchanges.plans import AUTO
from paceline.reports.table import PlainTable

RANKS = (2, 4, 8)
NO_HOOK, FP16 = "torch: no hook", "torch: fp16"
PEERS = (NO_HOOK, FP16, "torch: power-sgd, rank 1", "torch: power-sgd, rank 4", "epfml: power-sgd, rank 4")
QSGD, TOP_K, POWER_SGD = "qsgd, 7 levels", "top-k, 1 % + error feedback", "power-sgd, rank 4 + error feedback"
OURS = {  # biased codecs have error feedback, as `compress` gives it
    "identity": "identity",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8-sum": "int8-sum",
    "one-bit + error feedback": "one-bit",
    QSGD: "qsgd levels=7",
    "sparsifier": "sparsifier",
    TOP_K: "top-k fraction=0.01",
    "power-sgd, rank 1 + error feedback": "power-sgd rank=1",
    POWER_SGD: "power-sgd rank=4",
}
RECOMMENDED = (QSGD, TOP_K, "one-bit + error feedback", POWER_SGD, "int8-sum")
TOY_LANES = (NO_HOOK, FP16, "bfloat16", QSGD, TOP_K)
WARM_UP_STEPS = 6  # DDP makes its buckets anew, PyTorch's power-sgd begins with the third, ours looks at the link
ONE_BUCKET_MB = 1000.0
HEADER_BYTES = 66  # of a packet: Ethernet, IP, TCP with its time stamps
JUDGED_BYTES = 50_000  # a lane that sends less sends mostly what gloo adds to each message
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A network that is trained by some ranks: the sizes of its layers, how long each sleeps, and DDP's buckets."""

    ranks: int = 0
    widths: Sequence[int] = (512, 1024, 1024, 1024, 256)
    sleep_seconds: float = 0.0025
    bucket_mb: float = 4.0

    @property
    def parameters(self) -> int:
        """How many there are.

        >>> Training().parameters
        2886912
        """
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.widths))


@dataclass(frozen=True, kw_only=True)
class Job(Training):
    """What the ranks do: passes over all lanes, of some steps in each."""

    lanes: Sequence[str]
    bits_per_second: float = 200e6
    passes: int = 4
    steps: int = 5

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every pass over every lane."""
        return list(itertools.product(range(self.passes), self.lanes))

    @property
    def labels(self) -> list[str]:
        """What each line is about."""
        return [
            "a plain transfer",
            *(f"{self.ranks} ranks: {short(lane)}, {1 + number}" for number, lane in self.turns),
        ]


@experiment("links", question="a DDP step at 2, 4, 8 ranks, 200 Mbit/s each: codecs, torch's hooks", minutes=10)
def links(size: Size, *, repeat: int = 0) -> Telling:
    """Tell it for so many passes; 0 is what the size has."""
    reason = why_not()
    if reason:
        yield Skipped(reason)
        return
    tiny = Job(lanes=TOY_LANES, widths=(64, 128, 10), sleep_seconds=0.0005, bucket_mb=0.02, passes=1, steps=2)
    job: Job = size.pick(tiny, Job(lanes=(*peers_at_hand(), *OURS)))
    job = replace(job, passes=repeat or job.passes)
    counts = size.pick((3,), RANKS)
    goodputs, turns, results = {}, {}, {}
    for ranks in counts:
        here = replace(job, ranks=ranks)
        with ended_by_signals(), Switch(ranks) as switch:
            switch.shape(job.bits_per_second)
            hosts = list(zip(switch.hosts, switch.interfaces, strict=True))
            total = len(counts) * len(job.labels)
            lines = yield from told_by_ranks(__name__, ranks, asdict(here), here.labels, hosts=hosts, total=total)
        goodputs[ranks], turns[ranks] = lines[0]["goodput"], lines[1:]
        results[ranks] = rows_of(turns[ranks])
        yield table_of(results[ranks], here)
    yield from claims_of(results)
    yield f"A plain transfer had {', '.join(map(percent, goodputs.values()))} of the rate."
    if not size.toy and PEERS[-1] not in job.lanes:
        yield f"{PEERS[-1]} is left out: its package `powersgd` is not installed."
    figures = {"parameters": job.parameters, "rows": results, "goodputs": goodputs, "turns": turns}
    yield Numbers({"job": asdict(job), **figures})


def peers_at_hand() -> tuple[str, ...]:
    """Return the lanes of others that can run here."""
    return PEERS if find_spec("powersgd") else PEERS[:-1]


def short(lane: str) -> str:
    """Return a lane's name as tables have room for it.

    >>> short("one-bit + error feedback")
    'one-bit + EF'
    """
    return lane.replace("error feedback", "EF")


# -- rows, tables and claims -------------------------------------------------------------------------------------------


def rows_of(turns: Sequence[Row]) -> list[Row]:
    """Return a row for each lane, in the order of the first pass: its best pass, beside no hook and PyTorch's fp16.

    >>> counts = {"wire_bytes": 8e6, "packets": 1000, "reported_bytes": None, "processor_seconds": 0.01}
    >>> first = {"lane": NO_HOOK, "seconds": [4.0, 2.0, 3.0], **counts}
    >>> row = rows_of([first, {"lane": FP16, "seconds": [2.0], **counts}, first | {"seconds": [2.5]}])[0]
    >>> row["seconds"], row["of_fp16"], row["wire_bytes"]
    (2.5, 0.8, 8000000.0)
    """
    best: dict[str, Row] = {}
    for turn in turns:
        row = {name: turn[name] for name in ("lane", "wire_bytes", "packets", "reported_bytes", "processor_seconds")}
        row["seconds"] = median(turn["seconds"])
        if row["seconds"] < best.setdefault(row["lane"], row)["seconds"]:
            best[row["lane"]] = row
    plain, fp16 = (best[lane]["seconds"] for lane in (NO_HOOK, FP16))
    return [row | {"of_no_hook": plain / row["seconds"], "of_fp16": fp16 / row["seconds"]} for row in best.values()]


def table_of(rows: Sequence[Row], job: Job) -> PlainTable:
    rate = f"{job.bits_per_second / 1e6:.0f} Mbit/s"
    return PlainTable(
        title=f"A step of {job.parameters:,} parameters, {job.ranks} ranks, {rate} for each",
        headings=("\nhook", "\nms", "processor\nms", "x no\nhook", "x\nfp16", "MB\nsent", "MB as\ntold"),
        rows=[
            (
                row["lane"] if row["lane"] in PEERS else f"ours: {short(row['lane'])}",
                *(f"{1000 * row[name]:,.0f}" for name in ("seconds", "processor_seconds")),
                *(f"{row[name]:.2f}" for name in ("of_no_hook", "of_fp16")),
                f"{row['wire_bytes'] / 1e6:.3f}",
                "-" if row["reported_bytes"] is None else f"{row['reported_bytes'] / 1e6:.3f}",
            )
            for row in rows
        ],
        caption="ms: the median step of the best pass; processor: a rank's time of it in a step. EF: error feedback.",
    )


def claims_of(results: Mapping[int, Sequence[Row]]) -> Iterator[Claim]:
    """Yield what is judged of the rows by number of ranks."""
    for ranks, rows in results.items():
        at, by_lane = f"{ranks} ranks: ", {row["lane"]: row for row in rows}
        ours, theirs = (
            min((row for row in rows if row["lane"] in lanes), key=lambda row: float(row["seconds"]))
            for lanes in (OURS, PEERS)
        )
        what = f"{at}our best, {short(ours['lane'])}, x {theirs['lane']}"
        yield bar(what, theirs["seconds"] / ours["seconds"], least=1.0)
        for lane in (*RECOMMENDED, "bfloat16"):
            if lane in by_lane:
                least = 1.0 if lane in RECOMMENDED else 0.95
                yield bar(f"{at}{short(lane)}, x fp16", by_lane[lane]["of_fp16"], least=least)
        told = [missing(row) for row in rows if row["reported_bytes"] and row["wire_bytes"] >= JUDGED_BYTES]
        worst = f"{at}bytes as told against the interface's, the worst"
        yield bar(worst, max(told, default=NAN), most=0.03, write=percent)
    most = max(results)
    sent = {row["lane"]: row["wire_bytes"] for row in results[most]}
    yield bar(f"{most} ranks: bytes of qsgd / of fp16", sent[QSGD] / sent[FP16], most=0.45)


def missing(row: Row) -> float:
    """Return by which share told bytes differ from what the interface sent, without the headers of its packets."""
    told, sent, packets = map(float, (row["reported_bytes"], row["wire_bytes"], row["packets"]))
    return abs(told / (sent - HEADER_BYTES * packets) - 1)


# -- a rank: its lanes -------------------------------------------------------------------------------------------------


class Asleep(nn.Module):
    """A layer that sleeps: so long in forward, and twice as long in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, later."""
        return asleep(inputs, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradients[0], None


asleep: Callable[[torch.Tensor, float], torch.Tensor] = _Sleep.apply


def network(training: Training) -> nn.Sequential:
    """Return fully connected layers, each of which sleeps."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(training.widths):
        layers += [Asleep(training.sleep_seconds), nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Lane:
    """A network, its hook, and steps with it; `plan` is how a codec's payloads are exchanged."""

    def __init__(self, hook: str, training: Training, *, plan: str = AUTO) -> None:
        torch.manual_seed(0)
        self.module = network(training)
        self._model: nn.Module = self.module
        self._teacher = torch.randn(training.widths[0], training.widths[-1])
        self._draws = torch.Generator().manual_seed(1 + dist.get_rank())
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self._aggregator: Any = None
        self.compression: Any = None
        factors = int(hook.rpartition(" ")[2]) if hook in PEERS[2:] else 0  # the rank of power-sgd's matrices
        if hook.startswith("epfml"):
            theirs = import_module("powersgd")
            settings = theirs.Config(rank=factors, start_compressing_after_num_steps=0)
            self._aggregator = theirs.PowerSGD(list(self.module.parameters()), settings)
            return
        # PyTorch's power-sgd hangs on gloo with more than one bucket
        model = DistributedDataParallel(self.module, bucket_cap_mb=ONE_BUCKET_MB if factors else training.bucket_mb)
        self._model = model
        if factors:
            state = PowerSGDState(None, matrix_approximation_rank=factors, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)
        elif hook == FP16:
            model.register_comm_hook(None, fp16_compress_hook)
        elif hook != NO_HOOK:
            self.compression = compress(model, OURS[hook], plan=plan, timeout_seconds=TIMEOUT_SECONDS)

    def step(self) -> float:
        """Take a step on a sample of this rank's own; return its seconds."""
        inputs = torch.randn(1, len(self._teacher), generator=self._draws)
        targets = (inputs @ self._teacher).argmax(1)
        began = time.perf_counter()
        if self._aggregator is None:
            self._optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self._model(inputs), targets))
        if self._aggregator is None:
            self._optimizer.step()
        else:  # it keeps what it holds back where the next gradient is added
            import_module("powersgd").optimizer_step(self._optimizer, self._aggregator)
        return time.perf_counter() - began

    def turn(self, steps: int, *, warm_up: int) -> Row:
        """Take some steps; return their seconds, and the bytes and processor time of one, the mean of all ranks."""
        for _ in range(warm_up):
            self.step()
        dist.barrier()
        before = self._counts()
        seconds = [self.step() for _ in range(steps)]
        dist.barrier()
        spent = self._counts() - before
        dist.all_reduce(spent)
        names = ("wire_bytes", "packets", "reported_bytes", "processor_seconds")
        counts = dict(zip(names, (spent / steps / dist.get_world_size()).tolist(), strict=True))
        return {"seconds": seconds, **counts, **({} if self.compression else {"reported_bytes": None})}

    def _counts(self) -> torch.Tensor:
        told = self.compression.sent_bytes if self.compression else 0
        return torch.tensor([*interface_counts(), told, time.process_time()], dtype=torch.float64)


def interface_counts() -> tuple[int, int]:
    """Return the bytes and packets that left this host by its interfaces, the loopback apart, as the kernel counts."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    counts = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    sent = [(int(fields[8]), int(fields[9])) for name, fields in counts.items() if name != "lo"]
    return sum(size for size, _ in sent), sum(packets for _, packets in sent)


def goodput(bits_per_second: float) -> float:
    """Send some megabytes from rank 0 to rank 1; return which share of the rate they had, on rank 1."""
    sent, answer = torch.zeros(round(bits_per_second / 8 / 4)), torch.zeros(1)  # what takes a second
    dist.barrier()
    began = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(sent, 1)
    elif dist.get_rank() == 1:
        dist.recv(sent, 0)
        answer[0] = 1 / (time.perf_counter() - began)
    dist.broadcast(answer, 1)
    return float(answer)


def turns_of(job: Job) -> Iterator[Row]:
    """Take all turns, as one rank: a line for each of `Job.labels`."""
    yield {"goodput": goodput(job.bits_per_second)}
    lanes: dict[str, Lane] = {}
    for number, name in job.turns:
        if name not in lanes:
            lanes[name] = Lane(name, job)
        turn = lanes[name].turn(job.steps, warm_up=1 if number else WARM_UP_STEPS)
        yield {"pass": number, "lane": name, **turn}


def main(folder: Path, rank: int, job: Job) -> None:
    """Be a rank."""
    write_lines(folder, rank, job.ranks, lambda: turns_of(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
