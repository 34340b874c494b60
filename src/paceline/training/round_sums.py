"""How the contributions of all ranks to a step become their sum: as they are, or with the gradients encoded.

    identity        one all-reduce                  [ contribution | change of the buffers | flags ]
    other codecs    one all-reduce, and after it    [ change of the buffers | flags ]
                    the exchange of the encoded     contribution: all-reduce, gather or two-step (`paceline.exchanges`)

What a codec sees is a rank's contribution (`contributions`), weighted: fresh, late and the compensation for the step
before are one vector. Sums are linear, so what is conserved where there is error feedback is conserved over rounds:

    the sum of the updates that a server would have made  =  the sum of the updates  +  sum r  +  sum R

r is what each rank holds back of its contributions, R what the owner of a shard holds back of its sums. A rank that a
step has nothing of brings nothing: what it holds back stays with it until its next contribution.

Contributions are encoded and not gradients, so a round is one exchange whatever the strategy asks for, and what error
feedback holds back is in units of the update: it needs no weight of a later round. To encode each gradient once, as a
server's workers do, every rank would have to keep the decoded gradients of all others.

A parameter whose flags sum to zero has no gradient in a step, and the optimiser leaves it alone. Of what was held back
of it before, some may come with this step: then it has a gradient, or that would be lost. One that never had a flag has
nothing to come: what a codec makes of its zeros (one-bit knows no zero) is noise, which is never applied, and what is
held back of that noise is forgotten when the parameter has its first flag. So all remember who had a flag.

A sum is a protocol, which knows no process group (`codecs.requests`): ranks run it over theirs, replays and simulations
run those of all ranks in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from paceline.codecs import Codec, ErrorFeedback
from paceline.codecs.naming import unsendable
from paceline.codecs.requests import AllReduce
from paceline.exchanges import ExchangeProtocol, make_exchange
from paceline.exchanges.plans import ALL_REDUCE, AUTO, adds_plainly
from paceline.randomness import torch_generator
from paceline.training.contributions import MessageLayout
from paceline.training.saved_state import check_tensor

USED = "used"  # in a state: which parameters ever had a flag


class RoundSum(ABC):
    """One rank's side of the sums of all rounds; `plan` says how ranks come to them.

    `unsendable` says what a contribution is that cannot be sent.
    """

    plan: str
    unsendable = "not finite"

    @abstractmethod
    def add_up(self, message: torch.Tensor, version: int, *, brings: bool) -> ExchangeProtocol:
        """Add up the messages of all ranks for step `version`, in place; one that `brings` no contribution is zeros."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered from round to round."""
        return {}

    def load_state_dict(self, plan: str, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of sums by this or another plan."""
        if state:
            raise ValueError("a codec has held something back, and gradients are added up as they are here")


class PlainSum(RoundSum):
    """Messages that are added up as they are, by one all-reduce.

    >>> next(PlainSum().add_up(torch.ones(2), 0, brings=True)).tensor
    tensor([1., 1.])
    """

    plan = ALL_REDUCE

    def add_up(self, message: torch.Tensor, version: int, *, brings: bool) -> ExchangeProtocol:
        return (yield AllReduce(message))


class EncodedSum(RoundSum):
    """Messages whose contributions travel encoded, those of the rank at `place` here; buffers and flags as they are.

    >>> from paceline.codecs import make_codec
    >>> layout = MessageLayout(gradient=2, buffers=0, flags=1)
    >>> alone = EncodedSum(make_codec("one-bit"), [torch.Size([2])], layout, place=0, world=1)
    >>> next(alone.add_up(torch.ones(3), 0, brings=True)).tensor
    tensor([1.])
    """

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[torch.Size],
        layout: MessageLayout,
        *,
        place: int,
        world: int,
        plan: str = AUTO,
        seed: int = 0,
    ) -> None:
        self.exchange = make_exchange(codec, shapes, place, world, plan)
        self.plan, self.unsendable = self.exchange.plan, unsendable(codec)
        self._layout, self._sizes, self._place, self._seed = layout, [shape.numel() for shape in shapes], place, seed
        self._holds_back = isinstance(self.exchange.codec, ErrorFeedback)
        self._used = torch.zeros(layout.flags, dtype=torch.bool)  # which parameters ever had a flag, alike on all ranks

    def add_up(self, message: torch.Tensor, version: int, *, brings: bool) -> ExchangeProtocol:
        contribution = self._layout.gradient_of(message)
        yield AllReduce(message[self._layout.gradient :])
        if self._holds_back:
            self._note_flags(message)
        generator = torch_generator(self._seed, "round", self._place, version)
        yield from self.exchange.run(contribution if brings else None, generator, out=contribution)
        if self._holds_back:
            self._flag_what_came_late(message)
        return message

    def _note_flags(self, message: torch.Tensor) -> None:
        flagged = self._layout.flags_of(message).cpu() != 0
        first = flagged & ~self._used
        if bool(first.any()):
            self._used |= flagged
            held = self.exchange.held()
            if held is not None:
                self.exchange.hold(-held * first.repeat_interleave(torch.tensor(self._sizes)).to(held))

    def _flag_what_came_late(self, message: torch.Tensor) -> None:
        flags = self._layout.flags_of(message)
        if not bool(flags.all()):
            parts = torch.split(self._layout.gradient_of(message), self._sizes)
            for place in ((flags == 0).cpu() & self._used).nonzero().view(-1).tolist():
                flags[place] = float(parts[place].any())

    def state_dict(self) -> dict[str, Any]:
        return self.exchange.state_dict() | ({USED: self._used.clone()} if self._holds_back else {})

    def load_state_dict(self, plan: str, state: dict[str, Any]) -> None:
        used = state.get(USED, torch.ones_like(self._used))
        check_tensor(USED, used, self._used)
        self.exchange.load_state_of(plan, {name: value for name, value in state.items() if name != USED})
        self._used = used.to("cpu", copy=True)


def make_round_sum(
    codec: Codec, shapes: Sequence[torch.Size], layout: MessageLayout, *, place: int, world: int, plan: str, seed: int
) -> RoundSum:
    """Return a rank's side of the sums, by a codec and a plan.

    >>> from paceline.codecs import make_codec
    >>> layout = MessageLayout(gradient=2, buffers=0, flags=1)
    >>> about = {"place": 0, "world": 2, "plan": "auto", "seed": 0}
    >>> [make_round_sum(make_codec(name), [torch.Size([2])], layout, **about).plan for name in ("identity", "qsgd")]
    ['all-reduce', 'gather']
    """
    if adds_plainly(codec, plan):
        return PlainSum()
    return EncodedSum(codec, shapes, layout, place=place, world=world, plan=plan, seed=seed)
