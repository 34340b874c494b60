"""Parts `round` and `python-lock` of the benchmark `lgc-ranks`: what a round costs where nobody is slow.

round        11 million parameters, 4 ranks on this machine, next to no computation (the loss is the parameters' sum).
             The peer is the same loop with a plain all-reduce: gradients are views of one flat vector, which is added
             up, divided, and given to the same optimiser. Lanes take turns in the same processes; a turn's figure is
             its seconds by its rounds, and the best turn of each lane counts. The processor's time of all ranks stands
             beside it: other programs on the machine do not lengthen it by much. The parts of a round are timed one by
             one on rank 0, while the other ranks wait.
python-lock  A tiny model, K = N - 1, and every rank but the last computes 5 ms (by sleep). The last rank is busy all
             the time: every batch of it takes 20 ms. What the others' rounds take depends on whether Python's lock is
             free on the last rank when its exchange thread wants it:
                 sleep        the last rank sleeps: the lock is free, and so is the core
                 hashing      its loader computes in C, without the lock: the core is taken, the lock is free
                 loader       its loader computes in Python
                 thread       it sleeps, and beside it a thread computes in Python without end
             each with Python's own switch interval of 5 ms, and with that of the synchronizers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, titled
from benchmarks.overhead_sides import network
from benchmarks.ranks import free_address, measured
from paceline.drivers.rounds.switching import SWITCH_SECONDS
from paceline.events import Share, Step
from paceline.training.contributions import RankGradients, VectorPool
from paceline.training.rank_model import RankModel
from paceline.training.train_state import all_finite

PLAIN, DDP, FULL = "plain all-reduce", "torch: ddp", "full"
COST = Bar(sign="<=", limit=1.3)
PYTHON_SWITCH_SECONDS = 0.005
COMPUTING_SECONDS, BUSY_SECONDS = 0.005, 0.020
BUSY = ("sleep", "hashing", "loader", "thread")
FIRST_ROUNDS = 2  # of a turn, not timed: they wait for pages, threads, and ranks that come from elsewhere
TINY, REDUCTIONS = 1_000, 20  # of the all-reduces that tell a hop's latency
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What the ranks of either part do; `address` is where they meet."""

    part: str
    address: str
    ranks: int
    elements: int
    turns: int
    rounds: int

    @property
    def lanes(self) -> list[str]:
        """The lanes of part `round`."""
        return [PLAIN, DDP, FULL, self.lgc]

    @property
    def lgc(self) -> str:
        """The lane that is judged beside `full`."""
        return f"lgc, K={self.ranks - 1}"

    @property
    def labels(self) -> list[str]:
        """What rank 0 writes a line of."""
        if self.part == "round":
            return ["parts", *(f"turn {turn + 1}, {lane}" for turn in range(self.turns) for lane in self.lanes)]
        return [f"turn {turn + 1}, {busy}, {seconds * 1000:g} ms" for turn, busy, seconds in self.stretches]

    @property
    def stretches(self) -> list[tuple[int, str, float]]:
        """The turns of part `python-lock`."""
        intervals = (PYTHON_SWITCH_SECONDS, SWITCH_SECONDS)
        return [(turn, busy, seconds) for turn in range(self.turns) for busy in BUSY for seconds in intervals]


def round_cost(options: Options, folder: Path) -> tuple[list[Table | str], dict[str, Any]]:
    """Measure part `round`."""
    plan = RoundPlan(
        part="round",
        address=free_address(),
        ranks=2 if options.quick else 4,
        elements=40_000 if options.quick else 11_000_000,
        turns=1 if options.quick else options.repeat or 5,
        rounds=3 if options.quick else 8,
    )
    parts, *turns = _measured(plan, folder)
    rows = round_rows(turns, plan)
    found: list[Table | str] = [
        _round_table(rows, plan, quick=options.quick),
        _parts_table(parts, plan, quick=options.quick),
    ]
    return found, {"rows": rows, "parts": parts, "turns": turns, "costs": parts["costs"]}


