"""Samples sit epochs out inside Trainer: whole epochs, all ranks alike, schedules that end, resumptions to the bit."""

from __future__ import annotations

from collections import Counter

import pytest

import paceline
from tests.integrations.ranks import launch

JOB = "tests.integrations.huggingface.pruning_job"
INFO = {"policy": "info-batch", "ratio": 0.5, "delta": 0.875}
FINE = {"policy": "fine-pruning", "window": 4, "starting_point": 1, "block": 2, "count": 2, "prune": 0.25}
SAMPLES, EPOCHS = 48, 4
REFUSED = {
    "iterable": "wants a train_dataset with a length",
    "part of an epoch": "num_train_epochs must be a whole number (num_train_epochs=1.5)",
    "dispatched": "the pruning sampler deals them itself",
    "split": "the pruning sampler deals them itself",
    "rebalanced": "take random, sequential or group_by_length",
    "out of order": "dataloader_in_order=False",
    "compute_loss_func": "losses=lambda outputs, inputs",
    "compute_loss": "Weighted has a compute_loss of its own",
    "other loss": "the model's own loss is",
    "policy": "unknown pruning policy 'magic'; choose from fine-pruning, info-batch",
    "setting": "info-batch has the settings ratio, delta (given: window)",
    "ratio": "ratio must be at least 0 and below 1",
    "rounds": "pruning and rounds cannot be in one Trainer",
    "twice": "this trainer has pruning already",
}


def run(*parts, world=2):
    """Run parts of the job in one launch; return the answers of each part, in the order of the ranks."""
    return list(zip(*launch(JOB, {"parts": parts}, world=world), strict=True))


