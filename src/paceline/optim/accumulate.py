"""A large batch in parts: gradients add up over several backward passes, and one step takes them all.

A batch of N samples that does not fit the memory is taken in parts of n_1 + n_2 + ... = N samples. The gradient of the
mean over the batch is the weighted sum of the gradients of the parts' means:

    g = sum_i  n_i / N * g_i

The usual loop divides each part's loss by the number of parts. That is another gradient as soon as parts differ in
size: a last batch that is smaller, a last group of fewer parts, sequences whose tokens count. Here each part has its
own weight. But N is not known before the last part, so the first part says what is to be expected, E = n_1 * steps:

    part        1              2              3                        4: the last
    weight      n_1 / E        n_2 / E        n_3 / E                  n_4 / N
    before it                                                          gradients so far *= E / N, unless E = N
    DDP         no_sync        no_sync        no_sync                  averages over the ranks

Equal parts therefore cost nothing more than the usual loop. A group that differs costs one pass over its gradients.
That pass comes before the last backward, because DistributedDataParallel averages *in* that backward, while gradients
of the earlier parts are still each rank's own. Weights are shares from the first part on (they are not made shares at
the end), so a loss that is scaled for fp16 overflows in parts where it would at once, and hardly earlier: only if a
group's first part is much smaller than its others.

Which part is the last must be known before its forward pass: that is when DDP makes ready to average. So the loop looks
one part ahead, within a group; the first part of the next group is not asked for before the optimiser has stepped.

Where ranks have batches of different sizes (paceline.Balance), a part weighs by the samples of all ranks: N_i, the
samples of this rank's group, becomes the mean of N_i over the ranks, which all know, and the average over the ranks is
the mean over all samples of the group. Where `samples` are given, ranks add them up once, before the last part.

Nothing here imports torch.distributed: a module that has a `no_sync` (DDP, FSDP) is asked to be quiet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar

import torch

from paceline.lookup import unknown
from paceline.optim.norms import entries
from paceline.optim.rank_samples import RANK_SAMPLES, RankSamples
from paceline.optim.sample_counts import checked_samples, count_samples

REDUCTIONS = ("mean", "sum")
LOOKS = 2  # groups of a loop: the first finds what an epoch left, the second what a step without a zero_grad() leaves

Part = TypeVar("Part")


class _Stage(Enum):
    """Where a loop is; the value is why `backward` is refused there."""

    OUTSIDE = "backward belongs inside of the loop: for part in accumulate(loader)"
    OPEN = ""
    DONE = "backward has been called for this part already: add the losses up, and call it once"
    FORGOTTEN = "this part's group is forgotten: go on with the next part"
    FAILED = "part {part}'s backward failed: call accumulate.forget(), for its gradients are there in part"


class Accumulate:
    """Takes `steps` parts from a loader for each step of the optimiser, and gives the gradient of all of them at once.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.arange(10.0).view(10, 1).split(3)              # parts of 3, 3, 3 and 1 samples
    >>> accumulate = Accumulate(model, steps=3)
    >>> for inputs in accumulate(loader):
    ...     loss = model(inputs).mean()                               # the mean over the part
    ...     accumulate.backward(loss)
    ...     if accumulate.ready:                                      # 3 parts, or what is left at the end
    ...         print(f"{accumulate.part} parts, gradient {model.weight.grad.item():.1f}")
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    3 parts, gradient 4.0
    1 parts, gradient 9.0

    `model` is what is trained, in its DistributedDataParallel if it has one, or several of them in a list: their
    gradients are weighted, and they average over the ranks once per group. Gradients must be zero when a group begins;
    the first two groups of a loop are looked at. With `reduction="sum"` losses are sums, and just add up.

    A backward that fails (out of memory, for instance) may have added some of its gradients: the group is refused from
    then on, and `forget` drops it.

    `part` is the number of the part in its group, from 1 to `steps`; 0 outside of the loop.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Module],
        steps: int,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps must be a whole number, 1 or more (steps={steps!r})")
        if reduction not in REDUCTIONS:
            raise unknown("reduction", reduction, REDUCTIONS)
        self.steps, self.reduction = steps, reduction
        self._modules = _modules_of(model)
        self._quiet = [module for one in self._modules for module in _with_no_sync(one)]
        for module in (inner for one in self._modules for inner in one.modules()):
            _check_parts(module, steps, reduction)
        self.part = 0
        self._stage, self._last, self._running = _Stage.OUTSIDE, False, False
        self._counted: int | None = None  # the samples of this part, as far as they can be seen
        self._group = PartWeights(steps)
        # DDP leaves gradients alone between two backwards; others that average by themselves may not
        self._plain = all(type(module).__name__ == "DistributedDataParallel" for module in self._quiet)
        self._watched: Watched | None = None
        self._looks = 0  # how many groups will still be looked at for gradients that are left over

    def __repr__(self) -> str:
        return f"Accumulate(steps={self.steps}, reduction={self.reduction!r}; part {self.part})"

    @property
    def ready(self) -> bool:
        """Whether the gradients are those of a whole group: it is time to step, and to zero them."""
        return self._stage is _Stage.DONE and self._last

    # -- the loop --------------------------------------------------------------------------------------------------

    def __call__(self, parts: Iterable[Part]) -> Generator[Part, None, None]:
        """Yield the parts of a loader; the last ones are a group even if they are fewer than `steps`.

        Any iterable will do. Its errors come up to one part early, for it is asked one part ahead.
        """
        self._check_beginning()
        self._running, self._looks = True, LOOKS
        try:
            for part, last in self._looking_ahead(parts):
                self._counted = count_samples(part) if self.reduction == "mean" else None
                self._stage, self._last = _Stage.OPEN, last
                with self._without_averaging(), self._weighing_group():
                    yield part
                if self._stage is _Stage.OPEN:
                    raise RuntimeError(
                        f"part {self.part} of {self.steps} had no backward: call accumulate.backward(loss) instead of "
                        "loss.backward(), or leave the whole group out with accumulate.forget()"
                    )
                if self._stage is _Stage.FAILED:  # and was caught, or it would not come here
                    raise RuntimeError(self._refusal())
        finally:  # the end, a break (the generator is closed), or an error
            self.part, self._last, self._running = 0, False, False
            self._stage = _Stage.OUTSIDE

    def _looking_ahead(self, parts: Iterable[Part]) -> Iterator[tuple[Part, bool]]:
        """Yield each part, and whether it is the last of its group."""
        iterator, end = iter(parts), object()
        ahead: Any = next(iterator, end)
        while ahead is not end:
            part, ahead = ahead, None
            self.part += 1
            full = self.part == self.steps
            if not full:
                ahead = next(iterator, end)
            yield part, full or ahead is end
            if full:
                ahead = next(iterator, end)  # not before the group has made its step
            if full or self._stage is _Stage.FORGOTTEN:
                self.part = 0

    def _without_averaging(self) -> contextlib.ExitStack:
        """Hold no_sync for a part that is not the last: for its forward too, as DDP wants it."""
        held = contextlib.ExitStack()
        for module in self._quiet if not self._last else ():
            held.enter_context(module.no_sync())
        return held

    def _weighing_group(self) -> contextlib.AbstractContextManager[None]:
        ranks = self._ranks
        return contextlib.nullcontext() if ranks is None else ranks.weighing_groups(self.steps)

    @property
    def _ranks(self) -> RankSamples | None:
        """Who knows the samples of all ranks, if batches differ in size."""
        found = (RANK_SAMPLES.get(module) for one in self._modules for module in one.modules())
        return next((each for each in found if each is not None), None)

    def _check_beginning(self) -> None:
        if self._running:
            raise RuntimeError(
                "another loop over this Accumulate is not at its end: a nested loop needs an Accumulate of its own, "
                "and a loop that was left needs its iterator closed if a variable holds it"
            )
        if self._group.parts:
            raise RuntimeError(
                f"gradients of {self._group.parts} of {self.steps} parts are left of a loop that was broken off: "
                "call accumulate.forget(), which drops them, or break only after a step"
            )

    # -- a part ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, samples: float | torch.Tensor | None = None) -> None:
        """Add the gradient of this part's loss, which is a mean over its samples (or a sum: `reduction`).

        How many they are is the length that the part's tensors have in common; `samples` says it where that is not so
        (`sample_counts.py` has the cases), and what is counted when the mean is over something else, tokens for
        instance. Give it for all parts of a group, or for none. With a GradScaler, give the scaled loss.
        """
        if self._stage is not _Stage.OPEN:
            raise RuntimeError(self._refusal())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss must be one number, the {self.reduction} over the part ({found})")
        if not self._group.parts:
            self._check_zero()
        elif self._watched is not None:
            self._watched.check()
        so_far, weight = self._weights(samples)
        self._stage = _Stage.FAILED  # until it is through: whoever catches its error must not go on as if it were
        if so_far != 1:
            self._scale_gradients(so_far)
        (loss if weight == 1 else loss * weight).backward()  # type: ignore[no-untyped-call]
        self._stage = _Stage.DONE
        self._watched = watch(self._modules) if self._plain and not self._last else None
        if self._last:
            self._group = PartWeights(self.steps)

    def forget(self) -> None:
        """Drop the group under way and its gradients: after a loop that was broken off, or to leave out a bad group.

        Inside of a loop the next part begins a new group. With DDP all ranks must forget at the same part.
        """
        for module in self._modules:
            module.zero_grad()
        self._group = PartWeights(self.steps)
        if self._stage is not _Stage.OUTSIDE:
            self._stage = _Stage.FORGOTTEN

    def _weights(self, samples: float | torch.Tensor | None) -> tuple[float, float]:
        """Return what the gradients so far, and this part's loss, are multiplied with."""
        if self.reduction == "sum":
            if samples is not None:
                raise ValueError(f"samples is for means: with reduction='sum' losses just add up (samples={samples})")
            self._group.parts += 1
            return 1.0, 1.0
        group, given = self._group, samples is not None
        if group.parts and given != group.given:
            others = f"part {group.parts}" if group.parts == 1 else f"parts 1 to {group.parts}"
            raise ValueError(
                f"samples was {'given' if group.given else 'not given'} for {others} of this group, and is "
                f"{'given' if given else 'not'} for part {self.part}: give it for all parts of a group, or for none"
            )
        ranks, group.given = self._ranks, given
        dealt = None if ranks is None else ranks.rank_samples()
        if ranks is None or (dealt is None and not given):
            return group.add(checked_samples(samples, self._counted), last=self._last)
        if given or dealt is None:
            filled = dealt is not None and not dealt[0]  # with samples of others, which count there
            own = 0.0 if filled else checked_samples(samples, None)
            return group.add(own, of=own or 1.0, last=self._last, total=ranks.mean_of)
        return group.add(dealt[0], of=dealt[1], last=self._last)

    def _refusal(self) -> str:
        return self._stage.value.format(part=self.part)

    def _check_zero(self) -> None:
        """Refuse gradients of before: of a step that was not taken, or of gradients that were not zeroed after it.

        That is before a group's first backward, not at the loop's beginning: zeroing them in the loop is fine. Where
        they are None, as zero_grad leaves them, nothing is computed; else a GPU is waited for, twice in a loop.
        """
        name = not_zero(self._modules) if self._looks else None
        if name is not None:
            raise RuntimeError(
                f"gradients are there already before this group's first backward ({name}): it would add to them. "
                "Step and zero_grad() belong inside of the loop, at accumulate.ready; what is there from before the "
                "loop, or is not the optimiser's, needs a model.zero_grad()"
            )
        self._looks = max(0, self._looks - 1)

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        gradients = {id(gradient): gradient for each in parameters if (gradient := each.grad) is not None}
        if not gradients:
            raise RuntimeError("the model has no gradients after backward: give Accumulate the model that is trained")
        for gradient in gradients.values():  # a parameter of two of the modules is multiplied once
            gradient.mul_(factor)


