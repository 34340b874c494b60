"""LARS: every layer moves by a share of its own length (You, Gitman, Ginsburg: large batch training, 2017).

With large batches come large rates, and the layer whose gradient is largest beside its weights bursts first. In AlexNet
|w| / |g| goes from 8.48 (the first convolution) to 117 (the first fully connected layer) among the weights. (The text
of the paper says 5.76 and 1345. By their norms those are biases: its table 2 seems to have ".w" and ".b" swapped, for a
convolution's weights are not 0.098 long beside a bias of 1.86.) One rate for all is then too much for one layer and too
little for another. LARS gives each its own,

    local = trust_coefficient * |w| / (|g| + weight_decay * |w|)        rate = lr * local
    d     = g + weight_decay * w                             (g negated to maximise)
    v     = momentum * v + rate * d
    w     = w - v                                            (Nesterov: w - (rate * d + momentum * v))

so that an update is at most `lr * trust_coefficient` of the layer's own length, however large or small its gradient is.
v is the paper's: it carries the rates of the past in it, so a rate that falls does not shrink steps already begun.

Where we differ from the paper: biases and the scales of normalisation are left out of the scaling unless
`exclude_bias_and_norm=False` (a tensor of at most one dimension counts as such); where a norm is 0 the formula says
nothing (0 / 0, or a layer that could never leave zero), and local is 1. With `clip` the global rate is a limit instead
of a factor, rate = min(local, lr), as LARC has it. `trust_coefficient=None` switches the scaling off, and what remains
is `torch.optim.SGD`. The rate over the run, Algorithm 1's (1 - t/T)^2, is a schedule's (`schedules.py`).

A step is taken in one of three ways that agree. `one_by_one` is plain tensor arithmetic, which autograd can pass
through. `many_at_once` uses torch's foreach kernels and leaves every number on its device, so no step waits for a GPU.
`one_pass` is for the CPU: torch has a fused kernel for SGD that reads w, g, v and writes w, v in a single pass,

    v <- momentum * v + (1 - dampening) * d;   w <- w - lr * v

and with dampening = 1 - rate and lr = 1 that is the step of LARS; a kernel of our own would be no faster. The
difference 1 - rate, a float64, has too few digits for float32 below a rate of 1e-8, and for float64 always: there plain
arithmetic takes over. Nesterov needs d twice, so three passes: v alone (lr = 0), then w by d (no momentum), then w by
v. In half precision the kernel of torch 2.13 does not work (vectors of 32 elements and more stay as they are), so there
it is plain arithmetic too.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT, _default_to_fused_or_foreach, _use_grad_for_differentiable
from torch.optim.sgd import sgd

from paceline.optim.norms import MEMORY_ORDERS, cpu_norm

PLAIN = (Tensor, torch.nn.Parameter)
"""The types that torch's kernels take as they are; subclasses, such as DTensor, have rules of their own."""

_VELOCITY, _MOMENTUM = "velocity", "momentum_buffer"  # with rates of the past in it, and without: torch's SGD
WEIGHT_DECAY = 5e-4  # where none is given, until the next release
_LEAST_RATE_IN_ONE_PASS = 1e-8
_HALVES = (torch.float16, torch.bfloat16)


class _Unset:
    """The type of a parameter's default where None is a value."""


_UNSET = _Unset()


