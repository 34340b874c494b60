"""What a rank asks of all ranks at once, as data: a protocol yields these, and whoever runs it answers.

    request      what every rank gives                     what every rank gets
    AllReduce    a tensor                                  the sum of all, or the largest, element by element
    AllGather    a tensor, of one size on all ranks        all of them, by place
    AllToAll     a part for every rank                     what every rank has for it, by place

Nothing here knows a process group: the same protocol runs over torch.distributed, and among ranks in one process.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from paceline.traffic import Traffic, all_reduce_traffic, gather_traffic


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Add up a tensor over all ranks, or take the largest of each element; the answer is the tensor itself.

    >>> AllReduce(torch.ones(2)).largest
    False
    """

    tensor: torch.Tensor
    largest: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Bring every rank's flat tensor to every rank; the answer has a row for each rank, by place.

    >>> AllGather(torch.zeros(4, dtype=torch.uint8)).tensor.numel()
    4
    """

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Bring part p of a flat tensor to the rank at place p; the answer is what all have for this rank, by place.

    `sends` are the lengths of the parts, `receives` those of what comes from each rank; `total` is the length of all
    that ranks send to each other, and None where all have the same `sends`.

    >>> AllToAll(torch.zeros(5, dtype=torch.uint8), sends=(2, 3), receives=(2, 2)).receives
    (2, 2)
    """

    tensor: torch.Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    total: int | None = None


Request = AllReduce | AllGather | AllToAll


def request_traffic(request: Request, world: int, place: int) -> Traffic:
    """Return what the rank at a place puts on the network for a request; sums and gathers go around a ring.

    >>> request_traffic(AllGather(torch.zeros(100, dtype=torch.uint8)), world=4, place=0)
    Traffic(hops=3, given_bytes=300)
    """
    match request:
        case AllReduce():
            return all_reduce_traffic(request.tensor.nbytes, world)
        case AllGather():
            return gather_traffic(request.tensor.nbytes, world)
        case AllToAll():
            return Traffic(1, (sum(request.sends) - request.sends[place]) * request.tensor.element_size())


def given_by_all(request: Request, world: int) -> int:
    """Return the bytes that all ranks together put on the network for a request.

    >>> given_by_all(AllGather(torch.zeros(100, dtype=torch.uint8)), world=4)
    1200
    """
    if isinstance(request, AllToAll):
        total = (world - 1) * sum(request.sends) if request.total is None else request.total
        return total * request.tensor.element_size()
    return round(world * request_traffic(request, world, place=0).given_bytes)


Adding = Generator[AllReduce, torch.Tensor, torch.Tensor]
"""A codec's `add_up`: it asks for sums, and returns that of all vectors, in `out` if that is given.

What of this rank's vector is not in the sum is written to `rest`, if that is given. `out` is written to at the end, and
may be the vector's own memory; `rest` from the first answer on.
The tensor of its first request ends with a place of zero for each rank: whoever runs it says there who is in trouble.
"""
