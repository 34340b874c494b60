"""Computes the update of a `Step`: the weighted sum of the gradients that its shares name.

    update = sum(fresh) + sum(late) - previous_mean_weight * (sum(fresh) of the step before)

sum(...) adds up weight * gradient. This is the only place where one process adds up gradients, always in the order of
the step's shares, element by element. So the same step gives the same bits for any length of the vector and any number
of threads. Processors with a fused multiply-add give other bits than those without.

It goes block by block: a block stays in the processor's cache while all gradients are added to it, and the fresh sum
takes the place of the one before without a copy of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.events import Share, Step

BLOCK = 512 * 1024  # elements; a multiple of what a processor adds at once


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
        self._sums: list[torch.Tensor] = []

    def update(
        self,
        step: Step,
        gradient_of: Callable[[Share], torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        check: bool = False,
    ) -> torch.Tensor:
        """Return the update that a step asks for, in `out` if that is given; `gradient_of` finds a share's gradient.

        With `check`, `is_finite` can be asked afterwards: each block is looked at while it is in the cache.
        """
        if not step.fresh:
            raise ValueError("a step needs at least one fresh gradient")
        if step.previous_mean_weight and self._previous_fresh is None:
            raise ValueError(f"step {step.version} compensates for a step before it, but none is remembered")
        shares = [(share.weight, gradient_of(share)) for share in (*step.fresh, *step.late)]
        out = torch.empty_like(shares[0][1]) if out is None else out
        remembered = self._previous_fresh
        if self._remembers and remembered is None:
            remembered = torch.empty_like(out)
        self._sums = []
        for start in range(0, out.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            before = None if remembered is None else remembered[part]
            self._add_up(step, [(weight, gradient[part]) for weight, gradient in shares], out[part], before)
            if check:
                self._sums.append(out[part].sum())
        self._previous_fresh = remembered if self._remembers else None
        return out

    def is_finite(self, update: torch.Tensor) -> bool:
        """Return whether the update that was just made, with `check`, is finite."""
        sums_are_finite = bool(torch.isfinite(torch.stack(self._sums)).all()) if self._sums else False
        return sums_are_finite or bool(torch.isfinite(update).all())

    def _add_up(
        self,
        step: Step,
        shares: Sequence[tuple[float, torch.Tensor]],
        out: torch.Tensor,
        remembered: torch.Tensor | None,
    ) -> None:
        """Compute a block of the update, and put its fresh sum in the place of the one before."""
        weight, gradient = shares[0]
        torch.mul(gradient, weight, out=out)
        for weight, gradient in shares[1 : len(step.fresh)]:
            out.add_(gradient, alpha=weight)
        fresh = out.clone() if remembered is not None and self._remembers else None
        for weight, gradient in shares[len(step.fresh) :]:
            out.add_(gradient, alpha=weight)
        if step.previous_mean_weight and remembered is not None:
            out.sub_(remembered, alpha=step.previous_mean_weight)
        if fresh is not None and remembered is not None:
            remembered.copy_(fresh)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the vector that it remembers, if there is one."""
        return {} if self._previous_fresh is None else {"previous_fresh": self._previous_fresh}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a copy of a `state_dict`."""
        held = state.get("previous_fresh")
        self._previous_fresh = None if held is None else held.clone()
