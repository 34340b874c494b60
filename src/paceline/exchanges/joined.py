"""Several exchanges in one: what they ask for at the same time is asked for together.

    exchange 0   encode ── request ┐                  ┌ answer ── request ┐            ┌ answer ── sum
    exchange 1   encode ── request ┼── one request ───┼ answer ── request ┼── one ... ─┼ answer ── sum
    exchange 2   encode ── request ┘                  └ answer ── request ┘            └ answer ── sum

A collective of a few kilobytes is all waiting: three of them take three times as long as one of their length.

Joined exchanges are by the same codec and plan, so they ask for the same things. Each keeps its codec, its memory and
its troubles. A sum of floats may have other last bits than alone, since where an element stands decides in which order
it is added up; they are the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from paceline.codecs import NotFiniteError
from paceline.codecs.requests import AllGather, AllReduce, AllToAll, Request
from paceline.exchanges.exchange import ExchangeProtocol, Outcome, TroubleError

JoinedProtocol = Generator[Request, torch.Tensor, list[Outcome]]

KNOWN_TO_ALL = (TroubleError, NotFiniteError)  # errors that follow from what all ranks have heard: all have ended alike


@dataclass(frozen=True, slots=True, eq=False)
class BegunExchange:
    """An exchange that has encoded its vector, and asks for the first time; or why it could not."""

    protocol: ExchangeProtocol
    first: Request | Exception


def begin_exchange(protocol: ExchangeProtocol) -> BegunExchange:
    """Take an exchange to its first request; raises nothing."""
    try:
        return BegunExchange(protocol, next(protocol))
    except Exception as error:
        return BegunExchange(protocol, error)


def join_exchanges(begun: Sequence[BegunExchange]) -> JoinedProtocol:
    """Exchange several vectors at once; return the sum of each, or the error that all ranks have in common.

    An error that is this rank's own is raised, and ends all of them: its next request would not fit the others'.

    >>> from paceline.codecs import make_codec
    >>> from paceline.exchanges import make_exchange
    >>> from paceline.exchanges.lockstep import answered
    >>> exchanges = [make_exchange(make_codec("identity"), [torch.Size([2])], 0, 1, "gather") for _ in range(3)]
    >>> together = join_exchanges([begin_exchange(exchange.run(torch.ones(2))) for exchange in exchanges])
    >>> try:
    ...     together.send(answered([next(together)])[0])
    ... except StopIteration as end:
    ...     end.value
    [tensor([1., 1.]), tensor([1., 1.]), tensor([1., 1.])]
    """
    protocols = [each.protocol for each in begun]
    try:
        requests: dict[int, Request] = {}
        for number, each in enumerate(begun):
            if isinstance(each.first, Exception):
                raise each.first
            requests[number] = each.first
        outcomes: dict[int, Outcome] = {}
        while requests:
            asked = list(requests.values())
            parts = _parts((yield _joined(asked)), asked)
            following: dict[int, Request] = {}
            for number, part in zip(requests, parts, strict=True):
                try:
                    following[number] = protocols[number].send(part)
                except StopIteration as end:
                    outcomes[number] = end.value
                except KNOWN_TO_ALL as error:
                    outcomes[number] = error
            requests = following
        return [outcomes[number] for number in range(len(begun))]
    finally:
        for protocol in protocols:
            protocol.close()


def _joined(requests: Sequence[Request]) -> Request:
    """Return one request for all; that of a single one is passed on as it is."""
    first = requests[0]
    if len(requests) == 1:
        return first
    if any(type(request) is not type(first) or request.tensor.dtype != first.tensor.dtype for request in requests):
        kinds = [f"{type(request).__name__} of {request.tensor.dtype}" for request in requests]
        raise ValueError(f"exchanges that are joined ask for the same things (they ask for {kinds})")
    if isinstance(first, AllToAll):
        lanes = [torch.split(request.tensor, list(request.sends)) for request in _to_all(requests)]
        parts = [part for to_one in zip(*lanes, strict=True) for part in to_one]
        sends, receives = (
            tuple(map(sum, zip(*lengths, strict=True)))
            for lengths in (
                [request.sends for request in _to_all(requests)],
                [request.receives for request in _to_all(requests)],
            )
        )
        totals = [request.total for request in _to_all(requests) if request.total is not None]
        return AllToAll(torch.cat(parts), sends, receives, sum(totals) if totals else None)
    together = torch.cat([request.tensor.view(-1) for request in requests])
    return AllReduce(together, first.largest) if isinstance(first, AllReduce) else AllGather(together)


def _parts(answer: torch.Tensor, requests: Sequence[Request]) -> list[torch.Tensor]:
    """Return each one's part of the answer to the request for all."""
    first = requests[0]
    if len(requests) == 1:
        return [answer]
    if isinstance(first, AllToAll):
        lengths = [request.receives for request in _to_all(requests)]
        pieces = torch.split(answer, list(itertools.chain.from_iterable(zip(*lengths, strict=True))))
        return [torch.cat(pieces[number :: len(requests)]) for number in range(len(requests))]
    sizes = [request.tensor.numel() for request in requests]
    parts = torch.split(answer, sizes, dim=-1)
    return [
        part.view(request.tensor.shape) if isinstance(first, AllReduce) else part
        for part, request in zip(parts, requests, strict=True)
    ]


def _to_all(requests: Sequence[Request]) -> list[AllToAll]:
    return [request for request in requests if isinstance(request, AllToAll)]
