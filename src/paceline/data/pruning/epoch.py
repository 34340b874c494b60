"""One epoch of a pruning sampler: who takes part in which order, the batches of each rank, weights and losses.

    sample     a b c d e f | g h i j k l | m n o p q a         17 samples, 3 ranks, batch_size 2: a step has 6 samples
    rank       0 0 1 1 2 2 | 0 0 1 1 2 2 | 0 0 1 1 2 2
    last step  17 - 12 = 5 samples are left: the sixth place is filled with the epoch's first sample, a

A last step that would have a single sample for each rank is joined to the step before it, whose batches are then larger
by one sample, because BatchNorm refuses a batch of one. With 14 or 15 samples the example above has two steps.

The policy treats a step (the batches of all ranks together) as one batch, so it decides what it would for a single
process with batch_size * ranks. The sample that fills up the last step is trained on twice, and its second loss is not
judged.

Where ranks have batches of different sizes (`deal`, of a balance), a step has the same samples, and only who computes
which of them differs. There no rank's batch is filled up: one for which there is none gets the epoch's first samples.
A last step that has fewer samples than the `least` of a rank is joined to the one before it there.

On the CPU losses are checked at once, and one that is not finite is an error. On an accelerator a check in every step
would wait for the device, so losses are copied there and fetched together, FETCHED_TOGETHER batches at a time; one that
is not finite is then a warning, and is not judged, because its step has been taken already.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.policy import Decision, Policy, chunks, count_steps, saved_array, whole_number
from paceline.randomness import torch_generator

FETCHED_TOGETHER = 64
SAME_ORDER = 1  # retries in the same order; later ones are shuffled anew, so that other samples are met too
DAMAGED = "the state is damaged, or not one of a pruning sampler"


Deal = Callable[[int, int], tuple[int, int]]
"""Returns where a rank's batch begins and ends in a step, given the step's number and how many samples it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How an order of samples is cut into batches of `batch_size` for one of `ranks` ranks, or as `deal` says.

    `least` is the fewest samples that a rank is dealt by `deal`.

    >>> layout = BatchLayout(batch_size=2, rank=2, ranks=3)
    >>> layout.steps(17), layout.places(2, 17)
    (3, (16, 18))
    """

    batch_size: int
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False
    deal: Deal | None = None
    least: int = 1

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, least=1)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be between 0 and world_size - 1 (rank={self.rank}, world_size={self.ranks})")

    @property
    def step_size(self) -> int:
        """The samples of all ranks in one step."""
        return self.batch_size * self.ranks

    @property
    def joined(self) -> int:
        """The most samples that are too few for a last step of their own: one for each rank, where batches have more.

        >>> BatchLayout(batch_size=4, ranks=3).joined, BatchLayout(batch_size=1, ranks=3).joined
        (3, 0)
        """
        if self.deal is not None:
            return self.least - 1
        return self.ranks if self.batch_size > 1 else 0

    def steps(self, samples: int) -> int:
        """Return how many steps so many samples take.

        >>> BatchLayout(batch_size=4).steps(10), BatchLayout(batch_size=4).steps(9)
        (3, 2)
        >>> BatchLayout(batch_size=4, drop_last=True).steps(10)
        2
        """
        return count_steps(samples, self.step_size, drop_last=self.drop_last, joined=self.joined)

    def places(self, step: int, samples: int) -> tuple[int, int]:
        """Return where this rank's batch begins and ends; places from `samples` on are the first ones again.

        >>> BatchLayout(batch_size=4).places(2, 10), BatchLayout(batch_size=4).places(1, 9)
        ((8, 10), (4, 9))
        """
        start, together = step * self.step_size, self.step_size
        if not self.drop_last and step == self.steps(samples) - 1:
            together = samples - start
        if self.deal is not None:
            first, end = self.deal(step, together)
            return start + first, start + end
        size = -(-together // self.ranks)
        return start + self.rank * size, start + (self.rank + 1) * size

    def ends(self, samples: int) -> NDArray[np.int64]:
        """Return where the groups of samples end that are judged together, by the samples of a step alone.

        So the same samples are judged together however many ranks there are. They are the steps' own, but where only
        several ranks join the last two.

        >>> BatchLayout(batch_size=4).ends(10), BatchLayout(batch_size=4).ends(9)
        (array([ 4,  8, 10]), array([4, 9]))
        """
        steps = count_steps(samples, self.step_size, drop_last=self.drop_last, joined=min(1, self.step_size - 1))
        ends = np.arange(1, steps + 1) * self.step_size
        if steps and not self.drop_last:
            ends[-1] = samples
        return ends


class BaseSampler:
    """A user's sampler, from whose draws pruned samples are taken away.

    To draw after a resumption what it would have drawn without one, it needs a `generator` of torch (as torch's own
    samplers have if they are given one), a `state_dict`, or a `set_epoch`.

    >>> base = BaseSampler([3, 1, 3], samples=5)
    >>> base.draw(epoch=1), base.population
    (array([3, 1, 3], dtype=int32), 2)
    """

    def __init__(self, sampler: Iterable[int], *, samples: int) -> None:
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"base must be a sampler that can be iterated over in every epoch (it is a {type(sampler).__name__}, "
                "which is used up after one)"
            )
        if hasattr(sampler, "num_replicas"):
            raise TypeError(
                f"base must draw for all ranks (it is a {type(sampler).__name__}, which draws for one of several): the "
                "pruning sampler deals what a base draws to the ranks itself"
            )
        self._sampler, self._samples = sampler, samples
        self.drawn = np.zeros(samples, np.bool_)
        """Which samples it has drawn at least once."""
        self._state_before: Any = None

    @property
    def population(self) -> int:
        """The number of different samples that it has drawn so far."""
        return int(np.count_nonzero(self.drawn))

    def draw(self, epoch: int) -> NDArray[np.int32]:
        """Return the samples that it gives in an epoch."""
        self._state_before = self._state()
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch - 1)
        try:
            order = np.fromiter((operator.index(index) for index in self._sampler), np.int64)
        except TypeError as error:
            raise TypeError(f"base must give numbers of samples, one by one, as samplers do: {error}") from error
        wrong = order[(order < 0) | (order >= self._samples)]
        if len(wrong):
            raise ValueError(
                f"the base sampler gave index {wrong[0]}, and there are {self._samples} samples: "
                "give the number of samples of the data set it draws from"
            )
        if not len(order):
            raise ValueError("the base sampler gave no index at all")
        self.drawn[order] = True
        return order.astype(np.int32)

    def state(self, *, to_draw_again: bool) -> dict[str, Any]:
        """Return what it takes to draw what it will draw next; or, once more, what it drew last."""
        sampler = self._state_before if to_draw_again else self._state()
        return {"given": torch.from_numpy(self.drawn.copy()), "sampler": sampler}

    def restore(self, drawn: NDArray[np.bool_], sampler: Any) -> None:
        """Go on from a `state`."""
        self.drawn = drawn
        if sampler is None:
            return
        if hasattr(self._sampler, "load_state_dict"):
            self._sampler.load_state_dict(sampler)
        elif isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.set_state(sampler)

    def _state(self) -> Any:
        if hasattr(self._sampler, "state_dict"):
            return self._sampler.state_dict()
        generator = getattr(self._sampler, "generator", None)
        return generator.get_state() if isinstance(generator, torch.Generator) else None


# -- the order of an epoch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedEpoch:
    """The samples that take part in an epoch, in their order, and the weights of their losses.

    `shares` are the weights divided by `batch_size` (None: all weights are 1), so that for a full batch the mean of
    weight * loss is the dot product of shares and losses. `keep` marks which samples of the data set take part.
    """

    order: NDArray[np.int32]
    shares: torch.Tensor | None
    keep: NDArray[np.bool_] | None
    layout: BatchLayout
    _whole_steps: int = field(init=False)

    def __post_init__(self) -> None:
        whole = min(len(self.order) // self.layout.step_size, self.steps - (not self.layout.drop_last))
        object.__setattr__(self, "_whole_steps", whole)

    @property
    def steps(self) -> int:
        """The number of batches that every rank gets."""
        return self.layout.steps(len(self.order))

    def places(self, step: int) -> tuple[int, int]:
        """Return where this rank's batch begins and ends in the order."""
        layout = self.layout
        if step < self._whole_steps and layout.deal is None:  # nearly always: this is asked for every batch
            start = (step * layout.ranks + layout.rank) * layout.batch_size
            return start, start + layout.batch_size
        return layout.places(step, len(self.order))

    def batch(self, step: int) -> NDArray[np.int32]:
        """Return the samples of this rank's batch."""
        start, stop = self.places(step)
        if stop <= len(self.order):
            return self.order[start:stop]
        return self.order[np.arange(start, stop) % len(self.order)]

    def mean(self, losses: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the mean of weight * loss over the samples of the batch at places `start` to `stop` - 1."""
        if self.shares is None:
            return losses.mean()
        shares = self._shares_at(self.shares, start, stop)
        whole = self.layout.batch_size
        if losses.is_cpu and losses.dtype is torch.float32 and stop - start == whole:
            return torch.dot(losses, shares)  # one kernel; the other way it is three
        return (losses * (shares * whole).to(losses)).mean()

    def weights(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the weights at places `start` to `stop` - 1; None where all are 1."""
        return None if self.shares is None else self._shares_at(self.shares, start, stop) * self.layout.batch_size

    def _shares_at(self, shares: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if stop <= len(self.order):
            return shares[start:stop]
        return shares[torch.arange(start, stop) % len(self.order)]

    @property
    def fingerprint(self) -> int:
        """A number that differs where the order does."""
        return zlib.crc32(self.order.tobytes())

    def state(self, losses: NDArray[np.float32]) -> dict[str, Any]:
        """Return what is saved of an epoch in its middle, beside the losses so far."""
        return {
            **_layout_state(self.layout),
            "order": torch.from_numpy(self.order.copy()),
            "keep": None if self.keep is None else torch.from_numpy(self.keep.copy()),
            "shares": None if self.shares is None else self.shares.clone(),
            "losses": torch.from_numpy(losses.copy()),
        }


def prepare(
    policy: Policy,
    layout: BatchLayout,
    *,
    epoch: int,
    attempt: int,
    progress: float,
    base: BaseSampler | None = None,
) -> PreparedEpoch:
    """Let the policy decide, and put those who take part in order: a new one for each epoch, or the base's.

    >>> from paceline.data.pruning.info_batch import InfoPolicy
    >>> prepared = prepare(InfoPolicy(5), BatchLayout(batch_size=2), epoch=1, attempt=0, progress=0.0)
    >>> sorted(prepared.order.tolist()), prepared.steps
    ([0, 1, 2, 3, 4], 2)
    """
    decision = policy.decide(epoch, progress)
    if base is None:
        seed = (policy.seed, "pruning", "order", epoch, max(0, attempt - SAME_ORDER))
        return with_order(decision, layout, _shuffled(policy.samples, decision.keep, torch_generator(*seed)))
    order = base.draw(epoch)
    return with_order(decision, layout, order if decision.keep is None else order[decision.keep[order]])


def with_order(decision: Decision, layout: BatchLayout, order: NDArray[np.int32]) -> PreparedEpoch:
    """Return an epoch in a given order; refused if there is not one step in it.

    >>> with_order(Decision(), BatchLayout(batch_size=4, drop_last=True), np.arange(3, dtype=np.int32))
    Traceback (most recent call last):
    ValueError: 3 samples take part in this epoch, and with drop_last one step takes 4: give a smaller batch_size, ...
    """
    weights = decision.weights_of(order)
    shares = None if weights is None else torch.from_numpy(weights).div_(layout.batch_size)
    prepared = PreparedEpoch(order=order, shares=shares, keep=decision.keep, layout=layout)
    if not prepared.steps:
        raise ValueError(
            f"{len(order)} samples take part in this epoch, and with drop_last one step takes {layout.step_size}: "
            "give a smaller batch_size, prune less, or leave drop_last out"
            if len(order)
            else "no sample takes part in this epoch: all that the base sampler gave sit out; prune less"
        )
    return prepared


def _shuffled(samples: int, keep: NDArray[np.bool_] | None, generator: torch.Generator) -> NDArray[np.int32]:
    number = samples if keep is None else int(np.count_nonzero(keep))
    order: NDArray[np.int32] = torch.randperm(number, generator=generator, dtype=torch.int32).numpy()
    if keep is not None:
        kept, filled = np.empty(number, np.int32), 0
        for part in chunks(samples):
            found = np.flatnonzero(keep[part]) + part.start
            kept[filled : filled + len(found)] = found
            filled += len(found)
        for part in chunks(number):
            order[part] = kept[order[part]]
    return order


def restored_epoch(
    state: Mapping[str, Any], samples: int, layout: BatchLayout, observed: int
) -> tuple[PreparedEpoch, NDArray[np.float32]]:
    """Return an epoch from its middle and its losses so far, or refuse a state of another rank or batch size."""
    for name, value in _layout_state(layout).items():
        if state[name] != value:
            raise ValueError(
                f"this state is from the middle of an epoch, with {name}={state[name]}, and here it is {value}: "
                "give every rank its own state, or save between epochs, where one state is for all"
            )
    size = len(state["order"]) if isinstance(state["order"], torch.Tensor) else 0
    order = saved_array(state["order"], np.int32, size, "order")
    losses = saved_array(state["losses"], np.float32, size, "losses")
    keep = None if state["keep"] is None else saved_array(state["keep"], np.bool_, samples, "keep")
    shares = None if state["shares"] is None else saved_array(state["shares"], np.float32, size, "shares")
    if not size or order.min() < 0 or order.max() >= samples or (keep is not None and not keep[order].all()):
        raise ValueError(f"order must hold numbers of samples that take part, below {samples:,}: {DAMAGED}")
    if np.isinf(losses).any() or (shares is not None and not (np.isfinite(shares) & (shares > 0)).all()):
        raise ValueError(f"losses and shares must be finite: {DAMAGED}")
    tensor = None if shares is None else torch.from_numpy(shares)
    prepared = PreparedEpoch(order=order, shares=tensor, keep=keep, layout=layout)
    if observed >= prepared.steps:
        raise ValueError(f"observed must be below the {prepared.steps} batches of its epoch ({observed=}): {DAMAGED}")
    return prepared, losses


def _layout_state(layout: BatchLayout) -> dict[str, Any]:
    return {
        "rank": layout.rank,
        "world_size": layout.ranks,
        "batch_size": layout.batch_size,
        "drop_last": layout.drop_last,
    }


def with_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with tensors for arrays: `torch.load(weights_only=True)` reads what `torch.save` wrote of it."""
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}


# -- the losses of an epoch --------------------------------------------------------------------------------------------


class EpochLosses:
    """The losses of an order of samples; one that has not come is NaN.

    >>> losses = EpochLosses(np.array([7, 8, 9], np.int32))
    >>> losses.put(1, torch.tensor([0.5, 0.25]))
    >>> losses.values
    array([ nan, 0.5 , 0.25], dtype=float32)
    """

    def __init__(self, order: NDArray[np.int32]) -> None:
        self._order = order
        self._values = np.full(len(order), np.nan, np.float32)
        self._on_device: list[tuple[int, torch.Tensor]] = []

    @property
    def values(self) -> NDArray[np.float32]:
        """All losses so far, fetched from the device where they are."""
        self._fetch()
        return self._values

    def put(self, start: int, losses: torch.Tensor) -> None:
        """Keep the losses of the places from `start` on; what is beyond the last place is not kept."""
        if losses.is_cpu:
            self._store(start, losses)
            return
        self._on_device.append((start, losses.to(torch.float32, copy=True)))  # the tensor may be a buffer used again
        if len(self._on_device) >= FETCHED_TOGETHER:
            self._fetch()

    def _fetch(self) -> None:
        if not self._on_device:
            return
        pending, self._on_device = self._on_device, []
        together = torch.cat([losses for _, losses in pending]).cpu()
        for (start, _), fetched in zip(pending, torch.split(together, [len(each[1]) for each in pending]), strict=True):
            finite = torch.isfinite(fetched)
            self._store(start, torch.where(finite, fetched, torch.nan))
            if not finite.all():
                bad = int((~finite).to(torch.uint8).argmax())
                sample = self._order[(start + bad) % len(self._order)]
                warnings.warn(f"the loss of sample {sample} was {float(fetched[bad])}: it is not judged", stacklevel=2)

    def _store(self, start: int, losses: torch.Tensor) -> None:
        values = (losses if losses.dtype is torch.float32 else losses.float()).numpy()
        if start + len(values) > len(self._values):
            values = values[: max(len(self._values) - start, 0)]
        self._values[start : start + len(values)] = values


def seen_only(
    order: NDArray[np.int32], values: NDArray[np.float32], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
    """Return the samples whose losses came, those losses, and where their batches end among them.

    >>> seen_only(np.arange(4, dtype=np.int32), np.array([1, np.nan, 2, 3], np.float32), np.array([2, 4]))
    (array([0, 2, 3], dtype=int32), array([1., 2., 3.], dtype=float32), array([1, 3]))
    """
    order, values = order[: ends[-1]], values[: ends[-1]]
    unseen = np.isnan(values)
    if unseen.any():
        sizes = np.diff(np.concatenate(([0], np.cumsum(~unseen)[ends - 1])))
        ends, order, values = np.cumsum(sizes[sizes > 0]), order[~unseen], values[~unseen]
    return order, values, ends
