"""Large batches, fewer samples and a model in stages: the scripts of these guides, and what they are to show."""

from __future__ import annotations

import re

from tests.examples.scripts import run, start


def percentages(line):
    return [float(number) for number in re.findall(r"([\d.]+)%", line)]


def test_lars_keeps_the_accuracy_that_sgd_loses_with_a_large_batch():
    (text,) = run("lars_large_batch.py", "--epochs", 20)
    small, sgd, lars = (max(percentages(line)) for line in text.splitlines()[-3:])
    assert small > 95
    assert sgd < small - 8
    assert lars > small - 6
    assert lars > sgd + 4


def test_a_batch_that_the_parts_do_not_make_up_is_refused():
    (text,) = run("lars_large_batch.py", "--batch", 600, ends_with=2)
    assert "invalid choice: 600 (choose from 500, 750, 1500)" in text


def test_pruning_in_very_few_epochs_trains_too():
    (text,) = run("infobatch.py", "--epochs", 2)
    assert re.search(r"^every sample +3,000 +0.0%", text, flags=re.MULTILINE)
    assert re.search(r"^FinePruning +3,000 +0.0%", text, flags=re.MULTILINE)


def test_both_policies_save_samples_and_keep_the_accuracy():
    (text,) = run("infobatch.py", "--epochs", 12)
    rows = dict(re.findall(r"^(\w+ ?\w+) +(.+)$", text, flags=re.MULTILINE)[-4:])
    saved, accuracy = ({name: percentages(row)[place] for name, row in rows.items()} for place in (0, 1))
    assert saved["every sample"] == 0
    assert saved["InfoBatch"] > 25
    assert saved["FinePruning"] == 5.0  # two of the twelve epochs leave out three tenths: its schedule, exactly
    assert min(accuracy.values()) > accuracy["every sample"] - 2


def test_the_page_says_who_sat_out(tmp_path):
    run("infobatch.py", "--epochs", 6, "--page", "pruning.html", folder=tmp_path)
    page = (tmp_path / "pruning.html").read_text(encoding="utf-8")
    assert "1,500" in page
    assert "fine-pruning" in page


def test_two_ranks_train_a_transformer_that_is_too_big_for_one():
    first, second = run("pipeline_transformer.py", "--steps", 12, "--microbatches", 4, ranks=2)
    assert "213 layers on 2 devices" in first
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < 0.5 * losses[0]
    ranks = re.findall(r"rank (\d) +stage (\d) +([\d,]+) weights +idle for (\d+)%", first)
    assert [(rank, stage) for rank, stage, *_ in ranks] == [("0", "0"), ("1", "1")]
    assert sum(int(weights.replace(",", "")) for _, _, weights, _ in ranks) == 1_206_080  # each has its own part
    assert all(int(weights.replace(",", "")) > 200_000 for _, _, weights, _ in ranks)
    assert "loss" not in second


def test_a_transformer_that_fits_nowhere_is_refused(tmp_path):
    process = start("pipeline_transformer.py", "--memory", 5, log=tmp_path / "log", folder=tmp_path)
    try:
        assert process.wait(120) == 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)
    assert "2 devices have 10.0 MB together; use more stages" in (tmp_path / "log").read_text(encoding="utf-8")
