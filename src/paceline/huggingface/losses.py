"""The loss of each sample, from what a model of transformers gives: its logits, and the labels of the batch.

    tokens      a b c │ d e f        logits (batch, tokens, words), labels (batch, tokens); -100 is no label
    labels      b c -  │ e - -       a causal model's logits at a place are for the label after it: shifted by one
    loss        2 4    │ 3           items: 2 and 1
    of samples  3      │ 3           the mean over a sample's items

    loss of the batch   (2 * 3 + 1 * 3) / (2 + 1)       every item counts the same, as in Trainer

Models return one loss for the batch, so the losses of samples are computed again, and compared with it: put together
they must give the same. That shows too whether labels are shifted (names do not tell it: GPT2LMHeadModel has no loss
type that transformers 5.23 knows), and by what the model divides. Trainer gives a model the number of items of all
accumulated batches of all ranks, and takes the loss for one that was divided by it; heads for classification of
transformers 5.23 that compute their loss themselves divide by their own batch, so that gradients grow with ranks and
accumulation. It is left as it is: with nobody pruned the loss is Trainer's own.

Where nothing fits (a mixture of experts adds a loss for its router, a loss has weights for classes) the losses of
samples cannot be known, and the user has to give them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from paceline.huggingface.hooks import TrainerSetupError

NO_LABEL = -100
LOOKS = 4  # batches: two losses may be alike by chance, as 2.9737 and 2.9749 were, one of them of other labels
TOLERANCE, TOLERANCE_OF_HALVES = 2e-5, 1e-2
HINT = "give prune() the losses yourself: losses=lambda outputs, inputs: one number for each sample"


class SampleLosses(NamedTuple):
    """The mean loss of each sample, and over how many items (tokens; one for a class) it is the mean."""

    losses: torch.Tensor
    items: torch.Tensor


def sample_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    shifted: bool = False,
    smoothing: float = 0.0,
    regression: bool = False,
) -> SampleLosses:
    """Return the loss of each sample: of tokens, of a class, of several classes at once, or of a regression.

    >>> logits = torch.zeros(2, 3, 4)
    >>> sample_losses(logits, torch.tensor([[0, 1, 2], [0, 1, -100]]), shifted=True)
    SampleLosses(losses=tensor([1.3863, 1.3863]), items=tensor([2, 1]))
    >>> sample_losses(torch.zeros(2, 3), torch.tensor([0, 2])).items
    tensor([1, 1])
    """
    size = len(logits)
    if logits.numel() == labels.numel() and (regression or labels.is_floating_point()):
        function = mse_loss if regression else binary_cross_entropy_with_logits
        each = function(logits.float().reshape(size, -1), labels.float().reshape(size, -1), reduction="none")
        return SampleLosses(each.mean(1), torch.full((size,), each.shape[1], device=logits.device))
    if labels.numel() == size:
        labels = labels.reshape(size)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        raise TrainerSetupError(
            f"logits of the shape {tuple(logits.shape)} and labels of the shape {tuple(labels.shape)} "
            f"({labels.dtype}) do not say the loss of each sample: {HINT}"
        )
    each = cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=NO_LABEL,
        reduction="none",
        label_smoothing=smoothing,
    ).reshape(size, -1)
    items = labels.reshape(size, -1).ne(NO_LABEL).sum(1)
    return SampleLosses(each.sum(1) / items.clamp(min=1), items)


class ModelLosses:
    """Finds the losses of samples of one model, once its own loss has shown how.

    >>> losses = ModelLosses(smoothing=0.0, regression=False)
    >>> labels = torch.tensor([[0, 1, 2], [3, 4, -100]])
    >>> for _ in range(LOOKS):
    ...     logits = torch.randn(2, 3, 5)
    ...     loss_of_model = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    ...     found = losses.learn(logits, labels, loss_of_model)
    >>> found.items, losses.shifted
    (tensor([2, 1]), True)
    """

    def __init__(self, *, smoothing: float, regression: bool) -> None:
        self.smoothing, self.regression = smoothing, regression
        self.shifted: bool | None = None
        """Whether logits are for the labels after them; None as long as it is looked at the model's own loss."""
        self.counted = True
        """Whether the model divides by the items that Trainer has counted; some divide by those of their batch."""
        self._ways = [(shifted, counted) for shifted in (True, False) for counted in (True, False)]
        self._looks = 0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> SampleLosses:
        """Return the losses of a batch, when it is known how to compute them."""
        return self._as(logits, labels, shifted=bool(self.shifted))

    def together(
        self, total: torch.Tensor, items: torch.Tensor, num_items: torch.Tensor | int | None = None, scale: int = 1
    ) -> torch.Tensor:
        """Return the loss of a batch from the sum of its items' losses, divided as Trainer and the model do.

        `num_items` are those that Trainer has counted, if it has, of all accumulated batches and of `scale` ranks.
        """
        if num_items is None:
            return total / items.sum().clamp(min=1)
        return total / (num_items if self.counted else items.sum().clamp(min=1)) * scale

    def learn(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        model_loss: torch.Tensor,
        num_items: torch.Tensor | int | None = None,
        scale: int = 1,
    ) -> SampleLosses:
        """Return the losses of a batch whose loss the model has computed itself; refuse to, where they do not agree."""
        if not (logits.ndim > 2 and labels.ndim > 1 and labels.shape[1] > 1):  # not (batch, tokens, words)
            self._ways = [way for way in self._ways if not way[0]]
        found = {shifted: self._as(logits, labels, shifted=shifted) for shifted, _ in self._ways}
        wanted = float(model_loss.detach().float().mean())
        if not math.isfinite(wanted) or not all(bool(each.items.any()) for each in found.values()):
            return found[self._ways[0][0]]  # nothing has a label, or the loss is not a number: it shows nothing
        sums = {}
        for way in self._ways:
            (losses, items), self.counted = found[way[0]], way[1]
            sums[way] = float(self.together((losses * items).sum().detach(), items, num_items, scale))
        tolerance = TOLERANCE if logits.dtype is torch.float32 else TOLERANCE_OF_HALVES
        most = tolerance * max(abs(wanted), tolerance)
        self._ways = [way for way, each in sums.items() if abs(each - wanted) <= most]
        if not self._ways:
            raise TrainerSetupError(
                f"the model's own loss is {wanted:.6g}, and the losses of its samples, from its logits and labels, "
                f"would make {' or '.join(sorted({f'{each:.6g}' for each in sums.values()}))}: {HINT}"
            )
        self._looks += 1
        shifted, self.counted = self._ways[0]
        if self._looks >= LOOKS and len({way[0] for way in self._ways}) == 1:
            self.shifted = shifted
        return found[shifted]

    def _as(self, logits: torch.Tensor, labels: torch.Tensor, *, shifted: bool) -> SampleLosses:
        return sample_losses(logits, labels, shifted=shifted, smoothing=self.smoothing, regression=self.regression)


def logits_of(outputs: Any) -> torch.Tensor:
    """Return a model's logits; refuse outputs that have none."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if not isinstance(logits, torch.Tensor):
        names = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise TrainerSetupError(f"the model gives no logits in training (it gives: {names}): {HINT}")
    return logits
