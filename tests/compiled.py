"""`python -m tests.compiled PART PARTS` compiles the kernels, unless they are on disk: a part of the codecs each time.

Several testers begin at once, and most of them with a few processes that all need the same kernels. Where none has
been compiled yet, as after a `git clone`, each would compile them, which takes 20 seconds of a core.
"""

from __future__ import annotations

import copy
import sys

import torch

from paceline.codecs import CODECS
from paceline.exchanges import make_exchange
from paceline.exchanges.lockstep import run_in_lockstep
from paceline.training import window_kernels
from tests.contracts.codec_variants import VARIANTS

RANKS = 2


def compile_kernels(part: int, parts: int) -> None:
    """Let two ranks exchange a matrix by every plan of every codec whose turn it is."""
    if part == 0:
        window_kernels.load_kernels()
    for name in list(CODECS)[part::parts]:
        for codec in VARIANTS.get(name, []):
            for plan in codec.plans:
                exchanges = [
                    make_exchange(copy.deepcopy(codec), [torch.Size([64, 80])], place, RANKS, plan)
                    for place in range(RANKS)
                ]
                run_in_lockstep([exchange.run(torch.randn(5120)) for exchange in exchanges])


if __name__ == "__main__":
    compile_kernels(int(sys.argv[1]), int(sys.argv[2]))
