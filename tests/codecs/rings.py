"""An all-reduce among ranks in one process, as a ring does it: every hop rounds, and parts begin at different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.codecs import ErrorFeedback
from paceline.codecs.requests import AllReduce


def reduced(
    tensors: Sequence[torch.Tensor], *, largest: bool = False, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the sum, or the largest, of all tensors, added one after the other in an order, in their own type."""
    total, *others = (tensors[place] for place in (order or range(len(tensors))))
    for other in others:
        total = torch.maximum(total, other) if largest else total + other
    return total


def added_up(
    codecs: Sequence[Any],
    vectors: Sequence[torch.Tensor],
    generators: Sequence[torch.Generator | None] | None = None,
    seen: list[torch.Tensor] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the `add_up` of all ranks; return the total on each, and, in float64, what of its own vector is in it.

    Part p of every tensor is summed from rank p on.

    What travels is appended to `seen`, a tensor of rows by rank for each request.
    """
    world, rests = len(vectors), [torch.full_like(vector, torch.nan) for vector in vectors]
    adding = [
        codec.add_up(
            vector,
            world,
            None if generators is None else generators[place],
            **({} if isinstance(codec, ErrorFeedback) else {"rest": rests[place]}),  # that one keeps it for itself
        )
        for place, (codec, vector) in enumerate(zip(codecs, vectors, strict=True))
    ]
    answers: list[Any] = [None] * world
    found: list[Any] = []
    first = True
    while len(found) < world:
        requests: list[AllReduce] = []
        for each, answer in zip(adding, answers, strict=True):
            try:
                requests.append(each.send(answer))
            except StopIteration as end:
                found.append(end.value)
        assert len(requests) in (0, world), "some ranks have ended, and others ask on"
        if requests:
            tensors = [request.tensor.view(-1) for request in requests]
            assert (
                len(
                    {
                        (tensor.dtype, tensor.shape, request.largest)
                        for tensor, request in zip(tensors, requests, strict=True)
                    }
                )
                == 1
            )
            if first:
                assert not any(tensor[-world:].any() for tensor in tensors), "places for the troubled must be zero"
            if seen is not None:
                seen.append(torch.stack(tensors))
            parts = [
                reduced(part, largest=requests[0].largest, order=[(place + hop) % world for hop in range(world)])
                for place, part in enumerate(zip(*(tensor.chunk(world) for tensor in tensors), strict=True))
            ]
            answers = [request.tensor.copy_(torch.cat(parts)) for request in requests]
            first = False
    parts_of = [vector.double() - rest.double() for vector, rest in zip(vectors, rests, strict=True)]
    return list(zip(found, parts_of, strict=True))
