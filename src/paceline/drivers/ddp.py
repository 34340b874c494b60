r"""DistributedDataParallel with gradients that travel encoded.

    backward:      gradients of bucket 0   of bucket 1    of bucket 2
                         |                     |              |
    the hook:      encode, send           encode         encode, send both     payloads travel while backward goes on
                         \                    \              \
    the scheduler:        sum, encode, send    ...            ...      decode  in the order of the buckets

A small payload waits for the next bucket's, and travels with it: a collective of its own would be all waiting.

How the ranks come to the sum is a plan of `paceline.exchanges`: all-reduce, gather or two-step; unless one is named,
the quickest for the codec, the bucket's size and the number of ranks. All ranks decode the same payloads in the same
order, or receive the same sum, so that all come to the same mean.

What goes wrong on one rank is told to all of them, and raised on all of them when backward is through: by then DDP has
finished its round, and a caller may catch the error, leave this step out and go on. The gradients are NaN then, so that
a step taken all the same does not pass unnoticed.

What goes wrong beside the codec (there is no memory for a sum, a connection is lost) ends the exchanges of this rank
for good. Its last heartbeat says why, and the others raise a RankGoneError that names it, in the same step or in the
next. No error may keep a bucket's future waiting: backward waits for it, and looks at nothing else.

With `not_finite="pass"` a gradient that is not finite raises nothing: all gradients of the step are NaN on all ranks,
so that a GradScaler leaves the step out everywhere, as it does with plain DDP. What codecs remember is as it was before
the step. (Where the error is raised, a rank whose own gradient was finite keeps it for the next step. Here it must not:
it is in units of a scale that now falls, and a scaler's first steps may overflow ten times in a row.)

DistributedDataParallel puts parameters into buckets, and after the first step into others: by then it has seen in which
order the gradients come. And a run that goes on from a checkpoint begins with the first buckets again. So a bucket is
known by the names of its parameters, and where the names change:

- what was held back (the residual of error feedback, and what a rank held back of the sums that it owned) follows its
  parameter into its new bucket: it is part of the gradient, and nothing of it may be lost. All of it becomes the
  residual of the rank that has it, wherever the new shards lie: only the sum over ranks counts;
- anything else that a codec remembers begins anew (the warm start of power-sgd finds itself again in a step or two).
"""
# No `from __future__ import annotations` here: DDP compares a hook's annotations with classes, not with their names.

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import Codec, NotFiniteError
from paceline.codecs.naming import resolve_codec, unsendable
from paceline.decoding import Count, decode
from paceline.distributed import RankGoneError, check_limits, first_line
from paceline.distributed.agreement import describe, raise_difference, raise_refusals, refusal_text, short_text
from paceline.distributed.groups import make_group
from paceline.distributed.stores import FleetingStore, meet_ranks
from paceline.drivers.ranks.exchanging import ConnectionLostError, ExchangeScheduler, Underway
from paceline.drivers.ranks.heartbeats import Heartbeats
from paceline.drivers.ranks.link_watch import LinkWatch
from paceline.exchanges import Trouble, TroubleError, VectorExchange, Workspace, make_exchange
from paceline.exchanges.exchange import Outcome
from paceline.exchanges.plans import (
    ALL_REDUCE,
    AUTO,
    GATHER,
    TWO_STEP,
    adds_plainly,
    check_plan,
    plans_of,
    refuse_float64,
    steps_of,
    takes_another,
)
from paceline.loggers import GuardedLog, Log
from paceline.randomness import torch_generator
from paceline.training.saved_state import check_tensor, refusing

log = logging.getLogger("paceline.ddp")

TIMEOUT_SECONDS = 600.0
FIGURES = ("steps", "skipped_steps", "payload_bytes", "gradient_bytes", "sent_bytes")  # of a state
RAISE, PASS = "raise", "pass"  # what becomes of a step in which a gradient is not finite


