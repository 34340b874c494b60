"""Journals as a server would write them, of any length, with restarts: records first, and then bytes."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.traces.checked_lines import checksum_of
from paceline.traces.journal import (
    FORMAT,
    Arrival,
    Arrived,
    Checkpointed,
    Dropped,
    Evaluated,
    Resumed,
    RunBegan,
    RunEnded,
    StepRecord,
    WorkerJoined,
    WorkerLeft,
    lines_of,
)

LATE = "its round had closed"


def began(*, workers=3, strategy="fastest-k", rounds=50, on="server"):
    return RunBegan(
        format=FORMAT, paceline="0.2.0", strategy=strategy, seed=0, workers=workers, blocks=1,
        recipe={"rounds": rounds},
        signature="", codec="none", on=on,
    )  # fmt: skip


def arrival(worker, version, at_seconds):
    return Arrival(
        worker=worker, version=version, draw=version, blocks_done=1, blocks=1, at_seconds=at_seconds, work_seconds=0.1,
        transfer_seconds=0.01, loss_mean=0.5, loss_variance=0.1, samples=8,
    )  # fmt: skip


def step(version, at_seconds, *, fresh, late=(), dropped=(), waiting=(), sent=100, received=200):
    """A step of a model with the gradients of these workers: fresh ones, those of the version before, and drops.

    Those that wait have arrived when the step is taken, and no record says what became of them.
    """
    keys = [*((worker, version) for worker in fresh), *((worker, max(0, version - 1)) for worker in (*late, *dropped))]
    keys += [(worker, version) for worker in waiting]
    return StepRecord(
        at_seconds=at_seconds,
        version=version,
        opened_seconds=max(0.0, at_seconds - 0.1),
        fresh=tuple((worker, version) for worker in fresh),
        late=tuple((worker, max(0, version - 1)) for worker in late),
        dropped=tuple(Dropped(worker=worker, version=max(0, version - 1), reason=LATE) for worker in dropped),
        arrivals=tuple(arrival(worker, of, at_seconds) for worker, of in keys),
        fingerprint=version,
        sent_bytes=sent,
        received_bytes=received,
    )


def joined(worker, at_seconds=0.0, host="node-7"):
    return WorkerJoined(at_seconds=at_seconds, worker=worker, shard=worker, first_draw=0, threads=1, host=host)


@st.composite
def journals(draw):
    """Draw the records of a run of a few workers: rounds, evaluations, checkpoints noted late, restarts, an end."""
    workers = draw(st.integers(1, 4))
    on = draw(st.sampled_from(("server", "ranks")))
    records = [began(workers=workers, on=on), *map(joined, range(workers))]
    version, at, saved = 0, 0.0, [0]
    for _ in range(draw(st.integers(0, 25))):
        at += draw(st.sampled_from((0.1, 0.25, 3.0)))
        what = draw(st.sampled_from(("step",) * 4 + ("measure", "save", "leave", "arrive", "restart")))
        if what == "step":
            fates = draw(
                st.lists(
                    st.sampled_from(("fresh", "late", "dropped", "waiting", "away")), min_size=workers, max_size=workers
                )
            )
            of = {fate: [worker for worker in range(workers) if fates[worker] == fate] for fate in set(fates)}
            first = {"fresh": of.get("fresh") or [0]}
            others = {
                fate: [worker for worker in of.get(fate, []) if worker not in first["fresh"]]
                for fate in ("late", "dropped", "waiting")
            }
            records.append(step(version, at, **first, **others, sent=draw(st.integers(0, 999)), received=7))
            version += 1
        elif what == "measure":
            loss = draw(st.sampled_from((None, 0.5, 2.0)))
            records.append(Evaluated(at_seconds=at, round=version, loss=loss, accuracy=None if loss is None else 0.5))
        elif what == "save":
            # A checkpoint is written beside the rounds: its note may come when others are done.
            noted = max(saved[-1], version - draw(st.integers(0, 2)))
            records.append(Checkpointed(at_seconds=at, version=noted))
            saved.append(noted)
        elif what == "arrive":
            late = arrival(draw(st.integers(0, workers - 1)), max(0, version - 1), at)
            drop = Dropped(worker=late.worker, version=late.version, reason=LATE)
            records.append(Arrived(arrivals=(late,), dropped=(drop,) if draw(st.booleans()) else ()))
        elif what == "leave":
            records.append(WorkerLeft(at_seconds=at, worker=draw(st.integers(0, workers - 1)), reason="it was killed"))
        else:
            # Mostly a checkpoint that was noted; at times one whose note was lost with the server.
            version = draw(st.sampled_from(saved[-3:] if len(saved) > 1 else [version]))
            saved = [each for each in saved if each <= version]
            records.append(Resumed(at_seconds=at, version=version, reason="restarted"))
            records += [joined(worker, at) for worker in range(workers)]
    if draw(st.booleans()):
        # The time after the last round is no part of the run: who was there says goodbye, and the model is saved.
        goodbyes = draw(st.lists(st.integers(0, workers - 1), max_size=3))
        records += [WorkerLeft(at_seconds=at + 7.0, worker=each, reason="all rounds are done") for each in goodbyes]
        records += [Checkpointed(at_seconds=at + 9.0, version=version)] * draw(st.integers(0, 1))
        records.append(RunEnded(at_seconds=at, reason="all rounds are done", rounds_done=version, diverged=False))
    return records


def lines(records):
    return lines_of(records)


def append(path, *records):
    """Write further records behind those that a journal holds."""
    before = checksum_of(path.read_bytes())
    with path.open("ab") as journal:
        journal.write(lines_of(records, before))
