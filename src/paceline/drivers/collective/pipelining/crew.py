"""The ranks of a pipeline: who is which stage of which replica, and how they talk besides tensors of the schedule.

    rank = replica * stages + stage

                 stage 0    stage 1    stage 2
    replica 0    rank 0 ──> rank 1 ──> rank 2       a row: one pipeline, with a group of its own
    replica 1    rank 3 ──> rank 4 ──> rank 5
                 a column: the ranks that hold the same layers

Before anything is computed all ranks tell each other what they are about to do, through rank 0, which knows for whom it
waits and tells the others who has not come. So a bad batch is refused by all ranks together, and nobody waits for one
that has refused.

What a rank does that fails in the middle of a schedule is in `farewell`.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.collectives import start_gather
from paceline.distributed.stores import StoreGather, private_store
from paceline.drivers.collective.pipelining.farewell import LOOK_SECONDS, Farewell
from paceline.drivers.collective.pipelining.messages import WORDS_BYTES, Message, plain, read, written
from paceline.drivers.collective.pipelining.rooms import room
from paceline.drivers.ranks.launch import place_in
from paceline.drivers.ranks.rendezvous import joined
from paceline.pipeline import PipelineError

GRACE_SECONDS = 30.0

_NUMBERS: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # of pipelines

HOW_TO_START = (
    "a pipeline needs a process for each stage, and this process is alone: start the script with "
    "`torchrun --nproc-per-node {stages} script.py`"
)


class Crew:
    """The ranks that run a pipeline, in `process_group` or all there are."""

    def __init__(
        self, stages: int, device: torch.device, timeout_seconds: float, given: dist.ProcessGroup | None = None
    ) -> None:
        self._ours = contextlib.ExitStack()
        self.device, self.timeout_seconds = device, timeout_seconds
        if not (dist.is_available() and dist.is_initialized()):
            place = place_in(os.environ)
            if place is None:
                raise PipelineError(HOW_TO_START.format(stages=stages))
            self._ours.enter_context(joined(place, timeout_seconds=timeout_seconds))
        self.ranks = dist.get_process_group_ranks(given or dist.group.WORLD)
        self.place = self.ranks.index(dist.get_rank())
        self.world, self.stages = len(self.ranks), stages
        self.replicas = max(1, self.world // stages)
        self.replica, self.stage = divmod(self.place, stages)
        try:
            store = self._meet()
            # A wait in it ends with our error, which names a rank, before it ends with the backend's.
            self._talk = self._own(self.rooms([range(self.world)], "gloo", timeout_seconds + GRACE_SECONDS))
            self.farewell = Farewell(
                self.ranks, self.place, store=store, talk=self._talk, who=self.who, timeout_seconds=timeout_seconds
            )
            rows = [range(first, first + stages) for first in range(0, self.world, stages)]
            columns = [range(stage, self.world, stages) for stage in range(stages)]
            self.row = self._own(self.rooms(rows))
            self.column = self._own(self.rooms(columns)) if self.replicas > 1 else self.row
            self.column_words = self._own(self.rooms(columns, "gloo")) if self.replicas > 1 else self.row
        except BaseException:
            self._ours.close()
            raise

    def _meet(self) -> Any:
        """Wait until all ranks are here, and have plans of as many stages; a store that no other pipeline has."""
        numbers = _NUMBERS.setdefault(dist.group.WORLD, Counter())
        numbers[tuple(self.ranks)] += 1
        name = "-".join(map(str, [*self.ranks, numbers[tuple(self.ranks)]]))
        store = private_store(f"pipeline/{name}")
        said = StoreGather(
            dist.PrefixStore("roll", store),  # type: ignore[attr-defined]
            self.place,
            self.world,
            timeout_seconds=self.timeout_seconds,
        ).gather("make a pipeline", self.stages)
        for rank, stages in zip(self.ranks, said, strict=True):
            if stages != said[0]:
                raise PipelineError(
                    f"all ranks must have the same plan: that of rank {rank} has {stages} stages, "
                    f"that of rank {self.ranks[0]} has {said[0]}"
                )
        if self.world % self.stages:
            raise PipelineError(
                f"the number of ranks must be a multiple of the stages (ranks={self.world}, stages={self.stages}): "
                "every replica of the pipeline has one rank for each stage"
            )
        return store

    # -- who is who --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number in the launch."""
        return self.ranks[self.place]

    def who(self, place: int) -> str:
        """A rank in words.

        The stage is what users know, the rank what their launcher shows.
        """
        replica, stage = divmod(place, self.stages)
        of = f" of replica {replica}" if self.replicas > 1 else ""
        return f"stage {stage}{of} (rank {self.ranks[place]})"

    def rooms(
        self, sets: Sequence[Sequence[int]], backend: str | None = None, timeout_seconds: float | None = None
    ) -> dist.ProcessGroup | None:
        """Groups of these places, for tensors unless a backend is named; the one of this rank. All ranks come here."""
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        ranks = [[self.ranks[place] for place in places] for places in sets]
        try:
            return room(ranks, self.ranks, backend, timeout_seconds or self.timeout_seconds)
        except (dist.DistError, RuntimeError) as error:
            raise RankGoneError(f"rank {self.rank} waited for all ranks to connect: {first_line(error)}") from error

    def _own(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise RuntimeError(f"rank {self.rank} is in none of the groups")
        return group

    # -- what they tell each other -------------------------------------------------------------------------------------

    def tell(self, words: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
        """Every rank's words, once all have come to do the same; a `refusal` among them is raised by all."""
        failure = self.farewell.failure
        if failure is not None:
            raise PipelineError(f"this pipeline has failed, and must be made anew: {first_line(failure)}")
        table = torch.full((self.world, WORDS_BYTES), ord(" "), dtype=torch.uint8)
        table[self.place] = written({**words, "what": what})
        gone = self._collect(table, what) if self.place == 0 else self._hand_in(table, what)
        if gone:
            raise self.farewell.give_up(RankGoneError(gone))
        said = [read(row) for row in table]
        self._agree(said, what)
        return said

    def _collect(self, table: torch.Tensor, what: str) -> str:
        """Rank 0's part: everybody's words come in, and the table goes out. Who is gone, in words; or nothing."""
        deadline = time.monotonic() + self.timeout_seconds
        arriving = [Message(dist.irecv, table[place], self.ranks[place], self._talk) for place in range(1, self.world)]
        lost = {}
        for place, message in enumerate(arriving, start=1):
            lost[place] = message.wait(deadline - time.monotonic())
        gone = [place for place, why in lost.items() if why]
        if any("imed out" in lost[place] for place in gone):
            return f"{self.who(0)} waited {self.timeout_seconds:g} s for {self.farewell.named(gone)} to {what}"
        told = plain(f"{self.farewell.are_gone(gone)}, and was to {what}") if gone else ""
        if gone:
            table[0] = written({"gone": told})
        others = [place for place in range(1, self.world) if place not in gone]
        leaving = [Message(dist.isend, table, self.ranks[place], self._talk) for place in others]
        for message in leaving:
            message.wait(self.timeout_seconds)  # one that is lost now is missed next time, or by its neighbours
        return told

    def _hand_in(self, table: torch.Tensor, what: str) -> str:
        ours = table[self.place].clone()
        sending = Message(dist.isend, ours, self.ranks[0], self._talk)
        why = Message(dist.irecv, table, self.ranks[0], self._talk).wait(self.timeout_seconds + GRACE_SECONDS / 2)
        if "imed out" in why:
            return f"{self.who(self.place)} waited {self.timeout_seconds:g} s for {self.who(0)} to {what}"
        if why:
            return self.farewell.left_words([0], LOOK_SECONDS) or f"{self.who(0)} is gone, and was to {what}"
        sending.wait(self.timeout_seconds)
        return str(read(table[0]).get("gone", ""))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers."""
        ours = torch.tensor(list(numbers), dtype=torch.float64)
        gathered, work = start_gather(ours, ours.numel(), self._talk)
        work.wait()
        rows: list[list[float]] = gathered.view(self.world, -1).tolist()
        return rows

    def _agree(self, said: Sequence[Mapping[str, Any]], what: str) -> None:
        for place, words in enumerate(said):
            if words["what"] != what:
                raise self.farewell.give_up(
                    PipelineError(
                        f"all ranks must do the same in the same order: {self.who(place)} wants to {words['what']}, "
                        f"and {self.who(self.place)} to {what}"
                    )
                )
        refusals = {place: words["refusal"] for place, words in enumerate(said) if words.get("refusal")}
        if refusals:
            place = min(refusals)
            alone = f"{self.who(place)}: " if len(refusals) < self.world else ""
            raise PipelineError(f"{alone}{refusals[place]}")

    def close(self) -> None:
        """Part from the others; only what was joined here is left."""
        self._ours.close()
