"""Hooks on a model: the weight of what enters its output in a backward pass, and how long a batch keeps its rank busy.

    forward pre-hook     which batch this is; its weight
    forward hook         every tensor of the output is replaced by an alias of it, whose gradient is multiplied
    backward is through  the rank has done its part: busy until here
    backward is over     DDP has averaged: the next batch begins

The weight is applied once, to the gradient that comes from outside: a loss that the model itself computes from its
logits sends its gradient through the model's own tensors, not through the aliases. So every gradient is multiplied
before it reaches a parameter, and the hooks of DDP (codecs, watching) have nothing to know of it. An alias is no view:
what a script does in place to an output would cut a view off from its gradient's way. (A small output is copied.)

What would be weighed twice, or not at all, is refused: an output that goes into the model again, a graph of gradients,
a backward pass through an evaluation, and parameters that a gradient reaches beside the aliases, in something that the
model returns and nobody here can open.

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
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from paceline.drivers.balancing.schedule import BalanceError

COPIED_BYTES = 1 << 18  # a small output is copied: that and a hook take a third of the time of a Function of Python's
WEIGHED = "paceline.balance"  # marks the node of such a copy
MOST_DEPTH = 4  # of objects in objects that an output is searched for tensors
MOST_NODES = 20_000  # of an input's graph that are searched for an output of the model
WATCHED_PARAMETERS = 3  # at either end of the model: one of them gets a gradient in every backward pass


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

    @property
    def several(self) -> bool:
        """Whether there are several ranks, so that weights matter."""


class BalanceHooks:
    """Tells of a model's passes, and weighs what enters its output."""

    def __init__(self, model: torch.nn.Module, listener: PassListener) -> None:
        self._listener, self._task, self._seen_training, self._open = listener, -1, False, True
        self._weight: float | None = None
        self._evaluates = False
        self._unweighed = False  # a forward pass was seen, and no gradient has entered its output yet
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(Hook(self._after_forward)),
        ]
        self._model = weakref.ref(model)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        watched = {id(each): each for each in (*trained[:WATCHED_PARAMETERS], *trained[-WATCHED_PARAMETERS:])}
        self._handles += [
            parameter.register_post_accumulate_grad_hook(Hook(self._on_parameter))  # type: ignore[no-untyped-call]
            for parameter in watched.values()
            if parameter.is_leaf
        ]
        inner = getattr(model, "module", None)
        if getattr(model, "will_sync_module_buffers", None) and isinstance(inner, torch.nn.Module):
            self._handles.append(inner.register_forward_pre_hook(Hook(self._before_inner)))

    def close(self) -> None:
        """Remove the hooks; what tensors still hold of them does nothing but weigh."""
        self._open = False
        for handle in self._handles:
            handle.remove()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: Any, named_inputs: Any) -> None:
        self._weight, self._evaluates = None, False
        if torch.compiler.is_compiling() or inside_backward():  # there layers are computed again, to save memory
            return
        if not torch.is_grad_enabled() or (self._seen_training and not module.training):
            self._evaluates = torch.is_grad_enabled() and self._listener.several
            self._listener.evaluated()
            return
        self._seen_training |= module.training
        if self._listener.several and comes_from_output((inputs, named_inputs)):
            raise BalanceError(
                "an output of the model goes into the model again, with its gradient, which would be weighed by "
                "samples twice: detach it, or give Balance (and DistributedDataParallel) a module whose forward is the "
                "whole roll-out"
            )
        self._weight = self._listener.begin_forward()
        self._listener.waits(begins=True)

    def _before_inner(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._weight is not None and not inside_backward():
            self._listener.waits(begins=False)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        weight, self._weight = self._weight, None
        if weight is None and not self._evaluates:
            return None
        self._unweighed |= weight is not None and self._listener.several
        call = self._refuse_evaluated if weight is None else partial(self._on_gradient, weight)
        return replaced(output, partial(aliased, call))

    def _refuse_evaluated(self, gradient: torch.Tensor) -> torch.Tensor:
        raise BalanceError(
            "a backward pass comes through an output of the model in eval(), after it was trained in train(): that was "
            "taken for an evaluation, and belongs to no batch. To train with frozen normalisation, call model.train(), "
            "and eval() of the layers that are frozen"
        )

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

    def _on_gradient(self, weight: float, gradient: torch.Tensor) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled() and self._open and self._listener.several:
            raise BalanceError(
                "a gradient with a graph of its own (create_graph=True) comes through the model's output: what is "
                "computed of it, a penalty say, would be of a gradient that is weighed by samples. Balance cannot "
                "weigh both; train such a model with equal batches"
            )
        self._unweighed = False
        if task != self._task and self._open and task != -1:
            self._task = task
            # Callbacks are called in the order in which they are queued; DDP queues its own while backward goes on:
            # after this one, and before the one that this one queues.
            queue(self._on_through)
        given = self._listener.given_weight()
        weight = weight if given is None else given
        if weight == 1:
            return gradient
        return gradient * weight if weight else torch.zeros_like(gradient)  # also where it is not finite

    def _on_parameter(self, parameter: torch.Tensor) -> None:
        if self._unweighed and self._open and torch._C._current_graph_task_id() != self._task:
            raise BalanceError(
                "a gradient reaches the model's parameters, and none has come through its output: the model returns "
                "something in which Balance finds no tensor, so its batches would not be weighed by samples. Let it "
                "return tensors, or tuples, lists, dicts or dataclasses of them"
            )

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


class WeighedOutput(torch.autograd.Function):
    """The same numbers once more, whose gradient is changed by a function on its way to the original.

    >>> WeighedOutput.apply(torch.ones(1, requires_grad=True), lambda gradient: 2 * gradient)
    tensor([1.], grad_fn=<WeighedOutputBackward>)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the tensor itself, as autograd sees it: another one."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the function for the backward pass."""
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Change the gradient."""
        return ctx.call(gradients[0]), None


def aliased(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient goes through a function.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> output = aliased(lambda gradient: 2 * gradient, 1 * weight)
    >>> output *= 3
    >>> output.backward()
    >>> weight.grad
    tensor([6.])
    """
    if not tensor.requires_grad:
        return tensor
    if tensor.nbytes <= COPIED_BYTES:
        copy_of_it = tensor.clone()
        assert copy_of_it.grad_fn is not None
        copy_of_it.grad_fn.metadata[WEIGHED] = True  # type: ignore[index]
        copy_of_it.register_hook(call)  # type: ignore[no-untyped-call]
        return copy_of_it
    alias: torch.Tensor = WeighedOutput.apply(tensor, call)  # type: ignore[no-untyped-call]
    return alias


def comes_from_output(inputs: Any) -> bool:
    """Return whether the gradient of any of these tensors comes to an output of a model that is weighed here.

    >>> output = aliased(lambda gradient: gradient, torch.ones(1, requires_grad=True) * 2)
    >>> comes_from_output((output + 1,)), comes_from_output({"hidden": [output.detach()]})
    (True, False)
    """
    starts = [leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
    waiting, seen = list[Any](starts), set[Any](starts)
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if type(node).__name__ == f"{WeighedOutput.__name__}Backward" or WEIGHED in node.metadata:
            return True
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        waiting += following
    return False


def replaced(output: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = MOST_DEPTH) -> Any:
    """Return a model's output with every tensor in it changed: of tuples, lists, dicts, and objects with attributes.

    >>> replaced({"loss": torch.zeros(1), "more": (torch.zeros(2), 3)}, torch.ones_like)
    {'loss': tensor([1.]), 'more': (tensor([1., 1.]), 3)}
    """
    if isinstance(output, torch.Tensor):
        return change(output)
    leaves, shape = tree_flatten(output)
    changed = [_replaced_leaf(leaf, change, depth) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return output
    return tree_unflatten(changed, shape)


def _replaced_leaf(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int) -> Any:
    """Return a leaf of a tree, changed: a tensor, or an object that holds some, of a class that no tree knows."""
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if not depth or leaf is None or isinstance(leaf, str | bytes | int | float | type | torch.nn.Module):
        return leaf
    parts = {key: replaced(value, change, depth - 1) for key, value in _parts(leaf)}
    if all(parts[key] is value for key, value in _parts(leaf)):
        return leaf
    if isinstance(leaf, tuple):
        held = tuple.__new__(type(leaf), (parts["item", place] for place in range(len(leaf))))
        if (attributes := getattr(leaf, "__dict__", None)) is not None:
            vars(held).update(attributes)
        return held
    made = copy.copy(leaf)  # a dataclass, say, which may be frozen
    for (kind, key), value in parts.items():
        if kind == "item":
            made[key] = value
        else:
            object.__setattr__(made, key, value)
    return made


def _parts(holder: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield what an object holds: ("item", key) of a dict, list or tuple of its own kind, else ("attribute", name)."""
    if isinstance(holder, MutableMapping):
        yield from ((("item", key), value) for key, value in list(holder.items()))
    elif isinstance(holder, list | tuple):
        yield from ((("item", place), value) for place, value in enumerate(holder))
    slots = (name for kind in type(holder).__mro__ for name in _names(getattr(kind, "__slots__", ())))
    for name in (*getattr(holder, "__dict__", ()), *slots):
        if not name.startswith("__") and hasattr(holder, name):
            yield ("attribute", name), getattr(holder, name)


def _names(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


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
