"""Computes the update of a `Step`: the weighted sum of the gradients that its shares name.

    update = sum(fresh) + sum(late) - previous_mean_weight * (sum(fresh) of the step before)

sum(...) adds up weight * gradient. This is the only place where gradients are added up, always in the order of the
step's shares, element by element. So the same step gives the same bits for any length of the vector and any number of
threads. Processors with a fused multiply-add give other bits than those without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.events import Share, Step


class Combiner:
    """Turns steps into updates, and remembers one vector: the fresh sum of the step before.

    With `remembers=False` it does not keep that vector, and refuses steps with a `previous_mean_weight`.

    >>> combiner = Combiner()
    >>> step = Step(version=0, fresh=(Share(worker=0, version=0, weight=0.5), Share(worker=1, version=0, weight=0.5)))
    >>> combiner.update(step, lambda share: torch.tensor([2.0 * share.worker]))
    tensor([1.])
    """

    def __init__(self, *, remembers: bool = True) -> None:
        self._remembers = remembers
        self._previous_fresh: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None

    def update(
        self, step: Step, gradient_of: Callable[[Share], torch.Tensor], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the update that a step asks for, in `out` if that is given; `gradient_of` finds a share's gradient."""
        if not step.fresh:
            raise ValueError("a step needs at least one fresh gradient")
        first, *others = step.fresh
        gradient = gradient_of(first)
        out = torch.mul(gradient, first.weight, out=torch.empty_like(gradient) if out is None else out)
        for share in others:
            out.add_(gradient_of(share), alpha=share.weight)
        fresh = self._copy(out) if self._remembers else None
        for share in step.late:
            out.add_(gradient_of(share), alpha=share.weight)
        if step.previous_mean_weight:
            if self._previous_fresh is None:
                raise ValueError(f"step {step.version} compensates for a step before it, but none is remembered")
            out.sub_(self._previous_fresh, alpha=step.previous_mean_weight)
        self._previous_fresh, self._spare = fresh, self._previous_fresh
        return out

    def _copy(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a copy, in memory that was used before if there is some."""
        if self._spare is None:
            return vector.clone()
        return self._spare.copy_(vector)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the vector that it remembers, if there is one."""
        return {} if self._previous_fresh is None else {"previous_fresh": self._previous_fresh}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict`."""
        self._previous_fresh, self._spare = state.get("previous_fresh"), None
