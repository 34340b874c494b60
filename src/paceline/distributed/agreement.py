"""All ranks agree, or all ranks raise.

A rank that raised alone would leave the others waiting in a collective. So before ranks do something together, each
sends the others a small JSON object ("words"): what it is about to do, and, if it cannot, why (its "refusal"):

    gather   the words of every rank, through a process group (`gather_rows`) or through the store (`StoreGather`)
    check    `raise_refusals`: one rank refuses, so all raise;  `raise_difference`: two ranks differ, so all raise

All ranks check the same data, so they come to the same result without a second exchange.

In a process group the objects are padded to one length, so that no exchange of lengths is needed:

    row of rank r    {"doing": "take a step", "inputs": 12, "refusal": ""}  and spaces up to ROW_BYTES

Text from outside (an error's message, a class's name) is made plain first: printable ASCII that JSON writes as it is,
so that its length is known before it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.distributed import RankGoneError, first_line, name_ranks
from paceline.distributed.collectives import PendingCollective, start_gather
from paceline.distributed.groups import never_destroy, shared_group
from paceline.distributed.stores import FleetingStore, ask_within, meet_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup  # for those who may not import torch.distributed

ROW_BYTES = 1024
MOST_CHARACTERS = 600  # of a refusal
SHORT_CHARACTERS = 160  # of one value of a description; a row has fewer than ten, and JSON may double them
ANNOUNCE_SECONDS = 1.0  # of a wait, after which a rank says that it has come
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# -- what ranks compare ------------------------------------------------------------------------------------------------


def raise_refusals(
    refusals: Sequence[str],
    *,
    ours: Exception | None = None,
    names: Sequence[str] = (),
    sentence: str = "{who}: {refusal}",
    error: type[Exception] = ValueError,
) -> None:
    """Raise on every rank if one of them refuses; "" is no refusal.

    A rank that refuses raises its own error (`ours`), the others an `error` that names the first who refused. `names`
    are the ranks in words, if they have others than "rank 0", "rank 1".

    >>> raise_refusals(["", "no such layer"])
    Traceback (most recent call last):
    ValueError: rank 1: no such layer
    """
    if ours is not None:
        raise ours
    for place, refusal in enumerate(refusals):
        if refusal:
            raise error(sentence.format(who=_name(place, names), refusal=refusal))


def raise_difference(
    descriptions: Sequence[Mapping[str, Any]],
    sentence: str = "all ranks must have the same {key}: {who} has {theirs}, and {other} has {ours}",
    *,
    names: Sequence[str] = (),
    reference: int | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raise on every rank if two ranks describe something differently.

    With `reference` every rank is compared with the one at that place, and must describe the same things; without, a
    value is compared with that of the first rank that describes it, and not every rank must.

    >>> raise_difference([{"codec": "qsgd"}, {"codec": "one-bit"}])
    Traceback (most recent call last):
    ValueError: all ranks must have the same codec: rank 1 has one-bit, and rank 0 has qsgd
    """
    first: dict[str, int] = {}
    for place, theirs in enumerate(descriptions):
        for key in theirs if reference is None else {**theirs, **descriptions[reference]}:
            other = first.setdefault(key, place) if reference is None else reference
            if theirs.get(key) != descriptions[other].get(key):
                raise error(
                    sentence.format(
                        key=key,
                        who=_name(place, names),
                        theirs=theirs.get(key),
                        other=_name(other, names),
                        ours=descriptions[other].get(key),
                    )
                )


def _name(place: int, names: Sequence[str]) -> str:
    return names[place] if names else f"rank {place}"


# -- how words travel in a group ---------------------------------------------------------------------------------------


