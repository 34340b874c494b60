"""A sampler's state, read with suspicion: whatever does not fit is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.numbers import whole
from paceline.data.pruning.policy import Policy, array_of
from paceline.data.pruning.prepared import PreparedEpoch

_HINT = "the state is damaged, or not one of a pruning sampler"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Where a sampler stood; in the middle of an epoch with the epoch and its losses so far."""

    epoch: int
    attempt: int
    observed: int
    ready: PreparedEpoch | None
    losses: NDArray[np.float32]
    given: NDArray[np.bool_] | None
    sampler: Any


def with_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with tensors for arrays: what `torch.save` writes and `torch.load(weights_only=True)` reads.

    >>> with_tensors({"samples": 1, "scores": np.zeros(1, np.float32)})
    {'samples': 1, 'scores': tensor([0.])}
    """
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}


def middle(ready: PreparedEpoch, losses: NDArray[np.float32]) -> dict[str, Any]:
    """What of an epoch is kept in its middle: who takes part, in which order, with which losses so far."""
    dealing = ready.dealing
    return {
        "rank": dealing.rank,
        "world_size": dealing.ranks,
        "batch_size": dealing.batch_size,
        "drop_last": dealing.drop_last,
        "order": torch.from_numpy(ready.order.copy()),
        "keep": None if ready.keep is None else torch.from_numpy(ready.keep.copy()),
        "shares": None if ready.shares is None else ready.shares.clone(),
        "losses": torch.from_numpy(losses.copy()),
    }


def checked(state: Mapping[str, Any], policy: Policy, dealing: Dealing) -> Saved:
    """Check a state, and load the policy's part of it: the last thing that can be refused.

    >>> from paceline.data.pruning.info_policy import InfoPolicy
    >>> checked({}, InfoPolicy(3), Dealing(batch_size=2))
    Traceback (most recent call last):
    ValueError: 'policy' is missing: the state is damaged, or not one of a pruning sampler
    """
    try:
        return _checked(state, policy, dealing)
    except KeyError as missing:
        raise ValueError(f"{missing} is missing: {_HINT}") from None


def _checked(state: Mapping[str, Any], policy: Policy, dealing: Dealing) -> Saved:
    learned = state["policy"]
    if not isinstance(learned, Mapping):
        raise ValueError(f"policy must be what a policy has learned (it is a {type(learned).__name__}): {_HINT}")
    if learned["name"] != policy.name:
        raise ValueError(f"this state is of {learned['name']}, and the sampler prunes by {policy.name}")
    policy.check_data(dict(learned))
    observed = whole("observed", state["observed"], least=0)
    ready, losses = _middle(state, policy.samples, dealing, observed) if observed else (None, np.empty(0, np.float32))
    base = state.get("base")
    found = Saved(
        epoch=whole("epoch", state["epoch"], least=1),
        attempt=whole("attempt", state["attempt"], least=0),
        observed=observed,
        ready=ready,
        losses=losses,
        given=None if base is None else array_of(base["given"], np.bool_, policy.samples, "given"),
        sampler=None if base is None else base["sampler"],
    )
    policy.load_state_dict(dict(learned))
    return found


def _middle(
    state: Mapping[str, Any], samples: int, dealing: Dealing, observed: int
) -> tuple[PreparedEpoch, NDArray[np.float32]]:
    """An epoch from its middle: it is of one rank among so many, with its batch size."""
    here = {"rank": dealing.rank, "world_size": dealing.ranks, "batch_size": dealing.batch_size}
    for name, value in (here | {"drop_last": dealing.drop_last}).items():
        if state[name] != value:
            raise ValueError(
                f"this state is from the middle of an epoch, with {name}={state[name]}, and here it is {value}: "
                "give every rank its own state, or save between epochs, where one state is for all"
            )
    size = len(state["order"]) if isinstance(state["order"], torch.Tensor) else 0
    order = array_of(state["order"], np.int32, size, "order")
    losses = array_of(state["losses"], np.float32, size, "losses")
    keep = None if state["keep"] is None else array_of(state["keep"], np.bool_, samples, "keep")
    shares = None if state["shares"] is None else array_of(state["shares"], np.float32, size, "shares")
    if not size or order.min() < 0 or order.max() >= samples or (keep is not None and not keep[order].all()):
        raise ValueError(f"order must hold numbers of samples that take part, below {samples:,}: {_HINT}")
    if np.isinf(losses).any() or (shares is not None and not (np.isfinite(shares) & (shares > 0)).all()):
        raise ValueError(f"losses and shares must be finite: {_HINT}")
    weights = None if shares is None else torch.from_numpy(shares)
    ready = PreparedEpoch(order=order, shares=weights, keep=keep, dealing=dealing)
    if observed >= ready.steps:
        raise ValueError(f"observed must be below the {ready.steps} batches of its epoch ({observed=}): {_HINT}")
    return ready, losses
