"""Parts `round`, `python-lock` and `link` of `lgc-ranks`: what a round costs where no rank is slow.

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
link         host A: rank 0, rank 1, and the server ==== 200 Mbit/s each way ==== host B: rank 2, rank 3
             Both train the same million parameters, `full` and `lgc` with K = 3. The same processes are ranks in one
             turn and workers of the server in the next. The server is where it has least to send: on the host of two of
             its workers, which hand their gradients over in memory. What must cross the cable in a round of `full`, in
             models each way: the ring 2 (N - 1) / N = 1.5 at once both ways, the server 2 down and then 2 up.

    python -m experiments.timings.lgc_ranks_round FOLDER RANK PLAN      a rank; the one after the last is the server
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.hosts import ADDRESSES, RATE, Cable, why_not
from experiments.core.ranks import (
    Line,
    by_lane,
    ended_by_signals,
    free_address,
    lines_of,
    started,
    told_by_ranks,
    write_lines,
)
from experiments.core.story import Numbers, Size
from experiments.core.turns import bar, cells, verdict
from paceline.drivers.rounds.switching import SWITCH_SECONDS
from paceline.events import Share, Step
from paceline.reports.table import PlainTable
from paceline.traces.journal import StepRecord
from paceline.traces.journal_files import read_journal
from paceline.training.contributions import RankGradients, VectorPool
from paceline.training.rank_model import RankModel
from paceline.training.train_state import all_finite

PLAIN, DDP, FULL = "plain all-reduce", "torch: ddp", "full"
MOST_COST, LEAST_RATIO = 1.3, 2.0
PYTHON_SWITCH_SECONDS = 0.005
COMPUTING_SECONDS, BUSY_SECONDS = 0.005, 0.020
BUSY = ("sleep", "hashing", "loader", "thread")
FIRST_ROUNDS = 2  # of a turn, not timed: they wait for pages, threads, and ranks that come from elsewhere
TINY, REDUCTIONS = 1_000, 20  # of the all-reduces that tell a hop's latency
PORT = 29577  # where ranks meet on the cable; each run of the server has one of the next
MODULE = "experiments.timings.lgc_ranks_round"

Costs = dict[str, float]
Loop = Callable[[int], list[float]]  # of rounds: when each was over


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of a part do; `address` is where they meet."""

    part: str
    address: str
    ranks: int
    elements: int
    turns: int
    rounds: int

    @property
    def strategies(self) -> dict[str, int]:
        """K of each strategy; that of `full` is the number of ranks."""
        return {FULL: self.ranks, f"lgc, K={self.ranks - 1}": self.ranks - 1}

    @property
    def lanes(self) -> list[tuple[int, str, Any]]:
        """Turn, lane and nothing; or turn, a way to be busy and an interval; or turn, strategy and where it runs."""
        intervals, places = (PYTHON_SWITCH_SECONDS, SWITCH_SECONDS), ("ranks", "server")
        lanes: dict[str, Iterable[tuple[str, Any]]] = {
            "round": itertools.product((PLAIN, DDP, *self.strategies), [""]),
            "python-lock": itertools.product(BUSY, intervals),
            "link": [(FULL, PLAIN), *itertools.product(self.strategies, places)],
        }
        return [(turn, *lane) for turn, lane in itertools.product(range(self.turns), lanes[self.part])]

    @property
    def labels(self) -> list[str]:
        """What rank 0 writes a line of."""
        labels = [" ".join(filter(None, (self.part, lane, str(more)))) for _, lane, more in self.lanes]
        return labels if self.part == "python-lock" else [f"{self.part}, all-reduces", *labels]


def plan_of(
    size: Size, part: str, address: str, *, elements: tuple[int, int], turns: int, rounds: tuple[int, int]
) -> Plan:
    """Return the plan of a part; pairs are a toy's figure and the laboratory's."""
    sizes = {"ranks": size.pick(2, 4), "elements": size.pick(*elements)}
    return Plan(part=part, address=address, **sizes, turns=size.pick(1, turns), rounds=size.pick(*rounds))


