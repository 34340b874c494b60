"""What two ranks do with a page: they run its blocks, with the names that a reader has before them.

A page's numbers are those of a cluster (K=7, 4 stages, 200 epochs), and a test's are smaller: `SHORTER` has both. Each
job returns what the test compares; a block that a job does not know fails.
"""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.docs.pages import blocks_run_by

SHORTER = {
    "k=7": "k=1",
    "k=3": "k=1",
    "stages=4, microbatches=8": "stages=2, microbatches=4",
    "stages=2, microbatches=8": "stages=2, microbatches=4",
    "epochs=200": "epochs=2",
    "range(200)": "range(2)",
    "batch_size=128": "batch_size=8",
    "batch_size=64": "batch_size=8",
    "batch_size=256": "batch_size=16",
    "batch_size=32": "batch_size=8",
    "shares = [2, 2, 1, 1]": "shares = [2, 1]",
    "num_workers=4": "num_workers=1",
    "batch, parts = 8192, 16": "batch, parts = 64, 4",
    "workers=10": "workers=1",
    "step == 300": "step == 3",
    "rounds=3000": "rounds=24",
    "0.0.0.0:29400": "127.0.0.1:{port}",
    "ps.example.org:29400": "127.0.0.1:{port}",
}


def code_of(page, test, **places):
    """Return the blocks of a page that a test of test_pages.py runs, with smaller numbers."""
    found = blocks_run_by(page, f"tests/docs/test_pages.py::{test}")
    for long, short in SHORTER.items():
        for name, value in places.items():
            short = short.replace(f"{{{name}}}", str(value))
        found = [code.replace(long, short) for code in found]
    return found


def readers_names(**more):
    """Return what a script has before a block of a page: a model, data, an optimiser, a loss function, ..."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(rank))
    dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    loader = DataLoader(dataset, batch_size=8)
    names = {
        "torch": torch,
        "dist": dist,
        "os": os,
        "paceline": paceline,
        "DataLoader": DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "model": model,
        "network": model,
        "network_of_yours": lambda: model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "loss_function": torch.nn.CrossEntropyLoss(),
        "dataset": dataset,
        "loader": loader,
        "batches": itertools.cycle(loader),
        "epochs": 2,
        "steps": 20,
        "rank": rank,
    }
    return names | more


def run(code, names, page):
    exec(compile(code, page, "exec"), names)


def numbers_of(model):
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def losses_of(names):
    inputs, targets = names["dataset"].tensors
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(names["model"](inputs), targets))


def trained(code, page, **more):
    """Run one block with names of its own; return the losses before and after, and the parameters."""
    names = readers_names(**more)
    before = losses_of(names)
    run(code, names, page)
    return {"before": before, "after": losses_of(names), "parameters": numbers_of(names["model"])}, names


def first_blocks():
    hook, balanced = code_of("../README.md", "test_first_blocks")
    names = readers_names()
    before = losses_of(names)
    run(hook, names, "README.md")
    for inputs, targets in names["loader"]:
        names["optimizer"].zero_grad()
        names["loss_function"](names["model"](inputs), targets).backward()
        names["optimizer"].step()
    compressed = {"before": before, "after": losses_of(names), "parameters": numbers_of(names["model"])}
    return [compressed, trained(balanced, "README.md")[0]]


def balance():
    """Run the page's blocks one after the other; all have the names of the first."""
    first, *others = code_of("balance.md", "test_balance")
    found, names = trained(first, "balance.md")
    losses = [found["before"], found["after"]]
    for code in others:
        run(code, names, "balance.md")
        losses.append(losses_of(names))
    names["balance"].close()
    return {"losses": losses, "parameters": numbers_of(names["model"]), "state": names["state"]}


def averaging():
    (loop,) = code_of("averaging.md", "test_averaging")
    found, _ = trained(loop, "averaging.md")
    return found


