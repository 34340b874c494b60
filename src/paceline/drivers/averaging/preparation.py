"""What a rank can say before it meets the others: what it averages, how that travels, and why it would refuse to.

    prepare ── refusal, if there is one ──> the group: all raise, or none

All that can go wrong on one rank alone goes wrong here, where the others can still be told; what takes long (a codec's
kernels are compiled) is done here too, where nobody is taken for dead yet.

Of a model are averaged the parameters that its optimiser trains, and the buffers that a checkpoint would hold. Buffers
travel as values: floating ones (BatchNorm's statistics), and BatchNorm's counter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.codecs.naming import resolve_codec
from paceline.distributed.agreement import describe
from paceline.drivers.averaging.transport import GatheredTransport, SummedTransport, Transport
from paceline.strategies.averaging import Averaging
from paceline.training.replica import (
    GradientReplica,
    Replica,
    averaged_buffers,
    check_codec,
    make_replica,
    message_dtype,
)

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "FlatParameter", "DTensor")  # by name: to import them takes long
NOT_WHOLE = "every rank holds a part of it, so there is nothing to average"
AVERAGED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimisers that have an averaging


class TrackedModel:
    """The tensors of one model and one optimiser that are averaged.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> tracked = TrackedModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> tracked.names, len(tracked.buffers)
    (['0.weight', '0.bias', '1.weight', '1.bias'], 3)
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        _check_kinds(model, optimizer)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"the optimizer has a parameter that the model does not have (of shape {shape})")
        trained = {id(parameter) for parameter in self._trained()}
        kept = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in trained]
        if not kept:
            raise ValueError("there is nothing to average: the optimizer has no trainable parameter of this model")
        self.names = [name for name, _ in kept]
        self.parameters = [parameter for _, parameter in kept]
        self.buffers = averaged_buffers(model)

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """The device on which averages are kept."""
        return self.parameters[0].device

    def check(self) -> None:
        """Refuse parameters that train unseen, and buffers that have been replaced."""
        known = {id(parameter) for parameter in self.parameters}
        for parameter in self._trained():
            if id(parameter) not in known:
                name = self._names.get(id(parameter), "a new one")
                raise ValueError(
                    f"a parameter trains that did not when averaging began, so its changes are in no average: {name}; "
                    "unfreeze first, and construct the averaging after"
                )
        if [id(buffer) for buffer in averaged_buffers(self._model)] != [id(buffer) for buffer in self.buffers]:
            raise ValueError(
                "the model's buffers are others than when averaging began: move or convert the model first, "
                "and construct the averaging after"
            )

    def everything(self) -> list[torch.Tensor]:
        """Return all parameters and buffers of the model, whether they are trained or not."""
        return [*self._model.parameters(), *self._model.buffers()]

    def description(self) -> str:
        """Return names, shapes and types in a few words: equal for equal models."""
        state = [*self._model.named_parameters(), *self._model.named_buffers()]
        lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state] + ["trained", *self.names]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        elements = sum(parameter.numel() for parameter in self.parameters)
        return f"{elements:,} elements in {len(self.names)} tensors, {digest}"

    def checksum(self) -> str:
        """Return a text that is the same as at another time if the tensors are the same, bit for bit.

        >>> model = torch.nn.Linear(3, 2)
        >>> tracked = TrackedModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> before = tracked.checksum()
        >>> model.weight.data = model.weight.data.flip(0)
        >>> tracked.checksum() == before
        False
        """
        digest = hashlib.sha256()
        for tensor in [*self.parameters, *self.buffers]:
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()


def _check_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a torch.nn.Module (it is a {type(model).__name__})")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer (it is a {type(optimizer).__name__})")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is a DistributedDataParallel, which averages already: give the model inside it")
    for where, module in model.named_modules():
        if _is_sharded(module):
            raise ValueError(f"{f'module {where}' if where else 'the model'} is sharded (FSDP): {NOT_WHOLE}")
    for name, parameter in model.named_parameters():
        if _is_sharded(parameter) or _is_sharded(parameter.data):
            raise ValueError(f"parameter {name} is sharded ({type(parameter.data).__name__}): {NOT_WHOLE}")
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet: run the model once before")
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is {parameter.dtype}: only floating-point parameters are averaged")


def _is_sharded(thing: object) -> bool:
    return any(kind.__name__ in SHARDED for kind in type(thing).__mro__)


# -- one rank's side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """One rank's side of an averaging."""

    member: Averaging
    tracked: TrackedModel
    codec: Codec

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

    def replica(self, workers: int, step: Callable[[], None]) -> Replica | GradientReplica:
        """Return the replica that averages move, from the values that the model has now."""
        return make_replica(self.tracked.parameters, self.tracked.buffers, self.member, workers=workers, step=step)

    def transport(self, replica: Replica | GradientReplica, group: dist.ProcessGroup, seed: int) -> Transport:
        """Return what takes the messages to the other ranks."""
        device = self.tracked.device
        if isinstance(self.codec, Identity):
            changes = sum(shape.numel() for shape in self.shapes)
            return SummedTransport(replica.size, changes, replica.dtype, device, group)
        return GatheredTransport(self.codec, self.shapes, replica.size, device, group, seed=seed)


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    member: Averaging | Callable[[], Averaging],
    codec: Codec | str,
) -> Prepared:
    """Find out what is averaged, and how it travels; an error says why it cannot be.

    >>> from paceline.strategies.averaging import make_averaging
    >>> model = torch.nn.Linear(3, 2).double()
    >>> prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: make_averaging("hpsgd"), "one-bit")
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=ErrorFeedback(OneBit()))
    """
    made = member if isinstance(member, Averaging) else member()
    found, tracked = resolve_codec(codec), TrackedModel(model, optimizer)
    if message_dtype(tracked.parameters) is torch.float64 and not isinstance(found, Identity):
        raise ValueError(f"codecs carry float32, and this model has float64 parameters (codec={found!r})")
    check_codec(made, found)
    if optimizer in AVERAGED:
        raise ValueError("this optimizer has an averaging already; close() that one first")
    prepared = Prepared(member=made, tracked=tracked, codec=found)
    if not isinstance(found, Identity):
        # Let the codec's kernels be loaded or compiled now: in the first average everybody would wait for it.
        warm = found.fresh(prepared.shapes)
        warm.decode(warm.encode(torch.ones(sum(map(torch.Tensor.numel, tracked.parameters)), device=tracked.device)))
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