def round_cost(size: Size, repeat: int) -> Generator[Any, Any, Costs]:
    """Tell part `round`, and return what all-reduces took."""
    plan = plan_of(size, "round", free_address(), elements=(40_000, 11_000_000), turns=repeat or 5, rounds=(3, 8))
    parts, *turns = yield from told_by_ranks(MODULE, plan.ranks, asdict(plan), plan.labels)
    rows = round_rows(turns)
    claims = {
        lane: bar(f"round, {lane}: beside the plain loop", rows[lane]["best_ratio"], most=MOST_COST)
        for lane in plan.strategies
    }
    yield PlainTable(
        title=f"A round without delays, {plan.elements:,} parameters, {plan.ranks} ranks",
        headings=("\nlane", "best\nms", "times\nplain", "median\nms", "times\nplain", "CPU\nms", "times\nplain", ""),
        rows=[(lane, *round_cells(row), verdict(claims[lane]) if lane in claims else "") for lane, row in rows.items()],
        caption=f"The best turn of {plan.turns}; CPU: of all ranks together.",
    )
    yield PlainTable(
        title="What a rank does in a round beside the all-reduce",
        headings=("part", "ms"),
        rows=[(name, f"{1000 * seconds:.2f}") for name, seconds in parts["parts"].items()],
        caption="Each alone on the machine.",
    )
    yield from claims.values()
    yield Numbers({"round": {"rows": rows, "parts": parts, "turns": turns, "costs": parts["costs"]}})
    return dict(parts["costs"])


def python_lock(size: Size, repeat: int) -> Generator[Any, Any, None]:
    """Tell part `python-lock`; no bar is asked."""
    plan = plan_of(size, "python-lock", free_address(), elements=(1000, 1000), turns=repeat or 3, rounds=(3, 80))
    turns = yield from told_by_ranks(MODULE, plan.ranks, asdict(plan), plan.labels)
    rows = lock_rows(turns)
    yield PlainTable(
        title=f"Milliseconds of a round in which one of {plan.ranks} ranks is busy",
        headings=("\nbusy with", "switch interval\n5 ms", f"\n{1000 * SWITCH_SECONDS:g} ms (ours)"),
        rows=[(busy, *(f"{1000 * seconds:.1f}" for seconds in row.values())) for busy, row in rows.items()],
        caption=f"{1000 * COMPUTING_SECONDS:g} ms of each are computing; the best turn of {plan.turns}; no bar.",
    )
    yield Numbers({"python-lock": {"rows": rows, "turns": turns}})


def link(size: Size, repeat: int) -> Generator[Any, Any, Costs | None]:
    """Tell part `link`, and return what all-reduces took; None where there can be no cable."""
    reason = why_not()
    if reason:
        yield f"lgc-ranks, link: skipped, and no bar judged: {reason}"
        yield Numbers({"link": {"skipped": reason}})
        return None
    plan = plan_of(
        size, "link", f"{ADDRESSES[0]}:{PORT}", elements=(40_000, 1_000_000), turns=repeat or 2, rounds=(2, 12)
    )
    count, text = plan.ranks + 1, json.dumps(asdict(plan))
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="paceline-lgc-ranks-") as name,
        Cable() as cable,
        started(MODULE, Path(name), count, text, hosts=hosts_of(cable, plan.ranks)) as ranks,
    ):
        ((first, *lines),) = yield from lines_of(ranks, Path(name), plan.labels, writers=1)
        for line in lines:
            if line["where"] == "server":
                trace = read_journal(Path(name, f"run-{line['run']}", "trace.jsonl"))
                line["times"] = [record.at_seconds for record in trace.records if isinstance(record, StepRecord)]
    rows = link_rows(lines, plan.rounds)
    claims = {
        strategy: bar(f"link, {strategy}: rounds a second of ranks / of the server", row["ratio"], least=LEAST_RATIO)
        for strategy, row in rows.items()
    }
    yield PlainTable(
        title="Rounds a second on two hosts, without and with a server",
        headings=("strategy", "ranks", "server", "ranks / server", ""),
        rows=[
            (strategy, *cells(row, ranks=".2f", server=".2f", ratio=".2f"), verdict(claims[strategy]))
            for strategy, row in rows.items()
        ],
        caption=f"{plan.elements:,} parameters, {plan.ranks} ranks, {RATE}/s; the best turn of {plan.turns}.",
    )
    yield from claims.values()
    yield Numbers({"link": {"rows": rows, "lines": lines, "costs": first}})
    return dict(first)


