"""Late work of a fixed or random number of blocks, in simulated runs: what arrives, when, and how it is weighed."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Recipe, simulate
from paceline.drivers.simulated.cluster import Cluster, blocks_when_late
from paceline.drivers.simulated.learner import Learner
from paceline.drivers.simulated.timing import RoundTimes
from paceline.recipes import read_recipe
from paceline.recipes.assembly import load_data, make_setup, make_training
from paceline.recipes.reading import RecipeError
from paceline.runs.training import train
from paceline.training import Batches

SMALL = Recipe(rounds=25, evaluate_every=25).with_settings(strategy={"k": 6}, delay={"persistence": 3})
WEIGHTS = (True, False, "samples")


def late_work(recipe):
    return [work for work in simulate(recipe).trace.works if work.outcome == "late"]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**53), worker=st.integers(0, 10**6), draw=st.integers(0, 10**6), blocks=st.integers(1, 64))
def test_a_random_number_of_blocks_is_one_of_them_and_depends_on_its_place_alone(seed, worker, draw, blocks):
    place = {"seed": seed, "worker": worker, "draw": draw}
    found = blocks_when_late("random", blocks, **place)
    assert 1 <= found <= blocks
    assert found == blocks_when_late("random", blocks, **place)
    assert blocks_when_late(blocks, blocks, **place) == blocks == blocks_when_late(None, blocks, **place)


def test_every_number_of_blocks_is_drawn_about_as_often():
    drawn = Counter(blocks_when_late("random", 4, seed=5, worker=w, draw=d) for w in range(40) for d in range(100))
    assert sorted(drawn) == [1, 2, 3, 4]
    assert all(850 < count < 1150 for count in drawn.values())  # 1,000 each; 27 is a standard deviation


def test_draws_of_a_worker_do_not_change_when_workers_are_added():
    def drawn(workers):
        recipe = SMALL.with_settings(cluster={"workers": workers, "late_blocks": "random"}, strategy={"k": 1})
        return {(work.worker, work.version): work.blocks_done for work in late_work(recipe)}

    few, many = drawn(4), drawn(7)
    both = few.keys() & many.keys()
    assert len(both) > 20
    assert all(few[place] == many[place] for place in both)


@pytest.mark.parametrize("on", ["server", "ranks"])
def test_all_blocks_are_plain_complete_work_to_the_last_bit(on):
    recipe = SMALL.with_settings(strategy={"on": on})
    plain, whole = simulate(recipe), simulate(recipe.with_settings(cluster={"late_blocks": 4}))
    assert torch.equal(plain.parameters, whole.parameters)
    assert plain.trace.rounds == whole.trace.rounds
    assert plain.trace.works == whole.trace.works


@pytest.mark.parametrize("late_blocks", [1, 3, "random"])
def test_late_gradients_have_the_blocks_that_were_asked_for_and_times_do_not_depend_on_it(late_blocks):
    recipe = SMALL.with_settings(cluster={"late_blocks": late_blocks})
    found = simulate(recipe).trace
    late = {work.blocks_done for work in found.works if work.outcome == "late"}
    assert late == ({1, 2, 3, 4} if late_blocks == "random" else {late_blocks})
    assert {work.blocks_done for work in found.works if work.outcome == "used"} == {4}
    assert found.rounds == simulate(SMALL).trace.rounds
    timed = RoundTimes(make_setup(recipe))
    assert [progress.seconds for progress in timed] == [each.closed_seconds for each in found.rounds]


@pytest.mark.parametrize("late_blocks", [1, "random"])
def test_how_partial_work_is_weighed_changes_what_is_learned(late_blocks):
    recipe = SMALL.with_settings(cluster={"late_blocks": late_blocks})
    found = [simulate(recipe.with_settings(strategy={"scale_partial": how})).parameters for how in WEIGHTS]
    assert not any(torch.equal(found[one], found[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("late_blocks", [None, 4])
def test_with_all_blocks_it_does_not_matter_how_partial_work_is_weighed(late_blocks):
    recipe = SMALL.with_settings(cluster={"late_blocks": late_blocks})
    first, *others = (simulate(recipe.with_settings(strategy={"scale_partial": how})).parameters for how in WEIGHTS)
    assert all(torch.equal(first, other) for other in others)


def test_whoever_closes_every_round_with_all_workers_has_no_late_blocks():
    recipe = SMALL.with_settings(cluster={"late_blocks": 1}, strategy={"k": 10})
    full = simulate(recipe.with_strategy("full")).parameters
    assert torch.equal(simulate(recipe).parameters, full)


@pytest.mark.parametrize(("how", "scale"), [(True, 2 / 8), (False, 1.0), ("samples", 1.0)])
def test_a_late_gradient_is_that_of_the_first_blocks(how, scale):
    """One of two workers is late with 2 of 8 blocks of 4 samples: the second step has its first 8, by autograd."""
    recipe = Recipe(rounds=2).with_settings(
        worker={"batch_size": 32, "blocks": 8},
        cluster={"workers": 2, "late_blocks": 2},
        strategy={"k": 1, "scale_partial": how},
        optimizer={"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    )
    training = make_training(recipe, load_data(recipe))
    learner = Learner(training)
    steps, models = Cluster(make_setup(recipe), trainer=learner).run(2), [learner.parameters.clone()]
    next(steps)
    models.append(learner.parameters.clone())
    second = next(steps)
    models.append(learner.parameters.clone())
    (late,), (fresh,) = second.late, second.fresh

    def mean_gradient(task, at, samples):
        assignment = Batches(training).assignment(worker=task.worker, draw=task.draw, blocks=8, blocks_done=8)
        module = copy.deepcopy(training.module)
        torch.nn.utils.vector_to_parameters(at, module.parameters())
        outputs = module(assignment.inputs[:samples])
        torch.nn.functional.cross_entropy(outputs, assignment.targets[:samples]).backward()
        return torch.nn.utils.parameters_to_vector([each.grad for each in module.parameters()])

    before = (models[0] - models[1]) / 0.1  # the first step was the fresh gradient alone
    part = 8 / (32 + 8) if how == "samples" else 1 / 2
    compensation = part * (scale * mean_gradient(late, models[0], 8) - before)
    expected = models[1] - 0.1 * (mean_gradient(fresh, models[1], 32) + compensation)
    torch.testing.assert_close(models[2], expected, rtol=1e-4, atol=1e-6)


BAD = {
    "with partial work": ({"late_work": "partial", "late_blocks": "2"}, "needs late_work = complete"),
    "more than a batch has": ({"late_blocks": "5"}, "between 1 and blocks (late_blocks=5, blocks=4)"),
    "none at all": ({"late_blocks": "0"}, "between 1 and"),
    "a word": ({"late_blocks": "some"}, "a whole number or 'random' or 'none'"),
}


@pytest.mark.parametrize("name", BAD)
def test_late_blocks_that_cannot_be_are_refused(name):
    given, words = BAD[name]
    with pytest.raises(RecipeError) as caught:
        read_recipe(overrides={f"cluster.{key}": value for key, value in given.items()})
    assert words in str(caught.value)
    assert "--cluster.late-blocks" in str(caught.value)


@pytest.mark.parametrize("strategy", ["lgc", "lgc@ranks", "hpsgd"])
def test_a_real_run_refuses_late_blocks_before_anything_is_started(strategy, tmp_path):
    recipe = SMALL.with_settings(cluster={"workers": 6, "late_blocks": 2}).with_strategy(strategy)
    with pytest.raises(ValueError, match=r"late_blocks is of simulated runs \(late_blocks=2\)"):
        train(recipe, out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("*"))


def test_none_is_what_a_document_of_before_means():
    document = Recipe().to_document()
    assert document["cluster"].pop("late_blocks") is None
    assert Recipe.from_document(document) == Recipe() == Recipe.from_document(Recipe().to_document())
    assert read_recipe(overrides={"cluster.late_blocks": "none"}) == Recipe()