def compress(
    model: DistributedDataParallel,
    codec: Codec | str,
    *,
    plan: str = AUTO,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    not_finite: str = RAISE,
    round_float64: bool = False,
    log: Log | None = None,
) -> "Compression":
    """Let the gradients of a DistributedDataParallel model travel encoded; call it once, on every rank.

    `codec` is a codec, or words that name it ("top-k fraction=0.01": with error feedback, since it is biased). `plan`
    is how the ranks come to the sum: "all-reduce", "gather", "two-step", or the quickest ("auto"). The ranks round
    independently, as `seed` says. Payloads travel in process groups of their own, of the same ranks and the same
    backend; if you give one that nothing else uses, it is the first of them. A rank that is not heard of for
    `timeout_seconds` ends the step with an error. A gradient that is not finite on one rank raises a NotFiniteError on
    all of them; with `not_finite="pass"` all gradients of the step are NaN on all of them instead, for a
    `torch.amp.GradScaler` to find. Gradients in float64 travel as they are with "identity"; any other codec takes them
    only if it may round them to float32 first (`round_float64`). `log` is called with `figures()` and the number of
    steps after each step (paceline.loggers).

    >>> import tempfile
    >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(1000, 10))
    >>> compression = compress(model, "qsgd")
    >>> model(torch.ones(1, 1000)).sum().backward()
    >>> compression
    Compression(QSGD(levels=7, bucket=512, norm='max', lossless='packed'), by gather, 1 step of 5,101 bytes, ...)
    >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"compress wants a DistributedDataParallel model (this is a {type(model).__name__})")
    check_limits(timeout_seconds=timeout_seconds)
    if not_finite not in (RAISE, PASS):
        raise ValueError(f'not_finite must be "raise" or "pass" (not_finite={not_finite!r})')
    codec = resolve_codec(codec)
    check_plan(plan, codec)
    if getattr(model, "_comm_hooks", None):
        raise ValueError("this model has a communication hook already; a DistributedDataParallel model takes one")
    compression = Compression(model, codec, plan, seed, process_group, timeout_seconds, not_finite, round_float64, log)
    try:
        model.register_comm_hook(compression, Compression._send)
    except RuntimeError as error:  # one of PyTorch's own, which are not in the list above
        raise ValueError(f"this model takes no communication hook: {first_line(error)}") from error
    return compression


class Compression:
    """What `compress` returns: what was sent, and the memories of the codecs for a checkpoint."""

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec,
        plan: str,
        seed: int,
        process_group: dist.ProcessGroup | None,
        timeout_seconds: float,
        not_finite: str,
        round_float64: bool = False,
        log: Log | None = None,
    ) -> None:
        self.codec, self.plan, self.not_finite, self._log = codec, plan, not_finite, GuardedLog(log)
        self.wait_seconds, self._backward_done = 0.0, 0.0
        self.steps = self.skipped_steps = self.payload_bytes = self.gradient_bytes = self.sent_bytes = 0
        self._timeout_seconds = timeout_seconds
        self._connect(model, process_group, round_float64)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
        self._generator = torch_generator(seed, "compress", self._rank)
        elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        exact = [name for name, each in model.module.named_parameters() if each.dtype is torch.float64]
        self._exchanges = BucketExchanges(
            codec,
            plan,
            self._ranks.index(self._rank),
            len(self._ranks),
            elements,
            added=exact if adds_plainly(codec, plan) else (),
        )
        self._failures: dict[int, Exception] = {}  # by bucket, of this step; the first error of each
        self._step_payload_bytes = self._step_gradient_bytes = 0  # of this step
        self._used: list[VectorExchange] = []  # in this step
        self._memories: list[dict[str, Any]] = []  # what they remembered before it, where that may be wanted
        self._parameters: list[torch.Tensor] = []  # in this step
        self._begun: list[VectorExchange] = []  # of those, the ones that are encoded and not sent yet
        self._begun_kept = False  # whether these are in float64
        self._lock = threading.Lock()  # the hook and the scheduler's thread change what follows
        self._open_buckets, self._is_shadow = set[int](), False
        self._taken: set[Underway] = set()  # in this step

    def _connect(self, model: DistributedDataParallel, given: dist.ProcessGroup | None, round_float64: bool) -> None:
        """Make the groups through which payloads travel, with all ranks or none."""
        theirs: dist.ProcessGroup = model.process_group
        self._ranks, self._rank = dist.get_process_group_ranks(theirs), dist.get_rank()
        shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
        ours, world = self.codec.fresh(shapes), len(self._ranks)
        refusal: Exception | None = None
        try:
            if given is not None and dist.get_process_group_ranks(given) != self._ranks:
                their_ranks = dist.get_process_group_ranks(given)
                raise ValueError(f"process_group must have the ranks of the model's own group (it has {their_ranks})")
            check_gradients(model)
            if not round_float64:
                remedy = ", or let it round them: compress(..., round_float64=True)"
                trained = {each.dtype for each in model.parameters() if each.requires_grad}
                refuse_float64(self.codec, self.plan, trained, remedy)
            make_exchange(self.codec, shapes, 0, world, self.plan)  # refuses what cannot be
        except Exception as error:  # the others must hear of it, whatever it is: they would wait
            refusal = error
        rows = meet_ranks(
            self._ranks,
            "compress",
            {
                "codec": short_text(describe(self.codec)),
                "plan": self.plan,
                "not_finite": f'not_finite="{self.not_finite}"',
                "name": os.urandom(8).hex(),
                "refusal": "" if refusal is None else refusal_text(refusal),
            },
            purpose="compress",
            timeout_seconds=self._timeout_seconds,
        )
        name, *_ = [row.pop("name") for row in rows]
        names = [f"rank {rank}" for rank in self._ranks]
        refusals = [row.pop("refusal") for row in rows]
        raise_refusals(refusals, ours=refusal, names=names, sentence="{who} cannot compress: {refusal}")
        raise_difference(  # payloads of ranks that encode differently would not fit in each other's places
            rows,
            "all ranks must compress alike: {who} with {theirs}, this one with {ours}",
            names=names,
            reference=self._ranks.index(self._rank),
        )
        device, backend = next(model.parameters()).device, dist.get_backend_config(theirs)
        first = given or make_group(self._ranks, backend, self._timeout_seconds)
        plans = [self.plan] if self.plan != AUTO else [each for each in plans_of(ours) if world > 2 or each != TWO_STEP]
        others = max(steps_of(plan, ours) for plan in plans) - 1
        groups = [first, *(make_group(self._ranks, backend, self._timeout_seconds) for _ in range(others))]
        store = FleetingStore(f"compress/{name}")
        self._heartbeats = Heartbeats(store, self._ranks, self._rank, silence_seconds=self._timeout_seconds)
        self._heartbeats.start()
        weakref.finalize(self, self._heartbeats.stop)
        self._scheduler = ExchangeScheduler(groups, device, self._heartbeats, self._timeout_seconds)
        gradient_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        watched = device.type == "cpu" and world > 1  # on a GPU nobody looks
        self._watch = LinkWatch(gradient_bytes) if watched else None

    def __repr__(self) -> str:
        times = self.gradient_bytes / max(1, self.payload_bytes)
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        plans = " and ".join(self.plans) or self.plan
        step = f"by {plans}, {steps} of {self.bytes_per_step:,.0f} bytes, {times:.1f} times smaller"
        skipped = f", {self.skipped_steps:,} left out" if self.skipped_steps else ""
        return f"Compression({self.codec!r}, {step if self.steps else 'no step yet'}{skipped})"

    @property
    def plans(self) -> list[str]:
        """The plans by which buckets are exchanged, each once: known after the first step."""
        return self._exchanges.plans

    @property
    def bytes_per_step(self) -> float:
        """The size of this rank's payloads of a step, the mean of all steps so far.

        `payload_bytes` are those of all steps, each payload counted once, however many ranks it goes to;
        `gradient_bytes` is what the gradients themselves would take. Neither counts `skipped_steps`, in which a
        gradient was not finite. `sent_bytes` is what this rank has given to the network for gradients, in all `steps`;
        the few all-reduces that time the link are not in it.
        """
        return self.payload_bytes / max(1, self.steps - self.skipped_steps)

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now, of this rank and in all.

        `wait_seconds` is how long payloads were waited for when backward passes were through, since this process began
        and but for its first step. (On a GPU the passes
        themselves may still run then, and are in it.)
        """
        return {
            "steps": self.steps,
            "sent_bytes": self.sent_bytes,
            "payload_bytes": self.payload_bytes,
            "gradient_bytes": self.gradient_bytes,
            "wait_seconds": self.wait_seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's codecs remember, and its generator's state: every rank has its own to save."""
        return {
            "codec": describe(self.codec),
            "rank": self._rank,
            "ranks": len(self._ranks),
            **{name: getattr(self, name) for name in FIGURES},
            "generator": self._generator.get_state(),
            **self._exchanges.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`, among as many ranks; a state that is refused changes nothing."""
        with refusing("the state of compress()"):
            self._check_state(state)
            figures = {name: decode(Count, state.get(name, 0), name) for name in FIGURES}  # an earlier one lacks some
            generator = torch.Generator(self._generator.device).set_state(state["generator"])  # a trial
            self._exchanges.load_state_dict(state, self._shapes)  # the last that may refuse
        self._generator.set_state(generator.get_state())
        for name, figure in figures.items():
            setattr(self, name, figure)

    def _check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state of something else."""
        if state["codec"] != describe(self.codec):
            raise ValueError(f"this state is of {state['codec']} (this codec is {describe(self.codec)})")
        if state["rank"] != self._rank:
            raise ValueError(f"this state is of rank {state['rank']} (this is rank {self._rank})")
        held = state["carried"] or any(bucket["memory"] for bucket in state["buckets"])
        if held and state.get("ranks", len(self._ranks)) != len(self._ranks):  # the last release does not say it
            raise ValueError(
                f"this state is of one among {state['ranks']} ranks (here are {len(self._ranks)}): what the others "
                "held back would be lost. Go on with as many ranks, or without the state"
            )

    # -- one bucket ------------------------------------------------------------------------------------------------

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Encode and send a bucket; return a future of the mean of all ranks."""
        try:
            return self._begin(bucket)
        except Exception as error:
            with suppress(Exception):  # the scheduler's thread does it again
                self._scheduler.fail(error)
            raise

    def _begin(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        index, buffer, last = bucket.index(), bucket.buffer(), bucket.is_last()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        shapes = [parameter.shape for parameter in bucket.parameters()]
        exchange = self._exchanges.exchange_of(names, shapes)
        what = f"bucket {index} of step {self.steps + 1} ({names[0]} .. {names[-1]})"
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._used.append(exchange)
        if self.not_finite == PASS:
            self._memories.append(exchange.state_dict())
            self._parameters += bucket.parameters()
        self._step_gradient_bytes += buffer.numel() * buffer.element_size()
        with self._lock:
            self._open_buckets.add(index)
        if last:
            self.steps += 1
            self._backward_done = time.perf_counter()
            self._is_shadow = not _after_backward(self._end_step, self._scheduler.fail)
        kept = buffer.dtype is torch.float64 and adds_plainly(self.codec, self.plan)
        direct = (buffer.dtype is torch.float32 or kept) and buffer.is_contiguous()
        if self._begun and (self._begun[0].plan != exchange.plan or self._begun_kept != kept):
            self._send_begun()
        self._begun_kept = kept
        protocol = exchange.run(buffer, self._generator, buffer if direct else None)
        self._scheduler.begin(protocol, functools.partial(self._finish, exchange, buffer, index, what, future))
        self._begun.append(exchange)
        if last or not takes_another([each.seconds for each in self._begun]):
            self._send_begun()
        return future

    def _send_begun(self) -> None:
        """Send what is encoded, together; all ranks do so at the same buckets."""
        self._begun = []
        self._scheduler.send()

    def _finish(
        self,
        exchange: VectorExchange,
        buffer: torch.Tensor,
        index: int,
        what: str,
        future: torch.futures.Future[torch.Tensor],
        underway: Underway,
        ended: Outcome,
    ) -> None:
        """Put the mean of all ranks into the bucket; runs in the scheduler's thread.

        It may be called again with what it has raised: the bucket's first error stays.
        """
        if future.done():  # and the next step may have begun
            return
        failure = ended if isinstance(ended, Exception) else None
        try:
            if isinstance(ended, torch.Tensor):
                ended.div_(len(self._ranks))
                if ended is not buffer:
                    buffer.copy_(ended)
                self._step_payload_bytes += exchange.made_bytes
            else:
                failure = self._error(ended, what)
                failure.__cause__ = getattr(ended, "cause", None) or ended.__cause__
        except Exception as error:
            failure = failure or error
        if failure is not None:
            self._failures.setdefault(index, failure)
            with suppress(Exception):  # the error is raised all the same
                buffer.fill_(float("nan"))
        try:
            with self._lock:
                self._taken.add(underway)
                self._open_buckets.discard(index)
                ends_shadow = self._is_shadow and not self._open_buckets
            if ends_shadow:
                self._is_shadow = False
                with suppress(Exception):  # those who have data raise it; this rank leaves the step out as they do
                    self._end_step()
        finally:
            future.set_result(buffer)

    def _error(self, error: Exception, what: str) -> Exception:
        """Return the error that all ranks raise."""
        if isinstance(error, ConnectionLostError):
            return RankGoneError(
                f"rank {self._rank} waited for the payloads of all {len(self._ranks)} ranks for {what}, for "
                f"{self._timeout_seconds:g} s at most: {first_line(error)}"
            )
        if not isinstance(error, TroubleError):
            return error
        ranks = [self._ranks[place] for place in error.troubles]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        name = "sum of the gradients" if error.summed else "gradient"
        if Trouble.NOT_FINITE in error.troubles.values():
            return NotFiniteError(
                f"{who}: the {name} is {unsendable(self.codec)} in {what}; nothing was averaged. "
                "Lower the learning rate or clip, and skip this step; for a GradScaler to skip it, "
                'compress(..., not_finite="pass")'
            )
        return RuntimeError(f"{who}: the {name} could not be encoded in {what}; the reason is with {who}")

    def _end_step(self) -> None:
        """Raise what has gone wrong in this step, on all ranks, and take back what they sent in it."""
        failures, self._failures = self._failures, {}
        try:
            self._settle(failures)
        except Exception as error:  # of this rank alone
            failures.setdefault(max(failures, default=-1) + 1, error)
            self._scheduler.fail(error)
        if failures and not (self.not_finite == PASS and are_not_finite(failures)):
            raise failures[min(failures)]

    def _settle(self, failures: dict[int, Exception]) -> None:
        """Let the codecs go on from this step, or as if it had not been; count it."""
        used, self._used = self._used, []
        memories, self._memories = self._memories, []
        parameters, self._parameters = self._parameters, []
        taken, self._taken = self._taken, set()
        payload_bytes, self._step_payload_bytes = self._step_payload_bytes, 0
        gradient_bytes, self._step_gradient_bytes = self._step_gradient_bytes, 0
        self.sent_bytes += sum(underway.given_bytes for underway in taken)
        if failures:
            self.skipped_steps += 1
            if self.not_finite == PASS and are_not_finite(failures):
                self._pass_not_finite(used, memories, parameters)
                return
            for exchange in used:  # the step is left out, on all ranks: what they sent in it was not used
                exchange.take_back()
            return
        self.payload_bytes += payload_bytes
        self.gradient_bytes += gradient_bytes
        if self.steps > 1:  # in the first step kernels are compiled
            self.wait_seconds += time.perf_counter() - self._backward_done
        if self._log:
            self._log(self.figures(), self.steps)
        if self._watch is not None:
            self._look_at_link(self._watch, taken)

    def _pass_not_finite(
        self, used: Sequence[VectorExchange], memories: Sequence[dict[str, Any]], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Let the step be as if it had not been for the codecs, and its gradients NaN: of all buckets, on all ranks.

        An optimiser of some of the parameters would otherwise take a step that the codecs know nothing of.
        """
        for exchange, memory in zip(used, memories, strict=True):
            exchange.load_state_dict(memory)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
        if self._log:
            self._log(self.figures(), self.steps)

    def _look_at_link(self, watch: LinkWatch, taken: set[Underway]) -> None:
        """Say once, after some steps, where the gradients themselves would be quicker on this link."""
        costs, probe = watch.end_step(taken), watch.probe()
        if probe is not None:
            self._scheduler.begin(probe, functools.partial(self._probed, watch))
            self._scheduler.send()
        if costs is not None and costs.is_dearer and self._ranks[0] == self._rank:
            log.warning(
                "%s among %d ranks is %.1f ms on the wire in a step, and takes %.1f ms to encode and decode; the "
                "gradients themselves would be about %.1f ms on this wire: without compress() a step would be quicker",
                describe(self.codec),
                len(self._ranks),
                1e3 * costs.wire_seconds,
                1e3 * costs.coding_seconds,
                1e3 * costs.plain_seconds,
            )

    def _probed(self, watch: LinkWatch, underway: Underway, outcome: Outcome) -> None:
        watch.probed(underway)


def are_not_finite(failures: Mapping[int, Exception]) -> bool:
    """Return whether there is no failure but numbers that are not finite.

    >>> are_not_finite({0: NotFiniteError("the gradient is not finite")}), are_not_finite({0: MemoryError()})
    (True, False)
    """
    return all(isinstance(each, NotFiniteError) for each in failures.values())


def check_gradients(model: DistributedDataParallel) -> None:
    """Refuse gradients that cannot travel encoded."""
    sparse = sparse_parameters(model.module)
    if sparse:
        raise ValueError(
            f"compress encodes dense gradients, and the gradient of {sparse[0]} is sparse: make the embedding with "
            "sparse=False, or train this model without compress()"
        )


def sparse_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters whose gradients are sparse, as DistributedDataParallel finds them.

    >>> sparse_parameters(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(9, 2, sparse=True)))
    ['1.weight']
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    sparse = {id(each.weight) for each in module.modules() if isinstance(each, kinds) and each.sparse}
    return [name for name, each in module.named_parameters() if id(each) in sparse and each.requires_grad]


def _after_backward(callback: Callable[[], None], failed: Callable[[Exception], None]) -> bool:
    """Call `callback` when backward is through and DDP has finished its round; return whether there is a backward.

    Where it cannot be called, `failed` is.

    There is none on a rank that is out of data, and keeps company in DDP's join().
    """
    later = torch.autograd.Variable._execution_engine.queue_callback

    def queue_again() -> None:
        try:
            later(callback)
        except Exception as error:
            failed(error)
            raise

    try:
        # They are called in the order in which they are queued. DDP queues its own after the hook of the last
        # bucket, so ours, if it were queued now, would come before: what comes now queues it again.
        later(queue_again)
    except RuntimeError:
        return False
    return True


# -- what the codecs remember ------------------------------------------------------------------------------------------


class BucketExchanges:
    """An exchange for each bucket, with what it remembers; by `plan`, from the place of this rank among `world`.

    `elements` are those of all buckets. The gradients of the parameters in `added` are added up on their way.

    >>> from paceline.codecs import make_codec
    >>> exchanges = BucketExchanges(make_codec("qsgd"), "auto", place=0, world=2)
    >>> exchanges.exchange_of(["weight", "bias"], [torch.Size([2, 3]), torch.Size([2])]).plan
    'gather'
    """

    def __init__(
        self,
        codec: Codec,
        plan: str = AUTO,
        place: int = 0,
        world: int = 1,
        elements: int | None = None,
        *,
        added: Collection[str] = (),
    ) -> None:
        self._added = frozenset(added)
        self._codec, self._plan, self._place, self._world, self._elements = codec, plan, place, world, elements
        self._exchanges: dict[tuple[str, ...], VectorExchange] = {}
        self._workspace = Workspace()  # all are decoded in the scheduler's thread
        self._sizes: dict[str, int] = {}
        self._carried: dict[str, torch.Tensor] = {}  # what is held back of parameters whose bucket is no more

    @property
    def plans(self) -> list[str]:
        """The plans that are in use, each once."""
        return sorted({exchange.plan for exchange in self._exchanges.values()})

    def exchange_of(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> VectorExchange:
        """Return the exchange of the bucket that holds these parameters."""
        key = tuple(names)
        if key not in self._exchanges:
            self._sizes.update(zip(names, (shape.numel() for shape in shapes), strict=True))
            self._carry_from(set(names))
            self._exchanges[key] = self._made(names, shapes)
            self._carry_into(key)
        return self._exchanges[key]

    def _made(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> VectorExchange:
        return make_exchange(
            self._codec,
            shapes,
            self._place,
            self._world,
            self._plan if self._added.isdisjoint(names) else ALL_REDUCE,
            self._workspace,
            of_elements=self._elements,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return every bucket's memory with the names of its parameters; tensors, names and sizes, and nothing else."""
        buckets = [
            {"parameters": list(key), "plan": exchange.plan, "memory": exchange.state_dict()}
            for key, exchange in self._exchanges.items()
        ]
        return {"buckets": buckets, "carried": dict(self._carried), "sizes": dict(self._sizes)}

    def load_state_dict(self, state: dict[str, Any], shapes: dict[str, torch.Size]) -> None:
        """Go on from a `state_dict`, or refuse it and change nothing; `shapes` are those of the model's parameters."""
        unknown = sorted(name for name in state["sizes"] if name not in shapes)
        if unknown:
            raise ValueError(f"this state is of another model: it has no parameter {unknown[0]!r}")
        for name, size in state["sizes"].items():
            if shapes[name].numel() != size:
                raise ValueError(
                    f"this state is of another model: {name!r} has {shapes[name].numel():,} elements (there: {size:,})"
                )
        exchanges: dict[tuple[str, ...], VectorExchange] = {}
        for bucket in state["buckets"]:
            there = [shapes[name] for name in bucket["parameters"]]
            exchange = exchanges[tuple(bucket["parameters"])] = self._made(bucket["parameters"], there)
            exchange.load_state_of(bucket.get("plan", GATHER), bucket["memory"])  # the last release gathered
        for name, held in state["carried"].items():
            like = torch.empty(state["sizes"][name], device="meta")
            check_tensor(f"what was held back of {name}", held, like)
        self._exchanges = exchanges
        self._carried, self._sizes = dict(state["carried"]), dict(state["sizes"])

    def _carry_from(self, names: set[str]) -> None:
        """Dissolve the buckets that hold one of these parameters, and remember what they held back."""
        for key in [key for key in self._exchanges if names.intersection(key)]:
            held = self._exchanges.pop(key).held()
            if held is not None:
                parts = torch.split(held, [self._sizes[name] for name in key])
                self._carried.update(zip(key, parts, strict=True))

    def _carry_into(self, key: tuple[str, ...]) -> None:
        """Give a new bucket what was held back of its parameters."""
        if not self._carried.keys() & set(key):
            return
        held = {name: self._carried.pop(name) for name in key if name in self._carried}
        some = next(iter(held.values()))
        parts = [held.get(name, some.new_zeros(self._sizes[name])) for name in key]
        self._exchanges[key].hold(torch.cat(parts))
