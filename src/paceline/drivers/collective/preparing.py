"""What a rank can say before it meets the others: what it averages, how that travels, and why it would refuse to.

    prepare ── refusal, if there is one ──> the meeting: all raise, or none

All that can go wrong on one rank alone goes wrong here, where the others can still be told; what takes long (a codec's
kernels are compiled) is done here too, where nobody is taken for dead yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.codecs.naming import resolve_codec
from paceline.distributed.agreement import describe
from paceline.drivers.collective.carriers import Carrier, Gathered, Summed, warm_up
from paceline.drivers.collective.states import member_description
from paceline.drivers.collective.tracked import AVERAGED, Tracked
from paceline.strategies.averaging import Averaging
from paceline.training.replica import GradientReplica, Replica, check_codec, message_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """One rank's side of an averaging."""

    member: Averaging
    tracked: Tracked
    codec: Codec

    @property
    def gradients(self) -> bool:
        """Whether gradients are averaged, not changes."""
        return self.member.averages == "gradients"

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the parameters that are averaged."""
        return [parameter.shape for parameter in self.tracked.parameters]

    def description(self) -> dict[str, str]:
        """What must be equal on all ranks, and in a checkpoint."""
        return {"model": self.tracked.description(), "codec": describe(self.codec)} | member_description(self.member)

    def replica(self, workers: int, step: Callable[[], None]) -> Replica | GradientReplica:
        """What is moved, from the values that the model has now."""
        parameters, buffers = self.tracked.parameters, self.tracked.buffers
        if self.gradients:
            return GradientReplica(parameters, buffers, workers=workers, step=step)
        return Replica(parameters, buffers, self.member, workers=workers)

    def carrier(self, replica: Replica | GradientReplica, group: dist.ProcessGroup, seed: int) -> Carrier:
        """What takes the messages to the other ranks."""
        device = self.tracked.device
        if isinstance(self.codec, Identity):
            changes = sum(shape.numel() for shape in self.shapes)
            return Summed(replica.size, changes, replica.dtype, device, group)
        return Gathered(self.codec, self.shapes, replica.size, device, group, seed=seed)


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    member: Averaging | Callable[[], Averaging],
    codec: Codec | str,
) -> Prepared:
    """What is averaged, and how it travels; an error says why it cannot be.

    >>> from paceline.strategies.averaging import make_averaging
    >>> model = torch.nn.Linear(3, 2).double()
    >>> prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: make_averaging("hpsgd"), "one-bit")
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=ErrorFeedback(OneBit()))
    """
    made = member if isinstance(member, Averaging) else member()
    found, tracked = resolve_codec(codec), Tracked(model, optimizer)
    if message_dtype(tracked.parameters) is torch.float64 and not isinstance(found, Identity):
        raise ValueError(f"codecs carry float32, and this model has float64 parameters (codec={found!r})")
    check_codec(made, found)
    if optimizer in AVERAGED:
        raise ValueError("this optimizer has an averaging already; close() that one first")
    prepared = Prepared(member=made, tracked=tracked, codec=found)
    if not isinstance(found, Identity):
        warm_up(found, prepared.shapes, tracked.device)
    return prepared


def check_limits(**limits: float) -> None:
    """Refuse limits of time that are none.

    >>> check_limits(timeout_seconds=0.0)
    Traceback (most recent call last):
    ValueError: timeout_seconds must be above 0 and finite (timeout_seconds=0.0)
    """
    for name, value in limits.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite ({name}={value})")
