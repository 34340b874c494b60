"""Gradients between the replicas of a stage: the mean over the samples of all of them.

    replica r has the mean gradient g_r of n_r samples    ->    sum over r of (n_r / n) g_r,    n = all samples

`identity` adds up exactly, in one all-reduce. Other codecs encode what a replica brings, (R n_r / n) g_r, with a memory
of its own if they are biased; every replica decodes all payloads in the order of the replicas and takes their mean, so
that all come to the same bits. Weights that several stages hold are always added up exactly: two stages would round the
same gradient differently, and their copies would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline.codecs import Codec, ErrorFeedback, Identity, NotFiniteError
from paceline.codecs.naming import resolve_codec
from paceline.distributed.collectives import AnySizeExchange, FixedSizeExchange, PayloadExchange, Trouble
from paceline.drivers.collective.pipelining.crew import Crew
from paceline.drivers.collective.pipelining.holdings import (
    Holdings,
    gradients_of,
    present,
    reduce_gradients,
    set_gradients,
)
from paceline.pipeline import PipelineError
from paceline.randomness import torch_generator


class Replicas:
    """Averages a stage's gradients over the replicas; with one replica there is nothing to do."""

    def __init__(self, codec: Codec | str, holdings: Holdings, crew: Crew, *, seed: int) -> None:
        self._holdings, self._crew = holdings, crew
        found = resolve_codec(codec)
        weights = list(holdings.alone().values())
        self.codec: Codec | None = None
        self.sent_bytes = 0
        self._encoded = False
        if crew.replicas == 1 or isinstance(found, Identity) or not weights:
            return
        self.codec = found.fresh([weight.shape for weight in weights])
        self._generator = torch_generator(seed, "pipeline", crew.rank)
        self._exchange: PayloadExchange = FixedSizeExchange(crew.column, crew.device)
        if not getattr(self.codec, "fixed_size", False):
            self._exchange = AnySizeExchange(crew.column, crew.column_words, crew.device)

    def average(self, share: float) -> Exception | None:
        """`share` is this replica's part of the sum that is wanted: n_r / n, or 1 where losses are sums.

        What is wrong with a gradient, if it cannot travel encoded; all ranks must hear of it.
        """
        if self._crew.replicas == 1:
            return None
        exact = self._holdings.shared() if self.codec else self._holdings.trained()
        for dtype in dict.fromkeys(weight.dtype for weight in exact.values()):
            weights = [weight for weight in exact.values() if weight.dtype is dtype]
            reduce_gradients(weights, self._crew.column, share)
        if self.codec is None:
            return None
        return self._average_encoded(self.codec, list(self._holdings.alone().values()), share)

    def _average_encoded(self, codec: Codec, weights: list[nn.Parameter], share: float) -> Exception | None:
        vector = gradients_of(weights).mul_(share * self._crew.replicas).float()
        most_bytes = codec.most_bytes(vector.numel())
        payload: torch.Tensor | Trouble
        cause: Exception | None = None
        self._encoded = False
        try:
            payload = codec.encode(vector, self._generator)
            self.sent_bytes += payload.numel()
            self._encoded = True
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            payload, cause = Trouble.NOT_FINITE if isinstance(error, NotFiniteError) else Trouble.OTHER, error
        delivery = self._exchange.send(payload, most_bytes, last=True)
        delivery.future.wait()
        payloads = delivery.payloads()
        if delivery.troubles:
            return cause or PipelineError("a gradient could not be encoded")
        total, decoded = torch.zeros_like(vector), torch.empty_like(vector)
        for each in payloads:
            total.add_(codec.decode(each, out=decoded))
        anywhere = present(weights)
        dist.all_reduce(anywhere, group=self._crew.column)
        set_gradients(weights, total.div_(self._crew.replicas), anywhere)
        return None

    def take_back(self) -> None:
        """The step is left out, on all ranks: what was sent in it is not used."""
        if isinstance(self.codec, ErrorFeedback) and self._encoded:
            self.codec.take_back()


def share_of(samples: Sequence[int], replica: int, *, sums: bool) -> float:
    """A replica's part in the whole batch.

    >>> share_of([6, 2], 1, sums=False), share_of([6, 2], 1, sums=True)
    (0.25, 1.0)
    """
    return 1.0 if sums else samples[replica] / sum(samples)
