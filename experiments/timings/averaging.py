"""Averaging over a slow link: who waits for the all-reduce, who does not, and what that does to speed and to loss.

    host 0: rank 0, rank 1 ======== 200 Mbit/s ======== rank 2, rank 3: host 1    network namespaces; needs root and
                                                                                  iproute2
Ranks are on gloo with one thread each. One all-reduce of the model is timed first; a step's computation is then set to
this time divided by a ratio, by padding the real forward and backward pass with sleep, as if an accelerator computed
it: four ranks that really computed so long on two cores would measure the cores. The padding is spread as a network's
own time is, one third over the forward pass and two thirds over the backward pass, layer by layer in proportion to
their weights, so that DistributedDataParallel can send the gradients of the last layers while the first are computed:

    |  forward 1 | 2 | 3 |  backward 3  |    2    |    1    | step
                                        ~~ 3 on its way ~~~~
                                                  ~~ 2 ~~

speed   samples per second of all ranks, where an all-reduce takes 1, 2 and 4 times a step's computation: each rank's
        steps over the seconds between two of its step boundaries, added up. Flushes are outside the clock: none is
        needed while one trains. psgd sends nothing, and is the limit.
        The processor's time of a step, of all threads, stands beside psgd's.
loss    seconds until the shared model is as good as ssgd's at the end of its time, on samples that no rank trains on.
        All lanes have the same learning rate and momentum (of a few that were tried in one process, those with which
        ssgd learns fastest), batches, first model and shards; nothing is tuned for any other lane.
        The loss is that of copies of the shared model: rank 0 takes one whenever it has moved (some milliseconds), and
        evaluates them afterwards.
slow    the last rank computes three times as long. `hpsgd + barrier` has a barrier of all ranks in every step, as the
        authors' code has. Waiting is 1 - (steps * computation + the optimiser's own seconds) / seconds: copying and
        merging are counted as waiting, and so is what other programs on the machine take away.

In a round every lane has a turn, so that what disturbs the machine disturbs all of them; the best round counts. What is
judged of hpsgd: it has at least 95 % of psgd's samples per second and twice ssgd's at ratio 2; it is at ssgd's last
loss no later than ssgd and local-sgd; beside a slow rank its fast ranks wait for at most 5 % of their time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.claims import percent
from experiments.core.hosts import ADDRESSES, RATE, Cable, why_not
from experiments.core.ranks import Line, ended_by_signals, told_by_ranks, write_lines
from experiments.core.story import FIRST_SEED, NAN, Numbers, Size, Skipped, Telling, experiment
from experiments.core.turns import bar
from paceline.reports.table import PlainTable

PERIOD = 8  # of local-sgd
WARM_UP_STEPS = 2
BARRIER, PAPER = "hpsgd + barrier", "hpsgd, no rebase"
SPEED_LANES = ("ddp", "ssgd", "local-sgd", "hpsgd", PAPER, "psgd")
LOSS_LANES = ("ddp", "ssgd", "local-sgd", "hpsgd", PAPER)
SLOW_LANES = ("ssgd", "local-sgd", BARRIER, "hpsgd")
NO_WAITING = ("hpsgd", PAPER, "psgd")
LOOKS = 4  # at which losses are shown, from the beginning to the end
TIMED_OPTIMISER = (0.001, 0.9)  # of SGD: what a step costs does not depend on its rate, and none may diverge
FORWARD_SHARE, BACKWARD_END = 1 / 3, 0.97  # what is left is for the first layer's own gradient
BUCKET_MB = 1.0  # DDP's default of 25 MB would put this model into one or two, and overlap next to nothing
REDUCTIONS = 7
MEETING = f"{ADDRESSES[0]}:29577"  # in a network namespace of its own
TIMEOUT_SECONDS = 60.0

Boundary: TypeAlias = Callable[[int, float], None]  # the step, and the seconds since the clock was started


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do."""

    ranks_per_host: int = 2
    widths: Sequence[int] = (64, 512, 512, 512, 512, 10)
    batch: int = 32
    ratios: Sequence[float] = (1.0, 2.0, 4.0)  # of an all-reduce's time to a step's computation
    rounds: int = 3
    seconds: float = 2.0  # of one lane in one round, as expected
    loss_ratio: float = 2.0
    loss_seconds: float = 8.0
    seeds: Sequence[int]
    optimisers: Sequence[Sequence[float]] = ((0.05, 0.0), (0.02, 0.9))  # of SGD: rate and momentum
    slow_times: int = 3  # the last rank's computation, where it is slow
    shard: int = 8192  # samples of a rank
    evaluated: int = 512  # samples of the fixed set

    @property
    def ranks(self) -> int:
        """How many there are on both hosts."""
        return 2 * self.ranks_per_host


