"""When each bucket of a DistributedDataParallel model was ready, and when its mean was there.

DDP takes one communication hook for its life. Ours is registered first, and passes on what comes later: whoever then
registers a hook (paceline.compress, PowerSGD, Trainer, Lightning) has it called exactly as DDP would have called it.

Without a later hook ours does what DDP does without one, to the last bit. DDP multiplies a gradient by 1/N while it
copies it into the bucket; but where `gradient_as_bucket_view` keeps gradients in their buckets from one step to the
next, it divides them by N in place, which rounds differently unless N is a power of two. Sparse gradients are divided
as well. In join() without `divide_by_initial_world_size`, N is the number of ranks that still have data.

A bucket that is timed costs a call of Python in gloo's thread. So buckets are timed in the first FIRST_STEPS steps, and
then in every tenth, the same on all ranks; in the others the script's own thread waits for all of them at once.
"""
# No `from __future__ import annotations` here: DDP compares a hook's annotations with classes, not with their names.

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.collectives import FollowedCollective
from paceline.traces.step_clock import StepClock
from paceline.traces.step_times import LINES_AT_A_STRIDE, MOST_BUCKETS, BucketsMade

FIRST_STEPS, EVERY = 50, 10

_TIMERS: "weakref.WeakKeyDictionary[DistributedDataParallel, BucketTimer]" = weakref.WeakKeyDictionary()
ONCE = "register_comm_hook or register_builtin_comm_hook can only be called once."  # as DDP says it


