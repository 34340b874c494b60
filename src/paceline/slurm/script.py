"""The job that `paceline train ... --on slurm` prints on a login node, for sbatch to read.

`exec` puts the training in the place of the script's shell: a signal that Slurm sends to the script (B:TERM) reaches
it, where a shell would wait for its command first; and its exit code is the job's.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from paceline.quantities import counted

WARNED_SECONDS = 60


def batch_script(words: Sequence[str], *, number: int, with_server: bool) -> str:
    """Return the script that runs `paceline WORDS` in a job of so many workers and their server, or so many ranks.

    >>> print(batch_script(["train", "my.toml", "--on", "slurm"], number=4, with_server=True))
    #!/bin/bash
    #SBATCH --job-name=paceline
    #SBATCH --ntasks=5            # the server and 4 workers
    ...
    exec ... -m paceline train my.toml --on slurm
    <BLANKLINE>
    """
    who = f"the server and {counted(number, 'worker')}" if with_server else counted(number, "rank")
    at_end = "a checkpoint" if with_server else "ranks end, and go on from the last checkpoint before"
    options = {
        "--job-name=paceline": "",
        f"--ntasks={number + with_server}": who,
        f"--signal=B:TERM@{WARNED_SECONDS}": f"a minute before the time is up: {at_end}",
        "--no-kill": "a node that fails takes its own processes with it, not the job",
        "--requeue": "a job that Slurm starts again goes on from its last checkpoint,",
        "--open-mode=append": "and its output after what was written before",
    }
    lines = [f"#SBATCH {option:<22}# {why}" if why else f"#SBATCH {option}" for option, why in options.items()]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join([sys.executable, '-m', 'paceline', *words])}", ""])