def check_run(answers, world, batch_size=4, accumulated=1, epochs=EPOCHS):
    """Check what holds for every pruned run of whole epochs; return the steps of its epochs."""
    first = answers[0]
    for name in ("bits", "ends", "times", "fractions", "rates"):
        assert all(each[name] == first[name] for each in answers), name  # all ranks are equal, to the bit
    assert len(first["ends"]) == epochs == first["epoch"] - 1  # none twice, none left out
    assert first["steps"] == list(range(1, first["global_step"] + 1))
    assert first["max_steps"] == first["ends"][-1] == first["global_step"]
    assert first["fractions"] == sorted(first["fractions"])
    assert [first["fractions"][end - 1] for end in first["ends"]] == list(range(1, epochs + 1))
    assert first["rates"] == sorted(first["rates"], reverse=True)
    assert first["rate_after"] == 0  # the schedule has come to its end
    fetched = sum(len(each["fetched"]) for each in answers)
    met = epochs * SAMPLES - sum(first["times"])
    assert met <= fetched < met + epochs * world  # those who fill up the last step of an epoch
    whole = SAMPLES // world
    assert Counter(index for each in answers for index in each["fetched"][:whole]) == Counter(range(SAMPLES))
    steps = [end - start for start, end in zip([0, *first["ends"]], first["ends"], strict=False)]
    assert steps[0] == -(-whole // (batch_size * accumulated))
    return steps


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_that_leaves_a_sample_over_trains_a_model_with_batch_norm(world):
    parts = [["normalised", {"samples": samples, "epochs": 40, "policy": INFO}] for samples in (49, 42)]
    parts += [["normalised", {"samples": 49, "epochs": 8, "policy": FINE}]]
    for ranks in run(*parts, world=world):
        assert all(each == ranks[0] for each in ranks)
        assert min(ranks[0]["sizes"]) > 1
        assert max(ranks[0]["sizes"]) == 5
        assert ranks[0]["rate_after"] == 0  # the schedule was told as many steps as there are


def test_epochs_are_shorter_and_all_ranks_take_the_same():
    """With both policies, accumulation with a remainder, grouped lengths, workers, losses of one's own, and a codec."""
    variants = {
        "info": INFO | {"evaluated": True, "eval_strategy": "epoch"},
        "fine": FINE,
        "accumulated": INFO | {"gradient_accumulation_steps": 4},
        "grouped": INFO | {"train_sampling_strategy": "group_by_length"},
        "own losses": INFO | {"own_losses": True, "gradient_accumulation_steps": 2, "codec": "one-bit"},
    }
    variants["own Trainer"] = variants["own losses"] | {"own_trainer": True}
    found = dict(zip(variants, run(*(["train", settings] for settings in variants.values())), strict=True))
    for name, answers in found.items():
        accumulated = variants[name].get("gradient_accumulation_steps", 1)
        steps = check_run(answers, world=2, accumulated=accumulated)
        assert max(answers[0]["shares"]) > 0.1, name
        assert name == "accumulated" or min(steps[1:]) < steps[0], name
    assert [end - 6 for end in found["fine"][0]["ends"]] == [0, 5, 10, 16]  # exactly as planned: a quarter twice
    assert found["own losses"][0]["bits"] == found["own Trainer"][0]["bits"]  # its compute_loss gives outputs alone
    evaluated = found["info"][0]
    training = [share for share in evaluated["reported"] if share is not None]
    assert training[:-1] == evaluated["shares"]  # reporters receive it with every log of training, and at the end
    assert len(evaluated["evaluations"]) == EPOCHS
    assert evaluated["evaluations"][-1] == pytest.approx(evaluated["evaluated_plainly"], rel=1e-5)


@pytest.mark.parametrize(("world", "samples"), [(1, 46), (2, 48)])
def test_with_nobody_pruned_training_is_plain_training(world, samples):
    """Also with a last batch that is shorter, and a last group of micro-batches."""
    (answers,) = run(["heads", {"samples": samples}], world=world)
    for found in answers:
        assert found
        assert all(difference < 1e-5 for difference in found.values()), found


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    """In mid-epoch and between epochs, with dropout, momenta, weights, a codec; batches are not fetched again."""
    steps = {"save_strategy": "steps", "save_steps": 5}
    variants = {
        "info": (INFO | steps | {"gradient_accumulation_steps": 2, "codec": "one-bit", "save_steps": 7}, 7),
        "grouped": (INFO | steps | {"train_sampling_strategy": "group_by_length", "ignore_data_skip": True}, 10),
        "fine": (FINE | {"save_strategy": "epoch", "optim": "sgd", "optim_args": "momentum=0.9"}, 11),
    }
    first, then = [], []
    for name, (settings, stop) in variants.items():
        first.append(["train", settings | {"folder": str(tmp_path / f"whole-{name}")}])
        first.append(["train", settings | {"folder": str(tmp_path / f"cut-{name}"), "stop": stop}])
        then.append(["train", settings | {"folder": str(tmp_path / f"cut-{name}"), "resume": True}])
    whole_and_cut, rest = run(*first), run(*then)
    middle = []
    for place, name in enumerate(variants):
        whole, cut, resumed = whole_and_cut[2 * place], whole_and_cut[2 * place + 1], rest[place]
        stopped = cut[0]["global_step"]
        for one, other in zip(whole, resumed, strict=True):
            for kept in ("bits", "times", "difficulty", "global_step", "max_steps", "checkpoints", "rate_after"):
                assert one[kept] == other[kept], (name, kept)
            assert one["fractions"][stopped:] == other["fractions"], name
            assert one["rates"][stopped:] == other["rates"], name
            assert other["fetched"], name
            assert one["fetched"][-len(other["fetched"]) :] == other["fetched"], name
            assert cut[0]["bits"] != other["bits"], name
        middle.append(stopped not in whole[0]["ends"])
    assert middle == [True, True, False]


@pytest.mark.parametrize("world", [1, 2])
def test_windows_begin_where_they_are_given_and_a_protected_class_loses_its_share(world):
    """Of 48 samples 12 sit out; 8 of the 48 are of a rare class and hard: their share would be 2."""
    windows = {"window_at": [3, 6]}
    hard, protected, other = run(
        ["protected", windows],
        ["protected", windows | {"protect": "classes"}],
        ["protected", {"window": 60, "protect": "classes"}],
        world=world,
    )
    plan = paceline.FinePruning(
        48, batch_size=8, window_at=[3, 6], starting_point=1, block=1, count=1, prune=0.25
    ).plan(9)
    for rank in range(world):
        assert tuple(hard[rank]["epochs"]) == tuple(protected[rank]["epochs"]) == plan.pruned_epochs
        pruned = len(plan.pruned_epochs)
        assert len(other[rank]["epochs"]) != pruned
        assert sum(hard[rank]["sat_out"]) == 12 * pruned
        assert hard[rank]["sat_out"][1] > 3 * pruned
        assert protected[rank]["sat_out"] == [10 * pruned, 2 * pruned]


def test_a_loop_that_tells_a_distributed_sampler_of_epochs_takes_the_loader_that_trainer_hands_out():
    (answers,) = run(["sampler_in_epochs", {}], world=1)
    assert answers[0] == {"met": [48, 48], "epoch": 3, "other": 1}


def test_max_steps_is_the_number_of_steps():
    """More epochs than whole ones would take: 40 steps are 3 1/3 whole epochs of 12."""
    (answers,) = run(["train", INFO | {"max_steps": 40}], world=1)
    assert answers[0]["global_step"] == answers[0]["max_steps"] == 40
    assert answers[0]["rate_after"] == 0
    assert len(answers[0]["ends"]) == 5
    assert sum(answers[0]["times"]) > 0


def test_an_epoch_that_a_callback_ends_counts_and_three_ranks_are_alike():
    ended, three = run(["train", FINE | {"end_epoch_at": 2}], ["train", INFO], world=3)
    check_run(three, world=3)
    for answer in ended:
        assert answer["epoch"] == EPOCHS + 1
        assert answer["ends"][0] == 2
        assert answer["bits"] == ended[0]["bits"]
        assert not answer["warnings"]


@pytest.fixture(scope="module")
def refusals():
    answers = run(*(["refuse", {"what": what}] for what in REFUSED), world=1)
    return dict(zip(REFUSED, (answer[0] for answer in answers), strict=True))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(refusals, what):
    assert REFUSED[what] in str(refusals[what])


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    """One that was saved without prune(), and one in the middle of an epoch of other ranks."""
    saved = {"save_strategy": "steps", "save_steps": 2, "stop": 2}
    pruned, plain = INFO | {"folder": str(tmp_path / "pruned")}, {"folder": str(tmp_path / "plain")}
    run(["train", saved | pruned], ["train", saved | plain])
    for settings, said in (
        (pruned, "holds the pruning of 2 ranks (here are 1)"),
        (INFO | plain, "was saved without prune()"),
    ):
        failed = launch(JOB, {"parts": [["train", settings | {"resume": True}]]}, world=1, check=False)
        assert said in str(failed[0])
    (tmp_path / "pruned" / "checkpoint-2" / "paceline-pruning-1-of-2.pt").unlink()
    for rank, failed in enumerate(launch(JOB, {"parts": [["train", pruned | {"resume": True}]]}, check=False)):
        words = "has no pruning state of rank 1: copy paceline-pruning-1-of-2.pt from that rank's machine"
        assert f"RankStateError: {'rank 1: ' if rank == 0 else ''}{tmp_path}" in str(failed)
        assert words in str(failed)


def test_ranks_have_written_their_files_before_an_old_checkpoint_is_deleted(tmp_path):
    """Rank 1 writes late, and then not at all: both raise."""
    (answers,) = run(["rotate", INFO | {"codec": "one-bit", "folder": str(tmp_path), "dropout": 0.0}])
    files = [f"paceline-{part}-{rank}-of-2.pt" for part in ("compression", "pruning") for rank in (0, 1)]
    assert answers[0]["seen"] == {"checkpoint-2": files, "checkpoint-4": files}
    assert [answer["meetings"] for answer in answers] == [3, 3]  # one a checkpoint, not one a part
    assert answers[0]["error"] == "rank 1: no space is left for rank 1"
    assert answers[1]["error"] == "no space is left for rank 1"
    assert "checkpoint-4" in answers[0]["left"]  # it stays: the next one is not whole
