"""The state of a training: the model, and all else that a step changes.

step + gradients -> Combiner -> update -> optimiser -> parameters -> outgoing: the model as workers get it
       changes of buffers (BatchNorm) -> their mean -> buffers

BatchNorm's statistics move by the mean of what the step's workers changed. They are those of a block, as on a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.events import Share, Step
from paceline.strategies.combine import Combiner
from paceline.training.outgoing import OutgoingModel
from paceline.training.plain import with_tensors, without_tensors
from paceline.training.saved_state import check_form, check_optimizer, check_schedule, check_tensor
from paceline.workers.flat import FlatModel


class Schedule(Protocol):
    """A learning-rate schedule, as far as a step is concerned."""

    def step(self) -> None:
        """Follow one step of the model."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it needs to go on later."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


class TrainState:
    """A model, its optimiser and its schedule, moved one step at a time.

    A state whose strategy never `compensates` for the step before has one vector less to remember. `outgoing` is the
    model as workers get it through the codec.

    >>> network = nn.Linear(2, 1)
    >>> state = TrainState(network, torch.optim.SGD(network.parameters(), lr=0.1))
    >>> step = Step(version=0, fresh=(Share(worker=0, version=0, weight=1.0),))
    >>> state.take(step, lambda share: torch.ones(3), [])
    True
    >>> state.version
    1
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | None = None,
        *,
        compensates: bool = True,
        codec: Codec | None = None,
        seed: int = 0,
    ) -> None:
        self.model = FlatModel(module)
        if self.model.parameters.dtype is not torch.float32:
            raise ValueError(f"the model must be float32 (it is {self.model.parameters.dtype}); call .float() on it")
        if self.model.parameters.device.type != "cpu":
            raise ValueError(f"the model must be on the CPU here (it is on {self.model.parameters.device})")
        self.version = 0
        self._optimizer, self._schedule = optimizer, schedule
        self._combiner = Combiner(remembers=compensates)
        codec = codec if codec is not None else Identity()
        self.outgoing = OutgoingModel(codec, self.model.parameters, self.model.shapes, seed=seed)

    def take(
        self,
        step: Step,
        gradient_of: Callable[[Share], torch.Tensor],
        buffer_changes: Sequence[torch.Tensor],
    ) -> bool:
        """Take a step; return False if the run has diverged.

        Then the update is not finite, and the model stays as it was; or the parameters after it are not, and the model
        is lost. `buffer_changes` are what each worker of the step changed in its buffers, late ones first.
        """
        update = self._combiner.update(step, gradient_of, out=self.model.gradient, check=True)
        if not self._combiner.is_finite(update):
            return False
        return self._follow_update(step, buffer_changes)

    def take_sum(self, step: Step, update: torch.Tensor, buffer_changes: Sequence[torch.Tensor]) -> bool:
        """Take a step with an update that ranks have come to among themselves; return False if the run has diverged."""
        if not all_finite(update):
            return False
        self.model.gradient.copy_(update)
        return self._follow_update(step, buffer_changes)

    def _follow_update(self, step: Step, buffer_changes: Sequence[torch.Tensor]) -> bool:
        self.step_optimizer()
        if not all_finite(self.model.parameters):
            return False
        self._move_buffers(buffer_changes, weight=min(1.0, sum(share.weight for share in step.fresh)))
        self.advance()
        return True

    def step_optimizer(self) -> None:
        """Take the optimiser's step, and then the schedule's."""
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def advance(self) -> None:
        """Note that the model has changed, and is of the next version."""
        self.version += 1
        self.outgoing.advance(self.version)

    def _move_buffers(self, changes: Sequence[torch.Tensor], *, weight: float) -> None:
        """Move BatchNorm's statistics by the mean of the workers' changes, which weigh as much as their gradients."""
        if changes and changes[0].numel():
            self.model.load_buffers(self.model.buffers + weight * torch.stack(list(changes)).mean(0))

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return all that is needed to go on later: plain values, and tensors by name, in the model's memory."""
        tensors: dict[str, torch.Tensor] = {"parameters": self.model.parameters, "buffers": self.model.buffers}
        plain = {
            "version": self.version,
            "optimizer": without_tensors(self._optimizer.state_dict(), "optimizer", tensors),
            "schedule": without_tensors(self._schedule.state_dict() if self._schedule else {}, "schedule", tensors),
            "combiner": without_tensors(self._combiner.state_dict(), "combiner", tensors),
            "outgoing": without_tensors(self.outgoing.state_dict(), "outgoing", tensors),
        }
        return plain, tensors

    def follow(self, schedule: Schedule) -> None:
        """Follow another schedule from the next step on."""
        self._schedule = schedule

    def load_state(self, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a `state`; a SavedStateError says what in it does not fit, before anything is loaded."""
        self._check_state(plain, tensors)
        self.model.load(tensors["parameters"], tensors["buffers"])
        self._optimizer.load_state_dict(with_tensors(plain["optimizer"], tensors))
        if self._schedule is not None:
            self._schedule.load_state_dict(with_tensors(plain["schedule"], tensors))
        self._combiner.load_state_dict(with_tensors(plain["combiner"], tensors))
        self.version = int(plain["version"])
        self.outgoing.load_state_dict(with_tensors(plain["outgoing"], tensors), self.version)

    def _check_state(self, plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name, mine in (("parameters", self.model.parameters), ("buffers", self.model.buffers)):
            check_tensor(name, tensors.get(name), mine)
        check_form("version", plain["version"], 0)
        check_optimizer(with_tensors(plain["optimizer"], tensors), self._optimizer)
        if self._schedule is not None:
            check_schedule(with_tensors(plain["schedule"], tensors), self._schedule)
        kept = with_tensors(plain["combiner"], tensors) | with_tensors(plain["outgoing"], tensors)
        for name in ("previous_fresh", "held"):
            if name in kept:
                check_tensor(name, kept[name], self.model.parameters)


def all_finite(vector: torch.Tensor) -> bool:
    """Return whether every number of a vector is finite. A finite sum says so in half the time.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())


def fingerprint(vector: torch.Tensor) -> int:
    """Return a number that changes with any one bit of a float32 vector: the sum of its words, at the speed of memory.

    Words that trade places leave it as it is: it tells two computations apart, and is no protection.

    >>> fingerprint(torch.tensor([1.0])) == fingerprint(torch.tensor([1.0000001]))
    False
    """
    return sum(map(int, word_sums(vector)))


def word_sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a tensor's 64-bit words, and that of what is left: several times quicker than of shorter ones.

    >>> word_sums(torch.tensor([1, 2, 5], dtype=torch.int32))
    (tensor(8589934593), tensor(5))
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = 8 // flat.element_size()
    if flat.storage_offset() % words:  # no 64-bit word begins there
        flat = flat.clone()
    even = flat.numel() // words * words
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat[:even].view(torch.int64).sum(), flat[even:].view(narrow).sum(dtype=torch.int64)
