r"""DistributedDataParallel with gradients that travel encoded.

    backward:   gradients of bucket 0   of bucket 1   of bucket 2
                      |                     |             |
    the hook:      encode, send          encode, send  encode, send        payloads travel while backward goes on
                             \                   \            \
    arrived:                  decode all, mean    ...          ...         in the order of the ranks

Every rank decodes the same payloads in the same order, its own among them, so that all ranks come to the same mean.

Where DDP all-reduces, this gathers: payloads cannot be added up on their way. It moves `ranks - 1` payloads to each
rank where an all-reduce moves about two gradients, so a codec gains while it shrinks more than about ranks / 2.

What goes wrong on one rank is told to all of them, and raised on all of them when backward is through: by then DDP has
finished its round, and a caller may catch the error, leave this step out and go on. The gradients are NaN then, so that
a step taken all the same does not pass unnoticed.

DistributedDataParallel puts parameters into buckets, and after the first step into others: by then it has seen in which
order the gradients come. And a run that goes on from a checkpoint begins with the first buckets again. So a bucket is
known by the names of its parameters, and where the names change:

- what was held back (the residual of error feedback) follows its parameter into its new bucket: it is part of
  the gradient, and nothing of it may be lost;
- anything else that a codec remembers begins anew (the warm start of power-sgd finds itself again in a step or two).
"""
# No `from __future__ import annotations` here: DDP compares a hook's annotations with classes, not with their names.

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import Codec, ErrorFeedback, NotFiniteError
from paceline.codecs.naming import resolve_codec
from paceline.distributed import RankGoneError, check_limits, first_line
from paceline.distributed.agreement import describe, gather_rows, raise_difference, short_text
from paceline.distributed.collectives import AnySizeExchange, Delivery, FixedSizeExchange, PayloadExchange, Trouble
from paceline.distributed.groups import make_group
from paceline.randomness import torch_generator

TIMEOUT_SECONDS = 600.0
RESIDUAL = "residual"  # in a codec's state_dict: what it holds back, one number for each element of the vector


