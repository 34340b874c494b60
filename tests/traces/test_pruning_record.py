"""A record of pruning is read back as it was written, or refused in one line; planted wrong labels are found."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from paceline.traces.label_errors import class_thresholds, find_label_errors, looks_wrong
from paceline.traces.pruning_record import KINDS, PRUNING, PruningRecord, read_pruning


def record_of(samples=12, classes=3, **more) -> PruningRecord:
    label = np.arange(samples) % classes
    values = {
        "label": label,
        "guess": label,
        "times_pruned": label,
        "difficulty": np.linspace(-1, 5, samples),
        "label_probability": np.full(samples, 0.8),
        "guess_probability": np.full(samples, 0.8),
        "loss": np.full(samples, 0.2),
        "classes": [f"class {number}" for number in range(classes)],
        "settings": {"prune": 0.3},
        "source": {"seed": 3},
    }
    return PruningRecord(policy="fine-pruning", epochs=9, **{**values, **more})


def damaged(folder, change=lambda arrays, said: None):
    """A file like one that is written, but for a change."""
    path = record_of().write(folder)
    arrays = load(path.read_bytes())
    said = {
        "format": 1,
        "policy": "none",
        "settings": {},
        "epochs": 9,
        "classes": ["a", "b", "c"],
        "source": {},
    }
    metadata = {"paceline": json.dumps(said)}
    change(arrays, metadata)
    path.write_bytes(save(arrays, metadata=metadata))
    return path


def test_a_record_is_read_back_bit_by_bit(tmp_path) -> None:
    written = record_of()
    assert written.write(tmp_path) == tmp_path / PRUNING
    found = read_pruning(tmp_path)
    for field in dataclasses.fields(PruningRecord):
        one, other = getattr(written, field.name), getattr(found, field.name)
        assert np.array_equal(one, other), field.name
    for name, kind in KINDS.items():
        assert getattr(found, name).dtype == kind
    assert [path.name for path in tmp_path.iterdir()] == [PRUNING]


def test_whole_numbers_of_any_kind_are_taken_and_none_is_changed() -> None:
    assert record_of(times_pruned=np.arange(12, dtype=np.int64) % 4).prunings == 18
    with pytest.raises(ValueError, match="times_pruned must be whole numbers between 0 and 65535"):
        record_of(times_pruned=np.full(12, -1))
    with pytest.raises(ValueError, match="times_pruned must be whole numbers"):
        record_of(times_pruned=np.full(12, 0.5))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"label": np.full(12, 3)}, "label must be between 0 and 2, the classes (found 3)"),
        ({"guess": np.full(12, -1)}, "guess must be between 0 and 2, the classes (found -1)"),
        ({"loss": np.full(11, 0.1)}, "loss must have a value for each of 12 samples (it has 11)"),
        ({"loss": np.full(12, np.nan)}, "loss must be finite (sample 0 is not)"),
        ({"difficulty": np.full(12, np.inf)}, "difficulty must be finite"),
        ({"label_probability": np.full(12, 1.5)}, "label_probability must be between 0 and 1"),
        ({"times_pruned": np.full(12, 10)}, "times_pruned must be at most epochs (10 times in 9 epochs)"),
        ({"classes": []}, "classes must be between 1 and 100,000 names"),
        ({"label": np.zeros((3, 4), np.int32)}, "label must be a row of values"),
    ],
)
def test_values_that_no_run_leaves_are_refused(more, said) -> None:
    with pytest.raises(ValueError) as refused:
        dataclasses.replace(record_of(), **more)
    assert said in str(refused.value)


def _drop(name):
    return lambda arrays, said: arrays.pop(name)


def _put(name, value):
    return lambda arrays, said: arrays.update({name: value})


def _say(**more):
    def change(arrays, metadata):
        metadata["paceline"] = json.dumps({**json.loads(metadata["paceline"]), **more})

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop("loss"), "it must hold label, guess"),
        (_put("more", np.zeros(12, np.float32)), "it must hold label, guess"),
        (_put("loss", np.zeros(12, np.float64)), "loss must be of type float32 (it is F64)"),
        (_put("loss", np.zeros(5, np.float32)), "loss must have one value for each sample"),
        (_put("loss", np.zeros((12, 1), np.float32)), "loss must have one value for each sample"),
        (_put("loss", np.full(12, np.nan, np.float32)), "loss must be finite"),
        (_put("label", np.full(12, 7, np.int32)), "label must be between 0 and 2"),
        (lambda arrays, said: said.clear(), "its metadata says nothing of paceline"),
        (lambda arrays, said: said.update(paceline="[" * 100_000), "its metadata is no JSON"),
        (lambda arrays, said: said.update(paceline='{"format": NaN}'), "its metadata is no JSON"),
        (_say(format=3), "its metadata is not of format 1 to 2"),
        (_say(format=2), "its metadata must give classes, epochs, format, policy, settings, sha256, source"),
        (_say(format=2, sha256="0" * 64), "it is not as it was written (sha256 differs)"),
        (_say(more=1), "its metadata must give classes, epochs, format, policy, settings, source"),
        (_say(epochs=True), "its metadata gives no epochs"),
        (_say(classes=["a", 3, "c"]), "classes must be between"),
    ],
)
def test_a_hostile_record_is_refused_in_one_line(tmp_path, change, said) -> None:
    path = damaged(tmp_path, change)
    with pytest.raises(ValueError) as refused:
        read_pruning(tmp_path)
    assert str(refused.value).startswith(f"{path} is refused: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_cut_and_no_changed_header_gets_through_as_anything_but_a_value_error(tmp_path) -> None:
    whole = record_of().write(tmp_path).read_bytes()
    huge = (2**62).to_bytes(8, "little") + whole[8:]
    for data in (b"", whole[:7], whole[:100], whole[:-1], whole + b"more", huge):
        (tmp_path / PRUNING).write_bytes(data)
        with pytest.raises(ValueError, match="is refused: it is no safetensors file"):
            read_pruning(tmp_path)


@settings(max_examples=60)
@given(st.data())
def test_a_changed_byte_gives_the_same_record_or_a_value_error(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    whole = bytearray(record_of().write(folder).read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / PRUNING).write_bytes(whole)
    said = ""
    try:
        found = read_pruning(folder)
        assert all(getattr(found, name).tobytes() == getattr(record_of(), name).tobytes() for name in KINDS)
        assert (found.policy, found.settings, found.source) == (
            record_of().policy, record_of().settings, record_of().source
        )  # fmt: skip
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


def test_what_is_no_plain_file_is_not_waited_for(tmp_path) -> None:
    with pytest.raises(ValueError, match="it is missing"):
        read_pruning(tmp_path)
    os.mkfifo(tmp_path / PRUNING)
    with pytest.raises(ValueError, match="it is not a plain file"):
        read_pruning(tmp_path)


# -- labels that look wrong -------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    classes=st.integers(2, 6),
    each=st.integers(5, 30),
    planted=st.data(),
    seed=st.integers(0, 2**32 - 1),
)
def test_planted_labels_that_the_model_contradicts_surely_are_found_and_no_others(classes, each, planted, seed) -> None:
    generator = np.random.default_rng(seed)
    truth = np.repeat(np.arange(classes), each)
    wrong = np.zeros(len(truth), np.bool_)
    wrong[[planted.draw(st.integers(0, each - 1)) + each * number for number in range(classes)]] = True
    label = np.where(wrong, (truth + generator.integers(1, classes, len(truth))) % classes, truth)
    sure = generator.uniform(0.6, 1.0, len(truth))
    sure[wrong] = 1.0  # at least as sure as of any other, so at least as sure as on average
    record = record_of(
        samples=len(truth), classes=classes, label=label, guess=truth, guess_probability=sure,
        label_probability=np.where(wrong, 1 - sure, sure),
    )  # fmt: skip
    assert np.array_equal(looks_wrong(record), wrong)
    assert sorted(find_label_errors(record)) == np.flatnonzero(wrong).tolist()


def test_a_threshold_is_the_mean_over_the_samples_labelled_so() -> None:
    label = [0, 0, 1, 1, 1, 1]
    probability = [0.9, 0.5, 0.4, 0.2, 0.6, 0.2]
    record = record_of(
        samples=6, classes=3, label=label, guess=[0, 0, 1, 0, 1, 0], label_probability=probability,
        guess_probability=[0.9, 0.5, 0.4, 0.69, 0.6, 0.71],
    )  # fmt: skip
    assert class_thresholds(record).tolist() == pytest.approx([0.7, 0.35, np.inf])
    assert find_label_errors(record).tolist() == [5]  # 0.69 is more than the label has, and less than 0.7


def test_nothing_is_suspected_of_being_a_class_that_nobody_has() -> None:
    record = record_of(
        label=np.zeros(12, np.int32),
        guess=np.full(12, 2),
        label_probability=np.zeros(12),
        guess_probability=np.ones(12),
    )
    assert len(find_label_errors(record)) == 0


def test_the_surest_come_first() -> None:
    label = np.array([0] * 6 + [1] * 6)
    guess = label.copy()
    guess[[0, 1, 2]] = 1
    probability = np.where(guess == label, 0.5, 0.1)
    given = np.where(guess == label, 0.5, 0.0)
    given[[0, 1, 2]] = [0.7, 0.9, 0.8]
    record = record_of(
        classes=2, label=label, guess=guess, times_pruned=label, label_probability=probability, guess_probability=given
    )
    assert find_label_errors(record).tolist() == [1, 2, 0]
