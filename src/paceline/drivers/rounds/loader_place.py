"""Where a pass over a loader stands, as part of a checkpoint: which order it follows, and how many batches are trained.

    pass begins ── place_of: what its order follows from ──> b0 b1 b2 ─ state: place and 3 batches ...
    later: go_on: the same order, its first 3 batches skipped ──────────────> b3 b4 b5 ...

The order of torch's own samplers follows from a generator's state (torch's default one where they have none), or from a
seed and an epoch. So the batches that were trained are skipped at the sampler, and none of them is loaded. A loader
that has a state of its own (torchdata's StatefulDataLoader) and our samplers are asked for theirs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data.pruning.sampler import PrunedBatches
from paceline.decoding import Count, decode
from paceline.drivers.rounds.sampler import TakenBatches

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
PLACE = ("kind", "about", "epoch", "generator", "seeds")  # what is in a place
TAKEN, LOADER, SAMPLER, LIST, PLAIN, UNKNOWN = "taken", "loader", "sampler", "list", "plain", "unknown"


def place_of(loader: Iterable[Any]) -> dict[str, Any]:
    """Return what the order of a pass follows from that begins now; `kind` says how it is gone on with."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, TakenBatches):
        return {"kind": TAKEN}  # it is saved with the rounds
    if isinstance(batch_sampler, PrunedBatches):
        return {"kind": SAMPLER}
    keeps = getattr(loader, "use_stateful_dataloader", True)  # accelerate's loaders have the methods either way
    if keeps and callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return {"kind": LOADER}
    if isinstance(loader, list | tuple):
        return {"kind": LIST, "about": f"{len(loader)} batches"}
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return {"kind": UNKNOWN, "about": f"{type(loader).__name__} is no DataLoader"}
    sampler: Any = loader.sampler if batch_sampler is None else batch_sampler
    if type(batch_sampler) is BatchSampler:
        sampler = batch_sampler.sampler
    kind = type(sampler)
    if kind not in (SequentialSampler, DistributedSampler, *RANDOM):
        return {"kind": UNKNOWN, "about": f"{kind.__name__} may draw another order each time"}
    about = f"{kind.__name__} of {len(sampler)} samples in {len(loader)} batches"
    if isinstance(sampler, DistributedSampler):
        about += f", rank {sampler.rank} of {sampler.num_replicas}, seed {sampler.seed}, shuffle {sampler.shuffle}"
        return {"kind": PLAIN, "about": about, "epoch": sampler.epoch}
    if kind not in RANDOM:
        return {"kind": PLAIN, "about": about}
    # Before the sampler's draw, torch draws a seed for workers: from the same generator, unless workers live on.
    lives_on = loader.num_workers > 0 and loader.persistent_workers and loader._iterator is not None
    seeds = not lives_on and loader.generator is sampler.generator
    return {"kind": PLAIN, "about": about, "generator": _generator(sampler).get_state(), "seeds": seeds}


def state_of(loader: Iterable[Any], place: Mapping[str, Any], trained: int) -> dict[str, Any]:
    """Return the state of a pass that began at this place, and of which so many batches are trained."""
    state = {**place, "trained": trained}
    if place["kind"] == LOADER:
        state["state"] = loader.state_dict()  # type: ignore[attr-defined]
    elif place["kind"] == SAMPLER:
        state["state"] = loader.batch_sampler.state_dict()  # type: ignore[attr-defined]
    return state


def go_on(loader: Iterable[Any], state: Mapping[str, Any]) -> Iterator[Any]:
    """Return the batches of the pass that are left, from a `state_of` a loader like this one.

    A ValueError says why the pass must begin again.
    """
    trained, kind = decode(Count, state["trained"], "trained"), state["kind"]
    here = place_of(loader)
    if here["kind"] != kind or here.get("about") != state.get("about"):
        raise ValueError(f"the state is of another loader ({_words(state)}; here {_words(here)})")
    if kind == UNKNOWN:
        raise ValueError(f"{here['about']}, and has no state_dict")
    if kind == LOADER:
        loader.load_state_dict(state["state"])  # type: ignore[attr-defined]
    elif kind == SAMPLER:
        loader.batch_sampler.load_state_dict(state["state"])  # type: ignore[attr-defined]
    elif kind == LIST:
        return itertools.islice(iter(loader), trained, None)
    elif kind == PLAIN:
        assert isinstance(loader, DataLoader)
        return _skip(loader, state, trained)
    return iter(loader)


def _skip(loader: DataLoader[Any], state: Mapping[str, Any], trained: int) -> Iterator[Any]:
    """Return the rest of a pass over torch's own loader, and leave all generators as if it had not been broken off."""
    indices: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = indices.sampler if isinstance(indices, BatchSampler) else indices
    generators = [torch.default_generator, *([loader.generator] if loader.generator is not None else [])]
    before, epoch = [each.get_state() for each in generators], getattr(sampler, "epoch", 0)
    if "generator" in state:
        source = _generator(sampler)
        source.set_state(state["generator"])
        if state["seeds"]:
            torch.empty((), dtype=torch.int64).random_(generator=source)
    if "epoch" in state:
        sampler.set_epoch(decode(Count, state["epoch"], "epoch"))
    rest: Iterator[Any] = itertools.islice(iter(indices), trained, None)
    rest = itertools.chain(list(itertools.islice(rest, 1)), rest)  # the order is drawn now
    own = getattr(sampler, "generator", None)
    after = None if own is None else own.get_state()
    if "epoch" in state:
        sampler.set_epoch(epoch)
    copied = copy.copy(loader)  # its workers are those of this pass; of the loader only the sampler is another
    replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(copied).update({"_iterator": None, replaced: _Rest(rest, len(loader))})  # it refuses to be set otherwise
    batches = iter(copied)
    for generator, earlier in zip(generators, before, strict=True):
        generator.set_state(earlier)
    if own is not None and after is not None:
        own.set_state(after)
    return batches


def _generator(sampler: Any) -> torch.Generator:
    return torch.default_generator if sampler.generator is None else sampler.generator


def _words(state: Mapping[str, Any]) -> str:
    return str(state.get("about") or state["kind"])


class _Rest:
    """What is left of a pass, for a loader that asks for a sampler."""

    def __init__(self, rest: Iterator[Any], batches: int) -> None:
        self._rest, self._batches = rest, batches

    def __iter__(self) -> Iterator[Any]:
        return self._rest

    def __len__(self) -> int:
        return self._batches