def is_timed(step: int) -> bool:
    """Return whether the buckets of a step are timed; where lines are sums of several steps, those of all of a sum.

    >>> [step for step in range(90) if is_timed(step)] == [*range(50), 50, 60, 70, 80]
    True
    >>> [step for step in range(20_040, 20_080) if is_timed(step)]
    [20040, 20041, 20060, 20061]
    """
    if step < FIRST_STEPS:
        return True
    in_a_line = 1 << ((step // LINES_AT_A_STRIDE + 1).bit_length() - 1)
    return step // in_a_line % EVERY == 0


def time_buckets(
    model: DistributedDataParallel, clock: StepClock, write: Callable[[BucketsMade], None]
) -> "BucketTimer | None":
    """Time the buckets of a model from now on; None where somebody else's hook was registered before."""
    timer = _TIMERS.get(model)
    if timer is None:
        timer = BucketTimer(model)
        try:
            dist._register_comm_hook(model.reducer, timer, BucketTimer._take)  # type: ignore[attr-defined]
        except RuntimeError:
            return None
        _TIMERS[model] = timer
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            object.__setattr__(model, name, ReplacedMethod(model, name, getattr(timer, name)))
    timer.begin(clock, write)
    return timer


def count_buffers_as_wait(model: torch.nn.Module, clock: StepClock) -> Callable[[], None]:
    """Count as "wait" what DDP does to make buffers equal at the beginning of a forward pass; return how to end that.

    BatchNorm's statistics come from rank 0 in every step: whoever comes early waits there for whoever is late.
    """
    if not isinstance(model, DistributedDataParallel) or not any(True for _ in model.buffers()):
        return lambda: None
    here = weakref.ref(model)
    method: Callable[..., None] = DistributedDataParallel._sync_buffers

    def sync_buffers() -> None:
        with clock.entered("wait"):
            method(here())

    def end() -> None:
        if (watched := here()) is not None:
            watched.__dict__.pop("_sync_buffers", None)

    object.__setattr__(model, "_sync_buffers", ReplacedMethod(model, "_sync_buffers", sync_buffers))
    return end


class ReplacedMethod:
    """What a watched model has in place of one of DDP's methods. A copy of the model has DDP's own again."""

    def __init__(self, model: DistributedDataParallel, name: str, call: Callable[..., None]) -> None:
        self._model, self._name, self._call = weakref.ref(model), name, call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _method_of, (self._model(), self._name)


def _method_of(model: Any, name: str) -> Any:
    return types.MethodType(getattr(type(model), name), model)


class BucketTimer:
    """The hook of one model, for the model's life; it measures between `begin` and `end`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._of = weakref.ref(model)
        self._inner: tuple[Any, Callable[..., Any]] | None = None
        self._clock: StepClock | None = None
        self._write: Callable[[BucketsMade], None] = lambda made: None
        self._timing = False  # this backward pass
        self._works: list[Any] = []  # of this backward pass, to be waited for
        self._sizes: list[int] = []
        self._sizes_written: list[int] = []
        self._with_data = 1.0  # ranks, in join()
        self._kept: dict[int, int] = {}  # where gradients were before this backward pass, by their parameters' ids
        world = model.process_group.size()
        if model.gradient_as_bucket_view and world & (world - 1):  # else it is the same, to the last bit
            for parameter in model.parameters():
                if parameter.requires_grad:
                    note = functools.partial(_note_gradient, weakref.ref(self), weakref.ref(parameter))
                    parameter.register_hook(note)  # type: ignore[no-untyped-call]

    def begin(self, clock: StepClock, write: Callable[[BucketsMade], None]) -> None:
        """Measure with a clock; `write` is told of every change of the buckets' sizes."""
        self._clock, self._write, self._sizes_written = clock, write, []

    def end(self) -> None:
        """Measure no more. The hook stays, since DDP lets go of none."""
        self._clock = None

    # -- registrations that come later -----------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Do what DDP's method does, but for the registration: the hook is called by ours."""
        model = self._model()
        model._check_comm_hook(hook)
        model.logger._set_comm_hook_name(hook.__qualname__)
        if self._inner is not None:
            raise RuntimeError(ONCE)
        model._comm_hooks.append((hook, state))
        self._inner = state, hook

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        model, kinds = self._model(), dist.BuiltinCommHookType  # type: ignore[attr-defined]
        model.logger._set_comm_hook_name(str(comm_hook_type))
        if self._inner is not None:
            raise RuntimeError(ONCE)
        hooks = {kinds.ALLREDUCE: default_hooks.allreduce_hook, kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook}
        self._inner = model.process_group, hooks[comm_hook_type]

    def _model(self) -> Any:
        model = self._of()
        if model is None:
            raise RuntimeError("the model that is watched is gone")
        return model

    # -- one bucket ------------------------------------------------------------------------------------------------

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Be DDP's hook for one bucket."""
        clock = self._clock
        if clock is None:
            return self._started(bucket, None)
        index = bucket.index()
        if index == 0:
            clock.begin_buckets()
            self._timing, self._sizes = is_timed(clock.step), []
        if not self._timing:
            return self._started(bucket, None)
        buffer = bucket.buffer()
        self._sizes.append(0 if buffer.is_sparse else buffer.nbytes)
        if bucket.is_last():
            self._note_sizes(clock)
        mark_done = clock.bucket_ready(index) if index < MOST_BUCKETS else None
        return self._started(bucket, mark_done)

    def _started(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        mark_done: Callable[[], None] | None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Start what brings a bucket's gradients together; return a future of the mean."""
        if self._inner is None:
            return self._summed(bucket, mark_done)
        state, hook = self._inner
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if mark_done is None:
            return future

        def pass_on(theirs: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            mark_done()
            return theirs.value()

        return future.then(pass_on)  # a done callback would be called when DDP has gone on already

    def _note_sizes(self, clock: StepClock) -> None:
        if self._sizes != self._sizes_written:
            self._sizes_written = self._sizes
            self._write(BucketsMade(step=clock.step, bytes=tuple(self._sizes)))

    def _summed(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        mark_done: Callable[[], None] | None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce that DDP would have started; return a future of the mean."""
        buffer, model = bucket.buffer(), self._model()
        group = model.process_group
        self._divide(bucket, buffer, self._divisor(model, group, bucket))
        work = group.allreduce([buffer])
        if buffer.device.type != "cpu":
            theirs: torch.futures.Future[Any] = work.get_future()
            return theirs.then(functools.partial(_mean_of, mark_done))
        if mark_done is None and not model.static_graph and torch._C._current_graph_task_id() != -1:
            return self._waited_for(work, buffer, bucket)
        return FollowedCollective(work).future.then(functools.partial(self._take_mean, mark_done))

    def _waited_for(self, work: Any, buffer: torch.Tensor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Return a future that is done, and have the work waited for before DDP looks at the first of them.

        DDP takes no future of C++'s, and one of Python's makes gloo's thread call Python. DDP looks at futures in a
        callback of autograd's that it queues after it has called the hook for the last bucket: so ours is called first.
        (With a static graph, or in join(), it may look at them elsewhere.)
        """
        if bucket.index() == 0:
            self._works = []
        self._works.append(work)
        if bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_wait_for, self._works))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    @staticmethod
    def _take_mean(mark_done: Callable[[], None] | None, following: torch.futures.Future[Any]) -> torch.Tensor:
        """Note that the mean is there, and return it; raise what went wrong. A thread of gloo's may call it."""
        if mark_done is not None:
            mark_done()
        mean: torch.Tensor = following.value()[0].value()[0]
        return mean

    def _divide(self, bucket: Any, buffer: torch.Tensor, by: float) -> None:
        if buffer.is_sparse:
            buffer.div_(by)
            return
        kept = self._kept
        if not kept:
            buffer.mul_(1.0 / by)
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if kept.get(id(parameter)) == gradient.data_ptr():
                gradient.div_(by)
            else:
                gradient.mul_(1.0 / by)
        if bucket.is_last():
            self._kept = {}

    def _divisor(self, model: Any, group: dist.ProcessGroup, bucket: Any) -> float:
        """Return the number of ranks, or in join(), if that is asked for, of those that still have data."""
        if not model._join_config.enable or getattr(model, "_divide_by_initial_world_size", True):
            return float(group.size())
        if bucket.index() == 0:
            has_data = torch._C._current_graph_task_id() != -1
            counted = torch.tensor([float(has_data)], device=next(model.parameters()).device)
            group.allreduce([counted]).wait()
            self._with_data = counted.item()
        return self._with_data


def _note_gradient(timer: Any, parameter: Any, arriving: torch.Tensor) -> None:
    """Note where a parameter's gradient is before another is added to it."""
    if (noting := timer()) is not None and (given := parameter()) is not None:
        noting._kept[id(given)] = 0 if given.grad is None else given.grad.data_ptr()


def _wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _mean_of(mark_done: Callable[[], None] | None, future: Any) -> torch.Tensor:
    """Note that the mean is there, and return it; raise what went wrong."""
    if mark_done is not None:
        mark_done()
    mean: torch.Tensor = future.value()[0]
    return mean
