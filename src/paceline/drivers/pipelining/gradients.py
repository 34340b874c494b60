"""Gradients after a step: added up over the stages that share a weight, and averaged over the replicas of a stage.

    replica r has the mean gradient g_r of n_r samples    ->    sum over r of (n_r / n) g_r,    n = all samples

`identity` adds up exactly, in one all-reduce. Other codecs encode what a replica brings, (R n_r / n) g_r, with a memory
of its own if they are biased; the replicas exchange it by the quickest plan (`paceline.exchanges`), and all come to the
same bits. Weights that several stages hold are always added up exactly: two stages would round the
same gradient differently, and their copies would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline.codecs import Codec, Identity, NotFiniteError
from paceline.codecs.naming import resolve_codec
from paceline.drivers.pipelining.ranks import PipelineRanks
from paceline.drivers.pipelining.weights import WeightOwnership
from paceline.drivers.ranks.exchanging import exchange_now
from paceline.exchanges import TroubleError, VectorExchange, make_exchange
from paceline.exchanges.plans import AUTO, refuse_float64
from paceline.pipeline import PipelineError
from paceline.randomness import torch_generator

STEPS = 4  # that an exchange takes at the most


class GradientAverager:
    """Brings this rank's gradients together with those of other stages and of other replicas."""

    def __init__(self, codec: Codec | str, weights: WeightOwnership, ranks: PipelineRanks, *, seed: int) -> None:
        self._weights, self._ranks = weights, ranks
        found = resolve_codec(codec)
        alone = list(weights.trained(shared=False).values())
        self.exchange: VectorExchange | None = None
        self.sent_bytes = 0
        if ranks.replicas == 1 or isinstance(found, Identity) or not alone:
            return
        refuse_float64(found, AUTO, {weight.dtype for weight in alone})
        self.exchange = make_exchange(found, [weight.shape for weight in alone], ranks.replica, ranks.replicas)
        self._generator = torch_generator(seed, "pipeline", ranks.rank)

    def average(self, share: float) -> Exception | None:
        """Add up over stages and average over replicas; return what is wrong with a gradient that cannot be encoded.

        `share` is this replica's part of the sum that is wanted: n_r / n, or 1 where losses are sums. All ranks must
        hear of an error that is returned.
        """
        trained = self._weights.trained()
        for shared in self._weights.shared:
            reduce_gradients((trained[name] for name in shared.names if name in trained), shared.group)
        if self._ranks.replicas == 1:
            return None
        exact = self._weights.trained(shared=True) if self.exchange else trained
        reduce_gradients(exact.values(), self._ranks.column, share)
        if self.exchange is None:
            return None
        return self._average_encoded(self.exchange, list(self._weights.trained(shared=False).values()), share)

    def _average_encoded(self, exchange: VectorExchange, weights: list[nn.Parameter], share: float) -> Exception | None:
        vector = torch.cat(_flat_gradients(weights)).mul_(share * self._ranks.replicas).float()
        column = [self._ranks.column] * STEPS  # one at a time, in the same order on all: no more groups are needed
        try:
            total = exchange_now(exchange.run(vector, self._generator), column, self._sent)
        except TroubleError as error:
            return error.cause or PipelineError("a gradient could not be encoded")
        except NotFiniteError as error:  # the sum; all replicas have the same
            return error
        anywhere = _has_gradient(weights)
        dist.all_reduce(anywhere, group=self._ranks.column)
        _set_gradients(weights, total.div_(self._ranks.replicas), anywhere)
        return None

    def _sent(self, sent: int) -> None:
        self.sent_bytes += sent

    def undo(self) -> None:
        """Undo an average whose step is left out, on all ranks: what was sent in it is not used."""
        if self.exchange is not None:
            self.exchange.take_back()


def share_of(samples: Sequence[int], replica: int, *, sums: bool) -> float:
    """Return a replica's part in the whole batch.

    >>> share_of([6, 2], 1, sums=False), share_of([6, 2], 1, sums=True)
    (0.25, 1.0)
    """
    return 1.0 if sums else samples[replica] / sum(samples)


def reduce_gradients(weights: Iterable[nn.Parameter], group: dist.ProcessGroup, factor: float = 1.0) -> None:
    """Add up `factor` times the gradients over the ranks of a group, with one collective for each type of element."""
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for weight in weights:
        by_type.setdefault(weight.dtype, []).append(weight)
    for alike in by_type.values():
        flags = _has_gradient(alike)
        vector = torch.cat([*_flat_gradients(alike), flags])
        vector[: -len(flags)] *= factor
        dist.all_reduce(vector, group=group)
        _set_gradients(alike, vector[: -len(flags)], vector[-len(flags) :])


@torch.no_grad()
def _flat_gradients(weights: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return each gradient as a vector; zeros where there is none.

    >>> _flat_gradients([nn.Parameter(torch.ones(2))])
    [tensor([0., 0.])]
    """
    every = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    return [(each.to_dense() if each.is_sparse else each).reshape(-1) for each in every]


def _has_gradient(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return 1 where a weight has a gradient, 0 where nothing computes one.

    >>> _has_gradient([nn.Parameter(torch.ones(2))]).tolist()
    [0.0]
    """
    flags = [float(weight.grad is not None) for weight in weights]
    return torch.tensor(flags, dtype=weights[0].dtype, device=weights[0].device)


@torch.no_grad()
def _set_gradients(weights: Sequence[nn.Parameter], vector: torch.Tensor, anywhere: torch.Tensor) -> None:
    """Give the parts of a vector back to the weights; none to one that has no gradient `anywhere` (0).

    >>> weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    >>> _set_gradients([weight, unused], torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 0.0]))
    >>> weight.grad.tolist(), unused.grad
    ([1.0, 2.0], None)
    """
    parts = torch.split(vector, [weight.numel() for weight in weights])
    for weight, part, has in zip(weights, parts, anywhere.tolist(), strict=True):
        if not has:
            continue
        if weight.grad is None or weight.grad.is_sparse:
            weight.grad = part.reshape(weight.shape).to(weight.dtype, copy=True)
        else:
            weight.grad.copy_(part.reshape(weight.shape))