def _with_new_name(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings with `trust_coefficient` by that name: states of before have `trust`."""
    return {"trust_coefficient" if name == "trust" else name: value for name, value in group.items()}


def _warn_of_trust(*, stacklevel: int) -> None:
    warnings.warn(
        "trust is called trust_coefficient now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


class LARS(Optimizer):
    """SGD with momentum and layer-wise adaptive rates, for large batches; used like any `torch.optim` optimiser.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = LARS(model.parameters(), lr=2.0, weight_decay=5e-4)
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(3, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> moved = (model.weight - before).norm() / before.norm()
    >>> 0.0019 < moved <= 0.002001  # lr * trust_coefficient of its length
    tensor(True)

    Args:
        params: parameters, named parameters or groups of them, as for every optimiser of torch.
        lr: global rate, a number or a tensor of one element. With 1.0 a layer moves by at most trust_coefficient of its
            length; the paper has 2 to 30.
        momentum: share of the last step that is taken again, between 0 and 1.
        weight_decay: L2 penalty; part of the gradient, and of the local rate. Where it is not given it is 5e-4, with a
            warning: with the next release it is 0 then, as in torch's SGD.
        trust_coefficient: the share of its own length by which a layer may move per unit of lr; None: no scaling, and
            torch's SGD.
        exclude_bias_and_norm: whether tensors of at most one dimension take lr as it is.
        nesterov: look-ahead momentum, as in torch's SGD.
        clip: lr is an upper limit for the local rate instead of a factor (LARC).
        maximize: climb instead of descend.
        foreach: torch's multi-tensor kernels; the default on GPUs. No step waits for the device.
        fused: one pass through memory per layer, by torch's fused SGD kernel; the default on the CPU, and only there.
            For float32; other types and tensors that lie otherwise in memory take the plain way.
        differentiable: let autograd pass through the step.
        trust: the old name of trust_coefficient.

    A NaN in a gradient makes its whole layer NaN, and an infinity at least the elements where it was; where the rate is
    not scaled, both only the elements where they were, as in torch's SGD. Other layers are not touched. With mixed
    precision `torch.amp.GradScaler` leaves such a step out.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        trust_coefficient: float | None = 0.001,
        exclude_bias_and_norm: bool = True,
        nesterov: bool = False,
        clip: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        *,
        trust: float | _Unset | None = _UNSET,
    ) -> None:
        if not isinstance(trust, _Unset):
            if trust_coefficient != 0.001:
                raise TypeError("trust is the old name of trust_coefficient: give trust_coefficient alone")
            _warn_of_trust(stacklevel=3)
            trust_coefficient = trust
        if weight_decay is None:
            if isinstance(params, Iterator):
                params = list(params)
            groups = params if isinstance(params, list) and params else [None]
            if not all(isinstance(group, dict) and "weight_decay" in group for group in groups):
                warnings.warn(
                    f"LARS has weight_decay={WEIGHT_DECAY:g} where none is given, and 0 with the next release, as "
                    f"torch's SGD: give weight_decay={WEIGHT_DECAY:g} to keep it",
                    FutureWarning,
                    stacklevel=2,
                )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": WEIGHT_DECAY if weight_decay is None else weight_decay,
            "trust_coefficient": trust_coefficient,
            "exclude_bias_and_norm": exclude_bias_and_norm,
            "nesterov": nesterov,
            "clip": clip,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "differentiable": differentiable,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with settings of its own where it names them.

        >>> optimizer = LARS([torch.zeros(2, 2)], lr=1.0, weight_decay=0.0)
        >>> optimizer.add_param_group({"params": [torch.zeros(2)], "trust_coefficient": None, "lr": 0.1})
        >>> optimizer.add_param_group({"params": [torch.zeros(3)], "momentum": -1})
        Traceback (most recent call last):
        ValueError: momentum must be between 0 and 1 (momentum=-1)
        """
        if "trust" in param_group:
            _warn_of_trust(stacklevel=3)
            param_group = _with_new_name(param_group)
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                _check_parameter(parameter, fused=self.param_groups[-1]["fused"])
        except TypeError:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` has kept; that of another optimiser is refused, for its momentum is another.

        >>> weight = torch.zeros(2, 2)
        >>> LARS([weight], lr=1.0, weight_decay=0.0).load_state_dict(torch.optim.SGD([weight], lr=0.1).state_dict())
        Traceback (most recent call last):
        ValueError: this state is not that of LARS: its groups have no 'trust_coefficient'; begin anew, ...
        """
        groups = [_with_new_name(group) for group in state_dict["param_groups"]]
        if any("trust_coefficient" not in group for group in groups):
            raise ValueError(
                "this state is not that of LARS: its groups have no 'trust_coefficient'; begin anew, LARS's rates are "
                "others too"
            )
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults = _with_new_name(self.defaults)
        for group in self.param_groups:
            if "trust" in group:  # the groups stay the objects that they are: schedulers hold them
                group["trust_coefficient"] = group.pop("trust")
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients at hand; `closure` may compute them anew and return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            layers = self._layers(group)
            if layers:
                _take_step(layers, group)
        return loss

    def _layers(self, group: dict[str, Any]) -> list[LayerTensors]:
        """Return the parameters of a group that have a gradient, each with its gradient and velocity."""
        layers = []
        for parameter in group["params"]:
            velocity = None
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "LARS needs dense gradients (a layer's norm is taken); build Embedding(sparse=False)"
                )
            if group["momentum"] != 0:
                state, name = self.state[parameter], _MOMENTUM if group["trust_coefficient"] is None else _VELOCITY
                if state.get(name) is None:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                velocity = state[name]
            layers.append(LayerTensors(parameter, parameter.grad, velocity))
        return layers


