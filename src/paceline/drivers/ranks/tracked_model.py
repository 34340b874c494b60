"""The model and the optimiser of a rank: which of their tensors all ranks hold alike, and what cannot be held alike.

Of a model the ranks keep equal the parameters that its optimiser trains, and the buffers that a checkpoint would hold:
floating ones (BatchNorm's statistics), and BatchNorm's counter.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.drivers.ranks.group import AVERAGING, Purpose
from paceline.training.replica import averaged_buffers

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "FlatParameter", "DTensor")  # by name: to import them takes long
NOT_WHOLE = "every rank holds a part of it, so there is nothing to average"
VARIANCE = "running_var"
ACCELERATED = "AcceleratedOptimizer"  # by name: accelerate is an extra
IN_USE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimisers whose steps ranks take together


class TrackedModel:
    """The tensors of one model and one optimiser that all ranks hold alike.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> tracked = TrackedModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> tracked.names, len(tracked.buffers)
    (['0.weight', '0.bias', '1.weight', '1.bias'], 3)
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, purpose: Purpose = AVERAGING
    ) -> None:
        self._model, self._optimizer, self._purpose = model, optimizer, purpose
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
            raise ValueError("there is nothing to train: the optimizer has no trainable parameter of this model")
        self.names = [name for name, _ in kept]
        self.parameters = [parameter for _, parameter in kept]
        self.buffers = averaged_buffers(model)
        variances = {id(buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] == VARIANCE}
        self.variances = [id(buffer) in variances for buffer in self.buffers]  # BatchNorm's, which are never negative

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which sums over the ranks are kept."""
        return self.parameters[0].device

    def check(self) -> None:
        """Refuse parameters that train unseen, and buffers that have been replaced."""
        self.check_trained()
        if [id(buffer) for buffer in averaged_buffers(self._model)] != [id(buffer) for buffer in self.buffers]:
            noun = self._purpose.noun
            raise ValueError(
                f"the model's buffers are others than when {noun} began: move or convert the model first, "
                f"and construct the {noun} after"
            )

    def check_trained(self) -> None:
        """Refuse parameters that train unseen."""
        noun, unit = self._purpose.noun, self._purpose.unit
        known = {id(parameter) for parameter in self.parameters}
        for parameter in self._trained():
            if id(parameter) not in known:
                name = self._names.get(id(parameter), "a new one")
                raise ValueError(
                    f"a parameter trains that did not when {noun} began, so its changes are in no {unit}: {name}; "
                    f"unfreeze first, and construct the {noun} after"
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
        raise ValueError(
            "do not wrap the model in DistributedDataParallel, which averages too: give the plain module, and make no "
            "DistributedDataParallel of it (Accelerate: paceline.huggingface.prepare; Ray: prepare_model(model, "
            "parallel_strategy=None))"
        )
    if is_in_live_ddp(model):
        raise ValueError(
            "the model is also inside a DistributedDataParallel, which would average its gradients as well: train the "
            "plain module, and make no DistributedDataParallel of it (or delete the one that there is)"
        )
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


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser that takes the steps: accelerate's wrapper around it has no hooks of its own.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> plain_optimizer(optimizer) is optimizer
    True
    """
    while any(kind.__name__ == ACCELERATED for kind in type(optimizer).__mro__):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def is_in_live_ddp(model: torch.nn.Module) -> bool:
    """Whether a DistributedDataParallel that still exists has parameters of this model.

    DDP leaves no trace on a module or its parameters: its hooks are in C++. So the objects of this process are looked
    through for it, once: 0.1 s for the 300,000 that there are when torch is loaded.

    >>> is_in_live_ddp(torch.nn.Linear(3, 2))
    False
    """
    if not dist.is_available() or not dist.is_initialized():
        return False
    ours, kinds = {id(parameter) for parameter in model.parameters()}, {DistributedDataParallel}
    while more := {kind for each in kinds for kind in each.__subclasses__()} - kinds:
        kinds |= more

    def found() -> bool:
        wrappers = [each for each in gc.get_objects() if type(each) in kinds]
        made = [each for each in wrappers if "reducer" in vars(each)]  # else it was refused while it was made
        return any(id(parameter) in ours for each in made for parameter in each.parameters())

    if not found():
        return False
    gc.collect()  # one that was deleted may still be there, in a ring of references
    return found()


def _is_sharded(thing: object) -> bool:
    return any(kind.__name__ in SHARDED for kind in type(thing).__mro__)
