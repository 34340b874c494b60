"""paceline inside Lightning: `import lightning`, version 2.6 or newer.

    Trainer(callbacks=[paceline.lightning.Compress("qsgd")])     gradients of DDP travel encoded
    Trainer(strategy=paceline.lightning.Averaging("hpsgd"))      ranks train alone, and average what they have learned
    Trainer(strategy="paceline-hpsgd")                           the same with its defaults, as LightningCLI takes it
    Trainer(callbacks=[paceline.lightning.Prune(pruning)])       samples sit epochs out

Each keeps what every rank remembers in Lightning's one checkpoint file, and tells Lightning's loggers its figures, as
"paceline/...". The whole of it is in docs/lightning.md.

In Lightning a strategy and callbacks see all that is needed, where a Trainer of Hugging Face's is met at its methods.

    compression     Compress: the codec hook, at the moment when Lightning has wrapped the model
    averaging       Averaging: a strategy without DDP; places: where ranks come together, and who is there
    pruning         Prune: epochs whose lengths differ
    rank_states     the states of all ranks, on their way into rank 0's checkpoint
    trainer         what all three ask of a Trainer: its package, its loggers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names, need_extra

need_extra("lightning", "lightning")

import paceline.lightning.averaging  # noqa: E402, F401 - it tells Lightning the names of its strategies

if TYPE_CHECKING:
    from paceline.lightning.averaging import Averaging
    from paceline.lightning.compression import Compress
    from paceline.lightning.pruning import Prune
    from paceline.lightning.trainer import LightningError

_HOMES = {"Averaging": "averaging", "Compress": "compression", "LightningError": "trainer", "Prune": "pruning"}

__all__ = ["Averaging", "Compress", "LightningError", "Prune"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