def _take_step(layers: list[LayerTensors], group: dict[str, Any]) -> None:
    if group["trust_coefficient"] is None:
        _torch_sgd(layers, group)
        return
    settings = {name: group[name] for name in _STEP_SETTINGS}
    if isinstance(group["lr"], Tensor):
        settings["lr"] = group["lr"].squeeze()
    _way([layer.parameter for layer in layers], group)(layers, LayerStep(**settings))


def _way(parameters: list[Tensor], group: dict[str, Any]) -> Callable[[list[LayerTensors], LayerStep], None]:
    """Choose one of the three ways: the one asked for, or else the quickest that fits."""
    if group["fused"]:
        return one_pass
    if group["foreach"]:
        return many_at_once
    if group["foreach"] is not None or group["fused"] is not None or group["differentiable"]:
        return one_by_one
    if torch.compiler.is_compiling():
        return many_at_once
    if all(type(parameter) in PLAIN and parameter.is_cpu for parameter in parameters):
        return one_pass
    _, foreach = _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False)
    return many_at_once if foreach else one_by_one


def _torch_sgd(layers: list[LayerTensors], group: dict[str, Any]) -> None:
    sgd(
        [layer.parameter for layer in layers],
        [layer.gradient for layer in layers],
        [layer.velocity for layer in layers],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        foreach=False if group["differentiable"] else group["foreach"],
        fused=group["fused"] and all(map(fits_the_kernel, layers)),
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse a group's settings that cannot be, with the value and what is allowed."""
    for name in ("lr", "momentum", "weight_decay", "trust_coefficient"):
        value = group[name]
        fits = isinstance(value, Real) or (name == "lr" and isinstance(value, Tensor))
        if isinstance(value, bool) or not (fits or (name == "trust_coefficient" and value is None)):
            raise TypeError(f"{name} must be a number ({name}={value!r})")
    for name in ("exclude_bias_and_norm", "nesterov", "clip", "maximize", "differentiable", "foreach", "fused"):
        if not isinstance(group[name], bool) and not (name in ("foreach", "fused") and group[name] is None):
            raise TypeError(f"{name} must be True or False ({name}={group[name]!r})")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element (lr has shape {tuple(lr.shape)})")  # as torch says it
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite ({name}={group[name]})")
    if not 0 <= group["momentum"] <= 1:
        raise ValueError(f"momentum must be between 0 and 1 (momentum={group['momentum']})")
    if group["trust_coefficient"] is not None and not 0 < group["trust_coefficient"] < math.inf:
        raise ValueError(
            f"trust_coefficient must be above 0 and finite, or None for no scaling "
            f"(trust_coefficient={group['trust_coefficient']})"
        )
    if group["nesterov"] and group["momentum"] == 0:
        raise ValueError("nesterov needs momentum above 0 (momentum=0)")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach are two ways of one step: choose one (fused=True, foreach=True)")
    if group["differentiable"] and (group["fused"] or group["foreach"]):
        raise ValueError("differentiable goes step by step, neither fused nor foreach (differentiable=True)")


def _check_parameter(parameter: Tensor, *, fused: bool | None) -> None:
    """Refuse a parameter whose length LARS cannot take, or that the fused kernel does not know."""
    if not parameter.is_floating_point():
        kind = "complex" if parameter.is_complex() else "not floating-point"
        raise TypeError(f"LARS takes real floating-point parameters; one is {kind} ({parameter.dtype})")
    if fused and not (parameter.is_cpu and type(parameter) in PLAIN):
        what = f"a {type(parameter).__name__} on {parameter.device}"
        raise TypeError(f"fused=True takes plain tensors on the CPU only; one is {what}: leave fused out")


# -- the rate of a layer -----------------------------------------------------------------------------------------------


def is_bias_or_norm(parameter: Tensor) -> bool:
    """Whether a parameter is commonly left out of the scaling: a bias or a scale of a normalisation, by its dimensions.

    >>> is_bias_or_norm(torch.zeros(8)), is_bias_or_norm(torch.zeros(8, 4))
    (True, False)
    """
    return parameter.dim() <= 1


def local_rate(weight_norm: float, gradient_norm: float, *, trust_coefficient: float, weight_decay: float) -> float:
    """Return the layer's own factor, where neither norm is 0.

    >>> local_rate(3.0, 0.5, trust_coefficient=0.001, weight_decay=0.0)
    0.006
    """
    return trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One step's settings, the same for all layers of a group, and the rate of a layer that follows from its norms.

    The rate is computed twice by the same arithmetic: on tensors, for a device that must not be waited for, and on
    numbers, for the CPU. A NaN in a norm comes out as a NaN in the rate.

    >>> step = LayerStep(lr=2.0, trust_coefficient=0.001, weight_decay=0.0)
    >>> step.rate(weight_norm=3.0, gradient_norm=0.5), step.rate(weight_norm=0.0, gradient_norm=0.5)
    (0.012, 2.0)
    """

    lr: float | Tensor
    trust_coefficient: float
    weight_decay: float
    clip: bool = False
    momentum: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    exclude_bias_and_norm: bool = True
    differentiable: bool = False

    def scales(self, parameter: Tensor) -> bool:
        """Whether the layer gets a rate of its own."""
        return not (self.exclude_bias_and_norm and is_bias_or_norm(parameter))

    def rate(self, *, weight_norm: float, gradient_norm: float) -> float:
        """Return the rate from norms that are plain numbers."""
        lr = float(self.lr)
        if weight_norm == 0 or gradient_norm == 0:
            return lr
        local = local_rate(
            weight_norm, gradient_norm, trust_coefficient=self.trust_coefficient, weight_decay=self.weight_decay
        )
        if not self.clip:
            return lr * local
        return lr if local > lr else local  # in this order a NaN stays one

    def rates(self, *, weight_norms: Tensor, gradient_norms: Tensor) -> Tensor:
        """Return the rates from norms that are on a device; nothing is read back from it."""
        still = (weight_norms == 0) | (gradient_norms == 0)
        # the denominator is kept from 0, for a 0 / 0 that is not chosen still makes the gradient of `where` a NaN
        below = torch.where(still, 1.0, gradient_norms + self.weight_decay * weight_norms)
        local = self.trust_coefficient * weight_norms / below
        # `lr` may be a scalar on the CPU: `mul` and `minimum` take it as a number, `where` would copy it and wait
        if not self.clip:
            return self.lr * torch.where(still, 1.0, local)
        limited = torch.where(still, math.inf, local)
        return torch.minimum(limited, self.lr) if isinstance(self.lr, Tensor) else limited.clamp(max=self.lr)

    def on(self, device: torch.device) -> LayerStep:
        """Return the same step with a rate that can be used beside tensors on a device."""
        if not isinstance(self.lr, Tensor) or self.lr.is_cpu or self.lr.device == device:
            return self
        return dataclasses.replace(self, lr=self.lr.to(device, non_blocking=True))


_STEP_SETTINGS = tuple(field.name for field in dataclasses.fields(LayerStep))  # torch.compile cannot trace `fields`


# -- a step, in three ways ---------------------------------------------------------------------------------------------


class LayerTensors(NamedTuple):
    """A parameter with its gradient and its velocity (None without momentum)."""

    parameter: Tensor
    gradient: Tensor
    velocity: Tensor | None


def _columns(layers: Sequence[LayerTensors]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return parameters, gradients and velocities as torch's kernels take them: without momentum no velocities."""
    velocities = [layer.velocity for layer in layers if layer.velocity is not None]
    return [layer.parameter for layer in layers], [layer.gradient for layer in layers], velocities


def norms_in(tensor: Tensor) -> torch.dtype | None:
    """Return the type for sums of squares: half precision overflows at 256, and on the CPU float32 loses digits."""
    if tensor.is_cpu:
        return torch.float64
    return torch.float32 if tensor.dtype in _HALVES else None


def one_by_one(layers: list[LayerTensors], step: LayerStep) -> None:
    """Take the step by plain tensor arithmetic, layer by layer; the rates stay on their device."""
    for layer in layers:
        parameter, gradient, _ = layer
        # autograd keeps what the norm was taken of, and the parameter is about to be changed in place
        weights = parameter.clone() if step.differentiable else parameter
        near = step.on(parameter.device)
        rate: float | Tensor = near.lr
        if step.scales(parameter):
            rate = near.rates(
                weight_norms=torch.linalg.vector_norm(weights, dtype=norms_in(weights)),
                gradient_norms=torch.linalg.vector_norm(gradient, dtype=norms_in(gradient)),
            )
        _plainly(layer, rate, step)


def _plainly(layer: LayerTensors, rate: float | Tensor, step: LayerStep) -> None:
    parameter, gradient, velocity = layer
    direction = gradient.neg() if step.maximize else gradient
    if step.weight_decay != 0:
        direction = direction.add(parameter, alpha=step.weight_decay)
    moved = direction * rate
    if velocity is None:
        parameter.sub_(moved)
        return
    velocity.mul_(step.momentum).add_(moved)
    parameter.sub_(moved.add(velocity, alpha=step.momentum) if step.nesterov else velocity)


def many_at_once(layers: list[LayerTensors], step: LayerStep) -> None:
    """Take the step by foreach kernels, for layers of one device and type at a time."""
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[LayerTensors]] = {}
    for layer in layers:
        parameter, gradient, _ = layer
        alike.setdefault((parameter.device, parameter.dtype, gradient.dtype), []).append(layer)
    for chosen in alike.values():
        _many_alike(*_columns(chosen), step)


