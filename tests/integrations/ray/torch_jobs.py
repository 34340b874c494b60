"""What docs/ray.md says of TorchTrainer, carried out by two ranks of a real Ray, in one launch.

Each rank runs the page's three loops one after the other, the first one twice, as a trainer that is started again
would, and then walks into the traps. The last line that `main` prints is what the ranks saw, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.docs.pages import blocks


def code():
    """Return the names that the page's loops define."""
    names = {}
    for block in blocks("ray.md"):
        if any(f"def {loop}(config)" in block for loop in ("average", "compressed", "rounds")):
            exec(compile(block, "docs/ray.md", "exec"), names)
    return names


def be_rank(config):
    """Run all of it as a rank of TorchTrainer, and leave what was seen in a file of this rank's."""
    import ray.train

    names, reports, real = code(), [], ray.train.report

    def report(metrics, checkpoint=None):
        reports.append(metrics)
        real(metrics, checkpoint=checkpoint)

    ray.train.report = report
    try:
        names["average"]({"epochs": config["epochs"]})
        names["average"]({"epochs": config["epochs"] + 1})  # goes on from the last checkpoint that was reported
        folder = ray.train.get_checkpoint().path
        names["compressed"]({"epochs": 3})
        names["rounds"]({"epochs": 2})
    finally:
        ray.train.report = real
    files = sorted(path.name for path in Path(folder).glob("*.pt"))
    rank = ray.train.get_context().get_world_rank()
    seen = {"reports": reports, "files": files, **traps(names["samples"]())}
    Path(config["folder"], f"seen-{rank}.json").write_text(json.dumps(seen))


def traps(dataset):
    import ray.train.torch
    import torch
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    import paceline
    import paceline.ray

    pruning = paceline.InfoBatch(dataset, batch_size=32, epochs=3)
    pairs = TensorDataset(dataset.tensors[0], dataset.tensors[0])  # the two parts of a sample have one shape
    loader = ray.train.torch.prepare_data_loader(DataLoader(pairs, batch_sampler=pruning))
    found = {"shape": list(next(iter(loader)).shape)}
    try:
        pruning.observe(torch.ones(32, requires_grad=True))
    except paceline.PacelineError as error:
        found["observe"] = str(error)
    batches = BatchSampler(SequentialSampler(dataset), 32, drop_last=False)
    try:
        paceline.ray.prepare_data_loader(DataLoader(dataset, batch_sampler=batches))
    except paceline.ray.DataLoaderError as error:
        found["refused"] = str(error)
    plain = paceline.ray.prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    kept = paceline.ray.prepare_data_loader(DataLoader(dataset, batch_sampler=pruning))
    kept.sampler.set_epoch(0)  # as scripts do with a DistributedSampler
    found["kept"] = [kept.batch_sampler is pruning, len(kept)]
    found["plain"] = [type(plain.sampler).__name__, len(plain)]
    try:
        paceline.ray.report({}, pruning, pruning)
    except ValueError as error:
        found["twice"] = str(error)
    return found


def main(folder):
    names = {"average": be_rank, "config_folder": folder}
    trainer = next(block for block in blocks("ray.md") if "trainer = TorchTrainer(" in block)
    settings = f'{{"epochs": 2, "folder": {folder!r}}}'
    exec(compile(trainer.replace('{"epochs": 2}', settings), "docs/ray.md", "exec"), names)
    seen = [json.loads(Path(folder, f"seen-{rank}.json").read_text()) for rank in range(2)]
    print("found " + json.dumps({"metrics": names["result"].metrics, "seen": seen}), flush=True)


if __name__ == "__main__":
    from tests.integrations.ray import torch_jobs  # so that Ray sends `be_rank` by its name

    torch_jobs.main(sys.argv[1])
