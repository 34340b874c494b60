"""A step's shares and the gradients they name -> one update.

    update = sum(fresh) + sum(late) - previous_mean_weight * (sum(fresh) of the step before)

Sums run in the order of the step's shares, so that the same step gives the same bits wherever it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from paceline.events import Share, Step


class Combiner:
    """Turns steps into updates; remembers one vector, the fresh sum of the step before.

    One that never `remembers` saves a copy, and cannot compensate.

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
        """The update that a step asks for, in `out` if that is given; `gradient_of` finds a share's gradient."""
        out = _weighted_sum(step.fresh, gradient_of, out)
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
        """A copy, in memory that was used before if there is some."""
        if self._spare is None:
            return vector.clone()
        return self._spare.copy_(vector)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The vector it remembers, if there is one."""
        return {} if self._previous_fresh is None else {"previous_fresh": self._previous_fresh}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict`."""
        self._previous_fresh, self._spare = state.get("previous_fresh"), None


def _weighted_sum(
    shares: Iterable[Share], gradient_of: Callable[[Share], torch.Tensor], out: torch.Tensor | None
) -> torch.Tensor:
    total: torch.Tensor | None = None
    for share in shares:
        gradient = gradient_of(share)
        if total is None:
            total = torch.mul(gradient, share.weight, out=torch.empty_like(gradient) if out is None else out)
        else:
            total.add_(gradient, alpha=share.weight)
    if total is None:
        raise ValueError("a step needs at least one fresh gradient")
    return total