def python_lock(options: Options, folder: Path) -> tuple[list[Table | str], dict[str, Any]]:
    """Measure part `python-lock`."""
    plan = RoundPlan(
        part="python-lock",
        address=free_address(),
        ranks=2 if options.quick else 4,
        elements=1000,
        turns=1 if options.quick else options.repeat or 3,
        rounds=3 if options.quick else 80,
    )
    turns = _measured(plan, folder)
    rows = lock_rows(turns)
    return [_lock_table(rows, plan, quick=options.quick)], {"rows": rows, "turns": turns}


def _measured(plan: RoundPlan, folder: Path) -> list[Row]:
    name, module = f"lgc-ranks, {plan.part}", "benchmarks.lgc_ranks_round"
    return measured(name, module, json.dumps(asdict(plan)), plan.labels, None, folder, ranks_per_host=plan.ranks)


# -- a rank of part `round` --------------------------------------------------------------------------------------------


def backward(model: nn.Module) -> None:
    """Compute a gradient for every parameter, with as little work as can be."""
    sum((parameter.sum() for parameter in model.parameters()), torch.zeros(())).backward()  # type: ignore[no-untyped-call]


def made(elements: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and the optimiser of every lane."""
    model = network(elements)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


class PlainLoop:
    """The peer: a flat gradient, one all-reduce, the optimiser."""

    def __init__(self, elements: int) -> None:
        self._model, self._optimizer = made(elements)
        parameters = list(self._model.parameters())
        self._flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        parts = torch.split(self._flat, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def seconds(self, rounds: int) -> list[float]:
        """Return when each of so many rounds was over."""
        return _after_each(rounds, self._round)

    def _round(self) -> None:
        self._flat.zero_()
        backward(self._model)
        dist.all_reduce(self._flat)
        self._flat.div_(dist.get_world_size())
        self._optimizer.step()


class DDPLoop:
    """torch's own, with gradients as views of its buckets."""

    def __init__(self, elements: int) -> None:
        inner, self._optimizer = made(elements)
        self._model = DistributedDataParallel(_Summed(inner), gradient_as_bucket_view=True)

    def seconds(self, rounds: int) -> list[float]:
        """Return when each of so many rounds was over."""
        return _after_each(rounds, self._round)

    def _round(self) -> None:
        self._optimizer.zero_grad()
        self._model().backward()
        self._optimizer.step()


class _Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> torch.Tensor:
        return sum((parameter.sum() for parameter in self.inner.parameters()), torch.zeros(()))


class SyncedLoop:
    """A synchronizer of ours; K is the number of ranks for `full`."""

    def __init__(self, elements: int, k: int, **common: Any) -> None:
        self._model, optimizer = made(elements)
        if k == dist.get_world_size():
            self.sync: Any = paceline.FullSync(self._model, optimizer, record=True, blocks=1, **common)
        else:
            self.sync = paceline.LGCSync(self._model, optimizer, k=k, record=True, blocks=1, **common)

    def seconds(self, rounds: int, before_batch: Callable[[], None] = lambda: None) -> list[float]:
        """Return when the update of each of so many rounds was there."""
        known = len(self.sync.history)
        for _ in self.sync.epoch([None], rounds=rounds):
            before_batch()
            backward(self._model)
            self.sync.step()
        self.sync.flush()
        return [closed.done for closed in self.sync.history[known:]]


def _after_each(rounds: int, one_round: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(rounds):
        one_round()
        times.append(time.perf_counter())
    return times


def round_turns(plan: RoundPlan) -> Any:
    """Yield a line for the parts, and one for every turn."""
    yield _parts(plan)
    loops: dict[str, Any] = {
        PLAIN: PlainLoop(plan.elements),
        DDP: DDPLoop(plan.elements),
        FULL: SyncedLoop(plan.elements, plan.ranks),
        plan.lgc: SyncedLoop(plan.elements, plan.ranks - 1),
    }
    for turn in range(plan.turns):
        for lane, loop in loops.items():
            dist.barrier()
            before = time.process_time()
            times = loop.seconds(FIRST_ROUNDS + plan.rounds)[FIRST_ROUNDS - 1 :]
            processor = _sum_of_ranks(time.process_time() - before) / (FIRST_ROUNDS + plan.rounds)
            yield {
                "turn": turn,
                "lane": lane,
                "seconds": (times[-1] - times[0]) / plan.rounds,
                "rounds": [after - before for before, after in itertools.pairwise(times)],
                "processor_seconds": processor,
            }
    for lane in (FULL, plan.lgc):
        loops[lane].sync.close()


def _sum_of_ranks(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _parts(plan: RoundPlan) -> Row:
    """Time what a rank does in a round, one by one, and all-reduces of a small and of the model's vector."""
    model, optimizer = made(plan.elements)
    parameters = list(model.parameters())
    costs = reduction_costs(sum(parameter.numel() for parameter in parameters))
    parts: dict[str, float] = {}
    if dist.get_rank() == 0:
        stepping: list[float] = []

        def step() -> None:
            began = time.perf_counter()
            optimizer.step()
            stepping.append(time.perf_counter() - began)

        own = RankModel(parameters, [], step)
        pool = VectorPool(own.layout.size, own.dtype, torch.device("cpu"))
        gradients = RankGradients(0, own.layout, pool)
        flat, times = torch.zeros(own.layout.gradient), dict[str, list[float]]()

        def timed(name: str, what: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            found = what()
            times.setdefault(name, []).append(time.perf_counter() - began)
            return found

        for version in range(6):
            backward(model)
            message = timed("pack", lambda: own.pack(pool.take()))
            timed("finite?", partial(all_finite, message))
            timed("fingerprint", own.fingerprint)
            gradients.keep(version, message)
            fresh = (Share(worker=0, version=version, weight=1 / (plan.ranks - 1)),)
            lgc = Step(version=version, fresh=fresh, previous_mean_weight=0.25)
            update = timed("contribution", partial(gradients.contribute, lgc))
            timed("apply", partial(own.apply, update))
            pool.give(update)
            timed("plain: zero", flat.zero_)
            timed("plain: divide", partial(flat.div_, 4))
        times["apply"] = [both - alone for both, alone in zip(times["apply"], stepping, strict=True)]
        times["optimiser"] = stepping
        parts = {name: min(found[1:]) for name, found in times.items()}
    dist.barrier()
    return {"parts": parts, "costs": costs}


def reduction_costs(elements: int) -> dict[str, float]:
    """Return the best seconds of an all-reduce of a small vector, and of one of so many elements."""
    found = {}
    for name, size in (("small_seconds", TINY), ("large_seconds", elements)):
        vector, seconds = torch.zeros(size), []
        for _ in range(REDUCTIONS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(vector)
            seconds.append(time.perf_counter() - began)
        found[name] = min(seconds)
    return {"ranks": dist.get_world_size(), "bytes": 4 * elements, "small_bytes": 4 * TINY, **found}


# -- a rank of part `python-lock` --------------------------------------------------------------------------------------


def lock_turns(plan: RoundPlan) -> Any:
    """Yield a line for every turn; only the last rank is busy."""
    loop = SyncedLoop(plan.elements, plan.ranks - 1, most_behind=10_000)
    for turn, busy, switch_seconds in plan.stretches:
        sys.setswitchinterval(switch_seconds)
        dist.barrier()
        stop, beside = threading.Event(), None
        before_batch: Callable[[], None] = lambda: time.sleep(COMPUTING_SECONDS)  # noqa: E731
        if dist.get_rank() == plan.ranks - 1:
            before_batch = {"hashing": _hash, "loader": _count}.get(busy, lambda: time.sleep(BUSY_SECONDS))
            if busy == "thread":
                beside = threading.Thread(target=_count_until, args=(stop,), daemon=True)
                beside.start()
        times = loop.seconds(FIRST_ROUNDS + plan.rounds, before_batch)[FIRST_ROUNDS - 1 :]
        stop.set()
        if beside is not None:
            beside.join()
        yield {
            "turn": turn,
            "busy": busy,
            "switch_seconds": switch_seconds,
            "seconds": (times[-1] - times[0]) / plan.rounds,
        }
    loop.sync.close()


def _count() -> None:
    """Compute in Python for a while."""
    until, number = time.perf_counter() + BUSY_SECONDS, 0
    while time.perf_counter() < until:
        for _ in range(50):
            number = (31 * number + 7) % 1_000_003


def _count_until(stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        for _ in range(50):
            number = (31 * number + 7) % 1_000_003


def _hash() -> None:
    """Compute without Python's lock for as long."""
    until, data = time.perf_counter() + BUSY_SECONDS, bytes(1_000_000)
    while time.perf_counter() < until:
        hashlib.sha256(data).digest()


def main(folder: Path, rank: int, plan: RoundPlan) -> None:
    """Take all turns as one rank."""
    torch.set_num_threads(1)
    timeout, address = timedelta(seconds=120), f"tcp://{plan.address}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=plan.ranks, timeout=timeout)
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for line in round_turns(plan) if plan.part == "round" else lock_turns(plan):
            lines.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


# -- rows and tables ---------------------------------------------------------------------------------------------------


def round_rows(turns: Sequence[Row], plan: RoundPlan) -> list[Row]:
    """Return a row for each lane: best turn, median round and least processor time, and each by the plain loop's."""
    rows: list[Row] = []
    for lane in plan.lanes:
        own = [turn for turn in turns if turn["lane"] == lane]
        row = {
            "best": min(turn["seconds"] for turn in own),
            "median": median(each for turn in own for each in turn["rounds"]),
            "processor": min(turn["processor_seconds"] for turn in own),
        }
        plain = rows[0] if rows else row
        rows.append({"lane": lane, **row, **{f"{name}_ratio": value / plain[name] for name, value in row.items()}})
    return rows


def lock_rows(turns: Sequence[Row]) -> list[Row]:
    """Return a row for each way to be busy: the best turn's seconds of a round with either interval."""
    rows: list[Row] = []
    for busy in dict.fromkeys(turn["busy"] for turn in turns):
        best = {
            name: min(turn["seconds"] for turn in turns if turn["busy"] == busy and turn["switch_seconds"] == interval)
            for name, interval in (("python", PYTHON_SWITCH_SECONDS), ("ours", SWITCH_SECONDS))
        }
        rows.append({"busy": busy, **best})
    return rows


def _table(title: str, *, quick: bool) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)


def _round_table(rows: Sequence[Row], plan: RoundPlan, *, quick: bool) -> Table:
    table = _table(f"A round without delays, {plan.elements:,} parameters, {plan.ranks} ranks", quick=quick)
    table.add_column("lane", no_wrap=True)
    for name in ("best ms", "x plain", "median", "x plain", "cpu ms", "x plain", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        judged = row["lane"] in (FULL, plan.lgc)
        table.add_row(
            row["lane"],
            *(
                cell
                for name in ("best", "median", "processor")
                for cell in (f"{1000 * row[name]:.1f}", COST.show(row[f"{name}_ratio"]))
            ),
            str(COST) if judged else "",
            coloured(COST.verdict(row["best_ratio"])) if judged else "",
        )
    return table


def _parts_table(parts: Row, plan: RoundPlan, *, quick: bool) -> Table:
    table = _table("What a rank does in a round beside the all-reduce, each alone on the machine", quick=quick)
    for name in parts["parts"]:
        table.add_column(name, justify="right")
    table.add_row(*(f"{1000 * seconds:.2f} ms" for seconds in parts["parts"].values()))
    return table


def _lock_table(rows: Sequence[Row], plan: RoundPlan, *, quick: bool) -> Table:
    title = f"A round in ms, {1000 * COMPUTING_SECONDS:g} ms of it computing; one of {plan.ranks} ranks busy (no bar)"
    table = _table(title, quick=quick)
    table.add_column("the last rank is busy with")
    names = (f"switch interval {1000 * PYTHON_SWITCH_SECONDS:g} ms", f"{1000 * SWITCH_SECONDS:g} ms (ours)")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["busy"], f"{1000 * row['python']:.1f}", f"{1000 * row['ours']:.1f}")
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), RoundPlan(**json.loads(sys.argv[3])))
