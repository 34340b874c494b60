"""The page on pruning: whom it shows, that it stays small, and that nothing in it can break it."""

from __future__ import annotations

import base64
import dataclasses
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.pruning_commands import document
from paceline.reports.pruning_facts import MOST_BINS, OFTEN, PruningFacts, headline, sentences
from paceline.reports.pruning_page import MOST_IMAGES, MOST_PIXELS, data_uris, png, pruning_page, shown_samples
from paceline.traces.label_errors import label_trust, looks_wrong
from paceline.traces.pruning_record import PruningRecord, empty_record

HOSTILE = "</script><img src=x onerror=alert(1)>{{ title }}"


def record_of(samples=200, classes=10, *, seed=0, wrong=(), hard_are_pruned=True, **more) -> PruningRecord:
    generator = np.random.default_rng(seed)
    times = generator.integers(0, 9, samples)
    label = np.arange(samples) % classes
    guess, sure = label.copy(), generator.uniform(0.8, 0.99, samples)
    guess[list(wrong)] = (label[list(wrong)] + 1) % classes
    sure[list(wrong)] = 1.0
    values = {
        "policy": "fine-pruning",
        "epochs": 20,
        "classes": [f"class {number}" for number in range(classes)],
        "label": label,
        "guess": guess,
        "times_pruned": times,
        "difficulty": times * (1.0 if hard_are_pruned else -1.0) + generator.uniform(0, 0.5, samples),
        "label_probability": np.where(guess == label, sure, 0.0),
        "guess_probability": sure,
        "loss": generator.uniform(0, 1, samples) + (times if hard_are_pruned else 9 - times),
    }
    return PruningRecord(**{**values, **more})


def images_for(record, shape=(1, 8, 8), most=12):
    generator = np.random.default_rng(1)
    return {number: generator.normal(size=shape) for number in shown_samples(record, most=most).numbers}


# -- pictures ---------------------------------------------------------------------------------------------------------


