"""All workers of an averaging run in one process: each its own model, optimiser, batches and codec memory.

    compute   the gradient of a worker's batch, and where changes are averaged its optimiser's step
    enter     what it brings into an average
    add_up    the sum of what all brought, exchanged as they would
    merge     a worker takes in the sum
    settle    all orders of this moment are carried out: the step that waited for mean gradients, the schedule

A plain sum is taken in the type of the messages, in the order of the workers. What travels encoded goes through the
same exchanges as between ranks, request by request (`exchanges.lockstep`). The schedule of learning rates follows what
all agree on: after a merge it has been stepped as often as all workers together have merged steps for each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from paceline.codecs.payload import NotFiniteError
from paceline.codecs.requests import Request
from paceline.events import Begin, Merge, Window, is_merged
from paceline.exchanges import Trouble, TroubleError, VectorExchange, make_exchange
from paceline.exchanges.lockstep import sum_in_lockstep, traffic_of_requests
from paceline.exchanges.plans import ALL_REDUCE, adds_plainly, refuse_float64
from paceline.optim import make_optimizer
from paceline.randomness import torch_generator
from paceline.strategies.averaging import Averaging
from paceline.traffic import NO_TRAFFIC, Traffic, all_reduce_traffic
from paceline.training.batches import Batches
from paceline.training.replica import Flat, averaged_buffers, check_codec, local_gradient, make_replica
from paceline.training.train_state import all_finite
from paceline.training.training import Measurement, Training, measure
from paceline.workers.threads import threads_for

WINDOW_BYTES = 16  # what a worker says of itself, beside its numbers


class WorkerModel:
    """One worker's model, with its optimiser and schedule, its replica and its exchange, if it encodes anything."""

    def __init__(self, training: Training, member: Averaging, *, place: int, workers: int) -> None:
        self.module = copy.deepcopy(training.module)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer, self.schedule = make_optimizer(
            training.optimizer, self.module.parameters(), total_steps=training.total_steps
        )
        self.replica = make_replica(
            self.trained, averaged_buffers(self.module), member, workers=workers, step=self.optimizer.step
        )
        refuse_float64(training.codec, training.plan, {parameter.dtype for parameter in self.trained})
        refuse_float64(training.codec, training.plan, {each.dtype for each in self.module.buffers()}, noun="buffers")
        self.exchange: VectorExchange | None = None
        if not adds_plainly(training.codec, training.plan):
            shapes = [parameter.shape for parameter in self.trained]
            self.exchange = make_exchange(training.codec, shapes, place, workers, training.plan)
        self.step_is_due = False  # it has a gradient, and its optimiser has not stepped
        self.merged = False  # anything, ever
        self.to_schedule = 0  # the steps that the schedule is to have taken

    @property
    def parameters(self) -> torch.Tensor:
        """This worker's parameters, in one vector."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.trained])

    def settle(self) -> None:
        """Take the step that is due, and let the schedule follow."""
        if self.step_is_due:
            self.optimizer.step()
            self.step_is_due = False
        self.replica.catch_up()
        while self.schedule.last_epoch < self.to_schedule:
            self.schedule.step()


class AveragingWorkers:
    """The models of all workers of an averaging run, moved as the workers' averaging states order.

    >>> from paceline.data import load_dataset
    >>> from paceline.optim import OptimizerSettings
    >>> from paceline.strategies.averaging import make_averaging
    >>> digits, network = load_dataset("digits"), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> shards = torch.arange(400).split(200)
    >>> training = Training(module=network, dataset=digits, shards=shards, optimizer=OptimizerSettings(), total_steps=1)
    >>> workers = AveragingWorkers(training, make_averaging("local-sgd"), workers=2)
    >>> workers.compute(0, draw=0)
    >>> for worker in range(2):
    ...     workers.enter(worker, Begin(number=0, window=Window(steps=worker == 0)))
    >>> workers.add_up(0, [Window(steps=1), Window()]).given_bytes > 4 * workers.parameters.numel()
    True
    """

    def __init__(self, training: Training, member: Averaging, *, workers: int) -> None:
        check_codec(member, training.codec)
        self._training, self._workers = training, workers
        self._gradients = member.averages == "gradients"
        self._alone = member.alone(workers)
        self.models = [WorkerModel(training, member, place=place, workers=workers) for place in range(workers)]
        self._size = self.models[0].parameters.numel()
        exchanges = [model.exchange for model in self.models if model.exchange is not None]
        self._exchanges, self.plan = exchanges, exchanges[0].plan if exchanges else ALL_REDUCE
        self.batches = Batches(training)
        self._messages: dict[int, list[torch.Tensor | None]] = {}  # of the average that is being entered, by worker
        self._brings: dict[int, list[bool]] = {}
        self._totals: dict[int, torch.Tensor] = {}
        self._to_merge: dict[int, int] = {}  # how many workers have not merged a sum
        self._rounds: dict[int, int] = {}
        self._steps = 0
        self._spare = copy.deepcopy(training.module)
        self.diverged = False

    @property
    def parameters(self) -> torch.Tensor:
        """The model that all agree on, in one vector; while nothing has been averaged, the first worker's own."""
        return self.parameters_of(0)

    def parameters_of(self, worker: int) -> torch.Tensor:
        """Return the shared model as far as a worker has merged; its own parameters if it never has."""
        model = self.models[worker]
        return model.replica.shared if model.merged else model.parameters

    # -- steps -------------------------------------------------------------------------------------------------

    def compute(self, worker: int, draw: int) -> None:
        """Compute the gradient of a worker's batch; where changes are averaged, take the local step too."""
        model = self.models[worker]
        with threads_for(self._size), torch.random.fork_rng(devices=[]):
            local_gradient(model.module, self.batches, worker=worker, draw=draw)
            model.step_is_due = self._gradients
            if not self._gradients:
                model.optimizer.step()
        if self._alone:
            model.to_schedule += 1

    def settle(self, worker: int) -> None:
        """Finish a worker's step, when all orders of this moment are carried out."""
        with threads_for(self._size):
            self.models[worker].settle()

    # -- averages ----------------------------------------------------------------------------------------------

    def enter(self, worker: int, begin: Begin) -> None:
        """Take what a worker brings into an average."""
        model, brings = self.models[worker], begin.window.brought > 0
        message = torch.empty(model.replica.size, dtype=model.replica.dtype)
        with threads_for(self._size):
            model.replica.pack_change(message, scale=begin.scale, brings=brings)
        self._messages.setdefault(begin.number, [None] * self._workers)[worker] = message
        self._brings.setdefault(begin.number, [False] * self._workers)[worker] = brings

    def add_up(self, number: int, windows: Sequence[Window]) -> Traffic:
        """Add up what all brought; return what that puts on the network."""
        messages = [message for message in self._messages.pop(number) if message is not None]
        brings, total = self._brings.pop(number), messages[0]
        words_bytes = total.element_size() * (total.numel() - self._size) + WINDOW_BYTES
        with threads_for(self._size):
            if self._exchanges:
                changes = [message[: self._size].float() for message in messages]
                traffic = self._exchange(number, changes, brings)
                total[: self._size] = changes[0]
                traffic += Traffic(given_bytes=(self._workers - 1) * words_bytes)
            else:
                message_bytes = self._size * total.element_size() + words_bytes
                traffic = all_reduce_traffic(message_bytes, self._workers)
            summed = slice(self._size if self._exchanges else 0, None)  # an exchange has left its sum in the first
            for message in messages[1:]:
                total[summed].add_(message[summed])
            self.diverged = self.diverged or not all_finite(total)
        self._steps += sum(window.brought for window in windows)
        if is_merged(windows):  # else nobody merges it
            self._totals[number], self._to_merge[number] = total, self._workers
            self._rounds[number] = self._steps // self._workers
        return traffic

    def _exchange(self, number: int, changes: Sequence[torch.Tensor], brings: Sequence[bool]) -> Traffic:
        """Put the sum of all changes, as it arrives, in the place of the first."""
        traffic = NO_TRAFFIC

        def heard(requests: Sequence[Request]) -> None:
            nonlocal traffic
            traffic += traffic_of_requests(requests)

        protocols = [
            exchange.run(
                change if brought else None, torch_generator(self._training.seed, "average", place, number), out=change
            )
            for place, (exchange, change, brought) in enumerate(zip(self._exchanges, changes, brings, strict=True))
        ]
        try:
            sum_in_lockstep(self.plan, protocols, heard)
        except NotFiniteError:
            self.diverged = True
        except TroubleError as error:
            if Trouble.NOT_FINITE not in error.troubles.values():
                raise (error.cause or error) from None
            self.diverged = True
        return traffic

    def merge(self, worker: int, merge: Merge) -> None:
        """Let a worker take in the sum of an average."""
        model, total = self.models[worker], self._totals[merge.number]
        with threads_for(self._size):
            model.replica.merge(total, weight=merge.weight, open_steps=merge.open_steps)
        model.merged = True
        if not self._alone:
            model.to_schedule = min(self._rounds[merge.number], self._training.total_steps)
        self._to_merge[merge.number] -= 1
        if not self._to_merge[merge.number]:
            del self._totals[merge.number], self._to_merge[merge.number], self._rounds[merge.number]

    # -- how good it is ----------------------------------------------------------------------------------------

    def evaluate(self, worker: int = 0) -> Measurement:
        """Measure the shared model as far as a worker has merged, with the buffers that it has."""
        with threads_for(self._size):
            return measure(self._shared_model(worker), self._training)

    @property
    def module(self) -> torch.nn.Module:
        """The shared model as far as the first worker has merged, until it is asked for again."""
        return self._shared_model(0)

    @torch.no_grad()
    def _shared_model(self, worker: int) -> torch.nn.Module:
        model = self.models[worker]
        self._spare.load_state_dict(model.module.state_dict())
        if model.merged:
            trained = [parameter for parameter in self._spare.parameters() if parameter.requires_grad]
            Flat(trained, model.replica.dtype).write(model.replica.shared)
        return self._spare