def shares_by_speed():
    """Train a model whose change is the sum of all samples that were seen, so that their weights show."""
    (loop,) = code_of("guides/mixed-machines.md", "test_shares_by_speed")
    inputs = torch.randn(96, 20, generator=torch.Generator().manual_seed(5))
    model = torch.nn.Linear(20, 1, bias=False)
    names = readers_names(
        dataset=TensorDataset(inputs, torch.zeros(96)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_function=lambda outputs, targets: outputs.mean(),
        epochs=1,
    )
    with torch.no_grad():
        model.weight.zero_()
    run(loop, names, "mixed-machines.md")
    expected = -0.1 * inputs.sum(0) / 8 / 2  # the rate, each sample once, a batch of 8, the mean of two ranks
    return {
        "samples": len(names["parts"][dist.get_rank()]),
        "steps": names["sync"].steps,
        "distance": float((model.weight[0] - expected).abs().max()),
        "moved": float(expected.abs().max()),
    }


def shares_in_rounds():
    (loop,) = code_of("guides/mixed-machines.md", "test_shares_in_rounds")
    return trained(loop, "mixed-machines.md", epochs=20)[0]  # of one or two rounds each


def rounds(folder):
    loop, encoded, save, load = code_of("rounds.md", "test_rounds")
    found, _ = trained(loop, "rounds.md")
    names = readers_names(folder=folder)
    run(encoded, names, "rounds.md")
    for inputs, targets in names["loader"]:
        names["loss_function"](names["model"](inputs), targets).backward()
        names["sync"].step()
    run(save, names, "rounds.md")
    found["saved"], version = numbers_of(names["model"]), names["sync"].version
    names["sync"].close()
    dist.barrier()
    again = readers_names(folder=folder)
    again["parts"] = {name: again[name] for name in ("model", "optimizer", "scheduler")}
    # What the page saves is of a run without a codec, and what it loads too: the state of another codec is refused.
    run(load.replace("k=1,", 'k=1, codec="qsgd levels=7",'), again, "rounds.md")
    found["loaded"], found["versions"] = numbers_of(again["model"]), [version, again["sync"].version]
    again["sync"].close()
    return found


def codecs():
    (hook,) = code_of("codecs.md", "test_codecs")
    wrapped, trains = hook.split("...  # train as before\n")
    names = readers_names()
    before = losses_of(names)
    run(wrapped, names, "codecs.md")
    for _ in range(3):
        for inputs, targets in names["loader"]:
            names["optimizer"].zero_grad()
            names["loss_function"](names["model"](inputs), targets).backward()
            names["optimizer"].step()
    run(trains, names, "codecs.md")
    sizes = names["compression"].figures()
    return {
        "before": before,
        "after": losses_of(names),
        "parameters": numbers_of(names["model"]),
        "sizes": [sizes["payload_bytes"], sizes["gradient_bytes"]],
    }


def codecs_with_a_scaler():
    """One batch of the second rank is too much for a scaled loss."""
    (loop,) = code_of("codecs.md", "test_codecs_with_a_scaler")
    names, batches = readers_names(device="cpu"), itertools.count()
    before = losses_of(names)
    names["model"] = DistributedDataParallel(names["network"])
    plain = names["loss_function"]
    names["loss_function"] = lambda outputs, targets: (
        plain(outputs, targets) * (1e36 if next(batches) == 2 and dist.get_rank() == 1 else 1)
    )
    run(loop, names, "codecs.md")
    return {
        "before": before,
        "after": losses_of(names),
        "parameters": numbers_of(names["network"]),
        "scale": names["scaler"].get_scale(),
        "skipped": names["compression"].skipped_steps,
    }


def slow_network():
    (loop,) = code_of("guides/slow-network.md", "test_slow_network")
    names = readers_names()
    before, names["model"] = losses_of(names), DistributedDataParallel(names["network"])
    run(loop, names, "guides/slow-network.md")
    return {
        "before": before,
        "after": losses_of(names),
        "parameters": numbers_of(names["network"]),
        "steps": [len(names["loader"]), names["compression"].steps],
    }


def large_batches():
    whole, wrapped, counted = code_of("large-batches.md", "test_large_batches")
    first, _ = trained(whole, "large-batches.md")
    second, names = trained(wrapped, "large-batches.md")
    accumulate = paceline.Accumulate(names["model"], steps=2)
    names |= {"accumulate": accumulate, "padding": -100, "detection_loss": names["loss_function"]}
    images, tokens = counted.split("\n", 1)
    before = numbers_of(names["model"])
    kinds = [images, images, tokens, tokens]  # two groups of two parts
    for (inputs, targets), code in zip(accumulate(itertools.islice(names["loader"], 4)), kinds, strict=True):
        run(code, names | {"inputs": inputs, "images": inputs, "targets": targets}, "large-batches.md")
        if accumulate.ready:
            names["optimizer"].step()
            names["optimizer"].zero_grad()
    return [first, second, {"moved": before != numbers_of(names["model"])}]


def pipelines(folder):
    os.chdir(folder)
    trains, devices, big, norm, encoded, evaluates, loads = code_of("pipeline.md", "test_pipelines")
    sample = torch.zeros(8, 20)
    shared = TensorDataset(*readers_names()["dataset"].tensors)
    if dist.get_rank():  # one batch for all stages
        inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
        shared = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    names = readers_names(sample=sample, loader=DataLoader(shared, batch_size=8), dataset=shared)
    run(trains, names, "pipeline.md")
    first = float(names["loss"])
    for inputs, targets in itertools.chain.from_iterable(itertools.repeat(names["loader"], 3)):
        names["loss"] = names["pipe"].step(inputs, targets, names["loss_function"])
        run(norm, names, "pipeline.md")
        names["optimizer"].step()
    names["inputs"] = shared.tensors[0][:8]
    run(evaluates, names, "pipeline.md")
    dist.barrier()
    run(loads, names, "pipeline.md")
    found = {"losses": [first, float(names["loss"])], "norm": float(names["norm"])}
    found["outputs"] = names["outputs"] is not None
    found["stages"] = []
    for code in (devices, big):
        names |= {"model": readers_names()["model"]}
        run(code, names, "pipeline.md")
        found["stages"].append(names["plan"].stages)
    run(encoded, names | {"model": readers_names()["model"]}, "pipeline.md")
    return found


def pruning():
    (loop,) = code_of("pruning.md", "test_pruning")
    found, names = trained(loop, "pruning.md")
    return found | {"epochs": names["pruning"].epoch, "figures": names["pruning"].figures()}


def server_and_worker(folder, port):
    """Rank 0 serves, rank 1 works."""
    os.chdir(folder)
    serves, works = code_of("cluster.md", "test_server_and_worker", port=port)
    names = readers_names()
    before = losses_of(names)
    if dist.get_rank() == 0:
        names |= {"Net": lambda: names["network"], "loss_of": lambda model: 1.0, "accuracy_of": lambda model: 0.5}
        run(serves, names, "cluster.md")
    else:
        run(works, names, "cluster.md")
    return {"before": before, "after": losses_of(names), "parameters": numbers_of(names["model"])}
