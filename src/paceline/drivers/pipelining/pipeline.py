"""A model on several ranks, micro-batches through it: the class that users hold.

    plan = paceline.plan_pipeline(model, sample, stages=2, microbatches=4)
    with paceline.Pipeline(model, plan) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for inputs, targets in loader:
            loss = pipe.step(inputs, targets, loss_function)
            optimizer.step()

One step, on all ranks together:

    agree      on sizes, and whether anybody refuses: then all raise the same, and nothing has happened
    prepare    for sizes that have not been here: pieces are traced; whoever cannot refuses, and so do all
    schedule   micro-batches forward and backward, by torch's schedule; each weighs as many samples as it has
    average    gradients of weights that several stages hold, and of a stage over its replicas, by samples
    gather     the loss, the same on every rank

From the schedule on a rank cannot refuse any more: what goes wrong there ends the pipeline on all ranks.

Gradients are those of one process with the whole batch. BatchNorm is the exception that it is in every pipeline: it
sees micro-batches, in turn, and its statistics are those of one process that runs the same micro-batches and adds up
the gradients. They stay each replica's own; the whole state takes those of replica 0.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.codecs import Codec, NotFiniteError
from paceline.codecs.naming import resolve_codec
from paceline.distributed.agreement import describe, plain_text, refusal_text
from paceline.drivers.pipelining.batches import (
    Loss,
    Pass,
    Tensors,
    as_tuple,
    count_inputs,
    count_targets,
    passes,
    sums_of,
)
from paceline.drivers.pipelining.gradients import GradientAverager, share_of
from paceline.drivers.pipelining.ranks import PipelineRanks
from paceline.drivers.pipelining.runners import PipelineRunners
from paceline.drivers.pipelining.stages import StageSpan
from paceline.drivers.pipelining.weights import WeightOwnership
from paceline.pipeline import PipelineError
from paceline.pipeline.plan import Plan

TIMEOUT_SECONDS = 600.0
NOT_FINITE, OTHER = 1, 2
Result = TypeVar("Result")


class Pipeline:
    """A model cut by a plan over the ranks of a launch: rank = replica * stages + stage.

    Make it on every rank, with the same model and plan; start the script with torchrun. If there is no process group,
    it joins torchrun's, and leaves it in `close()`. `codec` is what gradients travel by between replicas ("identity" is
    exact). A wait for another rank ends after `timeout_seconds` with an error that names it. With `free_others` the
    model keeps only what this rank holds, and memory falls. `record` (here or in a step) fills `spans`: what this rank
    did in the last step, in order.

    `rank` is this rank's number in the launch, `stage` and `replica` are its place, and each of the `replicas` should
    have batches of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        device: str | torch.device = "cpu",
        codec: Codec | str = "identity",
        timeout_seconds: float = TIMEOUT_SECONDS,
        free_others: bool = False,
        seed: int = 0,
        record: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be above 0 and finite (timeout_seconds={timeout_seconds})")
        if not hasattr(plan, "cuts"):
            raise TypeError(f"plan must be a Plan; paceline.Plan.load reads one from a file ({type(plan).__name__})")
        self.plan, self.model, self.record = plan, model, record
        self.spans: tuple[StageSpan, ...] = ()
        self._ranks = ranks = PipelineRanks(int(plan.stages), torch.device(device), timeout_seconds, process_group)
        self.rank, self.stage, self.replica, self.replicas = ranks.rank, ranks.stage, ranks.replica, ranks.replicas
        self._is_last = ranks.stage == ranks.stages - 1
        try:
            self._runners: PipelineRunners = ranks.make_together(
                "trace the model", lambda: _traced(model, plan, ranks), lambda made: _description(codec, made)
            )
            self._weights = WeightOwnership(model, self._runners.graph, plan.cuts, ranks)
            ranks.failures.guard(self._weights.begin_equal)
            if free_others:
                self._weights.free_others()
            self._runners.hold_weights(self._weights.ours, self._weights.name_of)
            self._gradients = ranks.make_together(
                "take the codec", lambda: GradientAverager(codec, self._weights, ranks, seed=seed)
            )
            self._frozen = {name: weight.requires_grad for name, weight in self.named_parameters()}
            planned = self._runners.planned
            ranks.make_together("prepare the schedule", lambda: self._runners.runner(planned, trains=True))
        except BaseException:
            ranks.close()
            raise

    # -- training ------------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Tensors | None,
        targets: Tensors | None,
        loss_function: Loss | None,
        *,
        accumulate: bool = False,
        record: bool | None = None,
    ) -> torch.Tensor:
        """Run one batch forward and backward; return the mean loss, on every rank.

        Gradients are in the parameters' `.grad`; with `accumulate` they are added to those that are there. The first
        stage needs inputs, the last targets and the loss function; what others are given is not looked at. The loss
        function returns the mean over samples, or has `reduction == "sum"`, itself or as a partial; nobody can see
        through a lambda, which must be a mean. Of several replicas each has its own batch, and the loss and gradients
        are those of all of them.
        """
        rows = self._ranks.agree(self._step_words(inputs, targets, loss_function), "take a step")
        samples, sums = self._samples(rows), bool(rows[self._ranks.stages - 1]["sums"])
        mine, log = samples[self.replica], self._runners.log
        parts = passes(mine, self._runners.size)
        self._prepare(parts, samples, trains=True)
        log.spans = [] if (self.record if record is None else record) else None
        before = self._set_gradients_aside(accumulate)
        try:
            share = share_of(samples, self.replica, sums=sums)
            given = as_tuple(inputs, "inputs") if self.stage == 0 else ()
            loss = 0.0  # of this replica, where its last stage is
            for part in parts:
                log.first_microbatch = part.first // self._runners.size
                weight = 1.0 if sums else part.size / mine
                loss += self._guarded(functools.partial(self._run, part, given, targets, loss_function, weight))
            trouble = self._guarded(lambda: self._gradients.average(share))
            total = self._guarded(lambda: self._sum_losses(loss * share, trouble))
            for parameter, gradient in before:
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
        finally:
            self.spans = tuple(log.spans or ())
            for parameter, gradient in before:
                parameter.grad = gradient
        return torch.tensor(total, dtype=torch.float64)

    def _step_words(self, inputs: Any, targets: Any, loss_function: Any) -> dict[str, Any]:
        """Return what this rank has to say about a batch."""
        words: dict[str, Any] = {"inputs": 0, "targets": 0, "sums": False, "refusal": ""}
        try:
            if not torch.is_grad_enabled():
                raise PipelineError("step computes gradients: do not call it under torch.no_grad()")
            if any(weight.requires_grad != self._frozen[name] for name, weight in self.named_parameters()):
                raise PipelineError("requires_grad was changed: freeze parameters before the pipeline is made")
            if self.stage == 0:
                words["inputs"] = count_inputs(inputs, self.plan.shapes, self.plan.dtypes)
            if self._is_last:
                words["sums"], words["targets"] = sums_of(loss_function), count_targets(targets)
        except Exception as error:  # whatever was given: the others wait for this rank's word
            words["refusal"] = refusal_text(error)
        return words

    def _samples(self, rows: list[dict[str, Any]]) -> list[int]:
        """Return the samples of every replica, as all ranks read them."""
        stages = self._ranks.stages
        firsts, lasts = rows[::stages], rows[stages - 1 :: stages]
        for replica, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if "targets" in last and first["inputs"] != last["targets"]:
                one, other = self._ranks.name(replica * stages), self._ranks.name((replica + 1) * stages - 1)
                raise PipelineError(
                    f"inputs and targets must have the same number of samples: {one} has {first['inputs']}, "
                    f"{other} has {last['targets']}"
                )
            if last.get("sums") != lasts[0].get("sums"):
                raise PipelineError("all replicas must have the same loss function: some are means, some are sums")
        return [int(first["inputs"]) for first in firsts]

    def _prepare(self, parts: list[Pass], samples: list[int], *, trains: bool) -> None:
        """Make runners for all passes, or raise on all ranks. Where every batch is the planned one, they are there."""
        planned = int(self.plan.microbatches) * self._runners.size
        if not trains or any(each != planned for each in samples):
            self._ranks.make_together(
                "prepare for the batch",
                lambda: [self._runners.runner(part, trains=trains) for part in parts],
                lambda _: self._runners.tensor_sizes(parts),
            )

    def _set_gradients_aside(self, accumulate: bool) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return gradients from before, which are neither added up nor averaged again."""
        weights = list(self.parameters())
        before = [(each, each.grad) for each in weights if accumulate and each.grad is not None]
        for weight in weights:
            weight.grad = None
        return before

    def _run(
        self, part: Pass, inputs: tuple[torch.Tensor, ...], targets: Any, loss_function: Loss | None, weight: float
    ) -> float:
        ours: list[Any] = []
        if self._is_last:
            here = [each[part.samples].to(self._ranks.device) for each in as_tuple(targets, "targets")]
            every = [torch.split(each, part.size) for each in here]
            ours = list(every[0]) if isinstance(targets, torch.Tensor) else list(zip(*every, strict=True))
        runner = self._runners.runner(part, trains=True)
        return runner.train(self._inputs_of(part, inputs), ours, loss_function, weight)

    def _inputs_of(self, part: Pass, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(each[part.samples].detach().to(self._ranks.device) for each in inputs)

    def _sum_losses(self, loss: float, trouble: Exception | None) -> float:
        """Return the loss of all replicas; what went wrong somewhere is raised by all."""
        kind = 0 if trouble is None else NOT_FINITE if isinstance(trouble, NotFiniteError) else OTHER
        rows = self._ranks.gather_numbers([loss, kind])
        bad = [place for place, row in enumerate(rows) if row[1]]
        if bad:
            self._gradients.undo()
            raise _StepLeftOutError from (NotFiniteError if rows[bad[0]][1] == NOT_FINITE else PipelineError)(
                f"{self._ranks.name(bad[0])}: the gradient cannot travel between replicas, for it is not finite or "
                "cannot be encoded; lower the learning rate or clip, and leave this step out"
            )
        return sum(row[0] for row in rows)

    def _guarded(self, run: Callable[[], Result]) -> Result:
        """Run what talks to other ranks; an error says who is gone, or whose own code failed."""
        log, ranks = self._runners.log, self._ranks
        log.error = None
        try:
            return run()
        except _StepLeftOutError as left_out:  # all ranks raise its cause, and can go on
            raise left_out.__cause__ or left_out from None
        except Exception as error:
            if log.error is not None:
                raise ranks.failures.fail(log.error) from None
            first = ranks.place - ranks.stage
            neighbours = {first + (ranks.stage + step) % ranks.stages for step in (-1, 1)}
            raise ranks.failures.connection_lost(error, sorted(neighbours)) from error
        except BaseException:  # whoever interrupts this rank interrupts all
            ranks.failures.fail(PipelineError(f"{ranks.name(ranks.place)} was interrupted"))
            raise

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def predict(self, inputs: Tensors | None) -> Any:
        """Return what the model returns in eval mode, on every rank of the pipeline; each replica has its own inputs.

        Outputs must have the samples, or so many rows for each of them, in their first dimension.
        """
        words: dict[str, Any] = {"inputs": 0, "refusal": ""}
        try:
            if not self.plan.evaluates:
                raise PipelineError(
                    "this model's pieces do something else in eval mode than the model (its code asks for "
                    "self.training): collect full_state_dict() and evaluate the model in one process"
                )
            self._runners.output_rows()
            if self.stage == 0:
                words["inputs"] = count_inputs(inputs, self.plan.shapes, self.plan.dtypes)
        except Exception as error:  # whatever was given: the others wait for this rank's word
            words["refusal"] = refusal_text(error)
        samples = self._samples(self._ranks.agree(words, "predict"))
        parts = passes(samples[self.replica], self._runners.size)
        self._prepare(parts, samples, trains=False)
        given = as_tuple(inputs, "inputs") if self.stage == 0 else ()
        return self._guarded(lambda: self._predict(given, parts, samples[self.replica]))

    def _predict(self, inputs: tuple[torch.Tensor, ...], parts: list[Pass], samples: int) -> Any:
        outputs = [self._runners.runner(part, trains=False).predict(self._inputs_of(part, inputs)) for part in parts]
        graph, ranks = self._runners.graph, self._ranks
        source = ranks.ranks[(ranks.replica + 1) * ranks.stages - 1]
        results = []
        for number, (node, rows) in enumerate(zip(graph.outputs, self._runners.output_rows(), strict=True)):
            value = node.meta["val"]
            if self.rank == source:
                found = [output[number] if isinstance(output, tuple | list) else output for output in outputs]
                whole = torch.cat(found).contiguous()
            else:
                whole = torch.empty((samples * rows, *value.shape[1:]), dtype=value.dtype, device=ranks.device)
            dist.broadcast(whole.view(-1).view(torch.uint8), source, group=ranks.row)
            results.append(whole)
        return tuple(results) if graph.several_outputs else results[0]

    # -- weights -------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's pieces: what its optimiser is for."""
        return (weight for _, weight in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank's pieces with the model's names."""
        return self._weights.parameters()

    def grad_norm(self) -> float:
        """Return the norm of the whole model's gradient, for a clip; a weight that several stages hold counts once.

        Call it on every rank, after a step.
        """
        self._ranks.agree({}, "measure the gradient")
        rows = self._guarded(lambda: self._ranks.gather_numbers([self._weights.squared_gradients()]))
        first = self._ranks.place - self.stage
        return math.sqrt(sum(row[0] for row in rows[first : first + self._ranks.stages]))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers, under the model's names."""
        return self._weights.state_dict()

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the whole model's state on rank 0, replica 0's, on the CPU; None on the others.

        Call it on every rank.
        """
        self._ranks.agree({}, "collect the state")
        return self._guarded(self._weights.collect)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a state: of a whole one, or what `state_dict` gave here. Call it on every rank."""
        self._ranks.agree({"refusal": refusal_text(self._weights.refusal(state))}, "load a state")
        self._weights.load(state)

    def close(self) -> None:
        """Leave the process group if this pipeline has joined it."""
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _StepLeftOutError(Exception):
    """All ranks leave this step out; its cause says why."""


def _traced(model: nn.Module, plan: Plan, ranks: PipelineRanks) -> PipelineRunners:
    sizes = {int(shape[0]) for shape in plan.shapes}
    if len(sizes) != 1:
        raise PipelineError(f"all inputs must have one row for each sample (rows: {sorted(sizes)})")
    wanted = plan.stages * plan.chunks - 1
    if len(plan.cuts) != wanted:
        raise PipelineError(f"the plan must have {wanted} cuts (cuts={tuple(plan.cuts)})")
    return PipelineRunners(model, plan, ranks)


def _description(codec: Codec | str, runners: PipelineRunners) -> dict[str, str]:
    """Return what must be the same on all ranks, as short texts."""
    plan = runners.plan
    texts = {
        "plan": f"{plan.schedule} stages={plan.stages} chunks={plan.chunks} microbatches={plan.microbatches} "
        f"shapes={[list(shape) for shape in plan.shapes]}",
        "cuts": hashlib.sha256(str(tuple(plan.cuts)).encode()).hexdigest()[:16],
        "model": str(plan.fingerprint)[:16],
        "codec": describe(resolve_codec(codec)),
    }
    return {name: plain_text(text, 200) for name, text in texts.items()} | runners.tensor_sizes([runners.planned])
