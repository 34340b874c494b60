"""A run made ready to be served: from nothing, or from the newest whole checkpoint of an earlier one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import __version__
from paceline.codecs.naming import parse_codec
from paceline.drivers.served.conductor import Conductor
from paceline.drivers.served.frames import Sizes
from paceline.drivers.served.limits import Limits
from paceline.drivers.served.roster import Roster
from paceline.drivers.served.run import Measure, Run
from paceline.drivers.served.server import Server
from paceline.drivers.served.signature import signature
from paceline.strategies import LGC, STRATEGIES, Strategy
from paceline.traces.checkpoints import Checkpoint, read_newest
from paceline.traces.journal import FORMAT, TRACE, Resumed, RunBegan
from paceline.traces.journal_files import JournalWriter
from paceline.training import TrainState
from paceline.training.outgoing import warm_up
from paceline.training.train_state import Schedule

log = logging.getLogger("paceline.served")


@dataclass(frozen=True, kw_only=True)
class Served:
    """All that a served run is made of; `recipe` is what workers and the trace are told.

    >>> Served.__dataclass_fields__["codec"].default
    'identity'
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    strategy: Strategy
    rounds: int
    workers: int
    folder: Path
    codec: str = "identity"
    blocks: int = 4
    seed: int = 0
    most_workers: int = 0
    limits: Limits = field(default_factory=Limits)
    measure: Measure | None = None
    evaluate_every: int = 10
    checkpoint_every: int = 50
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rounds", "workers", "blocks", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more ({name}={getattr(self, name)})")


def open_run(served: Served, *, resume: bool = False) -> Run:
    """A run that can be served. A folder that holds a run is gone on with, or refused."""
    trace = served.folder / TRACE
    if not resume and trace.exists():
        raise ValueError(f"{served.folder} holds a run; resume it, or give another folder")
    checkpoint = _newest(served.folder) if resume else None
    served.folder.mkdir(parents=True, exist_ok=True)
    steps_per_round = served.strategy.updates_per_round(served.workers)
    codec = parse_codec(served.codec)
    trainee = TrainState(
        served.module,
        served.optimizer,
        served.schedule,
        compensates=isinstance(served.strategy, LGC),
        codec=codec,
        seed=served.seed,
    )
    trainee.state()  # what no checkpoint can hold is said now, and not after fifty rounds
    warm_up(codec, trainee.model.shapes)
    codec = codec.fresh(trainee.model.shapes)
    journal = JournalWriter(trace, append=resume)
    conductor = Conductor(
        strategy=served.strategy,
        trainee=trainee,
        codec=codec,
        roster=Roster(shards=served.workers, most=served.most_workers or 2 * served.workers),
        total_steps=served.rounds * steps_per_round,
        wait_for=served.workers,
        write=journal.write,
    )
    model = trainee.model
    server = Server(
        conductor,
        sizes=Sizes(
            most_payload_bytes=codec.most_bytes(model.parameters.numel()), buffer_bytes=4 * model.buffers.numel()
        ),
        signature=signature(served.module),
        codec=served.codec,
        seed=served.seed,
        blocks=served.blocks,
        limits=served.limits,
        recipe=dict(served.recipe),
        started_seconds=float(checkpoint.state["seconds"]) if checkpoint else 0.0,
    )
    if checkpoint is not None:
        _load(served, checkpoint, trainee, conductor)
    _begin_journal(journal, served, checkpoint)
    return Run(
        conductor,
        server,
        journal,
        folder=served.folder,
        steps_per_round=steps_per_round,
        signature=signature(served.module),
        codec=served.codec,
        measure=served.measure,
        evaluate_every=served.evaluate_every,
        checkpoint_every=served.checkpoint_every,
    )


def _newest(folder: Path) -> Checkpoint:
    checkpoint, refused = read_newest(folder)
    for reason in refused:
        log.warning("%s", reason)
    if checkpoint is None:
        why = f" ({refused[0]})" if refused else ""
        raise ValueError(f"{folder} has no whole checkpoint to resume from{why}")
    return checkpoint


def _load(served: Served, checkpoint: Checkpoint, trainee: TrainState, conductor: Conductor) -> None:
    """Go on from a checkpoint; one of another model or strategy is refused before anything is written."""
    if checkpoint.state.get("signature") != signature(served.module):
        raise ValueError(
            f"checkpoint {checkpoint.version} of {served.folder} is of another model: names, shapes, kinds or frozen "
            "values of its parameters differ"
        )
    if checkpoint.state.get("codec", served.codec) != served.codec:
        raise ValueError(
            f"checkpoint {checkpoint.version} of {served.folder} is of a run with codec {checkpoint.state['codec']!r} "
            f"(this one has {served.codec!r}); resume with the same"
        )
    try:
        trainee.load_state(checkpoint.state["trainee"], checkpoint.tensors)
        conductor.load_boundary(checkpoint.state)
    except KeyError as error:
        raise ValueError(
            f"checkpoint {checkpoint.version} of {served.folder} is of another strategy or optimiser: it has no {error}"
        ) from None
    log.info("goes on from checkpoint %d", checkpoint.version)


def _begin_journal(journal: JournalWriter, served: Served, checkpoint: Checkpoint | None) -> None:
    if journal.empty:
        name = next(name for name, kind in STRATEGIES.items() if isinstance(served.strategy, kind))
        journal.write(
            RunBegan(
                format=FORMAT,
                paceline=__version__,
                strategy=name,
                seed=served.seed,
                workers=served.workers,
                blocks=served.blocks,
                recipe=served.recipe,
                signature=signature(served.module),
                codec=served.codec,
            )
        )
    if checkpoint is not None:
        seconds = float(checkpoint.state["seconds"])
        journal.write(Resumed(at_seconds=seconds, version=checkpoint.version, reason="the server was started again"))
