"""The plan says what will happen: against the policies, against its own sums, and beside the paper's formulas."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.pruning import fine_pruning
from paceline.data.pruning.fine_pruning import FinePolicy, FineSchedule
from paceline.data.pruning.info_batch import InfoPolicy
from paceline.data.pruning.plan import WindowRow, draw_windows, plan_fine, plan_info

some = settings(max_examples=60)


@st.composite
def schedules(draw_windows, **fixed):
    window, block = draw_windows(st.integers(1, 40)), draw_windows(st.integers(1, 8))
    made = {
        "window": window,
        "starting_point": draw_windows(st.integers(0, window)),
        "attenuation": draw_windows(st.sampled_from([1, 1.01, 1.5, 2, 3])),
        "block": block,
        "count": draw_windows(st.integers(0, block)),
        "prune": draw_windows(st.sampled_from([0, 3, 0.3, 0.5])),
    }
    return FineSchedule(**(made | fixed))


def epochs_pruned_by(policy, epochs):
    """Which epochs a policy really prunes, in a run where somebody is always above the mean."""
    rng, found, kept_in = np.random.default_rng(0), [], []
    for epoch in range(1, epochs + 1):
        decision = policy.decide(epoch, (epoch - 1) / epochs)
        kept = np.arange(policy.samples) if decision.keep is None else np.flatnonzero(decision.keep)
        kept_in.append(len(kept))
        if decision.pruned:
            found.append(epoch)
        policy.judge(epoch, kept, rng.random(len(kept), np.float32), np.array([len(kept)]))
    return tuple(found), kept_in


def batches_of(samples, batch_size, *, drop_last=False):
    """How many batches one process makes; one sample that is left over is part of the last."""
    if drop_last:
        return samples // batch_size
    return len(range(0, samples, batch_size)) - (samples > batch_size > 1 and samples % batch_size == 1)


@some
@given(schedule=schedules(), epochs=st.integers(1, 120), batch_size=st.integers(1, 30), drop_last=st.booleans())
def test_the_plan_is_what_the_policy_does(schedule, epochs, batch_size, drop_last):
    samples = 30
    plan = plan_fine(schedule, samples, epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    pruned, kept = epochs_pruned_by(FinePolicy(samples, schedule), epochs)
    assert plan.exact
    assert plan.pruned_epochs == pruned
    batches = [batches_of(count, batch_size, drop_last=drop_last) for count in kept]
    assert plan.epoch_batches == batches
    assert plan.most_batches == plan.least_batches == sum(batches)
    trained = [number * batch_size for number in batches] if drop_last else kept
    assert plan.epoch_samples == trained
    whole = max(trained) if drop_last else samples
    assert plan.samples_saved == epochs * whole - sum(trained)
    assert plan.share_saved == plan.samples_saved / (epochs * whole)
    assert plan.steps_saved == epochs * max(batches) - sum(batches) == plan.times.t_save
    assert plan.times.b_prune * epochs == pytest.approx(sum(batches))


@some
@given(
    samples=st.integers(1, 40),
    epochs=st.integers(1, 30),
    ratio=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    delta=st.sampled_from([0.0, 0.1, 0.5, 0.875, 1.0]),
)
def test_info_batch_prunes_in_no_other_epochs_than_planned(samples, epochs, ratio, delta):
    plan = plan_info(samples, epochs=epochs, ratio=ratio, delta=delta, batch_size=7)
    assert not plan.exact
    assert plan.paper is None
    ever = [epochs_pruned_by(InfoPolicy(samples, ratio=ratio, delta=delta, seed=seed), epochs) for seed in range(2)]
    if plan.prune_num:
        assert set().union(*(pruned for pruned, _ in ever)) <= set(plan.pruned_epochs)
    assert all(sum(batches_of(count, 7) for count in kept) <= plan.most_batches for _, kept in ever)  # for schedulers
    assert plan.least_batches <= plan.most_batches
    with pytest.warns(DeprecationWarning, match="a scheduler wants most_batches"):
        assert plan.total_batches == plan.least_batches


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.3, 0.5, 0.875, 1.0])
def test_info_batch_prunes_in_all_epochs_planned_when_somebody_always_draws_a_bad_lot(delta):
    for epochs in range(1, 21):
        plan = plan_info(30, epochs=epochs, ratio=0.9, delta=delta, batch_size=7)
        assert plan.pruned_epochs == epochs_pruned_by(InfoPolicy(30, ratio=0.9, delta=delta), epochs)[0]


def test_what_info_batch_saves_at_best_is_reached_on_average_when_one_loss_stands_out():
    samples, found = 200, []
    plan = plan_info(samples, epochs=2, ratio=0.5, delta=1.0, batch_size=1)
    for seed in range(300):
        policy = InfoPolicy(samples, ratio=0.5, seed=seed)
        losses = np.ones(samples, np.float32)
        losses[17] = 9
        policy.judge(1, np.arange(samples), losses, np.array([samples]))
        found.append(policy.decide(2, 0.5).pruned)
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - 0.5 * (samples - 1)) < 4 * error
    assert plan.prune_num == 99


# -- the formulas -------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(schedule=schedules(attenuation=1, prune=1), epochs=st.integers(1, 300))
def test_without_attenuation_formula_3_is_an_upper_estimate_and_4_but_for_one_epoch(schedule, epochs):
    plan = plan_fine(schedule, 10, epochs=epochs, batch_size=1)
    exact, ends_within = len(plan.pruned_epochs), epochs % schedule.window >= max(1, schedule.starting_point)
    assert plan.paper.n_prune == fine_pruning.estimated_n_prune(schedule, epochs)
    assert exact <= plan.paper.n_prune + ends_within
    if epochs % schedule.window == 0:  # formula 3, as printed
        w, a, r, c = schedule.window, schedule.starting_point, schedule.block, schedule.count
        assert plan.paper.n_prune == ((w - a) // r * c + (w - a) % r) * (epochs // w)
        if (w - a) % r == 0 and a >= 2:
            assert exact == plan.paper.n_prune
    if exact != plan.paper.n_prune:
        assert plan.remarks  # it is said why


@some
@given(schedule=schedules(prune=1), epochs=st.integers(1, 300))
def test_attenuation_only_ever_adds_pruned_epochs(schedule, epochs):
    plain = plan_fine(replace(schedule, attenuation=1), 10, epochs=epochs, batch_size=1)
    assert set(plain.pruned_epochs) <= set(plan_fine(schedule, 10, epochs=epochs, batch_size=1).pruned_epochs)


def test_formula_4_can_be_one_too_small_and_with_attenuation_3_is_far_too_small():
    one_short = FineSchedule(window=100, starting_point=2, attenuation=1, block=1, count=1)
    plan = plan_fine(one_short, 10, epochs=50, batch_size=1)
    assert (len(plan.pruned_epochs), plan.paper.n_prune) == (49, 48)
    attenuated = plan_fine(FineSchedule(window=60, starting_point=30, attenuation=2), 10, epochs=600, batch_size=1)
    assert len(attenuated.pruned_epochs) > 1.5 * attenuated.paper.n_prune


def test_times_are_the_papers_formulas_in_seconds():
    schedule = FineSchedule(window=12, starting_point=4, attenuation=1, block=4, count=2, prune=0.5)
    plan = plan_fine(schedule, 100, epochs=24, batch_size=10, batch_seconds=0.5, overhead_seconds=0.25)
    assert plan.times == plan.paper  # here the formula is exact
    n, n_prune, b, T, t_0 = 24, 8, 10, 0.5, 0.25
    b_prune = (n_prune * 5 + (n - n_prune) * b) / n
    assert plan.paper.n_prune == n_prune
    assert plan.paper.b_prune == pytest.approx(b_prune)
    assert plan.paper.t_regular == n * T * b
    assert plan.paper.t_prune == pytest.approx(n * T * b_prune + n_prune * t_0)
    assert plan.paper.t_save == pytest.approx(plan.paper.t_regular - plan.paper.t_prune)
    assert plan.paper.unit == "seconds"


# -- the picture --------------------------------------------------------------------------------------------------


def marks_in(lines, mark):
    """How often a mark is drawn, the legend aside."""
    return sum(line.count(mark) for line in lines[: lines.index("")])


@some
@given(schedule=schedules(), epochs=st.integers(1, 200), width=st.integers(60, 120), ascii_only=st.booleans())
def test_the_picture_has_a_mark_for_every_epoch(schedule, epochs, width, ascii_only):
    plan = plan_fine(schedule, 30, epochs=epochs, batch_size=4)
    lines = draw_windows(plan.rows, width=width, ascii_only=ascii_only)
    assert max(map(len, lines)) <= max(width, 75)  # the legend does not shrink
    if any("more windows" in line for line in lines):
        return
    pruned, whole, before = "#.-" if ascii_only else "█·░"
    assert marks_in(lines, pruned) == len(plan.pruned_epochs)
    dashes = sum("-" in row.epochs for row in plan.rows) if ascii_only else 0
    assert marks_in(lines, whole) + marks_in(lines, before) - dashes == epochs - len(plan.pruned_epochs)
    assert "".join(lines).isascii() == ascii_only


def test_long_windows_are_wrapped_longer_ones_scaled_and_of_many_the_last_is_drawn():
    schedule = FineSchedule(window=150, starting_point=75, block=4, count=2)
    wrapped = draw_windows(plan_fine(schedule, 10, epochs=299, batch_size=1).rows)
    assert [line.split()[0] for line in wrapped[1:7]] == ["1-149", "+60", "+120", "150-299", "+60", "+120"]
    scaled = draw_windows(
        plan_fine(replace(schedule, window=6000, starting_point=3000), 10, epochs=11_999, batch_size=1).rows
    )
    assert [line.split()[:2] for line in scaled[1:3]] == [["1-5999", "3000"], ["6000-11999", "1500"]]
    assert max(map(len, scaled)) <= 80
    assert scaled[4].startswith("  A cell is ")
    many = draw_windows(
        plan_fine(replace(schedule, window=10, starting_point=5), 10, epochs=100_000, batch_size=1).rows
    )
    assert len(many) < 30
    assert [line.split()[0] for line in many[-4:-2]] == ["...", "100000"]


@pytest.mark.parametrize("schedule", [FineSchedule(), FineSchedule(window=7, starting_point=0, prune=0)])
def test_the_text_fits_80_columns_and_its_figures_are_the_plans(schedule):
    plan = plan_fine(schedule, 2**31 - 1, epochs=1000, batch_size=1, batch_seconds=1e-3)
    assert max(map(len, str(plan).splitlines())) <= 80
    (row,) = [line for line in str(plan).splitlines() if "n_prune" in line]
    assert row.split()[-2:] == [f"{len(plan.pruned_epochs):,}", f"{plan.paper.n_prune:,}"]
    assert f"prunes {len(plan.pruned_epochs):,} of 1,000 epochs" in str(plan)
    assert json.loads(json.dumps(plan.document()))["pruned_epochs"] == list(plan.pruned_epochs)


def test_a_picture_too_narrow_is_refused():
    with pytest.raises(ValueError, match=r"width must be at least 40 columns \(width=39\)"):
        draw_windows([WindowRow(first=1, cells="--")], width=39)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"epochs": 0}, r"epochs must be between 1 and 1,000,000 \(epochs=0\)"),
        ({"batch_size": 0}, r"batch_size must be at least 1 \(batch_size=0\)"),
        ({"samples": 0}, r"samples must be between 1 and 2,147,483,647 \(samples=0\)"),
        ({"batch_size": 11, "drop_last": True}, r"batch_size must be at most samples .* \(batch_size=11, samples=10\)"),
        ({"batch_seconds": 0.0}, r"batch_seconds must be above 0 and finite \(batch_seconds=0.0\)"),
        ({"overhead_seconds": 1.0}, r"overhead_seconds needs batch_seconds"),
        ({"overhead_seconds": -1.0, "batch_seconds": 1.0}, r"overhead_seconds must be at least 0 and finite"),
    ],
)
def test_bad_values_are_refused(given_, message):
    settings_ = {"samples": 10, "epochs": 5, "batch_size": 2} | given_
    with pytest.raises(ValueError, match=message):
        plan_fine(FineSchedule(), settings_.pop("samples"), **settings_)


@pytest.mark.parametrize(("name", "value"), [("ratio", 1.0), ("ratio", -0.1), ("delta", 1.1), ("delta", float("nan"))])
def test_a_bad_ratio_or_delta_is_refused(name, value):
    good = {"epochs": 5, "ratio": 0.5, "delta": 0.5, "batch_size": 2}
    with pytest.raises(ValueError, match=rf"{name} must be .* \({name}={value}\)"):
        plan_info(10, **(good | {name: value}))
