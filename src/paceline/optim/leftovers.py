"""Gradients that are not as a group of parts left them: there too early, or gone, or changed in its middle.

The usual slips around accumulation give a wrong gradient without a word: `zero_grad()` at the top of every part, as in
the plain loop; a step after every part; clipping in the middle; no `zero_grad()` after the step. What they do to one
parameter and its gradient can be seen without reading a number: another tensor, or another version of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.optim.norms import entries


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A parameter and its gradient as a part left them."""

    name: str
    parameter: Tensor
    gradient: Tensor
    versions: tuple[int, int]

    def check(self) -> None:
        """Refuse to add another part to what is no longer the sum of the parts before."""
        if self.parameter.grad is not self.gradient:
            what = "the gradients of the parts before are gone"
        elif self.gradient._version != self.versions[1]:
            what = "the gradients of the parts before have been changed"
        elif self.parameter._version != self.versions[0]:
            what = "the parameters have been changed"
        else:
            return
        raise RuntimeError(
            f"{what} in the middle of a group ({self.name}): step, zero_grad and clipping belong where "
            "accumulate.ready is True; to begin a group anew, call accumulate.forget()"
        )


def watch(modules: Iterable[torch.nn.Module]) -> Watched | None:
    """The first parameter that has a gradient, to be looked at again before the next part's backward.

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
    """The name of a parameter whose gradient is not zero; each device is asked once.

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
