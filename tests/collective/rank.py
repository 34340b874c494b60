"""One of the two processes: `python -m tests.collective.rank STORE RANK`. Reads jobs, writes what they returned."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

from tests.collective import jobs


def main(store, rank):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    answers.write('{"result": "ready"}\n')
    for line in sys.stdin:
        settings = json.loads(line)
        try:
            answer = {"result": getattr(jobs, settings.pop("job"))(**settings)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
