"""What a codec remembers between two gradients: most of them nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch


class NoMemory:
    """A codec that treats every gradient for itself.

    >>> NoMemory().state_dict()
    {}
    """

    __slots__ = ()

    def fresh(self, shapes: Sequence[torch.Size] | None = None) -> Self:
        """This codec for one more sender; without a memory it can serve any number of them."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on from; refuses the memory of another codec."""
        if state:
            raise ValueError(f"{type(self).__name__} has no memory, and this state has {', '.join(state)}")
