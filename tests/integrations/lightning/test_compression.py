"""Lightning's Trainer with `Compress`: gradients are encoded, fewer bytes pass, and codecs' memories go on later."""

from __future__ import annotations

import pytest

from tests.integrations.ranks import Network, launch

JOB = "tests.integrations.lightning.compression_job"
STEPS, GRADIENT_BYTES = 90, 4 * 400 * 400


def fit(folder, world=2, network=None, **settings):
    return launch(JOB, {"part": "fit", "folder": str(folder), **settings}, world=world, network=network)


def test_the_interface_counts_what_the_codec_promises(tmp_path):
    settings = {"kind": "Wide", "samples": 4 * STEPS, "options": {"max_epochs": 1}}
    sent = {}
    for codec in (None, "qsgd levels=7"):
        with Network() as network:
            found = fit(tmp_path, network=network, codec=codec, **settings)
            sent[codec] = network.sent_bytes()
        assert [each["global_step"] for each in found] == [STEPS, STEPS]
    told = [each["told"] for each in found]
    assert [each["steps"] for each in told] == [STEPS, STEPS]
    assert sent[None] > 2 * STEPS * GRADIENT_BYTES, "two ranks send a gradient each in a step"
    assert told[0]["payload_bytes"] < STEPS * GRADIENT_BYTES / 7.5, "levels -7 .. 7 are four bits of 32, and norms"
    promised = sum(each["sent_bytes"] for each in told)
    setting_up = 10 * GRADIENT_BYTES  # probes of the link (6), the first model, rendezvous, Lightning's own words
    assert promised < sent["qsgd levels=7"] < 1.25 * promised + setting_up
    assert sent[None] > 5 * sent["qsgd levels=7"]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_stay_equal_and_only_the_last_of_accumulated_batches_sends(tmp_path, world):
    found = fit(tmp_path, world, codec="one-bit", options={"accumulate_grad_batches": 3})
    assert len({each["model"] for each in found}) == 1
    assert {each["global_step"] for each in found} == {6}, "eight batches are two steps of three and one of two"
    assert {each["told"]["steps"] for each in found} == {6}


def test_one_rank_trains_plainly(tmp_path):
    plain = fit(tmp_path, 1, codec=None, strategy="auto")
    for strategy in ("auto", "ddp"):
        assert fit(tmp_path, 1, strategy=strategy) == plain


@pytest.mark.parametrize("save", [{"every_n_train_steps": 5}, {"every_n_epochs": 1}], ids=["mid-epoch", "epoch"])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path, save):
    settings = {"codec": "top-k fraction=0.1", "kind": "Counted", "samples": 28, "save": save}
    whole = fit(tmp_path / "whole", **settings)
    step = 10 if "every_n_train_steps" in save else 7
    ckpt = f"{tmp_path}/whole/step={step}.ckpt"
    again = fit(tmp_path / "again", ckpt=ckpt, **settings)
    assert [each["model"] for each in again] == [each["model"] for each in whole]
    assert again[0]["told"]["payload_bytes"] == whole[0]["told"]["payload_bytes"]
    without = fit(tmp_path / "without", codec=None, ckpt=ckpt, kind="Counted", samples=28)
    assert without[0]["model"] != whole[0]["model"]
    assert launch(JOB, {"part": "read", "ckpt": ckpt}, world=1) == [{"ranks": 2, "numbers": [0, 1]}]


def test_other_ranks_and_other_codecs_begin_anew_with_a_warning(tmp_path):
    shared = {"kind": "Counted", "save": {"every_n_epochs": 1}}
    fit(tmp_path / "two", codec="one-bit", options={"max_epochs": 1}, **shared)
    ckpt = f"{tmp_path}/two/step=8.ckpt"
    for world, codec in ((3, "one-bit"), (2, "top-k")):
        found = fit(tmp_path / "other", world, codec=codec, ckpt=ckpt, **shared)
        assert len({each["model"] for each in found}) == 1
        assert found[0]["global_step"] == 16
        assert len(found[0]["warnings"]) == 1
        assert "what 2 ranks remembered of ErrorFeedback(OneBit())" in found[0]["warnings"][0]


def test_a_second_fit_goes_on_with_what_the_first_held_back(tmp_path):
    found = fit(tmp_path, codec="one-bit", fits=2, options={"max_epochs": 1})
    assert [each["told"]["steps"] for each in found] == [16, 16]
    assert found[0]["model"] == found[1]["model"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "averaging"}, "this Trainer's strategy is AveragingStrategy: give Trainer(strategy='ddp')"),
        ({"strategy": "hook"}, "DDPStrategy(ddp_comm_hook=...) is a communication hook"),
        ({"scaled": True}, "gradients are scaled (float16)"),
        ({"codec": "qsdg"}, "did you mean 'qsgd'"),
        ({"codec": "one-bit", "kind": "Twofold"}, "with 2 optimizers that may be of other parameters"),
    ],
    ids=["averaging", "hook", "scaled", "codec", "optimizers"],
)
def test_what_cannot_be_right_is_refused_by_all(tmp_path, settings, words):
    found = launch(JOB, {"part": "refused", "folder": str(tmp_path), **settings})
    assert all(kind in ("LightningError", "ValueError") for kind, _ in found), found
    assert all(words in text for _, text in found), found