def _modules_of(model: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    modules = [model] if isinstance(model, torch.nn.Module) or not isinstance(model, Iterable) else list(model)
    others = [type(module).__name__ for module in modules if not isinstance(module, torch.nn.Module)]
    if others or not modules:
        raise TypeError(f"model must be a torch.nn.Module, or several of them (model={others[0] if others else []})")
    return modules


def _check_parts(module: torch.nn.Module, steps: int, reduction: str) -> None:
    """Refuse what would fail later: inside of DDP's first backward, or at the end of an epoch."""
    # As of PyTorch 2.13, no_sync in the first iteration of a static graph fails an assertion inside of the reducer.
    if getattr(module, "static_graph", False) and hasattr(module, "no_sync") and steps > 1:
        raise ValueError("a DistributedDataParallel with static_graph=True cannot leave out averages: it needs steps=1")
    if hasattr(module, "set_requires_gradient_sync") and reduction == "mean" and steps > 1:
        raise ValueError(
            "the gradients of a model that is sharded by fully_shard cannot be weighted between two backwards: "
            "it needs reduction='sum'"
        )


def _with_no_sync(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that average gradients by themselves; not what is inside of them."""
    if callable(getattr(module, "no_sync", None)):
        yield module
    else:
        for child in module.children():
            yield from _with_no_sync(child)


@dataclass(slots=True)
class PartWeights:
    """The weights of the parts of one batch, of which `steps` are expected.

    Until the last part they are shares of what is expected, and the last part corrects what came before it. For parts
    of 4, 4 and 2 samples, three expected:

        part        1        2        3, the last
        so far      * 1      * 1      * 12/10
        this part   4/12     4/12     2/10             together 4/10, 4/10, 2/10

    >>> weights = PartWeights(steps=3)
    >>> weights.add(4, last=False), weights.add(4, last=False), weights.add(2, last=True)
    ((1.0, 0.3333333333333333), (1.0, 0.3333333333333333), (1.2, 0.2))
    """

    steps: int
    parts: int = 0
    samples: float = 0.0
    of: float = 0
    expected: float = 0.0
    given: bool = False  # whether the caller said how many samples its parts have

    def add(
        self,
        samples: float,
        *,
        last: bool,
        of: float | None = None,
        total: Callable[[float], float] | None = None,
    ) -> tuple[float, float]:
        """Return what the gradients so far, and the mean of this part, are multiplied with.

        Where several ranks have parts of different sizes, `of` is the mean over the ranks of the part's samples; or
        else `total` returns, for the samples of the whole group, their mean over the ranks.
        """
        self.parts += 1
        self.samples += samples
        self.of += samples if of is None else of
        if self.parts == 1:
            self.expected = self.of * (1 if last else self.steps)
        if not last:
            return 1.0, samples / self.expected
        whole = self.of if total is None else total(self.samples)
        return 1.0 if self.parts == 1 else self.expected / whole, samples / whole


# -- gradients that are not as a group of parts left them: there too early, gone, or changed in its middle -----------


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A parameter and its gradient as a part left them.

    The usual slips around accumulation give a wrong gradient without a word: `zero_grad()` at the top of every part, as
    in the plain loop; a step after every part; clipping in the middle; no `zero_grad()` after the step. What they do to
    one parameter and its gradient can be seen without reading a number: another tensor, or another version of it.
    """

    name: str
    parameter: torch.Tensor
    gradient: torch.Tensor
    versions: tuple[int, int]

    def check(self) -> None:
        """Refuse to add another part to what is no longer the sum of the parts before."""
        slips = {
            "the gradients of the parts before are gone": self.parameter.grad is not self.gradient,
            "the gradients of the parts before have been changed": self.gradient._version != self.versions[1],
            "the parameters have been changed": self.parameter._version != self.versions[0],
        }
        found = next((words for words, happened in slips.items() if happened), None)
        if found is not None:
            raise RuntimeError(
                f"{found} in the middle of a group ({self.name}): step, zero_grad and clipping belong where "
                "accumulate.ready is True; to begin a group anew, call accumulate.forget()"
            )


def watch(modules: Iterable[torch.nn.Module]) -> Watched | None:
    """Return the first parameter that has a gradient, to be looked at again before the next part's backward.

    >>> model = torch.nn.Linear(1, 1)
    >>> model(torch.ones(1, 1)).backward()
    >>> watched = watch([model])
    >>> watched.check()
    >>> model.zero_grad()
    >>> watched.check()
    Traceback (most recent call last):
    RuntimeError: the gradients of the parts before are gone in the middle of a group (weight): ...
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        if parameter.grad is not None:
            versions = parameter._version, parameter.grad._version
            return Watched(name=name, parameter=parameter, gradient=parameter.grad, versions=versions)
    return None


@torch.no_grad()
def not_zero(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return the name of a parameter whose gradient is not zero, if there is one; each device is asked once.

    >>> model = torch.nn.Linear(1, 1)
    >>> not_zero([model])
    >>> model(torch.ones(1, 1)).backward()
    >>> not_zero([model])
    'weight'
    """
    asked: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        gradient: Any = parameter.grad
        if gradient is None or not parameter.requires_grad:
            continue
        if hasattr(gradient, "to_local"):  # of fully_shard: nobody talks for this
            gradient = gradient.to_local()
        asked.setdefault(gradient.device, []).append((name, entries(gradient).any()))
    for answers in asked.values():
        found = torch.stack([answer for _, answer in answers]).tolist()
        if any(found):
            return answers[found.index(True)][0]
    return None