def hosts_of(cable: Cable, ranks: int) -> list[tuple[str, str]]:
    """Return where each rank is, and then the server: on the first host."""
    first, second = zip(cable.hosts, cable.interfaces, strict=True)
    return [*[first] * (ranks // 2), *[second] * (ranks // 2), first]


def round_rows(turns: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return each lane's best turn, median round and least processor time, and each by the plain loop's."""
    rows: dict[str, dict[str, float]] = {}
    for lane, own in by_lane(turns).items():
        row = {
            "best": min(turn["seconds"] for turn in own),
            "median": median(each for turn in own for each in turn["rounds"]),
            "processor": min(turn["processor_seconds"] for turn in own),
        }
        plain = rows.get(PLAIN, row)
        rows[lane] = row | {f"{name}_ratio": value / plain[name] for name, value in row.items()}
    return rows


def round_cells(row: Mapping[str, float]) -> list[str]:
    milliseconds = {name: f"{1000 * row[name]:.1f}" for name in ("best", "median", "processor")}
    return [text for name, each in milliseconds.items() for text in (each, f"{row[f'{name}_ratio']:.2f}")]


def lock_rows(turns: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return for each way to be busy the best turn's seconds of a round, with either interval."""
    seconds: dict[tuple[str, float], list[float]] = {}
    for turn in turns:
        seconds.setdefault((turn["busy"], turn["switch_seconds"]), []).append(turn["seconds"])
    intervals = {"python": PYTHON_SWITCH_SECONDS, "ours": SWITCH_SECONDS}
    return {busy: {name: min(seconds[busy, each]) for name, each in intervals.items()} for busy in BUSY}


def link_rows(lines: Sequence[Line], rounds: int) -> dict[str, dict[str, float]]:
    """Add its rounds a second to each line; return the best of ranks and server for each strategy, and their ratio."""
    best: dict[str, dict[str, float]] = {}
    for line in lines:
        times = line["times"][FIRST_ROUNDS - 1 :]
        line["rounds_per_second"] = found = rounds / (times[-1] - times[0])
        row = best.setdefault(line["strategy"], {})
        row[line["where"]] = max(found, row.get(line["where"], 0.0))
    return {strategy: row | {"ratio": row["ranks"] / row["server"]} for strategy, row in best.items()}


# -- loops of a rank ---------------------------------------------------------------------------------------------------


class Summed(nn.Module):
    """A model of so many parameters in a few tensors, whose loss is their sum: as little work as can be."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(elements // 4000, 1000)) for _ in range(4)])

    def forward(self) -> torch.Tensor:
        return sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))


def made(elements: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimiser of every lane."""
    model = Summed(elements)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def plain_loop(elements: int) -> Loop:
    """Return the peer: a flat gradient, one all-reduce, the optimiser."""
    model, optimizer = made(elements)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes))
    for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = part.view_as(parameter)

    def one_round() -> None:
        flat.zero_()
        model().backward()
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        optimizer.step()

    return partial(after_each, one_round)


def ddp_loop(elements: int) -> Loop:
    """Return torch's own, with gradients as views of its buckets."""
    inner, optimizer = made(elements)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)

    def one_round() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return partial(after_each, one_round)


def after_each(one_round: Callable[[], None], rounds: int) -> list[float]:
    """Return when each of so many rounds was over."""
    times = []
    for _ in range(rounds):
        one_round()
        times.append(time.perf_counter())
    return times


class SyncedLoop:
    """A synchronizer of ours; K is the number of ranks for `full`."""

    def __init__(self, elements: int, k: int, **common: Any) -> None:
        self._model, optimizer = made(elements)
        kind: Any = paceline.FullSync if k == dist.get_world_size() else partial(paceline.LGCSync, k=k)
        self.sync = kind(self._model, optimizer, record=True, blocks=1, **common)

    def seconds(self, rounds: int, before_batch: Callable[[], None] = lambda: None) -> list[float]:
        """Return when the update of each of so many rounds was there."""
        known = len(self.sync.history)
        for _ in self.sync.epoch([None], rounds=rounds):
            before_batch()
            self._model().backward()
            self.sync.step()
        self.sync.flush()
        return [closed.done for closed in self.sync.history[known:]]


# -- a rank of part `round` --------------------------------------------------------------------------------------------


def round_turns(plan: Plan) -> Iterator[Line]:
    """Yield a line for the parts, and one for every turn."""
    yield parts_of_a_round(plan)
    synced = {lane: SyncedLoop(plan.elements, k) for lane, k in plan.strategies.items()}
    loops: dict[str, Loop] = {PLAIN: plain_loop(plan.elements), DDP: ddp_loop(plan.elements)}
    loops |= {lane: loop.seconds for lane, loop in synced.items()}
    for turn, lane, _ in plan.lanes:
        dist.barrier()
        before = time.process_time()
        times = loops[lane](FIRST_ROUNDS + plan.rounds)[FIRST_ROUNDS - 1 :]
        spent = torch.tensor(time.process_time() - before, dtype=torch.float64)
        dist.all_reduce(spent)
        yield {
            "turn": turn,
            "lane": lane,
            "seconds": (times[-1] - times[0]) / plan.rounds,
            "rounds": [after - before for before, after in itertools.pairwise(times)],
            "processor_seconds": float(spent) / (FIRST_ROUNDS + plan.rounds),
        }
    for loop in synced.values():
        loop.sync.close()


