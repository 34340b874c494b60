"""The protocols of all ranks in one process, request by request: for replays, simulations and tests.

All ranks ask for the same thing at the same time, as they must over a network; what would never end there is an
error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from paceline.codecs.requests import AllGather, AllToAll, Request, request_traffic
from paceline.exchanges.exchange import ExchangeProtocol, Outcome
from paceline.exchanges.plans import ALL_REDUCE
from paceline.traffic import Traffic


def run_in_lockstep(
    protocols: Sequence[ExchangeProtocol],
    heard: Callable[[Sequence[Request]], None] | None = None,
    answering: Callable[[Sequence[Request]], Sequence[torch.Tensor]] | None = None,
) -> list[Outcome]:
    """Run the protocols of all ranks to their ends; return what each returned, or raised, by place.

    `heard` is called with the requests of all ranks, each time; `answering` answers them in place of `answered`.

    >>> from paceline.codecs import make_codec
    >>> from paceline.exchanges import make_exchange
    >>> exchanges = [make_exchange(make_codec("identity"), [torch.Size([3])], place, 2, "gather") for place in (0, 1)]
    >>> run_in_lockstep([exchange.run(torch.ones(3)) for exchange in exchanges])
    [tensor([2., 2., 2.]), tensor([2., 2., 2.])]
    """
    answers: list[torch.Tensor | None] = [None] * len(protocols)
    while True:
        requests: list[Request] = []
        outcomes: list[Outcome] = []
        for protocol, answer in zip(protocols, answers, strict=True):
            try:
                requests.append(protocol.send(cast(torch.Tensor, answer)))  # None begins it
            except StopIteration as end:
                outcomes.append(end.value)
            except Exception as error:
                outcomes.append(error)
        if not requests:
            return outcomes
        if outcomes:
            raise ValueError(f"{len(outcomes)} of {len(protocols)} ranks have ended, and the others ask on: {outcomes}")
        if heard is not None:
            heard(requests)
        answers = list((answering or answered)(requests))


def sum_in_lockstep(
    plan: str,
    protocols: Sequence[ExchangeProtocol],
    heard: Callable[[Sequence[Request]], None] = lambda requests: None,
    answering: Callable[[Sequence[Request]], Sequence[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Run the protocols of exchanges by a plan, and return the sum that all come to; what all raise is raised.

    All decode the same payloads at the end of a gather and of a two-step. Here only the first rank does.

    >>> from paceline.codecs import make_codec
    >>> from paceline.exchanges import make_exchange
    >>> exchanges = [make_exchange(make_codec("identity"), [torch.Size([3])], place, 2, "gather") for place in (0, 1)]
    >>> sum_in_lockstep("gather", [exchange.run(torch.ones(3)) for exchange in exchanges])
    tensor([2., 2., 2.])
    """
    if plan == ALL_REDUCE:  # there every rank has something to remember at the end
        outcome = run_in_lockstep(protocols, heard, answering)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
    answers: list[torch.Tensor | None] = [None] * len(protocols)
    while True:
        requests = []
        try:
            for protocol, answer in zip(protocols, answers, strict=True):
                requests.append(protocol.send(cast(torch.Tensor, answer)))
        except StopIteration as end:
            total: torch.Tensor = end.value
            return total
        heard(requests)
        answers = list(answered(requests, shared=True) if answering is None else answering(requests))


def traffic_of_requests(requests: Sequence[Request]) -> Traffic:
    """Return what requests that all ranks make at the same time put on the network: of the rank that gives the most.

    >>> from paceline.codecs.requests import AllReduce
    >>> traffic_of_requests([AllReduce(torch.ones(2)), AllReduce(torch.ones(2))])
    Traffic(hops=2, given_bytes=8.0)
    """
    each = [request_traffic(request, len(requests), place) for place, request in enumerate(requests)]
    return max(each, key=lambda traffic: traffic.given_bytes)


def answered(requests: Sequence[Request], *, shared: bool = False) -> list[torch.Tensor]:
    """Return the answers to what all ranks ask for, by place; each rank has its own memory, unless it is `shared`.

    >>> from paceline.codecs.requests import AllReduce
    >>> [answer.tolist() for answer in answered([AllReduce(torch.ones(2)), AllReduce(torch.ones(2))])]
    [[2.0, 2.0], [2.0, 2.0]]
    """
    first = requests[0]
    if any(type(request) is not type(first) for request in requests):
        raise ValueError(f"ranks ask for different things: {[type(request).__name__ for request in requests]}")
    if isinstance(first, AllToAll):
        return _exchanged(cast(Sequence[AllToAll], requests))
    tensors = [request.tensor for request in requests]
    if any(tensor.shape != first.tensor.shape or tensor.dtype != first.tensor.dtype for tensor in tensors):
        raise ValueError(f"ranks bring different sizes: {[tuple(tensor.shape) for tensor in tensors]}")
    if isinstance(first, AllGather):
        rows = torch.stack([tensor.view(-1) for tensor in tensors])
        return [rows if shared else rows.clone() for _ in requests]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = torch.maximum(total, tensor) if first.largest else total.add_(tensor)
    return [tensor.copy_(total) for tensor in tensors]


def _exchanged(requests: Sequence[AllToAll]) -> list[torch.Tensor]:
    parts = [torch.split(request.tensor, list(request.sends)) for request in requests]
    answers = []
    for place, request in enumerate(requests):
        given = [theirs[place] for theirs in parts]
        if tuple(part.numel() for part in given) != request.receives:
            raise ValueError(f"place {place} expects {request.receives}, and gets {[part.numel() for part in given]}")
        answers.append(torch.cat(given))
    return answers
