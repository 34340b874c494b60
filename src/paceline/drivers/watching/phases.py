"""The phases of a script's steps, found by hooks; the script itself says nothing.

    forward pre-hook of the model         input ends, forward begins (training mode, gradients enabled)
    gradient of an output arrives         forward (with the loss) ends, backward begins
    autograd's callbacks                  backward is through: wait begins, until DDP or FSDP has finished its round
    optimizer.step() begins               what followed the backward pass (clipping, unscaling) was the optimiser's
    optimizer.step() ends                 the step ends, and input begins

What the time after a backward pass was is known when it ends: before optimizer.step() it was the optimiser's, before
another forward pass it was input (accumulated gradients: all until optimizer.step() is one step), before another
backward pass it was the loss.

- A step that a GradScaler leaves out has no optimizer.step(): it is one step with the next.
- Of several optimisers that hold parameters of the model, the first that takes a step ends the steps; the time of the
  others is the optimiser's, too. If it takes none while another takes MANY, the other takes its place.
- Where no torch optimiser takes a step, a step ends with the next forward pass that follows a backward pass, unless
  that was inside no_sync().
- Of an optimiser that calls others (ZeroRedundancyOptimizer, Lookahead) the outermost one counts.
- In evaluations between steps (eval mode, or gradients disabled) the whole stretch between two steps is in no phase. A
  pass in eval mode through which a gradient then comes was a forward pass: the model is trained like that.
- In a closure (LBFGS) forward and backward passes are what they are, and the rest of the step is the optimiser's.
- A step in which no forward pass was seen (the script calls a method of the model's own, or compiled the model in
  place) has no input either: all but the optimiser is in no phase. A model that was compiled in place is called
  through us from then on.

Hooks on a model are copied with it. Ours become hooks that do nothing, so that neither a copy (an average of the
weights) nor a saved model is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from paceline.traces.step_clock import Phase, StepClock

MANY = 50
MOST_OUTPUTS = 64  # of a forward pass, that are looked at


class StepPhases:
    """Enters phases on a clock as a model is trained, and calls `end_step` when a step is over.

    `optimizer` ends the steps, if it is given. `syncs` says whether a backward pass that is over brought gradients
    together. `before_first` is called before the first forward pass of a step, and what it does belongs to no step.
    `on_unseen` is called once, if forward passes are not seen.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        clock: StepClock,
        end_step: Callable[[], None],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        syncs: Callable[[], bool] = lambda: True,
        before_first: Callable[[], None] = lambda: None,
        on_unseen: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._clock, self._end_step = weakref.ref(model), clock, end_step
        self._syncs, self._before_first, self._on_unseen = syncs, before_first, on_unseen
        self._ends = weakref.ref(optimizer) if optimizer is not None else None
        self._given = optimizer is not None
        self._others_since = 0  # steps of other optimisers
        self._ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._task = -1  # the backward pass that is under way, or was last
        self._after_backward = self._evaluated = False
        self._trains_in_eval = self._eval_with_gradients = False
        self._stepping: list[tuple[torch.optim.Optimizer, bool]] = []  # those in step(), the outermost first; closures
        self._one_inside = False  # the one that ends the steps took its step inside another's
        self._synced_backwards = self._forwards = 0  # in this step
        self._unseen_told = False
        self._handles = [
            model.register_forward_pre_hook(WatchingHook(self._before_forward)),
            model.register_forward_hook(WatchingHook(self._after_forward)),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._open = True
        self._call_compiled_through_us()

    def close(self) -> None:
        """Remove the hooks; what tensors still hold of them does nothing."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is not None and isinstance(compiled := model._compiled_call_impl, CompiledCall):
            model._compiled_call_impl = compiled.call

    def _call_compiled_through_us(self) -> bool:
        """See calls of a model that was compiled in place: its hooks are compiled away. Return whether it was."""
        model = self._model()
        call = None if model is None else model._compiled_call_impl
        if model is None or call is None or isinstance(call, CompiledCall):
            return False
        model._compiled_call_impl = CompiledCall(self, self._model, call)
        return True

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or _inside_backward():  # there layers are computed again, to save memory
            return
        clock = self._clock
        with_gradients = torch.is_grad_enabled()
        if not with_gradients or not (module.training or self._trains_in_eval):
            if clock.phase in ("input", "other") and not self._after_backward:
                clock.enter("other", counting="other")
                self._evaluated = True
                self._eval_with_gradients = with_gradients
            return
        if module.training:
            self._trains_in_eval = False
        if self._stepping and not any(closure for _, closure in self._stepping):
            self._stepping.clear()  # a step has raised an error
        if self._synced_backwards and self._ends is None and not self._stepping:
            self._finish()
        if not self._forwards:
            self._before_first()
        self._forwards += 1
        clock.enter("forward", counting=self._counting_before_forward())
        self._after_backward = self._evaluated = self._eval_with_gradients = False

    def _counting_before_forward(self) -> Phase | None:
        if self._after_backward:
            return "optimiser" if self._stepping else "input"
        return "other" if self._evaluated else None

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _inside_backward():
            return
        if isinstance(output, torch.Tensor):
            if output.grad_fn is not None:
                output.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            return
        for tensor in _tensors_of(output):
            if tensor.grad_fn is not None:  # a parameter would keep the hook
                tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    # -- backward --------------------------------------------------------------------------------------------------

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task or not self._open:
            return
        self._task = task
        counting: Phase | None = "forward" if self._after_backward else None
        if self._eval_with_gradients and self._evaluated and self._clock.phase == "other":
            counting, self._trains_in_eval, self._evaluated = "forward", True, False  # that was no evaluation
            self._forwards += 1
        self._clock.enter("backward", counting=counting)
        self._after_backward = False
        # Callbacks are called in the order in which they are queued, and DDP's and FSDP's are queued while backward
        # goes on: after this one, and before the one that this one queues.
        _queue(self._on_backward_through)

    def _on_backward_through(self) -> None:
        self._clock.enter("wait")
        _queue(self._on_round_finished)

    def _on_round_finished(self) -> None:
        self._clock.enter("other")
        self._after_backward = True
        self._synced_backwards += self._syncs()

    # -- the optimiser ---------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or _inside_backward() or not self._is_ours(optimizer):
            return
        stepping = self._stepping
        if stepping:
            for place, (each, _) in enumerate(stepping):
                if each is optimizer:  # its last step has raised an error
                    del stepping[place:]
                    break
        stepping.append((optimizer, len(args) > 1 or bool(kwargs)))
        if len(stepping) > 1:
            return
        self._clock.enter("optimiser", counting="optimiser" if self._after_backward else None)
        self._after_backward = self._one_inside = False

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._stepping
        if not stepping or torch.compiler.is_compiling():
            return
        if stepping[0][0] is not optimizer:
            while len(stepping) > 1 and any(each is optimizer for each, _ in stepping):
                stepping.pop()
            self._one_inside |= self._ends is not None and self._ends() is optimizer
            return
        stepping.clear()
        if self._after_backward:  # of a closure
            self._clock.enter("optimiser", counting="optimiser")
            self._after_backward = False
        if self._one_inside or self._is_the_one(optimizer):
            self._finish()
        else:
            self._clock.enter("input")

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser holds parameters of the model."""
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        known = self._ours.get(optimizer)
        if known is None or known[0] != count:
            model = self._model()
            parameters = {id(each) for each in model.parameters()} if model is not None else ()
            held = any(id(each) in parameters for group in optimizer.param_groups for each in group["params"])
            known = self._ours[optimizer] = count, held
        return known[1]

    def _is_the_one(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the steps end with this optimiser's."""
        one = self._ends() if self._ends is not None else None
        if one is optimizer:
            self._others_since = 0
            return True
        self._others_since += 1
        if one is None or (self._others_since > MANY and not self._given):
            self._ends, self._others_since = weakref.ref(optimizer), 0
            return True
        return False

    def _finish(self) -> None:
        if not self._forwards:
            self._clock.recount("input", "other")
            if not self._call_compiled_through_us() and not self._unseen_told:
                self._unseen_told = True
                self._on_unseen()
        self._synced_backwards = self._forwards = 0
        self._after_backward = self._evaluated = self._eval_with_gradients = False
        self._end_step()


class CompiledCall:
    """What a watched model has in place of the call that `model.compile()` has made. Modules do not copy it."""

    def __init__(self, phases: StepPhases, model: weakref.ref[torch.nn.Module], call: Callable[..., Any]) -> None:
        self.call, self._phases, self._of = call, phases, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._of()
        if model is None or torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self._phases._before_forward(model, args)
        output = self.call(*args, **kwargs)
        self._phases._after_forward(model, args, output)
        return output


class WatchingHook:
    """A hook of a model's; a copy of it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return WatchingHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    """Take the place of a hook in a copy of a model."""


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a forward pass's output: nested tuples, lists, dicts, and attributes of what is none.

    >>> [tensor.numel() for tensor in _tensors_of({"loss": torch.zeros(1), "more": (torch.zeros(2), 3)})]
    [1, 2]
    """
    found = 0
    for leaf in tree_leaves(output):
        inner = [leaf] if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        for tensor in inner:
            if isinstance(tensor, torch.Tensor) and found < MOST_OUTPUTS:
                found += 1
                yield tensor
