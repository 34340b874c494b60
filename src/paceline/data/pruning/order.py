"""The order in which one worker meets its samples while some of them sit passes out.

    pass 0 (epoch 1)      pass 1 (epoch 2): b and e sit out      pass 2 ...
    c a d b e           | e b a c d  ->  a c d                 | ...
    [c a d b][e a c d] ...                                          batches run across the ends of passes

This is the order of `data/batches.py` without the samples that sit out: every batch has exactly `batch_size` samples,
and a pass in which no sample sits out is the same permutation as there. The policy knows samples by their position in
the shard, and counts passes as epochs, from 1. Which samples take part in a pass is decided when its first sample is
drawn, from all losses judged by then. A batch that spans two passes is judged as one batch of the first of them.

The next batch depends only on the seed, and on the draws and judged losses of this worker. A worker that takes over
from another at draw d has no losses to go by: it begins a new pass, number d * batch_size // shard size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.batches import check_shard
from paceline.data.pruning import PruningSettings, make_policy
from paceline.data.pruning.epoch import with_tensors
from paceline.data.pruning.groups import Groups
from paceline.data.pruning.policy import Decision, saved_array, whole_number
from paceline.randomness import seed_for, torch_generator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrunedBatch:
    """A batch: numbers of samples of the data set, and what each weighs (None: all weigh 1).

    >>> PrunedBatch(indices=torch.tensor([4, 7])).weights is None
    True
    """

    indices: torch.Tensor
    weights: torch.Tensor | None = None


class PrunedOrder:
    """Endless batches of a shard for one worker; `judge` takes the losses of each.

    `draws` is how many batches the worker is expected to draw in the whole run, for policies that ask how far it is;
    where `passes` says after how many of them the run ends, they say how far it is. `groups` are those of the shard's
    samples: what is protected, or else what `unequal` tells of.

    >>> settings = PruningSettings(name="info-batch", ratio=0.5)
    >>> order = PrunedOrder(torch.arange(10, 16), 3, settings, seed=0, worker=0, draws=100)
    >>> for _ in range(8):
    ...     batch = order.next()
    ...     order.judge(batch.indices.numpy().astype(np.float32))
    >>> order.whole_passes, order.sat_out > 0
    (4, True)
    """

    def __init__(
        self,
        shard: torch.Tensor,
        batch_size: int,
        settings: PruningSettings,
        *,
        seed: int,
        worker: int,
        draws: int,
        first_draw: int = 0,
        passes: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        check_shard(shard, batch_size=batch_size, worker=worker)
        for name, value, least in (("draws", draws, 1), ("first_draw", first_draw, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least} ({name}={value})")
        if settings.protect is not None and groups is None:
            raise ValueError(
                f"protect needs the groups of the shard's samples (protect={settings.protect!r}, groups=None)"
            )
        self._shard, self._batch_size, self._seed, self._worker, self._draws = shard, batch_size, seed, worker, draws
        self.policy = make_policy(
            settings,
            len(shard),
            seed=seed_for(seed, "pruning", worker),
            protected=groups if settings.protect is not None else None,
        )
        self._groups = groups if settings.protect is None else None
        self.unequal = ""  # which groups have lost more than twice their share, since that was first so
        self.draw, self._passes = first_draw, passes
        self.whole_passes = self.sat_out = 0
        self._number = first_draw * batch_size // len(shard)  # of the pass
        self._position = 0
        self._decision = Decision()
        self._pass: torch.Tensor | None = None  # positions in the shard, in the order of the pass; None: not begun
        self._open: torch.Tensor | None = None  # the positions of the last batch, until it is judged
        self._open_epoch = 0

    def next(self) -> PrunedBatch:
        """Return the next batch, exactly `batch_size` samples."""
        positions: list[torch.Tensor] = []
        weights: list[NDArray[np.float32] | None] = []
        missing, self._open_epoch = self._batch_size, self._number + 1
        while missing > 0:
            kept = self._begun_pass()
            taken = kept[self._position : self._position + missing]
            positions.append(taken)
            weights.append(self._decision.weights_of(taken.numpy()))
            missing -= len(taken)
            self._position += len(taken)
            if self._position == len(kept):
                self._end_pass()
        self.draw += 1
        self._open = torch.cat(positions)
        return PrunedBatch(indices=self._shard[self._open], weights=_joined(positions, weights))

    def judge(self, losses: NDArray[np.float32]) -> None:
        """Learn from the finite losses of the last batch, or of its first samples if no more were done."""
        if self._open is None or len(losses) > len(self._open):
            size = 0 if self._open is None else len(self._open)
            raise ValueError(f"there are {len(losses)} losses, and {size} samples that wait for theirs")
        positions, self._open = self._open[: len(losses)].numpy(), None
        finite = np.isfinite(losses)
        count = int(np.count_nonzero(finite))
        if count:
            self.policy.judge(self._open_epoch, positions[finite], losses[finite], np.array([count]))

    # -- passes ------------------------------------------------------------------------------------------------

    def _begun_pass(self) -> torch.Tensor:
        if self._pass is None:
            done = self.draw / self._draws if self._passes is None else self._number / self._passes
            self._decision = self.policy.decide(self._number + 1, min(1.0, done))
            keep = self._decision.keep
            if self._groups is not None and keep is not None and not self.unequal:
                self.unequal = self._groups.unequal_shares(keep)
            self._pass, self._position = self._kept(self._number, keep), 0
        return self._pass

    def _kept(self, number: int, keep: NDArray[np.bool_] | None) -> torch.Tensor:
        """Return who takes part in a pass, in its order."""
        generator = torch_generator(self._seed, "batches", self._worker, number)
        permuted = torch.randperm(len(self._shard), generator=generator)
        return permuted if keep is None else permuted[torch.from_numpy(keep)[permuted]]

    def _end_pass(self) -> None:
        self.policy.end_epoch(self._decision.keep)
        self.whole_passes += 1
        self.sat_out += self._decision.pruned
        self._number += 1
        self._pass, self._position, self._decision = None, 0, Decision()

    # -- going on later ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the order stands and what its policy has learned, as plain values and tensors."""
        keep, heavier = self._decision.keep, self._decision.heavier
        return {
            "draw": self.draw,
            "pass": self._number,
            "position": self._position,
            "begun": self._pass is not None,
            "keep": None if keep is None else torch.from_numpy(keep.copy()),
            "heavier": None if heavier is None else torch.from_numpy(heavier.copy()),
            "weight": self._decision.weight,
            "open": self._open,
            "open_epoch": self._open_epoch,
            "whole_passes": self.whole_passes,
            "sat_out": self.sat_out,
            "policy": with_tensors(self.policy.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where another order of the same shard, settings, seed and worker stood.

        A state that is refused changes nothing: the policy's part is the last that can be.
        """
        samples, learned = len(self._shard), state["policy"]
        self.policy.check_samples(learned)
        keep, heavier = (
            None if state[name] is None else saved_array(state[name], np.bool_, samples, name)
            for name in ("keep", "heavier")
        )
        weight, waiting = float(state["weight"]), state["open"]
        if not 0 <= weight < np.inf:
            raise ValueError(f"weight must be at least 0 and finite: the state is damaged (weight={weight})")
        if waiting is not None:
            check_shard(waiting, batch_size=1, worker=0)
            if int(waiting.min()) < 0 or int(waiting.max()) >= samples:
                raise ValueError(f"open must be positions in the shard of {samples:,}: the state is damaged")
        names = ("draw", "pass", "position", "whole_passes", "sat_out", "open_epoch")
        draw, number, position, whole_passes, sat_out, open_epoch = (
            whole_number(name, state[name], least=0, most=2**63) for name in names
        )
        begun = self._kept(number, keep) if state["begun"] else None
        if not 0 <= position < (1 if begun is None else len(begun)):
            raise ValueError(f"position must be within the pass: the state is damaged (position={position})")
        self.policy.load_state_dict(learned)
        self._decision, self._open = Decision(keep=keep, heavier=heavier, weight=weight), waiting
        self.draw, self._number, self._position, self._pass = draw, number, position, begun
        self.whole_passes, self.sat_out, self._open_epoch = whole_passes, sat_out, open_epoch


def _joined(positions: list[torch.Tensor], weights: list[NDArray[np.float32] | None]) -> torch.Tensor | None:
    """Return the weights of a batch; those of a pass without weights are 1."""
    if all(part is None for part in weights):
        return None
    return torch.cat(
        [
            torch.ones(len(taken)) if part is None else torch.from_numpy(part)
            for taken, part in zip(positions, weights, strict=True)
        ]
    )
