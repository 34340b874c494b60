"""Cuts of a model: every piece has the inputs that it has in the model, and each method cuts the same layers."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

from experiments.core.cut_models import ALIKE, EQUAL, OURS, Subject, measured, prepared, subjects_of, three_cuts
from experiments.core.turns import take_turns

SMALL = Subject(model=ALIKE, microbatch=4, narrow=8, wide=8, depth=1)


@pytest.fixture(scope="module")
def found():
    return measured(SMALL, repeats=3)


def test_a_subject_is_the_same_model_in_every_process():
    first, second = SMALL.built(), SMALL.built()
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    other = dataclasses.replace(SMALL, seed=1).built()
    assert not torch.equal(first[1].weight, other[1].weight)


def test_stages_of_the_model_of_equal_stages_are_the_same_layers():
    model = SMALL.built()
    (cut,) = SMALL.cuts()
    first, second = ([str(layer) for layer in part] for part in (model[1:cut], model[cut:]))
    assert first == second


def test_every_piece_takes_what_it_has_in_the_model(found):
    whole = found.subject.built()(*found.inputs)
    for method, places in three_cuts(found, 3, 4).items():
        cut, values = prepared(found, method, places), found.inputs
        for piece in cut.pieces:
            assert all(map(torch.equal, values, piece.inputs))
            given = piece.piece.module(*values)
            values = (given,) if isinstance(given, torch.Tensor) else given
        assert torch.equal(values[0], whole)


def test_by_the_profile_no_cut_is_better_than_ours(found):
    cuts = {method: prepared(found, method, places) for method, places in three_cuts(found, 3, 4).items()}
    assert {len(cut.pieces) for cut in cuts.values()} == {3}
    assert min(cuts.values(), key=lambda cut: cut.predicted_seconds).predicted_seconds == pytest.approx(
        cuts[OURS].predicted_seconds
    )


def test_cuts_take_turns_and_the_best_time_of_the_slowest_piece_counts(found):
    places = three_cuts(found, 2, 4)
    cuts = [prepared(found, method, places[method]) for method in (EQUAL, OURS)]
    steps = [step.label for step in take_turns({cut.method: cut.run for cut in cuts}, 2)]
    assert steps == [EQUAL, OURS, OURS, EQUAL]
    for cut in cuts:
        assert [len(piece.seconds) for piece in cut.pieces] == [4, 4]
        assert cut.best == max(min(piece.seconds) for piece in cut.pieces)
        assert cut.median == max(statistics.median(piece.seconds) for piece in cut.pieces)
        assert all(weight.grad is None for piece in cut.pieces for weight in piece.piece.module.parameters())


def test_subjects_are_named_sized_and_seeded():
    several = [SMALL, Subject(model="lenet", microbatch=2)]
    assert subjects_of(several, ()) == tuple(several)
    assert subjects_of(several, ["lenet"], 16, 3) == (Subject(model="lenet", microbatch=16, seed=3),)
