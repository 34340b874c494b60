"""Jobs in the process of a test, in place of the pool: a process of its own would load torch for every experiment."""

from __future__ import annotations

import pytest

from paceline.reproduce import running


def compute_here(monkeypatch: pytest.MonkeyPatch, *, most: int | None = None) -> list[str]:
    """Let jobs be computed one after the other, in this process; return the list that their names are added to.

    With `most`, the run is interrupted before it computes more.
    """
    names: list[str] = []

    def computed(jobs, processes, directory):
        for job in jobs:
            if most is not None and len(names) >= most:
                raise KeyboardInterrupt
            names.append(job.name)
            yield job, *running.run_timed(job.run, dict(job.settings))

    monkeypatch.setattr(running, "computed", computed)
    return names