def pixels_of(file: bytes):
    """A PNG file read by its specification: size, channels, the lines."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        kind, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest) == (8, [0, 0, 0])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, {0: 1, 2: 3}[colour])


@settings(max_examples=25)
@given(height=st.integers(1, 9), width=st.integers(1, 9), channels=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_a_png_holds_the_pixels_it_was_made_of(height, width, channels, seed) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    assert np.array_equal(pixels_of(png(pixels)), pixels)


def decoded(uri: str):
    return pixels_of(base64.b64decode(uri.removeprefix("data:image/png;base64,")))


def test_images_of_one_data_set_are_rescaled_together_and_by_channel() -> None:
    dark, bright = np.full((3, 2, 2), -1.0), np.full((3, 2, 2), 1.0)
    bright[2] = 9.0
    found = data_uris({4: dark, 7: bright, 8: np.zeros((3, 2, 2))})
    assert (decoded(found[4]).max(), decoded(found[7]).min()) == (0, 255)
    assert decoded(found[8])[0, 0].tolist() == [128, 128, 26]
    same = data_uris({0: np.full((4, 4), 3.0), 1: np.full((4, 4), np.nan)})
    assert decoded(same[0]).max() == 255  # what is not finite counts as 0


@pytest.mark.parametrize(
    ("shape", "size"),
    [((8, 8), (8, 8, 1)), ((1, 5, 8), (5, 8, 1)), ((8, 5, 3), (8, 5, 3)), ((3, 224, 224), (32, 32, 3)),
     ((1, 1, 400), (1, 33, 1)), ((1, 41, 10), (20, 5, 1))],
)  # fmt: skip
def test_an_image_of_any_size_becomes_a_small_one(shape, size) -> None:
    found = decoded(data_uris({0: np.random.default_rng(0).normal(size=shape)})[0])
    assert found.shape == size
    assert max(found.shape[:2]) <= MOST_PIXELS


@pytest.mark.parametrize("shape", [(), (5,), (2, 8, 8), (4, 8, 8), (1, 1, 8, 8), (3, 0, 8)])
def test_what_is_no_image_is_not_drawn_and_the_tables_stay(shape) -> None:
    record = record_of(wrong=[3])
    assert data_uris({0: np.zeros(shape)}) == {}
    page = pruning_page(record, {number: np.zeros(shape) for number in shown_samples(record).numbers})
    assert "<img" not in page
    assert '<div class="number">#3</div>' in page
    assert '<th scope="row">3</th>' in page
    assert page == pruning_page(record)


# -- whom it shows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard_are_pruned", [True, False])
def test_rows_are_the_most_and_the_least_pruned_of_each_class(hard_are_pruned) -> None:
    record = record_of(hard_are_pruned=hard_are_pruned)
    times, difficulty = record.times_pruned, record.difficulty
    for label, (most, least) in shown_samples(record, most=4).classes.items():
        mine = np.flatnonzero(record.label == label)
        assert len(most) == len(least) == 4
        assert set(most) | set(least) <= set(mine.tolist())
        assert not set(most) & set(least)
        others = sorted(set(mine.tolist()) - set(most))
        assert times[list(most)].min() >= times[others].max()
        assert times[list(least)].max() <= np.sort(times[mine])[3]
        hardest = mine[np.argmax(difficulty[mine])]
        assert (most if hard_are_pruned else least)[0] == hardest


def test_what_the_pruned_are_is_told_from_the_record_and_not_from_the_policy() -> None:
    for hard, word in ((True, "hard"), (False, "easy")):
        facts = PruningFacts(record_of(hard_are_pruned=hard, policy="a policy of tomorrow"))
        assert facts.prunes_the_hard is hard
        assert f"to be pruned often is to be {word}:" in " ".join(sentences(facts))
        kinds = ("hard", "easy") if hard else ("easy", "hard")
        assert f"the most pruned, which are {kinds[0]} here, and the least pruned, the {kinds[1]}." in pruning_page(
            facts.record
        )


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(0, 99))
def test_every_sample_and_every_pruning_is_counted_once(samples, classes, seed) -> None:
    record = record_of(samples, classes, seed=seed)
    facts = PruningFacts(record)
    assert sum(each.samples for each in facts.bins) == sum(each.samples for each in facts.classes) == samples
    assert sum(each.prunings for each in facts.classes) == facts.prunings
    assert len(facts.bins) <= MOST_BINS
    assert sorted(facts.by_times.tolist()) == list(range(samples))
    if facts.prunings:
        assert facts.often.sum() >= min(OFTEN * samples, np.count_nonzero(record.times_pruned))
        assert record.times_pruned[facts.often].min() > record.times_pruned[~facts.often].max(initial=0)
        assert sum(each.pruned_share for each in facts.classes) == pytest.approx(1)


def test_many_times_share_a_bin() -> None:
    record = record_of(epochs=65_535, times_pruned=np.linspace(0, 65_535, 200).astype(np.int64))
    bins = PruningFacts(record).bins
    assert len(bins) <= MOST_BINS
    assert [one.last + 1 for one in bins[:-1]] == [other.first for other in bins[1:]]


def test_the_headline_says_what_was_counted() -> None:
    times = np.zeros(100, np.int64)
    times[:10], times[10:30] = 6, 2
    record = record_of(100, 5, times_pruned=times, wrong=[4, 7, 40])
    assert headline(PruningFacts(record)) == "10 samples, 10 % of all, took 60 % of the prunings; 3 labels look wrong"
    said = "The model contradicts 3 labels, 2 of them among those pruned most often; it is sure of 3, 2 of them there."
    assert said in " ".join(sentences(PruningFacts(record)))
    nothing = record_of(times_pruned=np.zeros(200, np.int64))
    assert headline(PruningFacts(nothing)) == "Nothing was pruned in 20 epochs; no label looks wrong"
    assert sentences(PruningFacts(nothing)) == []


def test_a_model_that_is_hardly_trained_accuses_nobody_and_says_so() -> None:
    trained = record_of(wrong=[4, 7, 40])
    facts = PruningFacts(trained)
    assert (facts.why_not_judged, facts.label_errors.tolist()) == ("", [4, 7, 40])
    hardly = PruningFacts(dataclasses.replace(trained, label_probability=trained.label_probability * 0.6))
    assert looks_wrong(hardly.record).sum() >= 3  # by the rule alone it would accuse
    assert (len(hardly.label_errors), hardly.wrong.any()) == (0, False)
    assert headline(hardly).endswith("; the model is trained too little to judge labels")
    for told in (" ".join(sentences(hardly)), pruning_page(hardly.record).replace("\u00a0", " ")):
        assert "on average, and 82 % are needed to judge them: train it longer" in told
        assert "look wrong" not in told
    said = document(hardly)
    assert (said["labels_judged"], said["suspects"]) == (False, [])
    assert said["why_labels_are_not_judged"] in " ".join(sentences(hardly))
    assert document(facts)["labels_judged"]


@settings(max_examples=40, deadline=None)
@given(classes=st.integers(2, 12), sure=st.floats(0, 1), seed=st.integers(0, 99))
def test_chance_judges_nothing_and_certainty_judges(classes, sure, seed) -> None:
    """Trust is 0 for a model that knows the frequencies alone, 1 for certainty, and rises with every probability."""
    label = np.random.default_rng(seed).integers(0, classes, 60)
    shares = (np.bincount(label, minlength=classes) / 60)[label]

    def trust(probability) -> float:
        return label_trust(record_of(60, classes, label=label, label_probability=probability))

    if len(set(label.tolist())) > 1:
        assert trust(shares) == pytest.approx(0, abs=1e-6)
        assert trust(np.ones(60)) == pytest.approx(1)
        assert trust(sure * np.ones(60) + (1 - sure) * shares) == pytest.approx(sure, abs=1e-6)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_suspects_come_first_by_number_and_are_marked_wherever_they_are() -> None:
    record = record_of(wrong=[3, 77])
    page = pruning_page(record, images_for(record))
    assert shown_samples(record).label_errors == (3, 77)
    assert len(re.findall(r'<figure class="looks-wrong"><img src="data:image/png;base64,[^>]*>', page)) >= 2
    assert page.count('<figure class="looks-wrong">') == page.count('class="mark"')
    assert '<th scope="row">77</th><td>class 7</td><td>class 8</td><td>100.0 %</td>' in page


@pytest.mark.parametrize("classes", [1, 2, 10, 100, 1500])
def test_a_page_has_at_most_so_many_images_and_stays_small(classes) -> None:
    record = record_of(3000, classes, wrong=range(0, 400, 7) if classes > 1 else ())
    page = pruning_page(record, images_for(record, shape=(3, 64, 64), most=MOST_IMAGES), most=MOST_IMAGES)
    assert 0 < page.count("<img") <= MOST_IMAGES
    assert len(page.encode()) < 1_500_000
    assert (
        f"{classes - len(shown_samples(record, most=MOST_IMAGES).classes)} classes that are pruned less" in page
    ) == (classes >= 100)


def test_a_name_cannot_break_the_page_and_it_runs_nothing() -> None:
    named = {"data": {"name": HOSTILE}, "model": {"name": HOSTILE}}
    hostile = {"classes": [HOSTILE] * 10, "policy": HOSTILE, "settings": {HOSTILE: HOSTILE}, "source": named}
    record = dataclasses.replace(record_of(wrong=[3]), **hostile)
    page = pruning_page(record, title=HOSTILE, notes=[HOSTILE])
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_smallest_record_is_a_page_and_a_bad_number_is_refused() -> None:
    assert "<h1>Nothing was pruned in 0 epochs; no label looks wrong</h1>" in pruning_page(empty_record())
    with pytest.raises(ValueError, match=r"most must be between 1 and 200 images in a row \(most=0\)"):
        shown_samples(empty_record(), most=0)
