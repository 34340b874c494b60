"""Hooks on a model: the weight of what enters its output in a backward pass, and how long a batch keeps its rank busy.

    forward pre-hook     which batch this is; its weight
    forward hook         every tensor of the output is replaced by a view of it, whose gradient is multiplied
    backward is through  the rank has done its part: busy until here
    backward is over     DDP has averaged: the next batch begins

The weight is applied once, to the gradient that comes from outside: a loss that the model itself computes from its
logits sends its gradient through the model's own tensors, not through the views. So every gradient is multiplied before
it reaches a parameter, and the hooks of DDP (codecs, watching) have nothing to know of it.

    busy   |input, forward, backward|        |input, forward, ...      the optimiser's step counts with the next batch
           |                        | waits  |
           ^ backward was over      ^ through                          between the two somebody else was waited for

What is not the batch's own is left out: DDP's exchange of buffers at the beginning of a forward pass waits for rank 0,
and a batch around which the model was evaluated, or that is the first of a pass, counts for nothing. On a GPU moments
are events in the stream that computes, which are read later: nobody waits for the device.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten


class PassListener(Protocol):
    """What the hooks tell of."""

    def begin_forward(self) -> float:
        """A forward pass in training begins; return the weight of its batch."""

    def given_weight(self) -> float | None:
        """Return the weight that the script has given since the forward pass, if it has."""

    def backward_through(self) -> None:
        """This rank's part of a backward pass is done."""

    def backward_over(self) -> None:
        """The backward pass is over on all ranks."""

    def evaluated(self) -> None:
        """The model was called without being trained."""

    def waits(self, *, begins: bool) -> None:
        """A wait for other ranks begins or ends, before the forward pass."""

    def is_unseen(self) -> bool:
        """Return whether batches were handed out, and no forward pass of the model was told of."""

    def refuse_step(self) -> None:
        """Raise an error: the optimiser is about to step parameters with gradients that were not weighed."""


class BalanceHooks:
    """Tells of a model's passes, and weighs what enters its output."""

    def __init__(self, model: torch.nn.Module, listener: PassListener) -> None:
        self._listener, self._task, self._seen_training, self._open = listener, -1, False, True
        self._weight: float | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._before_forward)),
            model.register_forward_hook(Hook(self._after_forward)),
        ]
        self._model = weakref.ref(model)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        inner = getattr(model, "module", None)
        if getattr(model, "will_sync_module_buffers", None) and isinstance(inner, torch.nn.Module):
            self._handles.append(inner.register_forward_pre_hook(Hook(self._before_inner)))

    def close(self) -> None:
        """Remove the hooks; what tensors still hold of them does nothing but weigh."""
        self._open = False
        for handle in self._handles:
            handle.remove()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._weight = None
        if torch.compiler.is_compiling() or inside_backward():  # there layers are computed again, to save memory
            return
        if not torch.is_grad_enabled() or (self._seen_training and not module.training):
            self._listener.evaluated()
            return
        self._seen_training |= module.training
        self._weight = self._listener.begin_forward()
        self._listener.waits(begins=True)

    def _before_inner(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._weight is not None and not inside_backward():
            self._listener.waits(begins=False)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        weight, self._weight = self._weight, None
        if weight is None:
            return None
        return replaced(output, partial(self._weighed, weight))

    def _weighed(self, weight: float, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)  # gradients inside of the model do not come through it
        view.register_hook(partial(self._on_gradient, weight))  # type: ignore[no-untyped-call]
        return view

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or len(args) > 1 or kwargs:  # a closure: its passes are still to come
            return
        model = self._model()
        if model is None or not self._listener.is_unseen():
            return
        ours = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            self._listener.refuse_step()

    # -- backward --------------------------------------------------------------------------------------------------

    def _on_gradient(self, weight: float, gradient: torch.Tensor) -> torch.Tensor | None:
        task = torch._C._current_graph_task_id()
        if task != self._task and self._open and task != -1:
            self._task = task
            # Callbacks are called in the order in which they are queued; DDP queues its own while backward goes on:
            # after this one, and before the one that this one queues.
            queue(self._on_through)
        given = self._listener.given_weight()
        weight = weight if given is None else given
        if weight == 1:
            return None
        return gradient * weight if weight else torch.zeros_like(gradient)  # also where it is not finite

    def _on_through(self) -> None:
        self._listener.backward_through()
        queue(self._listener.backward_over)


class Hook:
    """A hook of a model's; a copy of it, in a copy of the model, does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> Any:
        return Hook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    """Take the place of a hook in a copy of a model."""


def inside_backward() -> bool:
    """Return whether this is called from a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def queue(callback: Callable[[], None]) -> None:
    """Let autograd call this when the backward pass that is under way is through."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def replaced(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a model's output with every tensor in it changed: of tuples, lists, dicts, and objects with attributes.

    >>> replaced({"loss": torch.zeros(1), "more": (torch.zeros(2), 3)}, torch.ones_like)
    {'loss': tensor([1.]), 'more': (tensor([1., 1.]), 3)}
    """
    if isinstance(output, torch.Tensor):
        return change(output)
    leaves, shape = tree_flatten(output)
    return tree_unflatten([_replaced_leaf(leaf, change) for leaf in leaves], shape)


def _replaced_leaf(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    held = getattr(leaf, "__dict__", None)
    if not held or isinstance(leaf, type | torch.nn.Module) or not any(map(_holds_tensor, held.values())):
        return leaf
    changed = copy.copy(leaf)  # a dataclass, say, which may be frozen
    for name, value in held.items():
        if _holds_tensor(value):
            object.__setattr__(changed, name, replaced(value, change))
    return changed


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])


