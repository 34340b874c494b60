"""`watch`: the losses of chosen samples over the epochs."""

from __future__ import annotations

import pytest
import torch

import paceline
from tests.data.pruning_play import KINDS, SAMPLES, losses_of, passes

EPOCHS = 9
WATCH = [3, 17, 41]
kinds = pytest.mark.parametrize("kind", KINDS)


def expected(taken, watch):
    """From the batches that were handed out: one entry for each epoch in which the sample took part."""
    return {
        sample: [(epoch, float(losses_of([sample], epoch))) for epoch, batch in taken if sample in batch]
        for sample in watch
    }


@kinds
def test_the_history_is_the_losses_that_were_observed_and_none_of_epochs_sat_out(kind):
    pruning = KINDS[kind](watch=WATCH)
    taken = passes(pruning, EPOCHS)
    assert pruning.loss_history == expected(taken, WATCH)
    everybody = KINDS[kind](watch=range(SAMPLES))
    passes(everybody, EPOCHS)
    missing = {sample: EPOCHS - len(found) for sample, found in everybody.loss_history.items()}
    assert list(missing.values()) == everybody.times_pruned.tolist()
    assert sum(missing.values()) > 0


@kinds
def test_watching_changes_nothing_else(kind):
    watching, plain = KINDS[kind](watch=WATCH), KINDS[kind]()
    assert passes(watching, EPOCHS) == passes(plain, EPOCHS)
    assert plain.loss_history == {}
    assert "watched_samples" not in plain.state_dict()


@kinds
@pytest.mark.parametrize("stop_after", [3, 7, 20])
def test_the_history_is_saved_and_gone_on_with_also_in_the_middle_of_an_epoch(kind, stop_after, tmp_path):
    whole, first, second = (KINDS[kind](watch=WATCH) for _ in range(3))
    passes(whole, EPOCHS)
    passes(first, EPOCHS, stop_after=stop_after)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    passes(second, EPOCHS)
    assert second.loss_history == whole.loss_history


def test_a_state_without_a_history_is_read_and_one_of_others_keeps_those_watched_here():
    plain, watching = KINDS["fine-pruning"](), KINDS["fine-pruning"](watch=WATCH)
    passes(plain, 3)
    passes(watching, 3)
    watching.load_state_dict(plain.state_dict())
    assert watching.loss_history == {sample: [] for sample in WATCH}
    other, again = KINDS["fine-pruning"](watch=[3, 4]), KINDS["fine-pruning"](watch=WATCH)
    passes(again, 3)
    other.load_state_dict(again.state_dict())
    assert other.loss_history == {3: again.loss_history[3], 4: []}


def test_a_damaged_history_is_refused_and_changes_nothing():
    pruning = KINDS["fine-pruning"](watch=WATCH)
    passes(pruning, 3)
    before, state = pruning.loss_history, pruning.state_dict()
    with pytest.raises(ValueError, match="watched_epochs must be"):
        pruning.load_state_dict(state | {"watched_epochs": torch.zeros(1, dtype=torch.int64)})
    assert pruning.loss_history == before


def test_an_epoch_that_is_broken_off_leaves_nothing():
    pruning = KINDS["fine-pruning"](watch=range(SAMPLES))
    for batch in pruning:
        pruning.observe(losses_of(batch, 1) + 100)
        break
    with pytest.warns(UserWarning, match="begun again"):
        taken = passes(pruning, 1)
    assert pruning.loss_history == expected(taken, range(SAMPLES))


def test_an_epoch_that_is_ended_early_has_those_who_were_observed():
    pruning = KINDS["fine-pruning"](watch=range(SAMPLES))
    for batch in pruning:
        pruning.observe(losses_of(batch, 1))
        pruning.end_epoch()
        break
    assert sorted(sample for sample, found in pruning.loss_history.items() if found) == sorted(batch)


@pytest.mark.parametrize("watch", [[50], [-1], [1.5], ["3"], "3", 7])
def test_what_is_no_sample_is_refused(watch):
    with pytest.raises(ValueError, match="watch must be"):
        paceline.FinePruning(50, batch_size=8, watch=watch)


def test_a_history_is_a_copy():
    pruning = KINDS["info-batch"](watch=[3])
    passes(pruning, 1)
    pruning.loss_history[3].clear()
    assert len(pruning.loss_history[3]) == 1