def compress(
    model: DistributedDataParallel,
    codec: Codec | str,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> "Compression":
    """Let the gradients of a DistributedDataParallel model travel encoded; call it once, on every rank.

    `codec` is a codec, or words that name it ("top-k fraction=0.01": with error feedback, since it is biased). The
    ranks round independently, as `seed` says. Payloads travel in a process group of their own, of the same ranks and
    the same backend, unless you give one that nothing else uses; a rank that is not heard of for `timeout_seconds`
    ends the step with an error.

    >>> import tempfile
    >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(1000, 10))
    >>> compression = compress(model, "qsgd")
    >>> model(torch.ones(1, 1000)).sum().backward()
    >>> compression
    Compression(QSGD(levels=7, bucket=512, norm='max', lossless='packed'), 1 step of 5,101 bytes, 7.8 times smaller)
    >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"compress wants a DistributedDataParallel model (this is a {type(model).__name__})")
    check_limits(timeout_seconds=timeout_seconds)
    codec = resolve_codec(codec)
    if getattr(model, "_comm_hooks", None):
        raise ValueError("this model has a communication hook already; a DistributedDataParallel model takes one")
    compression = Compression(model, codec, seed, process_group, timeout_seconds)
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
        seed: int,
        process_group: dist.ProcessGroup | None,
        timeout_seconds: float,
    ) -> None:
        self.codec = codec
        self.steps = self.payload_bytes = self.gradient_bytes = 0
        self._timeout_seconds = timeout_seconds
        self._connect(model, process_group)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
        self._generator = torch_generator(seed, "compress", self._rank)
        self._memories = BucketCodecs(codec)
        self._failures: dict[int, Exception] = {}  # by bucket, of this step
        self._sent: list[Codec] = []  # those whose payloads of this step are on their way
        self._decoded: dict[int, torch.Tensor] = {}  # by bucket: kept, for new memory costs more than decoding into it

    def _connect(self, model: DistributedDataParallel, given: dist.ProcessGroup | None) -> None:
        """Make the groups through which payloads travel, with all ranks or none."""
        theirs: dist.ProcessGroup = model.process_group
        self._ranks, self._rank = dist.get_process_group_ranks(given or theirs), dist.get_rank()
        if self._ranks != dist.get_process_group_ranks(theirs):
            raise ValueError(f"process_group must have the ranks of the model's own group (it has {self._ranks})")
        device = next(model.parameters()).device
        group = given or make_group(self._ranks, dist.get_backend_config(theirs), self._timeout_seconds)
        raise_difference(  # payloads of ranks that encode differently would not fit in each other's places
            gather_rows({"codec": short_text(describe(self.codec))}, group, device),
            "all ranks must compress alike: {who} with {theirs}, this one with {ours}",
            names=[f"rank {rank}" for rank in self._ranks],
            reference=self._ranks.index(self._rank),
        )
        shapes = [parameter.shape for parameter in model.parameters()]
        self._fixed_size: bool = getattr(self.codec.fresh(shapes), "fixed_size", False)
        self._exchange: PayloadExchange = FixedSizeExchange(group, device)
        if not self._fixed_size:
            self._exchange = AnySizeExchange(group, make_group(self._ranks, "gloo", self._timeout_seconds), device)

    def __repr__(self) -> str:
        times = self.gradient_bytes / max(1, self.payload_bytes)
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        step = f"{steps} of {self.bytes_per_step:,.0f} bytes, {times:.1f} times smaller"
        return f"Compression({self.codec!r}, {step if self.steps else 'no step yet'})"

    @property
    def bytes_per_step(self) -> float:
        """The size of this rank's payloads of a step, the mean of all steps so far.

        `payload_bytes` are those of all steps, each payload counted once, however many ranks it goes to;
        `gradient_bytes` is what the gradients themselves would have taken.
        """
        return self.payload_bytes / max(1, self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's codecs remember, and its generator's state: every rank has its own to save."""
        return {
            "codec": describe(self.codec),
            "rank": self._rank,
            "steps": self.steps,
            "payload_bytes": self.payload_bytes,
            "gradient_bytes": self.gradient_bytes,
            "generator": self._generator.get_state(),
            **self._memories.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`."""
        if state["codec"] != describe(self.codec):
            raise ValueError(f"this state is of {state['codec']} (this codec is {describe(self.codec)})")
        if state["rank"] != self._rank:
            raise ValueError(f"this state is of rank {state['rank']} (this is rank {self._rank})")
        self._memories.load_state_dict(state, self._shapes)
        self._generator.set_state(state["generator"])
        self.steps, self.payload_bytes = state["steps"], state["payload_bytes"]
        self.gradient_bytes = state["gradient_bytes"]

    # -- one bucket ------------------------------------------------------------------------------------------------

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Encode and send a bucket; return a future of the mean of all ranks."""
        index, buffer, last = bucket.index(), bucket.buffer(), bucket.is_last()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        shapes = [parameter.shape for parameter in bucket.parameters()]
        codec = self._memories.codec_of(names, shapes)
        payload, cause = self._encoded(codec, buffer)
        delivery = self._exchange.send(payload, codec.most_bytes(buffer.numel()), last=last)
        what = f"bucket {index} of step {self.steps + 1} ({names[0]} .. {names[-1]})"
        if last:
            self.steps += 1
            _after_backward(self._raise)
        finish = functools.partial(self._finish, delivery, codec, buffer, index, what, cause)
        return delivery.future.then(finish)

    def _encoded(self, codec: Codec, buffer: torch.Tensor) -> tuple[torch.Tensor | Trouble, Exception | None]:
        try:
            payload = codec.encode(buffer, self._generator)
            most = codec.most_bytes(buffer.numel())
            if payload.numel() > most or (payload.numel() < most and self._fixed_size):
                raise ValueError(f"{codec!r} promises {most:,} bytes, and has made {payload.numel():,}")
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            return Trouble.NOT_FINITE if isinstance(error, NotFiniteError) else Trouble.OTHER, error
        self._sent.append(codec)
        self.payload_bytes += payload.numel()
        self.gradient_bytes += buffer.numel() * buffer.element_size()
        return payload, None

    def _finish(
        self,
        delivery: Delivery,
        codec: Codec,
        buffer: torch.Tensor,
        index: int,
        what: str,
        cause: Exception | None,
        done: torch.futures.Future[Any],
    ) -> torch.Tensor:
        """Put the mean of all payloads into the bucket; runs in the backend's thread, raises nothing."""
        try:
            payloads = self._arrived(delivery, done, what)
            if delivery.troubles:
                raise self._error(delivery.troubles, what) from cause
            decoded = self._decoded.get(index)
            if decoded is None or decoded.shape != buffer.shape:
                decoded = self._decoded[index] = torch.empty_like(buffer, dtype=torch.float32)
            _mean(codec, payloads, buffer, decoded)
        except Exception as error:
            self._failures[index] = error
            buffer.fill_(float("nan"))
        return buffer

    def _arrived(self, delivery: Delivery, done: torch.futures.Future[Any], what: str) -> list[torch.Tensor]:
        try:
            done.value()
        except RuntimeError as error:
            raise RankGoneError(
                f"rank {self._rank} waited for the payloads of all {len(self._ranks)} ranks for {what}, and a rank is "
                f"gone, or was not heard of for {self._timeout_seconds:g} s: {first_line(error)}"
            ) from error
        return delivery.payloads()

    def _error(self, troubles: dict[int, Trouble], what: str) -> Exception:
        """Return the error that all ranks raise."""
        ranks = [self._ranks[place] for place in troubles]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if Trouble.NOT_FINITE in troubles.values():
            return NotFiniteError(
                f"{who}: the gradient is not finite in {what}; nothing was averaged. "
                "Lower the learning rate or clip, and skip this step"
            )
        return RuntimeError(f"{who}: the gradient could not be encoded in {what}; the reason is with {who}")

    def _raise(self) -> None:
        failures, self._failures = self._failures, {}
        sent, self._sent = self._sent, []
        if failures:
            for codec in sent:  # the step is left out, on all ranks: what they sent in it was not used
                if isinstance(codec, ErrorFeedback):
                    codec.take_back()
            raise failures[min(failures)]


def _after_backward(callback: Any) -> None:
    """Call `callback` when backward is through and DDP has finished its round."""
    later = torch.autograd.Variable._execution_engine.queue_callback
    with suppress(RuntimeError):  # no backward: this rank is out of data, and keeps company in DDP's join()
        # They are called in the order in which they are queued. DDP queues its own after the hook of the last
        # bucket, so ours, if it were queued now, would come before: what comes now queues it again.
        later(lambda: later(callback))


def _mean(codec: Codec, payloads: list[torch.Tensor], buffer: torch.Tensor, decoded: torch.Tensor) -> None:
    """Decode in the order of the ranks, add up in float32, divide; `decoded` is memory to work in."""
    direct = buffer.dtype is torch.float32 and buffer.is_contiguous()
    total = codec.decode(payloads[0], out=buffer if direct else torch.empty_like(buffer, dtype=torch.float32))
    for payload in payloads[1:]:
        total.add_(codec.decode(payload, out=decoded))
    total.div_(len(payloads))
    if total is not buffer:
        buffer.copy_(total)


# -- what the codecs remember ------------------------------------------------------------------------------------------


class BucketCodecs:
    """A codec for each bucket, with what it remembers.

    >>> from paceline.codecs import make_codec
    >>> codecs = BucketCodecs(make_codec("qsgd"))
    >>> codecs.codec_of(["weight", "bias"], [torch.Size([2, 3]), torch.Size([2])])
    QSGD(levels=7, bucket=512, norm='max', lossless='packed')
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._codecs: dict[tuple[str, ...], Codec] = {}
        self._sizes: dict[str, int] = {}
        self._carried: dict[str, torch.Tensor] = {}  # residuals of parameters whose bucket is no more

    def codec_of(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> Codec:
        """Return the codec of the bucket that holds these parameters."""
        key = tuple(names)
        if key not in self._codecs:
            self._sizes.update(zip(names, (shape.numel() for shape in shapes), strict=True))
            self._carry_from(set(names))
            self._codecs[key] = self._codec.fresh(shapes)
            self._carry_into(key)
        return self._codecs[key]

    def state_dict(self) -> dict[str, Any]:
        """Return every bucket's memory with the names of its parameters; tensors, names and sizes, and nothing else."""
        buckets = [{"parameters": list(key), "memory": codec.state_dict()} for key, codec in self._codecs.items()]
        return {"buckets": buckets, "carried": dict(self._carried), "sizes": dict(self._sizes)}

    def load_state_dict(self, state: dict[str, Any], shapes: dict[str, torch.Size]) -> None:
        """Go on from a `state_dict`; `shapes` are those of the model's parameters."""
        unknown = sorted(name for name in state["sizes"] if name not in shapes)
        if unknown:
            raise ValueError(f"this state is of another model: it has no parameter {unknown[0]!r}")
        for name, size in state["sizes"].items():
            if shapes[name].numel() != size:
                raise ValueError(
                    f"this state is of another model: {name!r} has {shapes[name].numel():,} elements (there: {size:,})"
                )
        self._codecs.clear()
        for bucket in state["buckets"]:
            codec = self._codec.fresh([shapes[name] for name in bucket["parameters"]])
            codec.load_state_dict(bucket["memory"])
            self._codecs[tuple(bucket["parameters"])] = codec
        self._carried, self._sizes = dict(state["carried"]), dict(state["sizes"])

    def _carry_from(self, names: set[str]) -> None:
        """Dissolve the buckets that hold one of these parameters, and remember what they held back."""
        for key in [key for key in self._codecs if names.intersection(key)]:
            residual = self._codecs.pop(key).state_dict().get(RESIDUAL)
            if residual is not None:
                parts = residual.reshape(-1).split([self._sizes[name] for name in key])
                self._carried.update(zip(key, parts, strict=True))

    def _carry_into(self, key: tuple[str, ...]) -> None:
        """Give a new bucket what was held back of its parameters."""
        if not self._carried.keys() & set(key):
            return
        held = {name: self._carried.pop(name) for name in key if name in self._carried}
        some = next(iter(held.values()))
        parts = [held.get(name, some.new_zeros(self._sizes[name])) for name in key]
        codec = self._codecs[key]
        codec.load_state_dict({**codec.state_dict(), RESIDUAL: torch.cat(parts)})
