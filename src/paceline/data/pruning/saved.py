"""A sampler's state, read with suspicion: whatever does not fit is refused before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.policy import Policy, array_of

_HINT = "the state is damaged, or not one of a pruning sampler"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Where a sampler stood; the order and the losses where it was in the middle of an epoch."""

    epoch: int
    attempt: int
    observed: int
    order: NDArray[np.int32]
    losses: NDArray[np.float32]


def with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The state with tensors for arrays: what `torch.save` writes and `torch.load(weights_only=True)` reads.

    >>> with_tensors({"samples": 1, "scores": np.zeros(1, np.float32)})
    {'samples': 1, 'scores': tensor([0.])}
    """
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}


def checked(state: dict[str, Any], policy: Policy, dealing: Dealing) -> Saved:
    """Check a state, and load the policy's part of it: the last thing that can be refused.

    >>> from paceline.data.pruning.info_policy import InfoPolicy
    >>> checked({}, InfoPolicy(3), Dealing(batch_size=2))
    Traceback (most recent call last):
    ValueError: policy is missing: the state is damaged, or not one of a pruning sampler
    """
    for name in ("policy", "epoch", "attempt", "observed"):
        if name not in state:
            raise ValueError(f"{name} is missing: {_HINT}")
    epoch, attempt, observed = (_whole(state, *each) for each in (("epoch", 1), ("attempt", 0), ("observed", 0)))
    kind = dict(state["policy"]).get("name")
    if kind != policy.name:
        raise ValueError(f"this state is of {kind}, and the sampler prunes by {policy.name}")
    order, losses = np.empty(0, np.int32), np.empty(0, np.float32)
    if observed:
        _check_place(state, dealing)
        order, losses = _middle(state, policy.samples)
        if observed >= dealing.steps(len(order)):
            raise ValueError(f"observed must be below the {dealing.steps(len(order))} batches of its epoch: {_HINT}")
    try:
        policy.load_state_dict(dict(state["policy"]))
    except KeyError as missing:
        raise ValueError(f"{missing} is missing: {_HINT}") from None
    return Saved(epoch=epoch, attempt=attempt, observed=observed, order=order, losses=losses)


def _whole(state: dict[str, Any], name: str, least: int) -> int:
    value = state[name]
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least} ({name}={value!r}): {_HINT}")
    return value


def _check_place(state: dict[str, Any], dealing: Dealing) -> None:
    """A state from the middle of an epoch is of one rank, among so many, with this batch size."""
    here = {"rank": dealing.rank, "world_size": dealing.ranks, "batch_size": dealing.batch_size}
    for name, value in here.items():
        if state.get(name) != value:
            raise ValueError(
                f"this state is from the middle of an epoch, with {name}={state.get(name)}, and here it is {value}: "
                "give every rank its own state, or save between epochs, where one state is for all"
            )


def _middle(state: dict[str, Any], samples: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    size = len(state["order"]) if isinstance(state.get("order"), torch.Tensor) else 0
    order = array_of(state.get("order", ()), np.int32, size, "order")
    losses = array_of(state.get("losses", ()), np.float32, size, "losses")
    if not size or order.min() < 0 or order.max() >= samples:
        raise ValueError(f"order must hold numbers of samples below {samples:,}: {_HINT}")
    if np.isinf(losses).any():
        raise ValueError(f"losses must be finite: {_HINT}")
    return order, losses
