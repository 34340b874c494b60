"""The job that `paceline train ... --on slurm` prints on a login node, for sbatch to read.

`exec` puts the training in the place of the script's shell: a signal that Slurm sends to the script (B:TERM) reaches
it, where a shell would wait for its command first; and its exit code is the job's.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

WARNED_SECONDS = 60


def batch_script(words: Sequence[str], *, tasks: int, who: str) -> str:
    """Return the script that runs `paceline WORDS` in a job of so many tasks; `who` says in words who they are.

    >>> print(batch_script(["train", "my.toml", "--on", "slurm"], tasks=5, who="the server and 4 workers"))
    #!/bin/bash
    #SBATCH --job-name=paceline
    #SBATCH --ntasks=5            # the server and 4 workers
    ...
    exec ... -m paceline train my.toml --on slurm
    <BLANKLINE>
    """
    options = {
        "--job-name=paceline": "",
        f"--ntasks={tasks}": who,
        f"--signal=B:TERM@{WARNED_SECONDS}": "a minute before the time is up: a checkpoint",
        "--no-kill": "a node that fails takes its own processes with it, not the job",
        "--requeue": "a job that Slurm starts again goes on from its last checkpoint,",
        "--open-mode=append": "and its output after what was written before",
    }
    lines = [f"#SBATCH {option:<22}# {why}" if why else f"#SBATCH {option}" for option, why in options.items()]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join([sys.executable, '-m', 'paceline', *words])}", ""])
