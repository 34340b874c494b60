"""What a rank can say before it meets the others: what it averages, how that travels, and why it would refuse to.

    prepare ── refusal, if there is one ──> the group: all raise, or none

All that can go wrong on one rank alone goes wrong here, where the others can still be told; what takes long (a codec's
kernels are compiled) is done here too, where nobody is taken for dead yet.

What of a model is averaged is a `TrackedModel` (drivers/ranks); buffers travel as values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed.agreement import describe
from paceline.drivers.averaging.transport import ExchangedTransport, SummedTransport, Transport
from paceline.drivers.ranks.exchanging import try_codec
from paceline.drivers.ranks.tracked_model import IN_USE, TrackedModel
from paceline.exchanges import make_exchange
from paceline.exchanges.plans import AUTO, adds_plainly, check_plan
from paceline.strategies.averaging import Averaging
from paceline.training.replica import (
    GradientReplica,
    Replica,
    check_codec,
    make_replica,
    message_dtype,
    runs_kernels,
)

# -- one rank's side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """One rank's side of an averaging."""

    member: Averaging
    tracked: TrackedModel
    codec: Codec
    plan: str

    @property
    def gradients(self) -> bool:
        """Whether gradients are averaged, not changes."""
        return self.member.averages == "gradients"

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the parameters that are averaged."""
        return [parameter.shape for parameter in self.tracked.parameters]

    def description(self) -> dict[str, str]:
        """Return what must be equal on all ranks, and in a checkpoint."""
        settings = {each.name: repr(getattr(self.member, each.name)) for each in dataclasses.fields(self.member)}
        about = {"model": self.tracked.description(), "codec": describe(self.codec), "member": self.member.name}
        return about | {name: text for name, text in settings.items() if name != "name"}

    @property
    def summed(self) -> bool:
        """Whether changes are added up as they are, in one all-reduce with all else."""
        return adds_plainly(self.codec, self.plan)

    def replica(self, workers: int, step: Callable[[], None]) -> Replica | GradientReplica:
        """Return the replica that averages move, from the values that the model has now."""
        return make_replica(self.tracked.parameters, self.tracked.buffers, self.member, workers=workers, step=step)

    def transport(self, replica: Replica | GradientReplica, group: dist.ProcessGroup, seed: int) -> Transport:
        """Return what takes the messages to the other ranks."""
        device = self.tracked.device
        if self.summed:
            changes = sum(shape.numel() for shape in self.shapes)
            return SummedTransport(replica.size, changes, replica.dtype, device, group)
        exchange = make_exchange(self.codec, self.shapes, group.rank(), group.size(), self.plan)
        return ExchangedTransport(exchange, replica.size, device, group, seed=seed)


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    member: Averaging | Callable[[], Averaging],
    codec: Codec | str,
    plan: str = AUTO,
) -> Prepared:
    """Find out what is averaged, and how it travels; an error says why it cannot be.

    >>> from paceline.strategies.averaging import make_averaging
    >>> model = torch.nn.Linear(3, 2).double()
    >>> prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: make_averaging("hpsgd"), "one-bit")
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=ErrorFeedback(OneBit())): take ...
    """
    made = member if isinstance(member, Averaging) else member()
    found, tracked = resolve_codec(codec), TrackedModel(model, optimizer)
    prepared = Prepared(member=made, tracked=tracked, codec=found, plan=plan)
    check_plan(plan, found)
    check_codec(made, found)
    if optimizer in IN_USE:
        raise ValueError("this optimizer has an averaging or rounds already; close() that one first")
    # Let kernels be loaded or compiled now: in the first average everybody would wait for it.
    try_codec(found, plan, tracked.parameters, tracked.buffers)
    if not prepared.gradients and runs_kernels(tracked.parameters, message_dtype(tracked.parameters, tracked.buffers)):
        from paceline.training.window_kernels import load_kernels

        load_kernels()
    return prepared


# -- checkpoints -------------------------------------------------------------------------------------------------------


def check_state(state: Mapping[str, Any], about: Mapping[str, str], checksum: str) -> None:
    """Refuse a state that is of something else.

    >>> check_state({"about": {"codec": "QSGD()"}}, {"codec": "OneBit()"}, "")
    Traceback (most recent call last):
    ValueError: this state is of another averaging: its codec is QSGD(), and this one's is OneBit()
    """
    for key, text in about.items():
        if state["about"].get(key) != text:
            raise ValueError(
                f"this state is of another averaging: its {key} is {state['about'].get(key)}, and this one's is {text}"
            )
    if state["checksum"] != checksum:
        raise ValueError(
            "the model is not what it was when this state was taken. Save: first the averaging's state_dict(), then "
            "the model's. Load: construct the averaging, load the model's state, then the averaging's"
        )
