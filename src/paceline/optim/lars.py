"""LARS: every layer moves by a share of its own length (You, Gitman, Ginsburg: large batch training, 2017).

With large batches come large rates, and the layer whose gradient is largest beside its weights bursts first: in
AlexNet |w| / |g| is 5.8 in the first layer and 1345 in a late one. One rate for all is then too much for one layer
and too little for another. LARS gives each its own,

    local = trust * |w| / (|g| + weight_decay * |w|)
    v     = momentum * v + lr * local * (g + weight_decay * w)
    w     = w - v

Where we differ from the paper: biases and the scales of normalisation are left out of the scaling unless
`exclude_bias_and_norm=False` (a tensor of at most one dimension counts as such); where a norm is 0, local is 1.
Weight decay applies to all. `trust=None` switches the scaling off, and what remains is `torch.optim.SGD`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _default_to_fused_or_foreach, _use_grad_for_differentiable
from torch.optim.sgd import sgd

from paceline.optim.lars_checks import PLAIN, check_parameter, check_settings
from paceline.optim.lars_rates import Trust
from paceline.optim.lars_steps import Layers, Step, fits_the_kernel, many_at_once, one_by_one, one_pass

_VELOCITY, _MOMENTUM = "velocity", "momentum_buffer"  # with rates of the past in it, and without: torch's SGD


class LARS(Optimizer):
    """SGD with momentum and layer-wise adaptive rates, for large batches; used like any `torch.optim` optimiser.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = LARS(model.parameters(), lr=2.0)
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(3, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> moved = (model.weight - before).norm() / before.norm()
    >>> 0.0019 < moved <= 0.002001  # lr * trust of its length
    tensor(True)

    Args:
        params: parameters, named parameters or groups of them, as for every optimiser of torch.
        lr: global rate, a number or a tensor of one element. LARS wants large ones: the paper has 2 to 30.
        momentum: share of the last step that is taken again, between 0 and 1.
        weight_decay: L2 penalty; part of the gradient, and of the local rate.
        trust: the share of its own length by which a layer may move per unit of lr; None: no scaling, torch's SGD.
        exclude_bias_and_norm: whether tensors of at most one dimension take lr as it is.
        nesterov: look-ahead momentum, as in torch's SGD.
        clip: lr is an upper limit for the local rate instead of a factor (LARC).
        maximize: climb instead of descend.
        foreach: torch's multi-tensor kernels; the default on GPUs. No step waits for the device.
        fused: one pass through memory per layer, by torch's fused SGD kernel; the default on the CPU, and only there.
            For float32; other types and tensors that lie otherwise in memory take the plain way.
        differentiable: let autograd pass through the step.

    A NaN in a gradient makes its whole layer NaN, and an infinity at least the elements where it was; where the rate is
    not scaled, both only the elements where they were, as in torch's SGD. Other layers are not touched. With mixed
    precision `torch.amp.GradScaler` leaves such a step out.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float | None = 0.001,
        exclude_bias_and_norm: bool = True,
        nesterov: bool = False,
        clip: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "exclude_bias_and_norm": exclude_bias_and_norm,
            "nesterov": nesterov,
            "clip": clip,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "differentiable": differentiable,
        }
        check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group, with settings of its own where it names them.

        >>> optimizer = LARS([torch.zeros(2, 2)], lr=1.0)
        >>> optimizer.add_param_group({"params": [torch.zeros(2)], "trust": None, "lr": 0.1})
        >>> optimizer.add_param_group({"params": [torch.zeros(3)], "momentum": -1})
        Traceback (most recent call last):
        ValueError: momentum must be between 0 and 1 (momentum=-1)
        """
        check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_parameter(parameter, fused=self.param_groups[-1]["fused"])
        except TypeError:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` has kept; that of another optimiser is refused, for its momentum is another.

        >>> weight = torch.zeros(2, 2)
        >>> LARS([weight], lr=1.0).load_state_dict(torch.optim.SGD([weight], lr=0.1).state_dict())
        Traceback (most recent call last):
        ValueError: this state is not that of LARS: its groups have no 'trust'; begin anew, LARS's rates are others too
        """
        if any("trust" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "this state is not that of LARS: its groups have no 'trust'; begin anew, LARS's rates are others too"
            )
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the gradients at hand; `closure` may compute them anew and return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            layers = self._layers(group)
            if layers.parameters:
                _take_step(layers, group)
        return loss

    def _layers(self, group: dict[str, Any]) -> Layers:
        """The parameters of a group that have a gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        velocities: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "LARS needs dense gradients (a layer's norm is taken); build Embedding(sparse=False)"
                )
            if group["momentum"] != 0:
                state, name = self.state[parameter], _MOMENTUM if group["trust"] is None else _VELOCITY
                if state.get(name) is None:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                velocities.append(state[name])
        return Layers(
            parameters=parameters, gradients=[parameter.grad for parameter in parameters], velocities=velocities
        )


def _take_step(layers: Layers, group: dict[str, Any]) -> None:
    if group["trust"] is None:
        _torch_sgd(layers, group)
        return
    lr = group["lr"]
    step = Step(
        trust=Trust(
            lr=lr.squeeze() if isinstance(lr, Tensor) else lr,
            trust=group["trust"],
            weight_decay=group["weight_decay"],
            clip=group["clip"],
        ),
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        exclude_bias_and_norm=group["exclude_bias_and_norm"],
        differentiable=group["differentiable"],
    )
    _way(layers.parameters, group)(layers, step)


def _way(parameters: list[Tensor], group: dict[str, Any]) -> Callable[[Layers, Step], None]:
    """Which of the three: the one asked for, or else the quickest that fits."""
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


def _torch_sgd(layers: Layers, group: dict[str, Any]) -> None:
    sgd(
        layers.parameters,
        layers.gradients,
        list(layers.velocities) if layers.velocities else [None] * len(layers.parameters),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        foreach=False if group["differentiable"] else group["foreach"],
        fused=group["fused"] and all(fits_the_kernel(layers, index) for index in range(len(layers.parameters))),
    )