def gather_rows(
    words: Mapping[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
    row_bytes: int = ROW_BYTES,
    *,
    finish: Callable[[Any, torch.device], None] = lambda work, _: work.wait(),
) -> list[dict[str, Any]]:
    """Return every rank's words, in the order of the group. All ranks of the group must call it; `finish` waits."""
    gathered, work = start_gather(encode_row(words, row_bytes).to(device), group)
    finish(work, device)
    return [decode_row(row[:row_bytes]) for row in gathered.view(group.size(), -1)]


def encode_row(words: Mapping[str, Any], row_bytes: int = ROW_BYTES) -> torch.Tensor:
    """Return words as a row of bytes.

    >>> decode_row(encode_row({"doing": "take a step"}))
    {'doing': 'take a step'}
    """
    text = json.dumps(words).encode()
    if len(text) > row_bytes:
        raise ValueError(f"words must have at most {row_bytes} bytes ({len(text)})")
    return torch.frombuffer(bytearray(text.ljust(row_bytes)), dtype=torch.uint8)


def decode_row(row: torch.Tensor) -> dict[str, Any]:
    """Return the words of a row.

    >>> decode_row(torch.tensor(list(b'{"inputs": 3}  '), dtype=torch.uint8))
    {'inputs': 3}
    """
    words: dict[str, Any] = json.loads(bytes(row.tolist()))
    return words


# -- meetings ----------------------------------------------------------------------------------------------------------


class MeetingTimeoutError(RankGoneError, TimeoutError):
    """Not all ranks have come to a meeting in time."""


def current_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return `group`, or else the group of all ranks; None as long as torch.distributed has no process group.

    >>> current_group() is None
    True
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return group if group is not None else dist.group.WORLD


class Meetings:
    """Collectives of the ranks of `group` on a separate gloo group: compare numbers, sum arrays.

    The separate group keeps them apart from the script's own collectives. All ranks must make the same calls. A rank
    that waits for longer than ANNOUNCE_SECONDS says in the store that it has come; where not all come in time, the
    error names those that have not said so.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, *, purpose: str) -> None:
        self.of, self._timeout_seconds, self._purpose = group, timeout_seconds, purpose
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._members = dist.get_process_group_ranks(group)
        self._group: dist.ProcessGroup | None = None
        self._name, self._number = "", 0  # of these meetings, and of the last one
        self._announced = 0  # the last one that this rank said it had come to

    def compare(self, moment: str, numbers: Mapping[str, int], *, remedy: str, error: type[Exception]) -> None:
        """Raise `error` on all ranks unless all come with the same numbers."""
        rows = self._gather(moment, numbers)
        sentence = f"ranks do not agree when they {moment}: {{key}} is {{theirs}} on {{who}}, {{ours}} on {{other}}; "
        raise_difference(rows, sentence + remedy, reference=0, error=error)

    def gather(self, moment: str, words: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's words, in the order of the ranks.

        Where ranks come with words of different moments, all of them hear which.
        """
        rows = self._gather(moment, {"moment": moment, **words})
        moments = [{"moment": row.pop("moment", "do something else")} for row in rows]
        raise_difference(
            moments,
            f"ranks of {self._purpose} do not do the same: {{who}} is to {{theirs}}, and {{other}} to {{ours}}",
        )
        return rows

    def _gather(self, moment: str, words: Mapping[str, Any]) -> list[dict[str, Any]]:
        finish = partial(self._finish, moment)
        return gather_rows(words, self._begin(moment), torch.device("cpu"), finish=finish)

    def add_up(self, values: NDArray[np.float32]) -> None:
        """Replace the values by their sum over all ranks, in place."""
        moment = "add up"
        work = dist.all_reduce(torch.from_numpy(values), group=self._begin(moment), async_op=True)
        self._finish(moment, work, torch.device("cpu"))

    def _begin(self, moment: str) -> dist.ProcessGroup:
        """Return the group, which is made when all ranks have come for the first time."""
        self._number += 1
        if self._group is None:
            try:
                rows = meet_ranks(
                    self._members,
                    moment,
                    os.urandom(8).hex(),
                    purpose=self._purpose,
                    timeout_seconds=self._timeout_seconds,
                )
                group = shared_group(
                    [self._members], self._members, "gloo", self._timeout_seconds, purpose=self._purpose, local=True
                )
            except RankGoneError as error:
                raise self._missing(moment, first_line(error)) from error
            self._name = f"meetings/{rows[0]}"
            self._group = cast("dist.ProcessGroup", group)  # this rank is one of the members
        return self._group

    def _finish(self, moment: str, work: Any, device: torch.device) -> None:
        """Wait for a collective that all ranks come to; name those that do not."""
        pending, began = PendingCollective(work, device), time.monotonic()
        pending.wait(min(ANNOUNCE_SECONDS, self._timeout_seconds))
        store, waited = FleetingStore(self._name), f"rank {self._members[self.rank]} waited to {moment}"
        failed: RuntimeError | None = None
        try:
            if pending.done():
                pending.check()
                return
        except RuntimeError as error:
            failed = error
        try:
            ask_within(lambda: self._announce(store), ANNOUNCE_SECONDS, waited)
            if failed is None:
                pending.wait(self._timeout_seconds - (time.monotonic() - began))
                if pending.done():
                    pending.check()
                    return
        except RankGoneError as error:
            raise self._missing(moment, first_line(error)) from error
        except RuntimeError as error:
            failed = error
        if self._group is not None and not pending.done():
            never_destroy(self._group)
        # Others may come in a moment; and where one is dead, the connections of all are lost before the slow have come.
        deadline = began + (2 * ANNOUNCE_SECONDS if failed is None else self._timeout_seconds)
        keys, missing = {rank: f"{self._number}/{place}" for place, rank in enumerate(self._members)}, self._members
        try:
            while True:
                time.sleep(min(ANNOUNCE_SECONDS, max(0.0, deadline - time.monotonic())))
                here = ask_within(lambda: [store.check([key]) for key in keys.values()], ANNOUNCE_SECONDS, waited)
                missing = [rank for rank, came in zip(keys, here, strict=True) if not came]
                if len(missing) < 2 or time.monotonic() >= deadline:
                    break
        except RankGoneError as error:
            raise self._missing(moment, first_line(error)) from error
        who = name_ranks(missing)
        lost = "it came too late for the others" if failed is None else first_line(failed)
        raise self._missing(moment, f"{who} did not" if who else lost) from failed

    def _announce(self, store: FleetingStore) -> None:
        """Say in the store that this rank has come to the meeting; all have read what it said of an earlier one."""
        store.set(f"{self._number}/{self.rank}", "here")
        if self._announced:
            store.delete_key(f"{self._announced}/{self.rank}")
        self._announced = self._number

    def _missing(self, moment: str, why: str) -> MeetingTimeoutError:
        return MeetingTimeoutError(
            f"rank {self._members[self.rank]} waited to {moment} in {self._purpose}, and not all ranks came (it waits "
            f"for {self._timeout_seconds:g} s at most): {why}"
        )


# -- texts of known length ---------------------------------------------------------------------------------------------


def plain_text(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text cut to `most` characters, each of which is one byte in JSON.

    >>> plain_text("\\x1b[31mno\\x1b[0m   such \\"layer\\"\\0", 12)
    "no such 'lay"
    """
    words = " ".join(_COLOURS.sub("", text).split()).replace("\\", "/").replace('"', "'")
    return "".join(each if each.isascii() else "?" for each in words if each.isprintable())[:most]


def refusal_text(error: BaseException | str) -> str:
    """Return an error as plain text for the other ranks.

    >>> refusal_text(ValueError("no such layer"))
    'no such layer'
    """
    return plain_text(error if isinstance(error, str) else str(error).strip() or type(error).__name__)


def short_text(text: str) -> str:
    """Return a text in ASCII, of which no more than SHORT_CHARACTERS are kept: a digest stands for the rest."""
    plain = text.encode("ascii", "backslashreplace").decode()
    if len(plain) <= SHORT_CHARACTERS:
        return plain
    return f"{plain[: SHORT_CHARACTERS - 20]}... {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"


def describe(thing: object) -> str:
    """Return an object's repr without its address, which differs from rank to rank and says nothing.

    >>> describe(object())
    '<object object>'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))
