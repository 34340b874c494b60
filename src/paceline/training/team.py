"""All workers of an averaging run in one process: each its own model, optimiser, batches and codec memory.

    compute   the gradient of a worker's batch, and where changes are averaged its optimiser's step
    enter     what it brings into an average, encoded as it would send it
    gathered  the sum of what all sent, in the order of the workers
    merge     a worker takes in the sum
    settle    all orders of this moment are carried out: the step that waited for mean gradients, the schedule

A plain sum is taken in the type of the messages. Payloads of a codec cannot be added up: each is decoded, and what
comes out is added up. One that brings nothing sends no payload. The schedule of learning rates follows what all agree
on: after a merge it has been stepped as often as all workers together have merged steps for each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.codecs.payload import NotFiniteError
from paceline.events import Begin, Merge, Window, moves
from paceline.optim import make_optimizer
from paceline.randomness import torch_generator
from paceline.strategies.averaging import Averaging
from paceline.training.batches import Batches
from paceline.training.replica import Flat, GradientReplica, Replica, averaged_buffers, check_codec, local_gradient
from paceline.training.train_state import all_finite
from paceline.training.training import Training, measure
from paceline.workers.threads import threads_for

WINDOW_BYTES = 16  # what a worker says of itself, beside its numbers
BUFFER_ELEMENT_BYTES = 4


class Player:
    """One worker: its model, its optimiser and schedule, its replica's books, its codec."""

    def __init__(self, training: Training, member: Averaging, *, workers: int) -> None:
        self.module = copy.deepcopy(training.module)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        buffers = averaged_buffers(self.module)
        self.optimizer, self.schedule = make_optimizer(
            training.optimizer, self.module.parameters(), total_steps=training.total_steps
        )
        self.replica: Replica | GradientReplica
        if member.averages == "gradients":
            self.replica = GradientReplica(self.trained, buffers, workers=workers, step=self._step)
        else:
            self.replica = Replica(self.trained, buffers, member, workers=workers)
        self.codec: Codec = training.codec.fresh([parameter.shape for parameter in self.trained])
        self.step_is_due = False  # it has a gradient, and its optimiser has not stepped
        self.merged = False  # anything, ever
        self.scheduled = self.to_schedule = 0

    def _step(self) -> None:
        self.optimizer.step()

    @property
    def own(self) -> torch.Tensor:
        """Its own parameters, in one vector."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.trained])

    def settle(self) -> None:
        """Take the step that is due, and let the schedule follow."""
        if self.step_is_due:
            self.optimizer.step()
            self.step_is_due = False
        self.replica.catch_up()
        while self.scheduled < self.to_schedule:
            self.schedule.step()
            self.scheduled += 1


class Team:
    """The workers of an averaging run, moved as their courses order.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> from paceline.strategies.averaging import make_averaging
    >>> team = Team(make_training(Recipe(), load_data(Recipe())), make_averaging("local-sgd"), workers=2)
    >>> team.compute(0, draw=0)
    >>> team.enter(0, Begin(number=0, window=Window(steps=1))) > 4 * team.parameters.numel()
    True
    """

    def __init__(self, training: Training, member: Averaging, *, workers: int) -> None:
        check_codec(member, training.codec)
        self._training, self._workers = training, workers
        self._gradients = member.averages == "gradients"
        self._alone = member.alone(workers)
        self.players = [Player(training, member, workers=workers) for _ in range(workers)]
        self._size = self.players[0].own.numel()
        self.gathers = not isinstance(training.codec, Identity)
        self.batches = Batches(training)
        self._messages: dict[int, list[torch.Tensor | None]] = {}  # of the average that is being entered, by worker
        self._totals: dict[int, torch.Tensor] = {}
        self._to_merge: dict[int, int] = {}  # how many workers have not merged a sum
        self._rounds: dict[int, int] = {}
        self._steps = 0
        self._exam = copy.deepcopy(training.module)
        self.diverged = False

    @property
    def parameters(self) -> torch.Tensor:
        """The model that all agree on, in one vector; while nothing has been averaged, the first worker's own."""
        return self.parameters_of(0)

    def parameters_of(self, worker: int) -> torch.Tensor:
        """The shared model as far as a worker has merged; its own parameters if it never has."""
        player = self.players[worker]
        return player.replica.shared if player.merged else player.own

    # -- steps -------------------------------------------------------------------------------------------------

    def compute(self, worker: int, draw: int) -> None:
        """The gradient of a worker's batch; where changes are averaged, the local step too."""
        player = self.players[worker]
        with threads_for(self._size), torch.random.fork_rng(devices=[]):
            local_gradient(player.module, self.batches, worker=worker, draw=draw)
            player.step_is_due = self._gradients
            if not self._gradients:
                player.optimizer.step()
        if self._alone:
            player.to_schedule += 1

    def settle(self, worker: int) -> None:
        """All orders of this moment are carried out."""
        with threads_for(self._size):
            self.players[worker].settle()

    # -- averages ----------------------------------------------------------------------------------------------

    def enter(self, worker: int, begin: Begin) -> int:
        """What a worker brings into an average, as the others get it; returns what it weighs."""
        player, brings = self.players[worker], begin.window.brought > 0
        message = torch.empty(player.replica.size, dtype=player.replica.dtype)
        with threads_for(self._size):
            player.replica.pack_change(message, scale=begin.scale, brings=brings)
            payload_bytes = self._travel(worker, begin.number, message[: self._size]) if self.gathers and brings else 0
        self._messages.setdefault(begin.number, [None] * self._workers)[worker] = message
        if not self.gathers:
            payload_bytes = self._size * message.element_size()
        return payload_bytes + BUFFER_ELEMENT_BYTES * (message.numel() - self._size) + WINDOW_BYTES

    def _travel(self, worker: int, number: int, change: torch.Tensor) -> int:
        """The change as it comes out of the codec, in its place; returns what it weighed on its way."""
        codec = self.players[worker].codec
        try:
            payload = codec.encode(change, torch_generator(self._training.seed, "average", worker, number))
        except NotFiniteError:
            self.diverged = True
            return 0
        change.copy_(codec.decode(payload))
        return payload.numel()

    def gathered(self, number: int, windows: Sequence[Window]) -> None:
        """Add up what all sent, in the order of the workers."""
        first, *others = (message for message in self._messages.pop(number) if message is not None)
        total = first
        with threads_for(self._size):
            for message in others:
                total.add_(message)
            self.diverged = self.diverged or not all_finite(total)
        brought = sum(window.brought for window in windows)
        self._steps += brought
        if moves(windows):  # else nobody merges it
            self._totals[number], self._to_merge[number] = total, self._workers
            self._rounds[number] = self._steps // self._workers

    def merge(self, worker: int, merge: Merge) -> None:
        """A worker takes in the sum."""
        player, total = self.players[worker], self._totals[merge.number]
        with threads_for(self._size):
            player.replica.merge(total, weight=merge.weight, open_steps=merge.open_steps)
        player.merged = True
        if not self._alone:
            player.to_schedule = min(self._rounds[merge.number], self._training.total_steps)
        self._to_merge[merge.number] -= 1
        if not self._to_merge[merge.number]:
            del self._totals[merge.number], self._to_merge[merge.number], self._rounds[merge.number]

    # -- how good it is ----------------------------------------------------------------------------------------

    def evaluate(self, worker: int = 0) -> tuple[float, float]:
        """Loss and accuracy of the shared model as far as a worker has merged, with the buffers that it has."""
        with threads_for(self._size):
            return measure(self._examined(worker), self._training.dataset, self._training.evaluation_samples)

    @property
    def module(self) -> torch.nn.Module:
        """The shared model as far as the first worker has merged, until it is asked for again."""
        return self._examined(0)

    @torch.no_grad()
    def _examined(self, worker: int) -> torch.nn.Module:
        player = self.players[worker]
        self._exam.load_state_dict(player.module.state_dict())
        if player.merged:
            trained = [parameter for parameter in self._exam.parameters() if parameter.requires_grad]
            Flat(trained, player.replica.dtype).write(player.replica.shared)
        return self._exam