def _many_alike(parameters: list[Tensor], gradients: list[Tensor], velocities: list[Tensor], step: LayerStep) -> None:
    rates = _rates_of_many(parameters, gradients, step)
    moved = gradients
    if step.maximize:
        moved = list(torch._foreach_neg(moved))
    if step.weight_decay != 0:
        moved = list(torch._foreach_add(moved, parameters, alpha=step.weight_decay))
    if moved is gradients:
        moved = list(torch._foreach_mul(moved, rates))
    else:
        torch._foreach_mul_(moved, rates)
    if velocities:
        torch._foreach_mul_(velocities, step.momentum)
        torch._foreach_add_(velocities, moved)
        if step.nesterov:
            torch._foreach_add_(moved, velocities, alpha=step.momentum)
        else:
            moved = velocities
    torch._foreach_sub_(parameters, moved)


def _rates_of_many(parameters: list[Tensor], gradients: list[Tensor], step: LayerStep) -> list[Tensor]:
    """Return one rate per layer, each a tensor without dimensions on the layers' device."""
    first = parameters[0]
    near = step.on(first.device)
    lr = near.lr
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=norms_in(first) or first.dtype, device=first.device)
    rates = [lr] * len(parameters)
    scaled = [index for index, parameter in enumerate(parameters) if step.scales(parameter)]
    if scaled:
        weights, slopes = [parameters[index] for index in scaled], [gradients[index] for index in scaled]
        found = near.rates(
            weight_norms=torch.stack(torch._foreach_norm(weights, 2, norms_in(first))),
            gradient_norms=torch.stack(torch._foreach_norm(slopes, 2, norms_in(slopes[0]))),
        )
        for index, rate in zip(scaled, found.unbind(), strict=True):
            rates[index] = rate
    return rates