def parts_of_a_round(plan: Plan) -> Line:
    """Time what a rank does in a round, one by one, and all-reduces of a small and of the model's vector."""
    model, optimizer = made(plan.elements)
    parameters = list(model.parameters())
    costs = reduction_costs(sum(parameter.numel() for parameter in parameters))
    parts: dict[str, float] = {}
    if dist.get_rank() == 0:
        times: dict[str, list[float]] = {}

        def timed(name: str, what: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            found = what()
            times.setdefault(name, []).append(time.perf_counter() - began)
            return found

        own = RankModel(parameters, [], lambda: timed("optimiser", optimizer.step))
        pool = VectorPool(own.layout.size, own.dtype, torch.device("cpu"))
        gradients = RankGradients(0, own.layout, pool)
        flat = torch.zeros(own.layout.gradient)
        for version in range(6):
            model().backward()
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
        stepping = times.pop("optimiser")
        times["apply"] = [both - alone for both, alone in zip(times["apply"], stepping, strict=True)]
        times["optimiser"] = stepping
        parts = {name: min(found[1:]) for name, found in times.items()}
    dist.barrier()
    return {"parts": parts, "costs": costs}


def reduction_costs(elements: int) -> Costs:
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


def lock_turns(plan: Plan) -> Iterator[Line]:
    """Yield a line for every turn; only the last rank is busy."""
    loop = SyncedLoop(plan.elements, plan.ranks - 1, most_behind=10_000)
    for turn, busy, switch_seconds in plan.lanes:
        sys.setswitchinterval(switch_seconds)
        dist.barrier()
        stop, beside = threading.Event(), None
        before_batch: Callable[[], None] = partial(time.sleep, COMPUTING_SECONDS)
        if dist.get_rank() == plan.ranks - 1:
            asleep = partial(time.sleep, BUSY_SECONDS)
            before_batch = {"hashing": hash_a_while, "loader": count_a_while}.get(busy, asleep)
            if busy == "thread":
                beside = threading.Thread(target=count_until, args=(stop.is_set,), daemon=True)
                beside.start()
        times = loop.seconds(FIRST_ROUNDS + plan.rounds, before_batch)[FIRST_ROUNDS - 1 :]
        stop.set()
        if beside is not None:
            beside.join()
        seconds = (times[-1] - times[0]) / plan.rounds
        yield {"turn": turn, "busy": busy, "switch_seconds": switch_seconds, "seconds": seconds}
    loop.sync.close()


def count_a_while() -> None:
    until = time.perf_counter() + BUSY_SECONDS
    count_until(lambda: time.perf_counter() >= until)


def count_until(over: Callable[[], bool]) -> None:
    """Compute in Python."""
    number = 0
    while not over():
        for _ in range(50):
            number = (31 * number + 7) % 1_000_003


def hash_a_while() -> None:
    """Compute without Python's lock."""
    until, data = time.perf_counter() + BUSY_SECONDS, bytes(1_000_000)
    while time.perf_counter() < until:
        hashlib.sha256(data).digest()


# -- the processes of part `link` --------------------------------------------------------------------------------------


def link_turns(plan: Plan) -> Iterator[Line]:
    """Take all turns as one rank; of the server's, the figures are in its journal."""
    yield reduction_costs(plan.elements)
    for run, (turn, strategy, where) in enumerate(plan.lanes):
        dist.barrier()
        line: Line = {"turn": turn, "where": where, "strategy": strategy, "run": run}
        if where == PLAIN:
            line["times"] = plain_loop(plan.elements)(FIRST_ROUNDS + plan.rounds)
        elif where == "ranks":
            loop = SyncedLoop(plan.elements, plan.strategies[strategy])
            line["times"] = loop.seconds(FIRST_ROUNDS + plan.rounds)
            loop.sync.close()
        else:
            model, _ = made(plan.elements)
            with paceline.Worker(f"{ADDRESSES[0]}:{PORT + 1 + run}", model) as worker:
                while worker.running():
                    worker.begin_batch(1)
                    model().backward()
                    worker.block_done()
                    worker.send()
        dist.barrier()
        yield line


def serve_turns(folder: Path, plan: Plan) -> None:
    """Serve one run after the other, each at a port of its own."""
    for run, (_, strategy, where) in enumerate(plan.lanes):
        if where != "server":
            continue
        model, optimizer = made(plan.elements)
        k = plan.strategies[strategy]
        paceline.serve(
            model,
            optimizer,
            strategy=paceline.Full() if k == plan.ranks else paceline.LGC(k=k),
            workers=plan.ranks,
            rounds=FIRST_ROUNDS + plan.rounds,
            listen=f"0.0.0.0:{PORT + 1 + run}",
            insecure=True,
            folder=folder / f"run-{run}",
            checkpoint_every=10**9,
        )


def main(folder: Path, rank: int, plan: Plan) -> None:
    """Take all turns as one rank, or serve."""
    if rank == plan.ranks:
        torch.set_num_threads(1)
        serve_turns(folder, plan)
        return
    turns = {"round": round_turns, "python-lock": lock_turns, "link": link_turns}[plan.part]
    write_lines(folder, rank, plan.ranks, lambda: turns(plan), address=plan.address)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
