"""One LARS step over a list of tensors, in three ways that agree: one by one, many at once, or in one pass each.

    d <- g + weight_decay * w                (g negated to maximise)
    v <- momentum * v + rate * d
    w <- w - v                               (Nesterov: w - (rate * d + momentum * v))

v is the paper's: it carries the rates of the past in it, so a rate that falls does not shrink steps already begun.

`one_by_one` is plain tensor arithmetic, which autograd can pass through. `many_at_once` uses torch's foreach kernels
and leaves every number on its device, so no step waits for a GPU. `one_pass` is for the CPU: torch has a fused kernel
for SGD that reads w, g, v and writes w, v in a single pass,

    v <- momentum * v + (1 - dampening) * d;   w <- w - lr * v

and with dampening = 1 - rate and lr = 1 that is the step of LARS. The difference 1 - rate, a float64, has too few
digits for float32 below a rate of 1e-8, and for float64 always: there plain arithmetic takes over. Nesterov needs d
twice, so three passes: v alone (lr = 0), then w by d (no momentum), then w by v. In half precision the kernel of torch
2.13 does not work (vectors of 32 elements and more stay as they are), so there it is plain arithmetic too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from paceline.optim.lars_rates import Trust, is_bias_or_norm
from paceline.optim.norms import MEMORY_ORDERS, cpu_norm

_LEAST_RATE_IN_ONE_PASS = 1e-8
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the parameters of a group have in common in one step."""

    trust: Trust
    momentum: float
    nesterov: bool
    maximize: bool
    exclude_bias_and_norm: bool
    differentiable: bool

    def scales(self, parameter: Tensor) -> bool:
        """Whether the layer gets a rate of its own."""
        return not (self.exclude_bias_and_norm and is_bias_or_norm(parameter))


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Parameters with their gradients and velocities (none without momentum), index by index."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    velocities: list[Tensor]

    def only(self, chosen: Sequence[int]) -> Layers:
        """Some of them."""
        return Layers(
            parameters=[self.parameters[index] for index in chosen],
            gradients=[self.gradients[index] for index in chosen],
            velocities=[self.velocities[index] for index in chosen] if self.velocities else [],
        )


def norms_in(tensor: Tensor) -> torch.dtype | None:
    """The type for sums of squares: half precision would overflow at 256, and on the CPU float32 loses digits."""
    if tensor.is_cpu:
        return torch.float64
    return torch.float32 if tensor.dtype in _HALVES else None


def one_by_one(layers: Layers, step: Step) -> None:
    """Plain tensor arithmetic, layer by layer; the rates stay on their device."""
    for index, parameter in enumerate(layers.parameters):
        gradient = layers.gradients[index]
        velocity = layers.velocities[index] if layers.velocities else None
        # autograd keeps what the norm was taken of, and the parameter is about to be changed in place
        weights = parameter.clone() if step.differentiable else parameter
        trust = step.trust.on(parameter.device)
        rate: float | Tensor = trust.lr
        if step.scales(parameter):
            rate = trust.rates(
                weight_norms=torch.linalg.vector_norm(weights, dtype=norms_in(weights)),
                gradient_norms=torch.linalg.vector_norm(gradient, dtype=norms_in(gradient)),
            )
        _plainly(parameter, gradient, velocity, rate, step)


def _plainly(parameter: Tensor, gradient: Tensor, velocity: Tensor | None, rate: float | Tensor, step: Step) -> None:
    direction = gradient.neg() if step.maximize else gradient
    if step.trust.weight_decay != 0:
        direction = direction.add(parameter, alpha=step.trust.weight_decay)
    moved = direction * rate
    if velocity is None:
        parameter.sub_(moved)
        return
    velocity.mul_(step.momentum).add_(moved)
    parameter.sub_(moved.add(velocity, alpha=step.momentum) if step.nesterov else velocity)


def many_at_once(layers: Layers, step: Step) -> None:
    """Foreach kernels; layers of all devices and types, one device and type at a time."""
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for index, (parameter, gradient) in enumerate(zip(layers.parameters, layers.gradients, strict=True)):
        alike.setdefault((parameter.device, parameter.dtype, gradient.dtype), []).append(index)
    for chosen in alike.values():
        _many_alike(layers.only(chosen), step)