# -- how long a rank is busy ---------------------------------------------------------------------------------------


class BusyClock:
    """Moments of the device that computes, and the seconds between them.

    >>> clock = BusyClock(torch.device("cpu"))
    >>> begin = clock.moment()
    >>> clock.seconds(begin, clock.moment()) >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def moment(self) -> Any:
        """Return what stands for now: on a GPU an event in its stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two moments; None as long as the device has not come to the second."""
        if self._device.type != "cuda":
            return float(end - begin)
        return begin.elapsed_time(end) / 1000 if end.query() else None


class BatchTimes:
    """The seconds that batches keep a rank busy, given when they are known. The first batch is nobody's measure.

    >>> times = BatchTimes(torch.device("cpu"))
    >>> for _ in range(2):
    ...     times.begin()
    ...     times.end_part()
    ...     times.end_batch(32)
    >>> [(samples, seconds < 1) for samples, seconds in times.known()]
    [(32, True)]
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = BusyClock(device)
        self._begun: Any = None
        self._waits_since: Any = None
        self._parts: list[tuple[Any, Any, int]] = []  # of the batch under way: begin, end, and 1, or -1 for a wait
        self._disturbed = True
        self._batches: list[tuple[int, list[tuple[Any, Any, int]]]] = []

    def begin(self) -> None:
        """Begin to be busy."""
        self._begun = self._clock.moment()

    def end_part(self) -> None:
        """Be through with a pass of the batch."""
        if self._begun is not None:
            self._parts.append((self._begun, self._clock.moment(), 1))
            self._begun = None

    def wait(self, *, begins: bool) -> None:
        """Begin or end a wait for others, in which this rank is not busy."""
        if begins:
            self._waits_since = self._clock.moment()
        elif self._waits_since is not None:
            self._parts.append((self._waits_since, self._clock.moment(), -1))
            self._waits_since = None

    def disturb(self) -> None:
        """Note that something else was done: this batch's time says nothing."""
        self._disturbed = True

    def end_batch(self, samples: int) -> None:
        """Note that the batch is over, and had so many samples; 0: its time says nothing."""
        if samples and not self._disturbed and self._parts:
            self._batches.append((samples, self._parts))
        self._parts, self._disturbed = [], False

    def known(self) -> list[tuple[int, float]]:
        """Return the samples and seconds of the batches whose times are known since the last call, in order."""
        found: list[tuple[int, float]] = []
        while self._batches:
            samples, parts = self._batches[0]
            seconds = [self._clock.seconds(begin, end) for begin, end, _ in parts]
            if any(each is None for each in seconds):
                break
            signs = (sign for _, _, sign in parts)
            found.append((samples, sum(sign * (each or 0.0) for sign, each in zip(signs, seconds, strict=True))))
            del self._batches[0]
        return found