TOY = {
    "ranks_per_host": 1, "widths": (16, 32, 10), "batch": 4, "ratios": (2.0,), "rounds": 1, "seconds": 0.0,
    "loss_seconds": 0.05, "optimisers": ((0.02, 0.9),), "shard": 64, "evaluated": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """One lane's turn: `speed` and `slow` are timed, `loss` is trained for."""

    part: str
    lane: str
    ratio: float
    turn: int  # the round, or the seed
    rate: float = 0.0  # of what is trained for its loss
    momentum: float = 0.0

    @property
    def label(self) -> str:
        """What the turn is about."""
        what = f"momentum {self.momentum:g}" if self.part == "loss" else f"{self.ratio:g} : 1"
        return f"{self.part}, {what}, {self.lane}"


def stretches(plan: Plan) -> list[Stretch]:
    """Return all turns; in a round every lane has one."""
    rounds, ratio = range(plan.rounds), plan.loss_ratio
    speed = product(rounds, plan.ratios, SPEED_LANES)
    slow = product(rounds, SLOW_LANES)
    loss = product(plan.optimisers, plan.seeds, LOSS_LANES)
    return [
        *(Stretch("speed", lane, each, turn) for turn, each, lane in speed),
        *(Stretch("slow", lane, ratio, turn) for turn, lane in slow),
        *(Stretch("loss", lane, ratio, seed, *optimiser) for optimiser, seed, lane in loss),
    ]


@experiment("averaging", question="four ranks over 200 Mbit/s: hpsgd, its sisters, DDP", minutes=8, seeds=2)
def averaging(size: Size) -> Telling:
    reason = why_not()
    if reason:
        yield Skipped(reason)
        return
    plan = Plan(seeds=[seed - FIRST_SEED for seed in size.seeds], **size.pick(TOY, {}))
    labels = ["all-reduce", *(stretch.label for stretch in stretches(plan))]
    with ended_by_signals(), Cable() as cable:
        hosts = list(zip(cable.hosts, cable.interfaces, strict=True))
        total = len(labels)
        lines = yield from told_by_ranks(__name__, plan.ranks, asdict(plan), labels, hosts=hosts, total=total)
    yield from conclusions(lines, plan)


def conclusions(lines: Sequence[Line], plan: Plan) -> Telling:
    """Tell what follows from the lines that rank 0 wrote."""
    speed, processor, slow = speed_rows(lines, plan), processor_rows(lines, plan), slow_rows(lines, plan)
    losses = [loss_rows(lines, plan, optimiser) for optimiser in plan.optimisers]
    yield from speed_told(speed, lines[0], plan)
    yield processor_table(processor, plan)
    for rows, optimiser in zip(losses, plan.optimisers, strict=True):
        yield from loss_told(rows, plan, optimiser)
    yield from slow_told(slow, plan)
    found = {"speed": speed, "processor": processor, "loss": losses, "slow": slow}
    yield Numbers({"rate": RATE, **found, "lines": lines})


# -- tables and claims -------------------------------------------------------------------------------------------------


def speed_told(rows: Sequence[Line], first: Line, plan: Plan) -> Telling:
    """Tell samples per second, and what hpsgd's are beside the limit and beside those who wait."""
    best = {row["lane"]: {ratio: row[f"{ratio:g}"]["best"] for ratio in plan.ratios} for row in rows}
    seconds, asked = median(first["seconds"]), plan.loss_ratio
    paces = ", ".join(f"{1000 * seconds / ratio:,.0f}" for ratio in plan.ratios)
    faster, beside = (best["hpsgd"][asked] / best[lane][asked] for lane in ("ssgd", "ddp"))
    yield PlainTable(
        title=f"Samples per second, {plan.ranks} ranks over {RATE}/s, by all-reduce : computation",
        headings=("\nlane", *(text for ratio in plan.ratios for text in (f"\n{ratio:g} : 1", "of\npsgd"))),
        rows=[
            (name_of(lane), *(text for ratio in plan.ratios
                              for text in (f"{own[ratio]:,.0f}", percent(own[ratio] / best["psgd"][ratio]))))
            for lane, own in best.items()
        ],
        caption=f"{first['parameters']:,} parameters; one all-reduce takes {1000 * seconds:,.0f} ms, batches of "
        f"{plan.batch}. A step's computation is real, and padded by sleep to {paces} ms. Best of {plan.rounds} "
        f"round(s), lanes in turn. At {asked:g} : 1 hpsgd has {beside:.2f} times the samples of torch's DDP.",
    )  # fmt: skip
    worst = min(plan.ratios, key=lambda ratio: best["hpsgd"][ratio] / best["psgd"][ratio])
    near = best["hpsgd"][worst] / best["psgd"][worst]
    yield bar(f"hpsgd's samples per second of psgd's, at the least ({worst:g} : 1)", near, least=0.95, write=percent)
    yield bar(f"hpsgd's samples per second / ssgd's at {asked:g} : 1", faster, least=2.0)


def processor_table(rows: Sequence[Line], plan: Plan) -> PlainTable:
    """Return the processor's time of a step, and what of it an average takes."""
    alone = next(row["seconds"] for row in rows if row["lane"] == "psgd")
    return PlainTable(
        title=f"The processor's time of a rank, at {plan.ratios[0]:g} : 1",
        headings=("lane", "ms a step", "of psgd", "averages", "ms each"),
        rows=[
            (
                name_of(row["lane"]),
                f"{1000 * row['seconds']:.1f}",
                f"{row['seconds'] / alone:.2f}",
                f"{row['averages']:.2f}",
                f"{1000 * (row['seconds'] - alone) / row['averages']:.1f}" if row["averages"] else "-",
            )
            for row in rows
        ],
        caption="Of all threads, gloo's too; psgd does not average. Averages: in a step, and what each takes.",
    )


def loss_told(rows: Sequence[Line], plan: Plan, optimiser: Sequence[float]) -> Telling:
    """Tell losses by the clock, and the time to ssgd's last."""
    settings = "SGD, rate {:g}, momentum {:g}".format(*optimiser)
    to_target = {row["lane"]: row["to_target"] for row in rows}

    def beside(lane: str, other: str) -> float:
        return to_target[lane] / to_target[other] if to_target[other] else NAN

    yield PlainTable(
        title=f"Loss by the clock, {settings}, at {plan.loss_ratio:g} : 1",
        headings=("\nlane", "steps of\na rank", *(f"at\n{seconds:.3g} s" for seconds in looks(plan)), "s to\ntarget",
                  "of\nssgd"),
        rows=[
            (
                name_of(row["lane"]),
                f"{row['steps']:,.0f}",
                *(f"{loss:.3f}" for loss in row["losses"]),
                "never" if math.isnan(row["to_target"]) else f"{row['to_target']:.2f}",
                shown(beside(row["lane"], "ssgd")),
            )
            for row in rows
        ],
        caption=f"Means over {len(plan.seeds)} seed(s). The target is ssgd's loss at its end, {rows[0]['target']:.3f} "
        f"on average. All lanes: {settings}, batches of {plan.batch}; nothing is tuned for a lane but ssgd. The "
        f"time to target of hpsgd as in the paper, without rebase, is {shown(beside(PAPER, 'ssgd'))} of ssgd's, and "
        f"{shown(beside(PAPER, 'local-sgd'))} of local-sgd's.",
    )  # fmt: skip
    for other in ("ssgd", "local-sgd"):
        yield bar(f"{settings}: hpsgd's time to target / {other}'s", beside("hpsgd", other), most=1.0)


def slow_told(rows: Sequence[Line], plan: Plan) -> Telling:
    """Tell speed and waiting beside a slow rank."""
    by_lane = {row["lane"]: row for row in rows}
    ahead = by_lane["hpsgd"]["all"] / by_lane[BARRIER]["all"]
    yield PlainTable(
        title=f"One of {plan.ranks} ranks computes {plan.slow_times} times as long, at {plan.loss_ratio:g} : 1",
        headings=("\nlane", "samples\n/ s", "of a\nfast rank", "of the\nslow one", "fast\nones wait",
                  "steps a\nwindow", "of the\nslow one"),
        rows=[
            (
                name_of(row["lane"]),
                *(f"{row[name]:,.0f}" for name in ("all", "fast", "slow")),
                percent(row["waiting"]),
                *(shown(row[name]) for name in ("fast_window", "slow_window")),
            )
            for row in rows
        ],
        caption="Waiting: neither computing nor the optimiser's step. Steps a window: as recorded by the averages. "
        f"hpsgd's samples per second in all are {ahead:.2f} times those with a barrier.",
    )  # fmt: skip
    yield bar("hpsgd's fast ranks wait beside a slow one", by_lane["hpsgd"]["waiting"], most=0.05, write=percent)


def name_of(lane: str) -> str:
    return {"ddp": "torch: ddp", "local-sgd": f"local-sgd({PERIOD})"}.get(lane, lane)


def shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


# -- figures, of the lines that rank 0 wrote ---------------------------------------------------------------------------


def speed_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """Return samples per second of all ranks, at every ratio: of the best round, the least disturbed, and of all."""
    rows = []
    for lane in SPEED_LANES:
        by_ratio: dict[str, list[float]] = {}
        for line in of(lines, "speed", lane):
            by_ratio.setdefault(f"{line['ratio']:g}", []).append(samples_per_second(line, plan))
        rows.append(
            {"lane": lane, **{key: {"best": max(rounds), "rounds": rounds} for key, rounds in by_ratio.items()}}
        )
    return rows


def samples_per_second(line: Line, plan: Plan) -> float:
    return plan.batch * sum(rates(line))


def processor_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """Return the processor's seconds of a step, where there is most time for averages: of the round with the least."""
    rows = []
    for lane in SPEED_LANES:
        turns = [line for line in of(lines, "speed", lane) if line["ratio"] == plan.ratios[0]]
        rounds = [sum(turn["processor"]) / sum(turn["steps"]) for turn in turns]
        averages = fmean(turn["averages"] / (WARM_UP_STEPS + turn["steps"][0]) for turn in turns)
        rows.append({"lane": lane, "seconds": min(rounds), "rounds": rounds, "averages": averages})
    return rows


def slow_rows(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """Return speed, the share of waiting, and steps per window, of the fast ranks and of the last, which is slow."""
    rows = []
    for lane in SLOW_LANES:
        turns = of(lines, "slow", lane)
        best = max(turns, key=lambda turn: samples_per_second(turn, plan))
        waiting = [fmean(waits(turn)[:-1]) for turn in turns]
        windows = [window for turn in turns for window in turn["windows"]]
        rows.append(
            {
                "lane": lane,
                "all": samples_per_second(best, plan),
                "fast": plan.batch * fmean(rates(best)[:-1]),
                "slow": plan.batch * rates(best)[-1],
                "waiting": waiting[turns.index(best)],
                "waiting_rounds": waiting,
                "fast_window": fmean(fmean(window[:-1]) for window in windows) if windows else NAN,
                "slow_window": fmean(window[-1] for window in windows) if windows else NAN,
            }
        )
    return rows


def rates(line: Line) -> list[float]:
    """Return the steps per second of every rank.

    >>> rates({"steps": [8, 4], "seconds": [2.0, 2.0]})
    [4.0, 2.0]
    """
    return [steps / seconds for steps, seconds in zip(line["steps"], line["seconds"], strict=True)]


def waits(line: Line) -> list[float]:
    """Return the share of its time in which a rank neither computes nor takes the optimiser's step; right for fast.

    >>> waits({"steps": [8], "seconds": [2.0], "computation": 0.125, "optimiser": [0.5]})
    [0.25]
    """
    parts = zip(line["steps"], line["seconds"], line["optimiser"], strict=True)
    return [1 - (steps * line["computation"] + optimiser) / seconds for steps, seconds, optimiser in parts]


def loss_rows(lines: Sequence[Line], plan: Plan, optimiser: Sequence[float]) -> list[Line]:
    """Return the seconds until a lane is where ssgd ends, for each seed, and their mean; NaN if it never is."""
    alike = [line for line in lines if line["part"] == "loss" and (line["rate"], line["momentum"]) == tuple(optimiser)]
    targets = {line["turn"]: line["losses"][-1] for line in of(alike, "loss", "ssgd")}
    rows = []
    for lane in LOSS_LANES:
        turns = of(alike, "loss", lane)
        seconds = [seconds_to(targets[turn["turn"]], turn["times"], turn["losses"]) for turn in turns]
        rows.append(
            {
                "lane": lane,
                "steps": fmean(turn["steps"] for turn in turns),
                "seconds": fmean(turn["times"][-1] for turn in turns),
                "losses": [fmean(loss_at(look, turn) for turn in turns) for look in looks(plan)],
                "to_target": fmean(seconds),
                "to_target_seeds": seconds,
                "target": fmean(targets.values()),
            }
        )
    return rows


def looks(plan: Plan) -> list[float]:
    return [plan.loss_seconds * part / (LOOKS - 1) for part in range(LOOKS)]


def seconds_to(target: float, times: Sequence[float], losses: Sequence[float]) -> float:
    """Return when the loss first is at the target or below; NaN if it never is.

    >>> seconds_to(1.5, [0.0, 2.0, 4.0], [3.0, 2.0, 1.0]), seconds_to(0.5, [0.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    (4.0, nan)
    """
    return next((elapsed for elapsed, loss in zip(times, losses, strict=True) if loss <= target), NAN)


def loss_at(seconds: float, turn: Line) -> float:
    """Return the loss of the last look before that.

    >>> loss_at(3.0, {"times": [0.0, 2.0, 4.0], "losses": [3.0, 2.0, 1.0]})
    2.0
    """
    return float([loss for elapsed, loss in zip(turn["times"], turn["losses"], strict=True) if elapsed <= seconds][-1])


def of(lines: Sequence[Line], part: str, lane: str) -> list[Line]:
    return [line for line in lines if line["part"] == part and line["lane"] == lane]


# -- lanes: a model with a padded pace, an optimiser, and who averages it ----------------------------------------------

AVERAGERS: dict[str, Callable[..., Any]] = {
    "ssgd": paceline.SSGD,
    "local-sgd": partial(paceline.LocalSGD, period=PERIOD),
    "hpsgd": paceline.HPSGD,
    PAPER: partial(paceline.HPSGD, rebase=False),
    BARRIER: partial(paceline.HPSGD, rebase=False),
    "psgd": paceline.PSGD,
}


class Pace:
    """How long a step's computation takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def begin(self) -> float:
        """Say that the step begins now."""
        self._began = time.perf_counter()
        return self._began

    def until(self, share: float) -> None:
        """Sleep until so much of the step's time is over."""
        left = self._began + share * self.seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Until(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, pace: Pace, forwards: float, backwards: float) -> torch.Tensor:
        ctx.pace, ctx.backwards = pace, backwards
        pace.until(forwards)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.pace.until(ctx.backwards)
        return gradients[0], None, None, None


held_up: Callable[[torch.Tensor, Pace, float, float], torch.Tensor] = _Until.apply


class Padded(nn.Module):
    """A layer whose output, and whose gradient, is there no sooner than at these shares of a step."""

    def __init__(self, layer: nn.Module, pace: Pace, forwards: float, backwards: float) -> None:
        super().__init__()
        self.layer, self._pace, self._shares = layer, pace, (forwards, backwards)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return held_up(self.layer(inputs), self._pace, *self._shares)


def network(widths: Sequence[int], pace: Pace) -> nn.Sequential:
    """Return fully connected layers, padded."""
    sizes = [inputs * outputs for inputs, outputs in pairwise(widths)]
    done = [size / sum(sizes) for size in accumulate(sizes)]
    layers: list[nn.Module] = []
    for (inputs, outputs), end, start in zip(pairwise(widths), done, [0.0, *done], strict=False):
        backwards = FORWARD_SHARE + (1 - start) * (BACKWARD_END - FORWARD_SHARE)
        layer = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # torch's own stays at the start for 50 steps
        layers += [Padded(layer, pace, end * FORWARD_SHARE, backwards), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Lane:
    """A model, an optimiser, and who averages; all lanes have the same settings."""

    def __init__(self, name: str, plan: Plan, seed: int, optimiser: Sequence[float], *, record: bool = False) -> None:
        torch.manual_seed(seed)
        self.name, self.pace = name, Pace()
        self.module = network(plan.widths, self.pace)
        self.model: nn.Module = self.module
        rate, momentum = optimiser
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=momentum)
        self.spent: dict[str, float] = {}
        self.reset()
        self.optimiser.register_step_post_hook(  # before the averaging's own, if it comes after
            lambda *_: self._add("optimiser", time.perf_counter())
        )
        self.sync: Any = None
        if name == "ddp":
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=BUCKET_MB)
        else:
            self.sync = AVERAGERS[name](self.model, self.optimiser, timeout_seconds=TIMEOUT_SECONDS, record=record)
        self.optimiser.register_step_pre_hook(  # and after it, if it comes before
            lambda *_: self._add("optimiser", -time.perf_counter())
        )

    def reset(self) -> None:
        """Count from now on where this rank's seconds go.

        Those of `computing` are forward, backward and what they were held up; of `stepping` the optimiser's step with
        all that averaging does in it; of `optimiser` that step alone; of `processor` all threads of this rank, gloo's
        too.
        """
        self.spent = {"computing": 0.0, "stepping": 0.0, "optimiser": 0.0, "processor": -time.process_time()}

    def _add(self, part: str, seconds: float) -> None:
        self.spent[part] += seconds

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take one step of a training loop."""
        began = self.pace.begin()
        self.optimiser.zero_grad()
        torch.autograd.backward(F.cross_entropy(self.model(inputs), targets))
        self.pace.until(1.0)
        computed = time.perf_counter()
        self.optimiser.step()
        self._add("computing", computed - began)
        self._add("stepping", time.perf_counter() - computed)
        if self.name == BARRIER:  # the authors' code: every step ends with one
            dist.barrier()

    def averages(self, step: int) -> int:
        """Return how many have moved the shared model, at the end of that step."""
        return step + 1 if self.sync is None else int(self.sync.averages)

    def shared(self) -> dict[str, torch.Tensor]:
        """Return a copy of what all ranks agree on."""
        if self.sync is None:
            return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        found: dict[str, torch.Tensor] = self.sync.shared
        return found

    @torch.no_grad()
    def loss(self, parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the loss of these parameters, at no pace."""
        self.pace.seconds = 0.0
        return float(F.cross_entropy(torch.func.functional_call(self.module, parameters, (inputs,)), targets))

    def close(self) -> None:
        """End the lane."""
        if self.sync is not None:
            self.sync.close()


# -- a rank: the seconds of one all-reduce, by which all paces are set, and then turn after turn -----------------------


class Task:
    """Random inputs, and the classes that a random network of one hidden layer gives them; a shard for each rank."""

    def __init__(self, plan: Plan, seed: int) -> None:
        draws = torch.Generator().manual_seed(1000 + seed)
        width, classes = plan.widths[0], plan.widths[-1]
        hidden = torch.randn(width, 2 * width, generator=draws) / width**0.5
        last = torch.randn(2 * width, classes, generator=draws)

        def drawn(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.randn(samples, width, generator=draws)
            return inputs, ((inputs @ hidden).relu() @ last - last.sum(0) * 0.4).argmax(1)

        self.evaluated = drawn(plan.evaluated)
        self._shard = [drawn(plan.shard) for _ in range(plan.ranks)][dist.get_rank()]
        self._draws = torch.Generator().manual_seed(plan.ranks * seed + dist.get_rank())
        self._batch = plan.batch

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some samples of this rank's shard."""
        inputs, targets = self._shard
        chosen = torch.randint(len(inputs), (self._batch,), generator=self._draws)
        return inputs[chosen], targets[chosen]


class Rank:
    """What a rank keeps from one turn to the next."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.task = plan, Task(plan, 0)
        self.kept: dict[tuple[str, str], Lane] = {}
        self.reduction = 0.0

    def lines(self) -> Iterator[Line]:
        """Do all of the plan: the all-reduce that is the measure of all paces, and every turn."""
        size = sum(parameter.numel() for parameter in self._lane("speed", "ddp").module.parameters())
        seconds = reduction_seconds(size)
        self.reduction = median(seconds)
        yield {"part": "all-reduce", "parameters": size, "seconds": seconds}
        for stretch in stretches(self.plan):
            yield asdict(stretch) | (self._trained(stretch) if stretch.part == "loss" else self._timed(stretch))
        for lane in self.kept.values():
            lane.close()

    def _lane(self, part: str, name: str) -> Lane:
        if (part, name) not in self.kept:
            self.kept[part, name] = Lane(name, self.plan, 0, TIMED_OPTIMISER, record=part == "slow")
        return self.kept[part, name]

    def _timed(self, stretch: Stretch) -> Line:
        """Return seconds between two step boundaries of this rank, while all train; the flush comes after the clock."""
        lane, computation = self._lane(stretch.part, stretch.lane), self.reduction / stretch.ratio
        times = self.plan.slow_times if stretch.part == "slow" else 1
        free = stretch.lane in NO_WAITING
        expected = step_seconds(stretch.lane, computation if free else times * computation, self.reduction)
        own_times = times if dist.get_rank() == self.plan.ranks - 1 else 1
        steps = whole_periods(self.plan.seconds / expected)
        if free and times > 1:  # no rank waits for another: all end at about the same time
            steps = times * whole_periods(steps / times) // own_times
        lane.pace.seconds = own_times * computation
        known = len(lane.sync.history) if lane.sync is not None else 0
        averages = lane.averages(-1)
        seconds = self._steps(lane, WARM_UP_STEPS, steps)
        spent = lane.spent | {"processor": lane.spent["processor"] + time.process_time()}
        averages = lane.averages(WARM_UP_STEPS + steps - 1) - averages
        windows = [average.windows for average in lane.sync.history[known:]] if lane.sync is not None else []
        if lane.sync is not None:
            lane.sync.flush()
        return {
            "computation": computation,
            "steps": of_all_ranks(steps),
            "seconds": of_all_ranks(seconds),
            **{part: of_all_ranks(seconds) for part, seconds in spent.items()},
            "averages": averages,  # those of the warm-up too
            "windows": [[window.steps for window in each] for each in windows],
        }

    def _steps(self, lane: Lane, before: int, steps: int, boundary: Boundary = lambda step, elapsed: None) -> float:
        dist.barrier()
        started = time.perf_counter()
        for step in range(before + steps):
            if step == before:
                lane.reset()
                started = time.perf_counter()
            lane.step(*self.task.batch())
            boundary(step, time.perf_counter() - started)
        return time.perf_counter() - started

    def _trained(self, stretch: Stretch) -> Line:
        """Return losses of copies of the shared model; rank 0 takes them on the way, and evaluates them afterwards."""
        plan, computation = self.plan, self.reduction / stretch.ratio
        self.task = Task(plan, 1 + stretch.turn)
        lane = Lane(stretch.lane, plan, 1 + stretch.turn, (stretch.rate, stretch.momentum))
        lane.pace.seconds = computation
        steps = whole_periods(plan.loss_seconds / step_seconds(stretch.lane, computation, self.reduction))
        taken, known = [(0.0, lane.shared())], 0

        def boundary(step: int, elapsed: float) -> None:
            nonlocal known
            if dist.get_rank() == 0 and lane.averages(step) > known:
                known = lane.averages(step)
                taken.append((elapsed, lane.shared()))

        seconds = self._steps(lane, 0, steps, boundary)
        lane.close()
        losses = [lane.loss(parameters, *self.task.evaluated) for _, parameters in taken]
        return {"steps": steps, "seconds": seconds, "times": [elapsed for elapsed, _ in taken], "losses": losses}


def reduction_seconds(size: int) -> list[float]:
    """Return the seconds of one all-reduce after the other, with nothing beside it; the same figures on every rank."""
    vector, seconds = torch.zeros(size), []
    for _ in range(REDUCTIONS + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(vector)
        seconds.append(time.perf_counter() - started)
    told = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.broadcast(told, 0)
    return [float(each) for each in told]


def of_all_ranks(value: float) -> list[float]:
    """Return what every rank has measured."""
    rows = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    rows[dist.get_rank()] = value
    dist.all_reduce(rows)
    return [float(each) for each in rows]


def step_seconds(lane: str, computation: float, reduction: float) -> float:
    """Return what a step should take; the number of steps is made of it, not the figures.

    >>> step_seconds("ssgd", 1.0, 2.0), step_seconds("local-sgd", 1.0, 2.0), step_seconds("hpsgd", 1.0, 2.0)
    (3.0, 1.25, 1.0)
    """
    waits = {"ddp": 1.0, "ssgd": 1.0, "local-sgd": 1 / PERIOD}
    return computation + waits.get(lane, 0.0) * reduction


def whole_periods(steps: float) -> int:
    """Return at least so many steps, and as many averages of local-sgd as belong to them.

    >>> whole_periods(0.5), whole_periods(17.0)
    (8, 24)
    """
    return PERIOD * max(1, math.ceil(steps / PERIOD))


def main(folder: Path, rank: int, plan: Plan) -> None:
    """Be a rank."""
    write_lines(folder, rank, plan.ranks, lambda: Rank(plan).lines(), address=MEETING)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
