"""What the ranks of the tests of rounds can be told to do. What a job returns goes through JSON."""

from tests.rounds.jobs.checkpoints import refused_states, resumed, wrong_states
from tests.rounds.jobs.epochs import broken_off, epochs, goes_on_within_an_epoch, second_loader
from tests.rounds.jobs.faults import (
    beyond_the_codec,
    does_not_deliver,
    drifts,
    failing_twice,
    fails_first,
    fails_in_the_constructor,
    flushes_outside_of_epochs,
    flushes_where_docs_say,
    never_constructs,
    overflows,
    raises,
    until_it_ends,
)
from tests.rounds.jobs.misuse import clips, misused, misused_loops, sets_rates, steps_scheduler_too
from tests.rounds.jobs.shares import by_speed, like_one_process, refused_shares, taken, weights
from tests.rounds.jobs.times import apart, watched
from tests.rounds.jobs.training import alike, counts_in_doubles, like_plain, schedules, some_close_first

__all__ = [
    "alike",
    "apart",
    "beyond_the_codec",
    "broken_off",
    "by_speed",
    "clips",
    "counts_in_doubles",
    "does_not_deliver",
    "drifts",
    "epochs",
    "failing_twice",
    "fails_first",
    "fails_in_the_constructor",
    "flushes_outside_of_epochs",
    "flushes_where_docs_say",
    "goes_on_within_an_epoch",
    "like_one_process",
    "like_plain",
    "misused",
    "misused_loops",
    "never_constructs",
    "overflows",
    "raises",
    "refused_shares",
    "refused_states",
    "resumed",
    "schedules",
    "second_loader",
    "sets_rates",
    "some_close_first",
    "steps_scheduler_too",
    "taken",
    "until_it_ends",
    "watched",
    "weights",
    "wrong_states",
]
