"""Clipping that comes after `sync.step()`, where no gradient is left: torch says nothing of it, and nothing is clipped.

Only the first step of a script is looked at. From its end to the next batch that the rounds hear of, a profile function
sees the calls of this thread, and nothing is left of it then: the loop costs what it did. Where the script has a
profiler of its own, no call is looked at.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import FrameType
from typing import Any

from torch.nn.utils import clip_grad_norm_

log = logging.getLogger("paceline.rounds")

CLIP = inspect.unwrap(clip_grad_norm_).__code__  # clip_grad_value_ refuses by itself to clip nothing


class ClippingCheck:
    """Warns where the first clipping after `begin` finds no gradient; `end` must come from the same thread."""

    def __init__(self) -> None:
        self._began = self._looks = False

    def begin(self) -> None:
        """Look at the calls from now on, the first time that this is called."""
        if not self._began:
            self._began = True
            if sys.getprofile() is None:
                self._looks = True
                sys.setprofile(self._see)

    def end(self) -> None:
        """Look no more."""
        if self._looks:
            self._looks = False
            if sys.getprofile() == self._see:
                sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return" and frame.f_code is CLIP and frame.f_locals.get("grads") == []:
            self.end()
            log.warning(
                "gradients were clipped after sync.step(), which has taken them: nothing was clipped. Clip between the "
                "backward pass and sync.step()"
            )
