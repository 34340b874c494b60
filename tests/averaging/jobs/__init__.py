"""What the ranks of the averaging tests can be told to do. What a job returns goes through JSON."""

from tests.averaging.jobs.checkpoints import documented, drifting, resumed, wrong_states
from tests.averaging.jobs.faults import left_by_one, lying, poisoned, stays_away, unable, until_it_ends
from tests.averaging.jobs.misuse import misused
from tests.averaging.jobs.tally import conserve, ends, numbers, paces, schedules
from tests.averaging.jobs.times import watched
from tests.averaging.jobs.training import adam_too, alike, alone, kinds, scaled, told

__all__ = [
    "adam_too",
    "alike",
    "alone",
    "conserve",
    "documented",
    "drifting",
    "ends",
    "kinds",
    "left_by_one",
    "lying",
    "misused",
    "numbers",
    "paces",
    "poisoned",
    "resumed",
    "scaled",
    "schedules",
    "stays_away",
    "told",
    "unable",
    "until_it_ends",
    "watched",
    "wrong_states",
]
