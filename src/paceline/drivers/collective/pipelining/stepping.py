"""One batch through the pipeline, on all ranks together.

    tell       sizes, and whether anybody refuses: then all raise the same, and nothing has happened
    prepare    for sizes that have not been here: pieces are traced; whoever cannot refuses, and so do all
    schedule   micro-batches forward and backward, by torch's schedule; each weighs as many samples as it has
    add up     gradients of weights that several stages hold
    average    a stage's gradients over its replicas, by samples
    gather     the loss, the same on every rank

From the schedule on a rank cannot refuse any more: what goes wrong there ends the pipeline on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.codecs import NotFiniteError
from paceline.drivers.collective.pipelining.batches import (
    Loss,
    Pass,
    as_tuple,
    count_inputs,
    count_targets,
    passes,
    sums_of,
)
from paceline.drivers.collective.pipelining.crew import Crew
from paceline.drivers.collective.pipelining.holdings import Holdings
from paceline.drivers.collective.pipelining.messages import refusal_of
from paceline.drivers.collective.pipelining.replicas import Replicas, share_of
from paceline.drivers.collective.pipelining.stages import Span
from paceline.drivers.collective.pipelining.workshop import Workshop
from paceline.pipeline import PipelineError
from paceline.pipeline.plan import Plan

NOT_FINITE, OTHER = 1, 2
Result = TypeVar("Result")


def together(
    crew: Crew, what: str, make: Callable[[], Result], describe: Callable[[Result], Mapping[str, str]] | None = None
) -> Result:
    """Make something on every rank, or refuse on every rank; what it is described by must be the same on all of them.

    Not every rank must describe the same things: replicas may have batches of different sizes.
    """
    made, refusal, cause = None, "", None
    words: Mapping[str, str] = {}
    try:
        made = make()
        words = describe(made) if describe else {}
    except Exception as error:
        refusal, cause = refusal_of(error), error
    try:
        said = crew.tell({"refusal": refusal, "same": dict(words)}, what)
    except PipelineError as error:
        raise error from cause
    first: dict[str, int] = {}
    for place, theirs in enumerate(said):
        for key, value in theirs["same"].items():
            before = first.setdefault(key, place)
            if value != said[before]["same"][key]:
                raise PipelineError(
                    f"all ranks must have the same {key}: {crew.who(place)} has {value}, "
                    f"and {crew.who(before)} has {said[before]['same'][key]}"
                )
    return made  # type: ignore[return-value] # there is one, or all have raised


class Stepper:
    """Takes the steps of a pipeline; `spans` is what this rank did in the last one, if that was wanted."""

    def __init__(self, plan: Plan, crew: Crew, workshop: Workshop, holdings: Holdings, replicas: Replicas) -> None:
        self.plan, self.spans = plan, tuple[Span, ...]()
        self._crew, self._workshop, self._holdings, self._replicas = crew, workshop, holdings, replicas
        self._frozen = {name: weight.requires_grad for name, weight in holdings.parameters()}

    def step(
        self, inputs: Any, targets: Any, loss_function: Loss | None, *, accumulate: bool, record: bool
    ) -> torch.Tensor:
        """Forward, backward, and gradients that all ranks agree on."""
        words = self._words(inputs, targets, loss_function)
        said = self._crew.tell(words, "take a step")
        samples, sums = self._sizes(said, "targets"), bool(said[self._crew.stages - 1]["sums"])
        mine = samples[self._crew.replica]
        parts = passes(mine, self._workshop.size)
        self._prepare(parts, samples, trains=True)
        self._workshop.log.spans = [] if record else None
        before = self._put_aside(accumulate)
        try:
            share = share_of(samples, self._crew.replica, sums=sums)
            weights = [1.0 if sums else part.size / mine for part in parts]
            loss = self._computed(parts, weights, inputs, targets, loss_function)
            trouble = self.guarded(lambda: self._finish(share))
            total = self.guarded(lambda: self._heard(loss * share, trouble))
            for weight, gradient in before:
                if weight.grad is not None:
                    gradient.add_(weight.grad)
        finally:
            self.spans = tuple(self._workshop.log.spans or ())
            for weight, gradient in before:
                weight.grad = gradient
        return torch.tensor(total, dtype=torch.float64)

    def _computed(
        self, parts: list[Pass], weights: list[float], inputs: Any, targets: Any, loss_function: Loss | None
    ) -> float:
        """The loss of this replica, where its last stage is; gradients of this rank's pieces alone."""
        given = as_tuple(inputs, "inputs") if self._crew.stage == 0 else ()
        loss = 0.0
        for part, weight in zip(parts, weights, strict=True):
            self._workshop.log.first_microbatch = part.first // self._workshop.size
            loss += self.guarded(functools.partial(self._run, part, given, targets, loss_function, weight))
        return loss

    def _words(self, inputs: Any, targets: Any, loss_function: Any) -> dict[str, Any]:
        """What this rank has to say about a batch."""
        words: dict[str, Any] = {"inputs": 0, "targets": 0, "sums": False, "refusal": ""}
        try:
            if not torch.is_grad_enabled():
                raise PipelineError("step computes gradients: do not call it under torch.no_grad()")
            if any(weight.requires_grad != self._frozen[name] for name, weight in self._holdings.parameters()):
                raise PipelineError("requires_grad was changed: freeze parameters before the pipeline is made")
            if self._crew.stage == 0:
                words["inputs"] = count_inputs(inputs, self.plan.shapes, self.plan.dtypes)
            if self._crew.stage == self._crew.stages - 1:
                words["sums"], words["targets"] = sums_of(loss_function), count_targets(targets)
        except Exception as error:  # whatever was given: the others wait for this rank's word
            words["refusal"] = refusal_of(error)
        return words

    def _sizes(self, said: list[dict[str, Any]], last: str) -> list[int]:
        """The samples of every replica, as all ranks read them."""
        stages = self._crew.stages
        firsts, lasts = said[::stages], said[stages - 1 :: stages]
        for replica, (first, end) in enumerate(zip(firsts, lasts, strict=True)):
            if last in end and first["inputs"] != end[last]:
                raise PipelineError(
                    f"inputs and targets must have the same number of samples: {self._crew.who(replica * stages)} has "
                    f"{first['inputs']}, {self._crew.who((replica + 1) * stages - 1)} has {end[last]}"
                )
            if end.get("sums") != lasts[0].get("sums"):
                raise PipelineError("all replicas must have the same loss function: some are means, some are sums")
        return [int(first["inputs"]) for first in firsts]

    def _prepare(self, parts: list[Pass], samples: list[int], *, trains: bool) -> None:
        """Runners for all passes, or an error on all ranks. Where every batch is the planned one, they are there."""
        planned = int(self.plan.microbatches) * self._workshop.size
        if not trains or any(each != planned for each in samples):
            make = self._workshop.runner
            together(
                self._crew,
                "prepare for the batch",
                lambda: [make(part, trains=trains) for part in parts],
                lambda _: self._workshop.sizes_of(parts),
            )

    def _put_aside(self, accumulate: bool) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients from before, which are neither added up nor averaged again."""
        before = [(each, each.grad) for each in self._weights() if accumulate and each.grad is not None]
        for weight in self._weights():
            weight.grad = None
        return before

    def _run(
        self, part: Pass, inputs: tuple[torch.Tensor, ...], targets: Any, loss_function: Loss | None, weight: float
    ) -> float:
        ours: list[Any] = []
        if self._crew.stage == self._crew.stages - 1:
            here = [each[part.samples].to(self._crew.device) for each in as_tuple(targets, "targets")]
            every = [torch.split(each, part.size) for each in here]
            ours = list(every[0]) if isinstance(targets, torch.Tensor) else list(zip(*every, strict=True))
        runner = self._workshop.runner(part, trains=True)
        return runner.train(self._cut(inputs, part), ours, loss_function, weight)

    def _cut(self, inputs: tuple[torch.Tensor, ...], part: Pass) -> tuple[torch.Tensor, ...]:
        return tuple(each[part.samples].detach().to(self._crew.device) for each in inputs)

    def _finish(self, share: float) -> Exception | None:
        self._holdings.add_up_shared()
        return self._replicas.average(share)

    def _heard(self, loss: float, trouble: Exception | None) -> float:
        """The loss of all replicas; or what went wrong somewhere, raised by all."""
        kind = 0 if trouble is None else NOT_FINITE if isinstance(trouble, NotFiniteError) else OTHER
        rows = self._crew.gather([loss, kind])
        bad = [place for place, row in enumerate(rows) if row[1]]
        if bad:
            self._replicas.take_back()
            self._workshop.log.error = error = (NotFiniteError if rows[bad[0]][1] == NOT_FINITE else PipelineError)(
                f"{self._crew.who(bad[0])}: the gradient cannot travel between replicas, for it is not finite or "
                "cannot be encoded; lower the learning rate or clip, and leave this step out"
            )
            raise _LeaveOut() from error
        return sum(row[0] for row in rows)

    def guarded(self, run: Callable[[], Result]) -> Result:
        """Run what talks to other ranks; say who is gone, or whose own code failed."""
        log = self._workshop.log
        log.error = None
        try:
            return run()
        except _LeaveOut as left:  # all ranks raise this one, and can go on
            raise log.error or left from None
        except Exception as error:
            if log.error is not None:
                raise self._crew.farewell.give_up(log.error) from None
            raise self._crew.farewell.lost(error, self._neighbours()) from error
        except BaseException:  # whoever interrupts this rank interrupts all
            self._crew.farewell.give_up(PipelineError(f"{self._crew.who(self._crew.place)} was interrupted"))
            raise

    def _neighbours(self) -> list[int]:
        base, stage, stages = self._crew.replica * self._crew.stages, self._crew.stage, self._crew.stages
        return sorted({base + (stage - 1) % stages, base + (stage + 1) % stages})

    def _weights(self) -> list[nn.Parameter]:
        return [weight for _, weight in self._holdings.parameters()]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Any:
        """Forward alone, in eval mode."""
        words: dict[str, Any] = {"inputs": 0, "refusal": ""}
        try:
            if not self.plan.evaluates:
                raise PipelineError(
                    "this model's pieces do something else in eval mode than the model (its code asks for "
                    "self.training): collect full_state_dict() and evaluate the model in one process"
                )
            self._workshop.rows()
            if self._crew.stage == 0:
                words["inputs"] = count_inputs(inputs, self.plan.shapes, self.plan.dtypes)
        except Exception as error:  # whatever was given: the others wait for this rank's word
            words["refusal"] = refusal_of(error)
        samples = self._sizes(self._crew.tell(words, "predict"), "targets")
        parts = passes(samples[self._crew.replica], self._workshop.size)
        self._prepare(parts, samples, trains=False)
        given = as_tuple(inputs, "inputs") if self._crew.stage == 0 else ()
        return self.guarded(lambda: self._predicted(given, parts, samples[self._crew.replica]))

    def _predicted(self, inputs: tuple[torch.Tensor, ...], parts: list[Pass], samples: int) -> Any:
        runners = [self._workshop.runner(part, trains=False) for part in parts]
        pairs = zip(runners, parts, strict=True)
        pieces = [runner.predict(self._cut(inputs, part)) for runner, part in pairs]
        source = self._crew.ranks[(self._crew.replica + 1) * self._crew.stages - 1]
        results = []
        for number, (node, rows) in enumerate(zip(self._workshop.graph.outputs, self._workshop.rows(), strict=True)):
            value = node.meta["val"]
            if self._crew.rank == source:
                found = [piece[number] if isinstance(piece, tuple | list) else piece for piece in pieces]
                whole = torch.cat(found).contiguous()
            else:
                whole = torch.empty((samples * rows, *value.shape[1:]), dtype=value.dtype, device=self._crew.device)
            dist.broadcast(whole.view(-1).view(torch.uint8), source, group=self._crew.row)
            results.append(whole)
        return tuple(results) if self._workshop.graph.several_outputs else results[0]


class _LeaveOut(Exception):  # noqa: N818
    """All ranks leave this step out."""
