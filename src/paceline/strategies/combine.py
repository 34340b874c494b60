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

    >>> combiner = Combiner()
    >>> step = Step(version=0, fresh=(Share(worker=0, version=0, weight=0.5), Share(worker=1, version=0, weight=0.5)))
    >>> combiner.update(step, lambda share: torch.tensor([2.0 * share.worker]))
    tensor([1.])
    """

    def __init__(self) -> None:
        self._previous_fresh: torch.Tensor | None = None

    def update(self, step: Step, gradient_of: Callable[[Share], torch.Tensor]) -> torch.Tensor:
        """The update that a step asks for; `gradient_of` finds the gradient behind a share.

        It may be the very vector that is remembered: read it, and leave it as it is.
        """
        fresh = _weighted_sum(step.fresh, gradient_of)
        update = fresh.clone() if step.late or step.previous_mean_weight else fresh
        for share in step.late:
            update.add_(gradient_of(share), alpha=share.weight)
        if step.previous_mean_weight:
            if self._previous_fresh is None:
                raise ValueError(f"step {step.version} compensates for a step before it, but none was taken")
            update.sub_(self._previous_fresh, alpha=step.previous_mean_weight)
        self._previous_fresh = fresh
        return update

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The vector it remembers, if there is one."""
        return {} if self._previous_fresh is None else {"previous_fresh": self._previous_fresh}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict`."""
        self._previous_fresh = state.get("previous_fresh")


def _weighted_sum(shares: Iterable[Share], gradient_of: Callable[[Share], torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for share in shares:
        gradient = gradient_of(share)
        total = gradient * share.weight if total is None else total.add_(gradient, alpha=share.weight)
    if total is None:
        raise ValueError("a step needs at least one fresh gradient")
    return total
