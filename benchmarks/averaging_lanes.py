"""The lanes of the benchmark `averaging`: a model with a padded pace, an optimiser, and who averages it.

A step's computation is real, and then padded by sleep to the wanted seconds, as if an accelerator computed it: four
ranks that really computed so long on two cores would measure the cores. The padding is spread as a network's own time
is, one third over the forward pass and two thirds over the backward pass, layer by layer in proportion to their
weights, so that DistributedDataParallel can send the gradients of the last layers while the first ones are computed:

    |  forward 1 | 2 | 3 |  backward 3  |    2    |    1    | step
                                        ~~ 3 on its way ~~~~
                                                  ~~ 2 ~~
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.averaging_plan import BARRIER, PAPER, PERIOD, Plan

FORWARD_SHARE, BACKWARD_END = 1 / 3, 0.97  # what is left is for the first layer's own gradient
BUCKET_MB = 1.0  # DDP's default of 25 MB would put this model into one or two, and overlap next to nothing
TIMEOUT_SECONDS = 60.0

AVERAGERS: dict[str, Callable[..., Any]] = {
    "ssgd": paceline.SSGD,
    "local-sgd": lambda *parts, **common: paceline.LocalSGD(*parts, period=PERIOD, **common),
    "hpsgd": paceline.HPSGD,
    PAPER: lambda *parts, **common: paceline.HPSGD(*parts, rebase=False, **common),
    BARRIER: lambda *parts, **common: paceline.HPSGD(*parts, rebase=False, **common),
    "psgd": paceline.PSGD,
}


class Pace:
    """How long a step's computation takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def begin(self) -> float:
        """The step begins now."""
        self._began = time.perf_counter()
        return self._began

    def until(self, share: float) -> None:
        """Sleep until so much of the step's time is over."""
        left = self._began + share * self.seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class Clock:
    """Where a rank's seconds go."""

    def __init__(self) -> None:
        self._began = 0.0
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self.computing = 0.0  # forward, backward, and what they were held up
        self.stepping = 0.0  # the optimiser's step with all that averaging does in it
        self.optimiser = 0.0  # the optimiser's step alone
        self._processor = time.process_time()

    def processor(self) -> float:
        """The processor's seconds since the reset, of all threads of this rank: gloo's too."""
        return time.process_time() - self._processor

    def optimising(self, *_: Any) -> None:
        """The optimiser begins."""
        self._began = time.perf_counter()

    def optimised(self, *_: Any) -> None:
        """The optimiser is done."""
        self.optimiser += time.perf_counter() - self._began


class _Until(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, pace: Pace, forwards: float, backwards: float) -> torch.Tensor:
        ctx.pace, ctx.backwards = pace, backwards
        pace.until(forwards)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.pace.until(ctx.backwards)
        return gradients[0], None, None, None


class Padded(nn.Module):
    """A layer whose output, and whose gradient, is there no sooner than at these shares of a step."""

    def __init__(self, layer: nn.Module, pace: Pace, forwards: float, backwards: float) -> None:
        super().__init__()
        self.layer, self._pace, self._shares = layer, pace, (forwards, backwards)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        outputs: torch.Tensor = _Until.apply(self.layer(inputs), self._pace, *self._shares)
        return outputs


def network(widths: list[int], pace: Pace) -> nn.Sequential:
    """Fully connected layers, padded."""
    sizes = [inputs * outputs for inputs, outputs in itertools.pairwise(widths)]
    done = [size / sum(sizes) for size in itertools.accumulate(sizes)]
    layers: list[nn.Module] = []
    for (inputs, outputs), end, start in zip(itertools.pairwise(widths), done, [0.0, *done], strict=False):
        backwards = FORWARD_SHARE + (1 - start) * (BACKWARD_END - FORWARD_SHARE)
        layer = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # torch's own stays at the start for 50 steps
        layers += [Padded(layer, pace, end * FORWARD_SHARE, backwards), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Lane:
    """A model, an optimiser, and who averages; all lanes have the same settings."""

    def __init__(self, name: str, plan: Plan, seed: int, optimiser: Sequence[float], *, record: bool = False) -> None:
        torch.manual_seed(seed)
        self.name, self.pace = name, Pace()
        self.module = network(plan.widths, self.pace)
        self.model: nn.Module = self.module
        rate, momentum = optimiser
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=rate, momentum=momentum)
        self.clock = Clock()
        self.optimiser.register_step_post_hook(self.clock.optimised)  # before the averaging's own, if it comes after
        self.sync: Any = None
        if name == "ddp":
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=BUCKET_MB)
        else:
            self.sync = AVERAGERS[name](self.model, self.optimiser, timeout_seconds=TIMEOUT_SECONDS, record=record)
        self.optimiser.register_step_pre_hook(self.clock.optimising)  # and after it, if it comes before

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of a training loop."""
        began = self.pace.begin()
        self.optimiser.zero_grad()
        F.cross_entropy(self.model(inputs), targets).backward()
        self.pace.until(1.0)
        computed = time.perf_counter()
        self.optimiser.step()
        self.clock.computing += computed - began
        self.clock.stepping += time.perf_counter() - computed
        if self.name == BARRIER:  # the authors' code: every step ends with one
            dist.barrier()

    def averages(self, step: int) -> int:
        """How many have moved the shared model, at the end of that step."""
        return step + 1 if self.sync is None else int(self.sync.averages)

    def shared(self) -> dict[str, torch.Tensor]:
        """A copy of what all ranks agree on."""
        if self.sync is not None:
            found: dict[str, torch.Tensor] = self.sync.shared
            return found
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    @torch.no_grad()
    def loss(self, parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Of these parameters, at no pace."""
        self.pace.seconds = 0.0
        return float(F.cross_entropy(torch.func.functional_call(self.module, parameters, (inputs,)), targets))

    def flush(self) -> None:
        """All ranks equal, and nothing of this lane on the link."""
        if self.sync is not None:
            self.sync.flush()

    def close(self) -> None:
        """The end of the lane."""
        if self.sync is not None:
            self.sync.close()
