"""InfoBatch (Qin et al. 2024): of those below the mean loss some sit out, drawn anew each epoch; the others weigh more.

    score       the loss when a sample was last seen; nobody sits out before it was seen once
    easy        score < mean of all scores
    an epoch    an easy sample is kept with probability 1 - ratio, and then weighs 1 / (1 - ratio)
    the end     in the last (1 - delta) of the run everybody takes part, and weighs 1

So the expected sum of an epoch's gradients is that of all samples. There are fewer steps, each of them larger.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.policy import Decision, Indices, Policy, chunks, finite_number, saved_array


class InfoPolicy(Policy):
    """InfoBatch over `samples` samples.

    >>> policy = InfoPolicy(4, ratio=0.5, seed=0)
    >>> policy.judge(1, np.arange(4), np.array([1, 9, 1, 9], np.float32), np.array([4]))
    >>> policy.decide(2, progress=0.1).weights
    array([2., 1., 2., 1.], dtype=float32)
    """

    name: ClassVar[str] = "info-batch"

    def __init__(self, samples: int, *, ratio: float = 0.5, delta: float = 0.875, seed: int = 0) -> None:
        super().__init__(samples, seed=seed)
        if not 0 <= finite_number("ratio", ratio) < 1:
            raise ValueError(f"ratio must be at least 0 and below 1 (ratio={ratio})")
        if not 0 <= finite_number("delta", delta) <= 1:
            raise ValueError(f"delta must be between 0 and 1 (delta={delta})")
        self.ratio, self.delta = ratio, delta
        self.settings = {"ratio": float(ratio), "delta": float(delta)}
        self.scores = np.full(samples, np.nan, np.float32)

    def decide(self, epoch: int, progress: float = 0.0) -> Decision:
        """Let each sample below the mean score sit out with probability `ratio`."""
        if progress >= self.delta or not self.ratio:
            return Decision()
        easy = self._easy()
        keep = self.draw_kept(epoch)
        np.logical_or(keep, ~easy, out=keep)
        if not easy.any() or np.count_nonzero(keep) < min(2, self.samples):  # no loss is known yet; or one sample stays
            return Decision()
        return Decision(keep=keep, heavier=easy, weight=1 / (1 - self.ratio))

    def _easy(self) -> NDArray[np.bool_]:
        """Return whose score is below the mean of the known scores; an unknown score is not."""
        total, seen = 0.0, 0
        for part in chunks(self.samples):
            known = self.scores[part][~np.isnan(self.scores[part])]
            total, seen = total + float(known.sum(dtype=np.float64)), seen + len(known)
        return np.asarray(self.scores < (total / seen if seen else -np.inf))

    def draw_kept(self, epoch: int) -> NDArray[np.bool_]:
        """Draw which samples would take part if all were easy."""
        generator, kept = self.generator("lots", epoch), np.empty(self.samples, np.bool_)
        for part in chunks(self.samples):
            kept[part] = generator.random(len(kept[part]), np.float32) >= np.float32(self.ratio)
        return kept

    def judge(self, epoch: int, samples: Indices, losses: NDArray[np.float32], ends: Indices) -> None:
        """Remember the losses."""
        for part in chunks(len(samples)):
            self.scores[samples[part]] = losses[part]

    def difficulty(self) -> NDArray[np.float32]:
        """Return the last loss of each sample; 0 for one that was never seen."""
        return np.nan_to_num(self.scores, nan=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, beside what every policy saves."""
        return super().state_dict() | {"scores": self.scores.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one that is refused changes nothing."""
        self.check_samples(state)
        scores = saved_array(state["scores"], np.float32, self.samples, "scores")
        super().load_state_dict(state)
        self.scores = scores
