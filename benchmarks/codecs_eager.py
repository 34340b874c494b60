"""The quantising codecs as one writes them in a few lines of torch: what ours are held against.

Each operation is a pass over the vector, and makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

WIDTH = 4  # bits of a level and its sign


@dataclass(frozen=True)
class EagerQSGD:
    """Stochastic levels of each bucket's largest magnitude, two to a byte.

    >>> codec = EagerQSGD()
    >>> sent = codec.decode(codec.encode(torch.linspace(-7, 7, 15)))
    >>> sent.tolist() == torch.linspace(-7, 7, 15).tolist()  # on the grid already: nothing to round
    True
    """

    levels: int = 7
    bucket: int = 512

    def encode(self, vector: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The length, the norms and the packed levels."""
        buckets = F.pad(vector, (0, -vector.numel() % self.bucket)).view(-1, self.bucket)
        magnitudes = buckets.abs()
        norms = magnitudes.amax(1, keepdim=True)
        exact = magnitudes / norms.clamp(min=torch.finfo(torch.float32).tiny) * self.levels
        levels = (exact + torch.rand_like(exact)).floor().clamp(max=self.levels).to(torch.uint8)
        codes = (levels | (buckets < 0).to(torch.uint8) << (WIDTH - 1)).view(-1)
        return vector.numel(), norms, codes[0::2] | codes[1::2] << WIDTH

    def decode(self, sent: tuple[int, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Levels times norms."""
        elements, norms, packed = sent
        codes = torch.stack([packed & 15, packed >> WIDTH], dim=1).view(-1, self.bucket)
        magnitudes = (codes & 7).to(torch.float32) * (norms / self.levels)
        return torch.where(codes >> (WIDTH - 1) != 0, -magnitudes, magnitudes).view(-1)[:elements]


@dataclass(frozen=True)
class EagerOneBit:
    """A sign for each element, eight to a byte, and two means.

    >>> EagerOneBit().decode(EagerOneBit().encode(torch.tensor([1.0, 2.0, -4.0])))
    tensor([ 1.5000,  1.5000, -4.0000])
    """

    def encode(self, vector: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The length, the means and the packed signs."""
        positive = vector >= 0
        count = positive.sum()
        upper = torch.where(positive, vector, 0.0).sum() / count.clamp(min=1)
        lower = torch.where(positive, 0.0, vector).sum() / (vector.numel() - count).clamp(min=1)
        bits = F.pad(positive, (0, -vector.numel() % 8)).view(-1, 8).to(torch.uint8)
        packed = bits[:, 0].clone()
        for place in range(1, 8):
            packed |= bits[:, place] << place
        return vector.numel(), torch.stack([lower, upper]), packed

    def decode(self, sent: tuple[int, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The mean of each element's sign."""
        elements, means, packed = sent
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return torch.where(bits.view(-1)[:elements] != 0, means[1], means[0])
