"""Jobs that stop in the middle, and go on from what was saved."""

from __future__ import annotations

import io
import time
from functools import partial

import torch
import torch.distributed as dist

from paceline.strategies import LGC
from tests.rounds.jobs.common import batch, compute, digest, error_of, setup, tally

LATE = 2  # the rank whose every gradient is late
TIMES = iter(range(10**6))


def saved(state):
    """A state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(sync, model, rounds, *, tag, late):
    """Rounds in one order: two ranks are fresh; the gradient of the third comes when its round has just closed."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for number in range(sync.version, sync.version + rounds):
        compute(sync, model, *batch(number, rank))
        if late and rank == LATE:
            sync._loop.wait_for_round(sync.version)
        elif late and number:
            store.wait([f"{tag}/{number - 1}"])
        sync.step()
        if late and rank == LATE:  # its report is on the way: word of it must not overtake it
            sync._loop._outbox.send(partial(store.set, f"{tag}/{number}", ""))


def resumed(strategy, rounds, after, **travels):
    """What two lives end with: one that goes on, and one that is saved in the middle, and goes on from that."""
    settings, tag = {"k": 2, **travels} if strategy == "lgc" else travels, next(TIMES)
    late, whole = strategy == "lgc", {}
    model, made, sync = setup(strategy, seed=3, norm=True, blocks=1, **settings)
    with sync:
        train(sync, model, after, tag=f"{tag}/whole", late=late)
        sync.flush()
        train(sync, model, rounds - after, tag=f"{tag}/whole", late=late)
    whole = [digest(model, made), tally(sync)]

    model, made, sync = setup(strategy, seed=3, norm=True, blocks=1, **settings)
    with sync:
        train(sync, model, after, tag=f"{tag}/part", late=late)
        state = saved({"sync": sync.state_dict(), "model": model.state_dict(), "optimizer": made.state_dict()})
    ended = tally(sync)
    model, made, sync = setup(strategy, seed=4, norm=True, blocks=1, **settings)
    model.load_state_dict(state["model"])
    made.load_state_dict(state["optimizer"])
    sync.load_state_dict(state["sync"])
    pending, held = len(state["sync"]["gradients"]["kept"]), sorted(state["sync"]["codec"])
    with sync:
        train(sync, model, rounds - after, tag=f"{tag}/part", late=late)
    lives = {"whole": whole, "resumed": [digest(model, made), tally(sync)]}
    return lives | {"pending": pending, "held": held, "ended": ended}


def wrong_states():
    """States that do not fit, and a state that is taken again and again while others hurry on."""
    model, _, sync = setup("lgc", k=1, seed=3)
    states, take_slowly = [], sync._loop.decider_state

    def decider_state():
        time.sleep(0.02)
        return take_slowly()

    sync._loop.decider_state = decider_state if dist.get_rank() == 0 else take_slowly
    with sync:
        for number in range(12):
            compute(sync, model, *batch(number, dist.get_rank()))
            sync.step()
            states.append(saved(sync.state_dict()))
        late = error_of(lambda: sync.load_state_dict(states[-1]))
    found = {"late": late, "closed": sync.state_dict()["version"]}
    whole = {}
    for state in states:
        decider = LGC(k=1).start()
        held = state["decider"].get("strategy")
        if held is not None:
            decider.load_state_dict(held)
            whole.setdefault("rounds", []).append([decider.version - state["version"], held["fresh"]])
    found["decider"] = whole
    other, _, sync = setup("lgc", k=1, seed=9)
    with sync:
        found["other model"] = error_of(lambda: sync.load_state_dict(states[-1]))
    other, _, sync = setup("lgc", k=2, seed=9)
    other.load_state_dict(model.state_dict())
    with sync:
        found["other k"] = error_of(lambda: sync.load_state_dict(states[-1]))
    found["last release"] = last_release(model, states[-1])
    return found


def last_release(model, state):
    """What scripts make of states of the last release that leave the weights of partial work open, or say them."""
    found = {}
    for began in (True, False):
        text = state["about"]["strategy"].replace("'samples'", str(began))
        old = {**state, "about": {**state["about"], "strategy": text}}
        for asked in ("auto", "samples"):
            mine, _, sync = setup("lgc", k=1, seed=9, scale_partial=asked)
            mine.load_state_dict(model.state_dict())
            with sync:
                error = error_of(lambda sync=sync, old=old: sync.load_state_dict(old))
                deciding = sync._loop.deciding
                found[f"{began} {asked}"] = [
                    error,
                    sync.strategy.scale_partial,
                    None if deciding is None else deciding.decider.state._weighing,
                    sync.about()["strategy"] == text,
                ]
    return found
