"""The ranks of a pipeline: who is which stage of which replica, how they agree, and how a failure reaches all of them.

    rank = replica * stages + stage

                 stage 0    stage 1    stage 2
    replica 0    rank 0 ──> rank 1 ──> rank 2       a row: one pipeline, with a process group of its own
    replica 1    rank 3 ──> rank 4 ──> rank 5
                 a column: the ranks that hold the same layers

Before anything is computed all ranks tell each other what they are about to do, through rank 0, which knows for whom it
waits and tells the others who has not come. So a bad batch is refused by all ranks together, and nobody waits for one
that has refused. The stages in the middle see no batch, so this message also tells them how large it is.

A rank that fails in the middle of a schedule cannot be waited for:

    stage 1 fails       posts why in the launch's store, then closes its connections
    stage 0, stage 2    a connection is closed: look for what was posted, post the same, and close theirs
    stage 3             and so on, until all have stopped

So nobody waits for the deadline. Where nothing was posted, the rank at the other end of the closed connection is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.agreement import (
    ROW_BYTES,
    decode_row,
    encode_row,
    plain_text,
    raise_difference,
    raise_refusals,
    refusal_text,
)
from paceline.distributed.collectives import start_gather
from paceline.distributed.groups import forget_groups, shared_group
from paceline.distributed.stores import meet_ranks, private_store
from paceline.drivers.ranks.launch import place_in
from paceline.drivers.ranks.rendezvous import joined
from paceline.pipeline import PipelineError

GRACE_SECONDS = 30.0
LOOK_SECONDS = 2.0  # in which a connection that was lost shows who is at its other end
POLL_SECONDS = 0.02
PROBE_TAG = 7001  # of messages that nobody sends
MOST_NAMED = 4  # of the ranks that are gone
PURPOSE = "pipeline"  # of process groups
HOW_TO_START = (
    "a pipeline needs a process for each stage, and this process is alone: start the script with "
    "`torchrun --nproc-per-node {stages} script.py`"
)
Result = TypeVar("Result")


class PipelineRanks:
    """The ranks that run a pipeline, in `process_group` or all there are.

    `ranks` are their numbers in the launch, and `place` is this rank's place among them. `row` and `column` are the
    process groups drawn above.
    """

    def __init__(
        self, stages: int, device: torch.device, timeout_seconds: float, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self._joined = contextlib.ExitStack()
        self.device, self.timeout_seconds = device, timeout_seconds
        if not (dist.is_available() and dist.is_initialized()):
            launched = place_in(os.environ)
            if launched is None:
                raise PipelineError(HOW_TO_START.format(stages=stages))
            self._joined.enter_context(joined(launched, timeout_seconds=timeout_seconds))
        self.ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.rank = dist.get_rank()
        self.place = self.ranks.index(self.rank)
        self.world, self.stages = len(self.ranks), stages
        self.replicas = max(1, self.world // stages)
        self.replica, self.stage = divmod(self.place, stages)
        try:
            store = self._meet()
            # A wait in it ends with our error, which names a rank, before it ends with the backend's.
            self._control = self._our_group([range(self.world)], "gloo", grace_seconds=GRACE_SECONDS)
            self.failures = FailurePropagation(
                self.ranks,
                self.place,
                store=store,
                group=self._control,
                name=self.name,
                timeout_seconds=timeout_seconds,
            )
            rows = [range(first, first + stages) for first in range(0, self.world, stages)]
            columns = [range(stage, self.world, stages) for stage in range(stages)]
            self.row = self._our_group(rows)
            self.column = self._our_group(columns) if self.replicas > 1 else self.row
        except BaseException:
            self.close()
            raise

    def _meet(self) -> Any:
        """Wait until all ranks are here with plans of as many stages; return a store that no other pipeline has."""
        words = {"stages": self.stages, "name": os.urandom(8).hex()}
        rows = meet_ranks(
            self.ranks, "make a pipeline", words, purpose="pipeline", timeout_seconds=self.timeout_seconds
        )
        name, *_ = [row.pop("name") for row in rows]
        raise_difference(
            rows,
            "all ranks must have the same plan: that of {who} has {theirs} stages, that of {other} has {ours}",
            names=[f"rank {rank}" for rank in self.ranks],
            error=PipelineError,
        )
        if self.world % self.stages:
            raise PipelineError(
                f"the number of ranks must be a multiple of the stages (ranks={self.world}, stages={self.stages}): "
                "every replica of the pipeline has one rank for each stage"
            )
        return private_store(f"pipeline/{name}")

    def name(self, place: int) -> str:
        """Return a rank as words for an error: its stage, which users know, and its rank, which the launcher shows."""
        replica, stage = divmod(place, self.stages)
        of = f" of replica {replica}" if self.replicas > 1 else ""
        return f"stage {stage}{of} (rank {self.ranks[place]})"

    def make_group(
        self, sets: Sequence[Sequence[int]], backend: str | None = None, *, grace_seconds: float = 0.0
    ) -> dist.ProcessGroup | None:
        """Make groups of these places, for tensors unless a backend is named; return the one that this rank is in.

        All ranks must call it.
        """
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        ranks = [[self.ranks[place] for place in places] for places in sets]
        limit = self.timeout_seconds
        return shared_group(ranks, self.ranks, backend, limit, purpose=PURPOSE, grace_seconds=grace_seconds)

    def _our_group(
        self, sets: Sequence[Sequence[int]], backend: str | None = None, *, grace_seconds: float = 0.0
    ) -> dist.ProcessGroup:
        group = self.make_group(sets, backend, grace_seconds=grace_seconds)
        if group is None:
            raise RuntimeError(f"rank {self.rank} is in none of the groups")
        return group

    def close(self) -> None:
        """Leave the process group if it was joined here."""
        self._joined.close()

    # -- agreement -----------------------------------------------------------------------------------------------------

    def agree(self, words: Mapping[str, Any], doing: str) -> list[dict[str, Any]]:
        """Return every rank's words, once all have come to do the same; a `refusal` among them is raised by all."""
        if self.failures.failure is not None:
            failed = first_line(self.failures.failure)
            raise PipelineError(f"this pipeline has failed, and must be made anew: {failed}")
        table = torch.full((self.world, ROW_BYTES), ord(" "), dtype=torch.uint8)
        table[self.place] = encode_row({**words, "doing": doing})
        gone = self._collect(table, doing) if self.place == 0 else self._hand_in(table, doing)
        if gone:
            raise self.failures.fail(RankGoneError(gone))
        rows = [decode_row(row) for row in table]
        for place, row in enumerate(rows):
            if row["doing"] != doing:
                raise self.failures.fail(
                    PipelineError(
                        f"all ranks must do the same in the same order: {self.name(place)} wants to {row['doing']}, "
                        f"and {self.name(self.place)} to {doing}"
                    )
                )
        refusals = [row.get("refusal", "") for row in rows]
        sentence = "{refusal}" if all(refusals) else "{who}: {refusal}"
        raise_refusals(refusals, names=self._names(), sentence=sentence, error=PipelineError)
        return rows

    def make_together(
        self,
        doing: str,
        make: Callable[[], Result],
        describe: Callable[[Result], Mapping[str, str]] = lambda made: {},
    ) -> Result:
        """Make something on every rank, or refuse on every rank; its description must be the same on all of them.

        Not every rank must describe the same things: replicas may have batches of different sizes.
        """
        made, refusal, cause = None, "", None
        words: Mapping[str, str] = {}
        try:
            made = make()
            words = describe(made)
        except Exception as error:
            refusal, cause = refusal_text(error), error
        try:
            rows = self.agree({"refusal": refusal, "same": dict(words)}, doing)
        except PipelineError as error:
            raise error from cause
        raise_difference([row["same"] for row in rows], names=self._names(), error=PipelineError)
        return made  # type: ignore[return-value] # there is one, or all have raised

    def _names(self) -> list[str]:
        return [self.name(place) for place in range(self.world)]

    def _collect(self, table: torch.Tensor, doing: str) -> str:
        """Receive everybody's words on rank 0, and send the table out; return who is gone, in words, or ""."""
        deadline = time.monotonic() + self.timeout_seconds
        arriving = {
            place: Message(dist.irecv, table[place], self.ranks[place], self._control) for place in range(1, self.world)
        }
        lost = {place: message.wait(deadline - time.monotonic()) for place, message in arriving.items()}
        gone = [place for place, why in lost.items() if why]
        if any("imed out" in lost[place] for place in gone):
            return f"{self.name(0)} waited {self.timeout_seconds:g} s for {self.failures.named(gone)} to {doing}"
        text = plain_text(f"{self.failures.are_gone(gone)}, and was to {doing}") if gone else ""
        if gone:
            table[0] = encode_row({"gone": text})
        others = [place for place in arriving if place not in gone]
        leaving = [Message(dist.isend, table, self.ranks[place], self._control) for place in others]
        for message in leaving:
            message.wait(self.timeout_seconds)  # one that is lost now is missed next time, or by its neighbours
        return text

    def _hand_in(self, table: torch.Tensor, doing: str) -> str:
        """Send this rank's words to rank 0, and receive everybody's; return who is gone, in words, or ""."""
        ours = table[self.place].clone()
        sending = Message(dist.isend, ours, self.ranks[0], self._control)
        why = Message(dist.irecv, table, self.ranks[0], self._control).wait(self.timeout_seconds + GRACE_SECONDS / 2)
        if "imed out" in why:
            return f"{self.name(self.place)} waited {self.timeout_seconds:g} s for {self.name(0)} to {doing}"
        if why:
            return self.failures.posted([0], LOOK_SECONDS) or f"{self.name(0)} is gone, and was to {doing}"
        sending.wait(self.timeout_seconds)
        return str(decode_row(table[0]).get("gone", ""))

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers."""
        ours = torch.tensor(list(numbers), dtype=torch.float64)
        gathered, work = start_gather(ours, self._control)
        work.wait()
        rows: list[list[float]] = gathered.view(self.world, -1).tolist()
        return rows


class FailurePropagation:
    """How the rank at `place` of these ranks lets the others know of its failure, and finds out about theirs.

    `name` is a function that returns a rank as words; `failure` is the error that has ended this pipeline.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        *,
        store: Any,
        group: dist.ProcessGroup,
        name: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        self._ranks, self._place, self._name = ranks, place, name
        self._store, self._group, self._timeout_seconds = store, group, timeout_seconds
        self._probes: list[Message] = []  # kept, so that none of them ends before its group does
        self.failure: Exception | None = None

    def fail(self, error: Exception) -> Exception:
        """Post an error that ends this pipeline, close all connections so that nobody waits, and return the error."""
        if self.failure is None:
            self.failure = error
            known = isinstance(error, PipelineError | RankGoneError)
            text = first_line(Exception(str(error if known else f"{type(error).__name__}: {error}")))
            with contextlib.suppress(RuntimeError):  # the store may be lost with whoever kept it
                self._store.set(str(self._place), text if known else f"{self._name(self._place)} has failed: {text}")
            self._close_connections()
        return error

    def connection_lost(self, error: Exception, places: Sequence[int]) -> Exception:
        """Return what to raise where a message to or from one of these places has failed."""
        everyone = range(len(self._ranks))
        others = " or ".join(self._name(place) for place in places if place != self._place)
        line = first_line(error)
        if "imed out" in line:
            text = f"{self._name(self._place)} waited {self._timeout_seconds:g} s for {others}"
            return self.fail(RankGoneError(self.posted(everyone) or text))
        deadline = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < deadline:
            gone = [place for place in everyone if place != self._place and self._is_closed(place)]
            posted = self.posted(everyone)  # a rank posts before it closes its connections
            if posted or gone:
                return self.fail(PipelineError(posted) if posted else RankGoneError(self.are_gone(gone)))
            time.sleep(POLL_SECONDS)
        return self.fail(RankGoneError(f"{self._name(self._place)} has lost its connection to {others}: {line}"))

    def guard(self, run: Callable[[], Result]) -> Result:
        """Run what talks to other ranks; an error names the rank that is gone."""
        try:
            return run()
        except (RuntimeError, dist.DistError) as error:
            raise self.connection_lost(error, range(len(self._ranks))) from error

    def named(self, places: Sequence[int]) -> str:
        """Return some ranks as words; of many only the first."""
        more = len(places) - MOST_NAMED
        return " and ".join([*map(self._name, places[:MOST_NAMED]), *([f"{more} more"] if more > 0 else [])])

    def are_gone(self, places: Sequence[int]) -> str:
        return f"{self.named(places)} {'is' if len(places) == 1 else 'are'} gone"

    def posted(self, places: Sequence[int], seconds: float = 0.0) -> str:
        """Return what one of these ranks has posted, or "" if there is nothing after `seconds`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store may be lost
            while True:
                for place in places:
                    if place != self._place and self._store.check([str(place)]):
                        return str(self._store.get(str(place)).decode(errors="replace"))
                if time.monotonic() >= deadline:
                    break
                time.sleep(POLL_SECONDS)
        return ""

    def _is_closed(self, place: int) -> bool:
        """Whether a message from there could not come: gloo says so at once."""
        probe = Message(dist.irecv, torch.empty(1, dtype=torch.uint8), self._ranks[place], self._group, PROBE_TAG)
        self._probes.append(probe)
        return probe.refused

    def _close_connections(self) -> None:
        """Close the connections of all groups; the next pipeline makes others."""
        for group in forget_groups(self._ranks, purpose=PURPOSE):
            if dist.get_backend(group) != "gloo":
                group.abort()
                continue
            # gloo has no abort. It closes all connections of a group when one wait runs out of time; that must be for a
            # rank that has not closed its own, or the wait would end at once and leave the others as they are.
            for rank in dist.get_process_group_ranks(group):
                if rank == self._ranks[self._place]:
                    continue
                probe = Message(dist.irecv, torch.empty(1, dtype=torch.uint8), rank, group, PROBE_TAG)
                if "imed out" in probe.wait(0.001):
                    break


class Message:
    """A tensor on its way to or from a rank. A wait that ends without it closes the group's connections."""

    def __init__(self, start: Any, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
        self._tensor = tensor  # it must live as long
        self._work, self._why = None, ""
        try:
            self._work = start(tensor, rank, group=group, tag=tag)
        except RuntimeError as error:
            self._why = first_line(error)

    @property
    def refused(self) -> bool:
        """Whether there is no connection any more."""
        return self._work is None

    def wait(self, seconds: float) -> str:
        """Wait for the tensor; return why it did not come, or "" if it did."""
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=max(0.001, seconds)))
            except RuntimeError as error:
                self._why = first_line(error)
        return self._why
