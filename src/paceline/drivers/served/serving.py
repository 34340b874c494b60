"""The server in a user's own script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.naming import text_of
from paceline.drivers.served.limits import Limits
from paceline.drivers.served.opening import Served, open_run
from paceline.drivers.served.run import Measure, Outcome, Standing
from paceline.drivers.served.security import check_exposed, join_address, parse_address, server_credentials
from paceline.strategies import Full, Strategy
from paceline.training.train_state import Schedule


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: Strategy | None = None,
    listen: str = "127.0.0.1:29400",
    rounds: int = 1000,
    workers: int | None = None,
    most_workers: int = 0,
    schedule: Schedule | None = None,
    codec: str | Codec = "identity",
    seed: int = 0,
    blocks: int = 4,
    tls: str | Path | None = None,
    insecure: bool = False,
    folder: str | Path = "runs/serve",
    resume: bool = False,
    checkpoint_every: int = 50,
    evaluate: Callable[[nn.Module], tuple[float, float]] | None = None,
    evaluate_every: int = 10,
    limits: Limits | None = None,
    on_open: Callable[[int], None] = lambda port: None,
    on_standing: Callable[[Standing], None] = lambda standing: None,
) -> Outcome:
    """Train `model` with the gradients of workers that come and go; returns when all rounds are done.

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        paceline.serve(model, optimizer, strategy=paceline.LGC(k=7), workers=10, rounds=300, listen="127.0.0.1:29400")

    The first round waits for `workers` (by default as many as the strategy's K); `most_workers`, by default twice as
    many, may be there at once. Trace and checkpoints go to `folder`;
    `resume=True` goes on from the newest checkpoint there. `evaluate` gets a copy of the model and returns its loss and
    accuracy. `codec` is one of `paceline.codecs`, or words that name it ("qsgd levels=7"); `seed` is for its random
    numbers. Beyond loopback `tls` is needed ("keys/server"; `paceline keys` makes them), or `insecure=True`.
    """
    host, port = parse_address(listen)
    check_exposed(host, tls=tls, insecure=insecure)
    strategy = strategy if strategy is not None else Full()
    if workers is None:
        workers = getattr(strategy, "k", None)
        if not isinstance(workers, int):
            raise ValueError("give workers: how many the first round waits for (the strategy has no fixed K)")
    served = Served(
        module=model,
        optimizer=optimizer,
        schedule=schedule,
        strategy=strategy,
        rounds=rounds,
        workers=workers,
        most_workers=most_workers,
        folder=Path(folder),
        codec=codec if isinstance(codec, str) else text_of(codec),
        seed=seed,
        blocks=blocks,
        limits=limits if limits is not None else Limits(),
        measure=None if evaluate is None else measure_with(model, evaluate),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
    )
    credentials = server_credentials(tls) if tls is not None else None

    async def run() -> Outcome:
        return await open_run(served, resume=resume).serve(
            join_address(host, port), credentials, on_open=on_open, on_standing=on_standing
        )

    return asyncio.run(run())


def measure_with(model: nn.Module, evaluate: Callable[[nn.Module], tuple[float, float]]) -> Measure:
    """Measure copies of a model, so that training goes on meanwhile."""
    import copy

    from paceline.workers.flat import FlatModel

    held = FlatModel(copy.deepcopy(model))

    def measure(parameters: torch.Tensor, buffers: torch.Tensor) -> tuple[float, float]:
        held.load(parameters, buffers)
        held.module.eval()
        with torch.no_grad():
            return evaluate(held.module)

    return measure
