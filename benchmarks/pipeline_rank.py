"""One rank of a pipeline benchmark: `python -m benchmarks.pipeline_rank FOLDER RANK`.

FOLDER/job.json says what is done: a pipeline for each plan, and then turn after turn one step in every lane. Each rank
appends a line of JSON to FOLDER/lines-RANK.jsonl for every step: what it computed from when to when.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.drivers.pipelining.pipeline import Pipeline
from paceline.pipeline.plan import Plan
from paceline.reproduce.lecture.cut_models import Subject

TIMEOUT_SECONDS = 120.0


def main(folder: Path, rank: int) -> None:
    """All turns."""
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job["ranks"], timeout=timeout)
    subject = Subject(**job["subject"])
    model = subject.built()
    pipes = {
        name: Pipeline(model, Plan.load(folder / f"{name}.json"), timeout_seconds=TIMEOUT_SECONDS, record=True)
        for name in dict.fromkeys(lane["plan"] for lane in job["lanes"])
    }
    batches = {lane["microbatches"]: subject.batch(lane["microbatches"]) for lane in job["lanes"]}
    loss_function = nn.CrossEntropyLoss()
    with (folder / f"lines-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for turn in range(job["turns"]):
            for number, lane in enumerate(job["lanes"]):
                pipe = pipes[lane["plan"]]
                pipe.step(*batches[lane["microbatches"]], loss_function)
                lines.write(json.dumps({"lane": number, "turn": turn, "spans": [list(s) for s in pipe.spans]}) + "\n")
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
