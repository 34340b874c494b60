"""A model on several ranks, micro-batches through it: what users hold.

    plan = paceline.plan_pipeline(model, sample, stages=2, microbatches=4)
    with paceline.Pipeline(model, plan) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for inputs, targets in loader:
            loss = pipe.step(inputs, targets, loss_function)
            optimizer.step()

Gradients are those of one process with the whole batch. BatchNorm is the exception that it is in every pipeline: it
sees micro-batches, in turn, and its statistics are those of one process that runs the same micro-batches and adds up
the gradients. They stay each replica's own; the whole state takes those of replica 0.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed.agreement import describe
from paceline.drivers.collective.pipelining.batches import Loss, Tensors
from paceline.drivers.collective.pipelining.crew import Crew
from paceline.drivers.collective.pipelining.holdings import Holdings
from paceline.drivers.collective.pipelining.messages import plain, refusal_of
from paceline.drivers.collective.pipelining.replicas import Replicas
from paceline.drivers.collective.pipelining.stages import Span
from paceline.drivers.collective.pipelining.stepping import Stepper, together
from paceline.drivers.collective.pipelining.workshop import Workshop
from paceline.pipeline import PipelineError
from paceline.pipeline.plan import Plan

TIMEOUT_SECONDS = 600.0


class Pipeline:
    """A model cut by a plan over the ranks of a launch: rank = replica * stages + stage.

    Make it on every rank, with the same model and plan; start the script with torchrun. If there is no process group,
    it joins torchrun's, and leaves it in `close()`. `codec` is what gradients travel by between replicas ("identity" is
    exact). A wait for another rank ends after `timeout_seconds` with an error that names it. With `free_others` the
    model keeps only what this rank holds, and memory falls. `record` (here or in a step) fills `spans`.
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
        self._crew = crew = Crew(int(plan.stages), torch.device(device), timeout_seconds, process_group)
        try:
            make, describe = functools.partial(_traced, model, plan, crew), functools.partial(_description, codec)
            workshop = together(crew, "trace the model", make, describe)
            self._holdings = Holdings(model, workshop.graph, plan.cuts, crew)
            crew.farewell.guard(self._holdings.begin_equal)
            if free_others:
                self._holdings.free_others()
            workshop.hold(self._holdings.ours, self._holdings.name_of)
            self._replicas = Replicas(codec, self._holdings, crew, seed=seed)
            self._stepper = Stepper(plan, crew, workshop, self._holdings, self._replicas)
            together(crew, "prepare the schedule", lambda: workshop.runner(workshop.planned, trains=True))
        except BaseException:
            crew.close()
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
        """Forward and backward of one batch: the mean loss, on every rank; gradients are in the parameters' `.grad`.

        The first stage needs inputs, the last targets and the loss function; what others are given is not looked at.
        The loss function returns the mean over samples, or has `reduction == "sum"`, itself or as a partial; nobody can
        see through a lambda, which must be a mean. Of several replicas each has its own batch, and the loss and
        gradients are those of all of them. With `accumulate` gradients are added to those that are there.
        """
        record = self.record if record is None else record
        return self._stepper.step(inputs, targets, loss_function, accumulate=accumulate, record=record)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def predict(self, inputs: Tensors | None) -> Any:
        """What the model returns in eval mode, on every rank of the pipeline; each replica has its own inputs.

        Outputs must have the samples, or so many rows for each of them, in their first dimension.
        """
        return self._stepper.predict(inputs)

    @property
    def spans(self) -> tuple[Span, ...]:
        """What this rank did in the last step, in order, if it was recorded."""
        return self._stepper.spans

    # -- weights -------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's pieces: what its optimiser is for."""
        return (weight for _, weight in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the model's names."""
        return self._holdings.parameters()

    def grad_norm(self) -> float:
        """The norm of the whole model's gradient, for a clip; a weight that several stages hold counts once.

        Call it on every rank, after a step.
        """
        self._crew.tell({}, "measure the gradient")
        rows = self._stepper.guarded(lambda: self._crew.gather([self._holdings.squares()]))
        first = self._crew.place - self._crew.stage
        return math.sqrt(sum(row[0] for row in rows[first : first + self._crew.stages]))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers, under the model's names."""
        return self._holdings.state_dict()

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's state on rank 0, replica 0's, on the CPU; None on the others. Call it on every rank."""
        self._crew.tell({}, "collect the state")
        return self._stepper.guarded(self._holdings.collected)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of a state: of a whole one, or what `state_dict` gave here. Call it on every rank."""
        self._crew.tell({"refusal": refusal_of(self._holdings.why_not(state))}, "load a state")
        self._holdings.load(state)

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """Which stage this rank is."""
        return self._crew.stage

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this rank belongs to."""
        return self._crew.replica

    @property
    def replicas(self) -> int:
        """How many replicas there are: each should have batches of its own."""
        return self._crew.replicas

    @property
    def rank(self) -> int:
        """This rank's number in the launch."""
        return self._crew.rank

    def close(self) -> None:
        """Leave the process group if this pipeline has joined it."""
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _traced(model: nn.Module, plan: Plan, crew: Crew) -> Workshop:
    sizes = {int(shape[0]) for shape in plan.shapes}
    if len(sizes) != 1:
        raise PipelineError(f"all inputs must have one row for each sample (rows: {sorted(sizes)})")
    if len(plan.cuts) != plan.stages * plan.chunks - 1:
        wanted = plan.stages * plan.chunks - 1
        raise PipelineError(f"the plan must have {wanted} cuts (cuts={tuple(plan.cuts)})")
    return Workshop(model, plan, crew)


def _description(codec: Codec | str, workshop: Workshop) -> dict[str, str]:
    """What must be the same on all ranks, as short words."""
    plan = workshop.plan
    said = {
        "plan": f"{plan.schedule} stages={plan.stages} chunks={plan.chunks} microbatches={plan.microbatches} "
        f"shapes={[list(shape) for shape in plan.shapes]}",
        "cuts": hashlib.sha256(str(tuple(plan.cuts)).encode()).hexdigest()[:16],
        "model": str(plan.fingerprint)[:16],
        "codec": describe(resolve_codec(codec)),
    }
    return {name: plain(text, 200) for name, text in said.items()} | workshop.sizes_of([workshop.planned])
