"""What a recipe's worker judges: what it has sent, on this connection; with the next it begins empty."""

from __future__ import annotations

import pytest
import torch

from paceline.drivers.served.job import work
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.training import Batches

BUSY = {"name": "fine-pruning", "window": 50, "starting_point": 0, "block": 1, "count": 1}
UNSENT, LOST_AT, DRAWS = (3, 9), 7, 16  # not finite; the connection


@pytest.fixture(scope="module")
def training():
    recipe = Recipe(rounds=DRAWS).with_settings(
        cluster={"workers": 3},
        strategy={"k": 2},
        data={"split": "iid"},
        worker={"batch_size": 240, "blocks": 2},
        pruning=BUSY,
    )
    return make_training(recipe, load_data(recipe))


class Scripted:
    """A worker whose server is a script: 3 and 9 are not finite, 5 ends early, 7 is lost with its connection, once."""

    number, shard, samples = 1, 1, 0

    def __init__(self):
        self.draw, self.welcome, self.losses = 0, object(), {}

    def running(self):
        return self.draw < DRAWS

    def begin_batch(self, blocks, *, samples):
        pass

    def block_done(self):
        return self.draw != 5

    def send(self, losses):
        draw, lost = self.draw, self.draw == LOST_AT and LOST_AT not in self.losses
        self.losses[draw] = losses
        if lost:  # whoever comes back draws it again
            self.welcome = object()
            return False
        self.draw += 1
        return draw not in UNSENT


class Watched(Batches):
    """Batches that write down what was drawn, and what was judged."""

    made: list

    def __init__(self, training):
        super().__init__(training)
        self.drawn, self.judged = [], []
        Watched.made.append(self)

    def assignment(self, **asked):
        found = super().assignment(**asked)
        self.drawn.append((asked["draw"], found.targets))
        return found

    def judge(self, *, worker, draw, losses):
        self.judged.append((draw, len(losses)))
        super().judge(worker=worker, draw=draw, losses=losses)


def test_a_worker_judges_what_it_sent_and_begins_empty_with_a_new_connection(training, monkeypatch):
    monkeypatch.setattr(Watched, "made", [], raising=False)
    monkeypatch.setattr("paceline.drivers.served.job.Batches", Watched)
    worker = Scripted()
    with torch.random.fork_rng(devices=[]):
        work(worker, training.module, training)
    (watched,) = Watched.made
    draws = [*range(LOST_AT + 1), *range(LOST_AT, DRAWS)]
    assert [draw for draw, _ in watched.drawn] == draws
    judged = [(draw, 120 if draw == 5 else 240) for draw in draws if draw not in UNSENT]
    judged.remove((LOST_AT, 240))  # the first time it was lost
    assert watched.judged == judged

    fresh = Batches(training)
    fresh.joined(1, draw=LOST_AT)
    for draw, targets in watched.drawn[LOST_AT + 1 :]:
        assert torch.equal(fresh.assignment(worker=1, draw=draw).targets, targets)
        if draw not in UNSENT:
            fresh.judge(worker=1, draw=draw, losses=worker.losses[draw])
    assert fresh.pruned.sat_out > 0
