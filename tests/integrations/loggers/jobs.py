"""What ranks of the loggers' tests do: train a little with a part that is given a log, and say what it came to."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline

STEPS = 6


def job(part, logger, folder):
    dist.init_process_group("gloo")
    log, collect = LOGGERS[logger](folder) if dist.get_rank() == 0 else (None, lambda: None)
    torch.manual_seed(0)
    figures = PARTS[part](torch.nn.Linear(2_000, 10), log)
    return {"figures": figures, "logged": collect()}


def train(model, optimizer, step):
    for number in range(STEPS):
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(8, 2_000)).square().mean().backward()
        step()
        optimizer.zero_grad()


def averaging(network, log):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with paceline.LocalSGD(network, optimizer, period=2, log=log) as sync:
        train(network, optimizer, optimizer.step)
    return sync.figures()


def rounds(network, log):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with paceline.FullSync(network, optimizer, log=log) as sync:
        train(network, optimizer, sync.step)
    return sync.figures()


def hook(network, log):
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    compression = paceline.compress(model, "qsgd", log=log)
    train(model, optimizer, optimizer.step)
    return compression.figures()


def wandb_offline(folder):
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(project="paceline", mode="offline", dir=folder)

    def collect():
        step = run.step
        run.log({"end": 1})  # a row is complete when the next begins
        names = [name for name in run.summary.keys() if name.startswith("paceline/")]  # noqa: SIM118 - it is no dict
        last = {name: run.summary[name] for name in names}
        run.finish()
        return {"last": last, "steps": step}

    return run.log, collect


def mlflow_database(folder):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    active = mlflow.start_run()

    def collect():
        client, run = mlflow.MlflowClient(), active.info.run_id
        mlflow.end_run()
        names = client.get_run(run).data.metrics
        last = {name: client.get_metric_history(run, name)[-1] for name in names}
        return {"last": {name: each.value for name, each in last.items()}, "steps": max(e.step for e in last.values())}

    return mlflow.log_metrics, collect


def tensorboard(folder):
    log = paceline.loggers.tensorboard(folder)

    def collect():
        log.close()
        return read_events(folder)

    return log, collect


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    return {"last": {tag: each.value for tag, each in last.items()}, "steps": max(e.step for e in last.values())}


PARTS = {"averaging": averaging, "rounds": rounds, "hook": hook}
LOGGERS = {"wandb": wandb_offline, "mlflow": mlflow_database, "tensorboard": tensorboard}
