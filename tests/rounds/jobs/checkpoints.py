"""Jobs that stop in the middle, and go on from what was saved."""

from __future__ import annotations

import copy
import io
import time
from functools import partial

import torch
import torch.distributed as dist

from paceline.strategies import LGC
from tests.rounds.jobs.common import batch, compute, digest, error_of, setup, tally
from tests.rounds.jobs.shares import SHARES

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


DAMAGES = {
    "about": {"about": None},
    "model": {"fingerprint": 7},
    "version": {"version": -1},
    "draws": {"draws": "four"},
    "seconds": {"seconds": float("nan")},
    "assigned": {"assigned": [[0]]},
    "plan": {"plan": "ring"},
    "codec": {"codec": {"residual": torch.ones(3)}},
    "codec's flags": {"codec": {"used": torch.ones(1, dtype=torch.bool)}},
    "samplers": {"samplers": [{"epoch": 0, "taken": 0, "samples": 9, "open": []}]},
    "loader": {"loader": {"rounds_left": -1}},
    "outcomes": {"outcomes": {"used": 1, "late": 0, "dropped": {"late": -1}}},
    "gradients": {"gradients": {"kept": {"3": torch.ones(2)}, "before": []}},
    "gradient before": {"gradients": {"kept": {}, "before": [3, 0.5]}},
    "decider": {"decider": {"strategy": {"version": "four"}, "undelivered": []}},
    "decider's round": {"decider": None},
}
LACKING = ("about", "version", "draws", "seconds", "gradients", "decider", "outcomes", "fingerprint")


def refused_states():
    """What each damage of a state is called, and whether the rounds are then as they were; they go on as if nothing."""

    def made(seed):
        model, optimizer, sync = setup("lgc", k=2, seed=seed, norm=True, codec="one-bit", shares=SHARES)
        sync.sampler(16)
        return model, optimizer, sync

    def all_of(sync):
        state, deciding = sync._take_state(), sync._loop.deciding
        del state["fingerprint"]  # of the model as it is
        return repr([state, sync.strategy, sync._model._agreed, sync._loader_state, sync._sampler_states, sync._met,
                     sync._loop.exchange.next_version, deciding and deciding.decider.state_dict()])  # fmt: skip

    model, optimizer, sync = made(3)
    states, weights = [], []
    with sync:
        for _ in range(2):
            for number in range(2):
                compute(sync, model, *batch(sync.draws + number, dist.get_rank(), sync.samples))
                sync.step()
            states.append(saved(sync.state_dict()))
            weights.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
    (first, second), found = states, {}
    text = second["about"]["strategy"].replace("'samples'", "False")  # another than the one in use, which goes with it
    old = {**second, "about": {**second["about"], "strategy": text}}
    damaged = {name: {**old, **damage} for name, damage in DAMAGES.items()}
    damaged["decider's round"]["decider"] = first["decider"]
    damaged |= {f"no {name}": {key: old[key] for key in old if key != name} for name in LACKING}
    model, optimizer, sync = made(4)
    model.load_state_dict(weights[0][0])
    sync.load_state_dict(first)
    before = all_of(sync)
    with sync:
        for name, state in damaged.items():
            model.load_state_dict(weights[1][0])
            error = error_of(lambda state=state: sync.load_state_dict(state))
            found[name] = [error, all_of(sync) == before]
            if error is None:  # what the deciding rank alone refuses
                model.load_state_dict(weights[0][0])
                sync.load_state_dict(first)
                assert all_of(sync) == before
        model.load_state_dict(weights[1][0])
        optimizer.load_state_dict(weights[1][1])
        sync.load_state_dict(second)
        for number in range(2):
            compute(sync, model, *batch(number, dist.get_rank(), sync.samples))
            sync.step()
    return {"found": found, "digest": digest(model, optimizer)}


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