@_disable_dynamo  # reads numbers back: one break in the graph, as torch's fused steps are, and not one per layer
def one_pass(layers: list[LayerTensors], step: LayerStep) -> None:
    """Take the step by torch's fused SGD kernel on the CPU, with each layer's rate; all that share one in one call."""
    same_rate = []
    for layer in layers:
        if layer.parameter.dtype != torch.float32 or not fits_the_kernel(layer):
            one_by_one([layer], step)
        elif step.scales(layer.parameter):
            rate = step.rate(weight_norm=cpu_norm(layer.parameter), gradient_norm=cpu_norm(layer.gradient))
            _fused([layer], rate, step)
        else:
            same_rate.append(layer)
    if same_rate:
        _fused(same_rate, float(step.lr), step)


def fits_the_kernel(layer: LayerTensors) -> bool:
    """Whether a layer's tensors are dense, of one type and in one order: the kernel walks through memory blindly."""
    parameter, gradient, velocity = layer
    velocity = parameter if velocity is None else velocity
    if parameter.dtype in _HALVES or not parameter.dtype == gradient.dtype == velocity.dtype:
        return False
    return any(fits(parameter) and fits(gradient) and fits(velocity) for fits in MEMORY_ORDERS)


def _fused(layers: list[LayerTensors], rate: float, step: LayerStep) -> None:
    parameters, gradients, velocities = _columns(layers)
    if not velocities:
        _kernel(parameters, gradients, [], step, lr=rate)
    elif not rate >= _LEAST_RATE_IN_ONE_PASS:  # or not a number
        for layer in layers:
            _plainly(layer, rate, step)
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
    step: LayerStep,
    *,
    lr: float,
    dampening: float = 0.0,
) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        velocities,
        weight_decay=step.weight_decay,
        momentum=step.momentum if velocities else 0.0,
        lr=lr,
        dampening=dampening,
        nesterov=False,
        maximize=step.maximize,
        is_first_step=False,
    )