def _many_alike(layers: Layers, step: Step) -> None:
    rates = _rates_of_many(layers, step)
    moved = layers.gradients
    if step.maximize:
        moved = list(torch._foreach_neg(moved))
    if step.trust.weight_decay != 0:
        moved = list(torch._foreach_add(moved, layers.parameters, alpha=step.trust.weight_decay))
    if moved is layers.gradients:
        moved = list(torch._foreach_mul(moved, rates))
    else:
        torch._foreach_mul_(moved, rates)
    if layers.velocities:
        torch._foreach_mul_(layers.velocities, step.momentum)
        torch._foreach_add_(layers.velocities, moved)
        if step.nesterov:
            torch._foreach_add_(moved, layers.velocities, alpha=step.momentum)
        else:
            moved = layers.velocities
    torch._foreach_sub_(layers.parameters, moved)


def _rates_of_many(layers: Layers, step: Step) -> list[Tensor]:
    """One number per layer, each a tensor without dimensions on the layers' device."""
    first = layers.parameters[0]
    trust = step.trust.on(first.device)
    lr = trust.lr
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=norms_in(first) or first.dtype, device=first.device)
    rates = [lr] * len(layers.parameters)
    scaled = [index for index, parameter in enumerate(layers.parameters) if step.scales(parameter)]
    if scaled:
        some = layers.only(scaled)
        found = trust.rates(
            weight_norms=torch.stack(torch._foreach_norm(some.parameters, 2, norms_in(first))),
            gradient_norms=torch.stack(torch._foreach_norm(some.gradients, 2, norms_in(some.gradients[0]))),
        )
        for index, rate in zip(scaled, found.unbind(), strict=True):
            rates[index] = rate
    return rates


@_disable_dynamo  # reads numbers back: one break in the graph, as torch's fused steps are, and not one per layer
def one_pass(layers: Layers, step: Step) -> None:
    """Torch's fused SGD kernel on the CPU, called with each layer's own rate; all that share one in one call."""
    same_rate: list[int] = []
    for index, parameter in enumerate(layers.parameters):
        if parameter.dtype != torch.float32 or not fits_the_kernel(layers, index):
            one_by_one(layers.only([index]), step)
        elif step.scales(parameter):
            gradient = layers.gradients[index]
            rate = step.trust.rate(weight_norm=cpu_norm(parameter), gradient_norm=cpu_norm(gradient))
            _fused([parameter], [gradient], layers.velocities[index : index + 1], rate, step)
        else:
            same_rate.append(index)
    if same_rate:
        some = layers.only(same_rate)
        _fused(some.parameters, some.gradients, some.velocities, float(step.trust.lr), step)


def fits_the_kernel(layers: Layers, index: int) -> bool:
    """The kernel walks through memory and does not look: a layer's tensors must be dense, of one type, in one order."""
    parameter, gradient = layers.parameters[index], layers.gradients[index]
    velocity = layers.velocities[index] if layers.velocities else parameter
    if parameter.dtype in _HALVES or not parameter.dtype == gradient.dtype == velocity.dtype:
        return False
    return any(fits(parameter) and fits(gradient) and fits(velocity) for fits in MEMORY_ORDERS)


def _fused(
    parameters: list[Tensor], gradients: list[Tensor], velocities: list[Tensor], rate: float, step: Step
) -> None:
    if not velocities:
        _kernel(parameters, gradients, [], step, lr=rate)
    elif not rate >= _LEAST_RATE_IN_ONE_PASS:  # or not a number
        for parameter, gradient, velocity in zip(parameters, gradients, velocities, strict=True):
            _plainly(parameter, gradient, velocity, rate, step)
    elif not step.nesterov:
        _kernel(parameters, gradients, velocities, step, lr=1.0, dampening=1 - rate)
    else:
        _kernel(parameters, gradients, velocities, step, lr=0.0, dampening=1 - rate)
        _kernel(parameters, gradients, [], step, lr=rate)
        torch._foreach_add_(parameters, velocities, alpha=-step.momentum)


def _kernel(
    parameters: list[Tensor],
    gradients: list[Tensor],
    velocities: list[Tensor],
    step: Step,
    *,
    lr: float,
    dampening: float = 0.0,
) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        velocities,
        weight_decay=step.trust.weight_decay,
        momentum=step.momentum if velocities else 0.0,
        lr=lr,
        dampening=dampening,
        nesterov=False,
        maximize=step.maximize,
        is_first_step=False,
    )
