"""Step times of a run with a server: where every gradient's time went, and the server's own.

A worker's line in times/worker-N.jsonl is one gradient. All of it is on the run's clock, which is the server's, but for
what the worker has measured itself: its durations come with the gradient, and none is believed beyond what the server
has seen (`bounded`).

    server   sent ···>                                                              ···> whole ── decoded, arrived
    worker        ···> first byte ── whole ── begins ── batch ── forward, backward ── gone ···>
             |                       |         | input  |                           |
             started                 |<behind->|                                    |
                       |<---down---->|<-------------------held--------------------->|    |<-up->|<-decode->|
             |<----------------------------------seconds------------------------------------------------->|

    started_seconds   when the server handed the model to the worker's stream (`sent`)
    seconds           from there until the gradient was given to the strategy: the journal's `at_seconds` - started
    held              from the model being whole at the worker until the gradient was given to its connection
    wait_seconds      (seconds - held) + behind: what the worker did not spend on this gradient
    transfer          seconds - held: the ways there and back, as in the journal; it has parts that are known,
                      down, up and decode, and what is left is latency both ways, and queues at both ends
    behind            the model was there, and the worker still computed or sent the gradient before; so the steps of a
                      worker that is late overlap: the next has `started` before this one has ended
    other_seconds     of `held`: the model loaded, the gradient encoded

A delay that a recipe injects is slept after each block's backward pass, and counts as backward. A gradient whose draw
is taken again (a server that was resumed) has another line, which counts.

The server's lines in times/server.jsonl are its steps:

    last gradient, to the strategy ── combine, optimiser, journal ── model encoded, queued for each worker ── ... ──
    closed                         |<--------step_seconds-------->|<------------send_seconds------------->|<-beside->|

The `started_seconds` of the workers that get this model lie in `send_seconds`. A checkpoint that is still being read
holds up the step, and is in `step_seconds`; what an evaluation or a checkpoint takes to begin is in `beside_seconds`,
and comes before the first byte of the model is written. `decode_seconds` is of all gradients since the step before, in
threads of their own.

`LinkTimed` lines (with the 1st, 2nd, 4th, 8th, ... gradient of a worker from one host) have the link's latency: half of
the least round trip that the system has seen on the connection (Linux; elsewhere 0). In server.jsonl they are of the
model, to that worker; in a worker's file of its gradient, and `to` is its own number, for a server has none. The first
packets of a message come at once, on any link: messages below LEAST_LINK_BYTES say nothing of a rate, and have no line.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline import __version__
from paceline.drivers.served.messages import Gradient
from paceline.files import discard
from paceline.processes import seen_from
from paceline.traces.journal import MOST_THREADS
from paceline.traces.step_times import (
    FORMAT,
    TIMES,
    LinkTimed,
    Noun,
    RoundTrip,
    ServerTimes,
    StepTimes,
    TimesBegan,
    TimesEnded,
    TimesWriter,
    times_path,
)

LEAST_LINK_BYTES = 256 * 1024
LOCAL_NOTE = "models and gradients lie in shared memory: nothing of them is on a wire"


def bounded(message: Gradient, *, seconds: float, most_down_bytes: int) -> StepTimes:
    """Return the step times that a worker claims for its gradient, cut to what can be: all of it within `seconds`.

    >>> claim = Gradient(version=0, draw=7, blocks_done=1, blocks=1, work_seconds=9.0, held_seconds=9.0, samples=0,
    ...                  loss_mean=None, loss_variance=None, payload_bytes=0, buffer_bytes=0, input_seconds=0.5,
    ...                  forward_seconds=9.0, backward_seconds=9.0)
    >>> times = bounded(claim, seconds=1.0, most_down_bytes=0)
    >>> times.input_seconds, times.forward_seconds, times.backward_seconds, times.wait_seconds
    (0.5, 0.5, 0.0, 0.0)
    """
    left = held = min(message.held_seconds, seconds)
    phases = []
    for claimed in (message.input_seconds, message.forward_seconds, message.backward_seconds, message.behind_seconds):
        phases.append(min(claimed, left))
        left -= phases[-1]
    processor = message.processor_seconds
    behind = phases[3]
    return StepTimes(
        step=message.draw,
        version=message.version,
        started_seconds=0.0,
        seconds=seconds,
        input_seconds=phases[0],
        forward_seconds=phases[1],
        backward_seconds=phases[2],
        wait_seconds=seconds - held + behind,
        processor_seconds=None if processor is None else min(processor, seconds * MOST_THREADS),
        trip=RoundTrip(
            held_seconds=held,
            behind_seconds=behind,
            down_seconds=min(message.down_seconds, seconds - held),
            down_bytes=min(message.down_bytes, most_down_bytes),
        ),
    )


class RunTimes:
    """Writes the step times of a run with a server; a disk that refuses them is noted in `error`, and ends nothing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> times = RunTimes(folder, workers=2)
    >>> times.stepped(ServerTimes(version=0, closed_seconds=1.0, step_seconds=0.5, send_seconds=0.25,
    ...                           decode_seconds=0.0))
    >>> times.close(2.0, "all rounds are done")
    >>> [path.name for path in sorted((folder / "times").iterdir())]
    ['server.jsonl']
    """

    def __init__(self, folder: Path, *, workers: int, host: str = "") -> None:
        self._folder, self._workers, self._host = folder, workers, host
        self._launch = secrets.token_hex(8)
        self._writers: dict[tuple[Noun, int], TimesWriter] = {}
        self._hosts: dict[int, tuple[str, bool]] = {}
        self._gradients: dict[int, int] = {}  # of each worker, since it last came from another host
        self._told: dict[tuple[Noun, int], TimesBegan] = {}  # the last TimesBegan in each file

    @property
    def error(self) -> str:
        """The first thing that went wrong on the disk, if something did."""
        return next((writer.error for writer in self._writers.values() if writer.error), "")

    def joined(self, worker: int, *, host: str, local: bool) -> None:
        """Begin a worker's file, or go on with it, perhaps from another host."""
        self._hosts[worker] = host, local
        writer, began = self._writer("worker", worker), self._began("worker", worker)
        if began != self._told["worker", worker]:  # a worker that goes and comes again adds no lines by that
            self._gradients[worker] = 0
            self._tell(writer, began)

    def left(self, worker: int) -> None:
        """Close a worker's file until the worker is there again."""
        writer = self._writers.get(("worker", worker))
        if writer is not None:
            writer.release()

    def gradient(
        self,
        worker: int,
        times: StepTimes,
        *,
        arrived_seconds: float,
        least_round_trip_seconds: Callable[[], float | None],
    ) -> None:
        """Write the times of one gradient of a worker."""
        writer = self._writer("worker", worker)
        writer.write(times)
        count = self._gradients[worker] = self._gradients.get(worker, 0) + 1
        trip = times.trip
        if count & (count - 1) or trip is None:
            return
        latency = min((least_round_trip_seconds() or 0.0) / 2, times.seconds)
        up, down = (trip.up_bytes, trip.up_seconds), (trip.down_bytes, trip.down_seconds)
        for (on_wire, seconds), file in ((up, writer), (down, self._writer("server"))):
            if on_wire >= LEAST_LINK_BYTES:
                file.write(
                    LinkTimed(
                        at_seconds=arrived_seconds,
                        to=worker,
                        bytes=on_wire,
                        seconds=seconds + latency,
                        latency_seconds=latency,
                    )
                )

    def stepped(self, times: ServerTimes) -> None:
        """Write the server's own time of one step."""
        self._writer("server").write(times)

    def close(self, now: float, reason: str) -> None:
        """Write the ends, and close all files; once more does no harm."""
        for writer in self._writers.values():
            writer.write(TimesEnded(at_seconds=now, reason=reason))
        self._close_all()

    def begin_again(self) -> None:
        """Write new files from now on: the folder was deleted or moved."""
        self._close_all()

    def remove(self) -> None:
        """Remove all files of a run in which nothing was computed."""
        for writer in self._close_all():
            discard(writer.path)
        with suppress(OSError):
            (self._folder / TIMES).rmdir()

    def _close_all(self) -> list[TimesWriter]:
        closed, self._writers, self._told = list(self._writers.values()), {}, {}
        for writer in closed:
            writer.close()
        return closed

    def _writer(self, noun: Noun, number: int = 0) -> TimesWriter:
        writer = self._writers.get((noun, number))
        if writer is None:
            writer = self._writers[noun, number] = TimesWriter(times_path(self._folder, noun, number))
            self._tell(writer, self._began(noun, number))
        return writer

    def _tell(self, writer: TimesWriter, began: TimesBegan) -> None:
        self._told[began.noun, began.number] = began
        writer.write(began)

    def _began(self, noun: Noun, number: int) -> TimesBegan:
        host, local = (self._host, False) if noun == "server" else self._hosts.get(number, ("", False))
        return TimesBegan(
            format=FORMAT,
            paceline=__version__,
            noun=noun,
            number=number,
            workers=self._workers,
            host=host.rsplit(" pid ", 1)[0][:200],
            launch=self._launch,
            seen_from=seen_from() if noun == "server" else "",
            sync="server",
            notes=(LOCAL_NOTE,) if local else (),
        )
