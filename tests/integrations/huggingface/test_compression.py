"""Gradients of Trainer's DDP travel encoded: fewer bytes, the same bits on all ranks and after a resumption."""

from __future__ import annotations

import pytest

from tests.integrations.ranks import Network, launch

JOB = "tests.integrations.huggingface.compression_job"
SEVERAL_BUCKETS = {"width": 192, "ddp_bucket_cap_mb": 1}  # 2 MB of gradients
REFUSED = {
    "hook": "comm_hook=fp16",
    "twice": "this trainer has compression already",
    "averaging": "compression and averaging cannot be in one Trainer: averaging keeps DDP away",
    "late": "this one trains already",
    "fp16": "Train with bf16=True",
    "fsdp": "wants the whole model on every rank",
    "tensor parallel": "tp_size=2",
    "no trainer": "wants a transformers.Trainer (this is a GPT2LMHeadModel)",
    "codec": "zip",
    "plan": "all-reduce",
    "timeout": "timeout_seconds must be above 0",
}


def run(*parts, world=2, network=None):
    """Run parts of the job in one launch; return the answers of each part, in the order of the ranks."""
    return list(zip(*launch(JOB, {"parts": parts}, world=world, network=network), strict=True))


def test_fewer_bytes_pass_and_the_log_says_how_many():
    """By the interface's count, of steps of one rank to the other and back: qsgd's 4 bits and scales against 32."""
    settings = {"counted": True, "samples": 128, "width": 64, "layers": 2, "ddp_bucket_cap_mb": 7}
    with Network() as network:
        plain, encoded = run(
            ["train", settings],
            ["train", settings | {"codec": "qsgd levels=7"}],
            network=network,
        )
    assert 6 < plain[0]["bytes_per_step"] / encoded[0]["bytes_per_step"] < 8.2  # 7.9, less the frames
    assert encoded[0]["bits"] == encoded[1]["bits"] != plain[0]["bits"]
    assert abs(encoded[0]["losses"][-1] - plain[0]["losses"][-1]) < 0.3
    assert encoded[0]["unused"]  # Trainer's own settings of DDP hold on
    for answer in encoded:
        training = [line for line in answer["log"] if "loss" in line or "train_loss" in line]
        sent = [line["paceline/sent_bytes"] for line in training]
        assert sent == sorted(sent)
        assert sent[0] > 0
        assert sent[-1] == answer["sent_bytes"]
        assert "7.9 times smaller" in answer["repr"]
    assert not any("paceline" in name for line in plain[0]["log"] for name in line)


def test_accumulated_micro_batches_travel_once():
    settings = {"codec": "qsgd", "gradient_accumulation_steps": 4, "samples": 80}  # 10 micro-batches: 4, 4 and 2
    (answers,) = run(["train", settings])
    assert [(each["steps"], each["compressed_steps"]) for each in answers] == [(3, 3)] * 2
    assert answers[0]["bits"] == answers[1]["bits"]


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    """In mid-epoch, with what codecs hold back; where DDP changes its buckets nothing that was held back is lost."""
    runs = {
        "one-bit": {"optim": "adamw_torch", **SEVERAL_BUCKETS},
        "top-k fraction=0.02": {"optim": "sgd", "optim_args": "momentum=0.9"},
    }
    saved = {"save_strategy": "steps", "save_steps": 3, "samples": 48}
    whole, cut, rest = [], [], []
    for codec, settings in runs.items():
        settings = settings | saved | {"codec": codec}
        whole.append(["train", settings | {"folder": str(tmp_path / f"whole {codec}")}])
        cut.append(["train", settings | {"folder": str(tmp_path / f"cut {codec}"), "stop": 3}])
        rest.append(["train", settings | {"folder": str(tmp_path / f"cut {codec}"), "resume": True}])
    moving = saved | SEVERAL_BUCKETS | {"codec": "one-bit", "ddp_find_unused_parameters": False}
    moving |= {"folder": str(tmp_path / "moved")}
    first = run(*whole, *cut, ["train", moving | {"stop": 3}])
    then = run(*rest, ["conserved", moving])
    for uninterrupted, broken_off, resumed in zip(first[:2], first[2:4], then[:2], strict=True):
        assert [each["steps"] for each in (*uninterrupted, *broken_off, *resumed)] == [6, 6, 3, 3, 6, 6]
        assert len({str(each["bits"]) for each in (*uninterrupted, *resumed)}) == 1
        assert broken_off[0]["bits"] != resumed[0]["bits"]
        assert {f"paceline-compression-{rank}-of-2.pt" for rank in (0, 1)} < set(resumed[0]["files"])
        assert len({each["payload_bytes"] for each in (*uninterrupted, *resumed)}) == 1
    for answer in then[2]:
        assert answer["moved"]
        assert answer["held"] > 0
        assert answer["difference"] < 1e-4


def test_three_ranks_and_an_accelerate_loop():
    trained, loop = run(["train", {"codec": "one-bit"}], ["accelerate_loop", {"codec": "qsgd levels=7"}], world=3)
    assert len({str(each["bits"]) for each in trained}) == 1
    for answer in loop:
        assert answer["equal"]
        assert answer["steps"] == 2 * 3  # three batches a rank, two of them together
        assert answer["losses"][-1] < answer["losses"][0]


@pytest.mark.parametrize("alone", [False, True])
def test_one_rank_trains_plainly_and_says_so(alone):
    """Torchrun's one process has a DistributedDataParallel too, and rounds nothing all the same."""
    encoded, plain = run(["one_rank", {"codec": "qsgd", "alone": alone}], ["train", {}], world=1)
    assert encoded[0]["bits"] == plain[0]["bits"]
    assert (encoded[0]["wrapped"] == "DistributedDataParallel") is not alone
    assert encoded[0]["lines"] == ["one rank: no gradients travel, and compress() has nothing to encode"]
    assert not any("paceline" in name for line in encoded[0]["log"] for name in line)


@pytest.fixture(scope="module")
def refusals():
    answers = run(*(["refuse", {"what": what}] for what in REFUSED), world=1)
    return dict(zip(REFUSED, (answer[0] for answer in answers), strict=True))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_training(refusals, what):
    assert REFUSED[what] in str(refusals[what])


def test_a_model_that_somebody_else_wrapped_and_a_checkpoint_of_other_ranks_are_refused(tmp_path):
    saved = {"codec": "one-bit", "save_strategy": "steps", "save_steps": 2, "folder": str(tmp_path)}
    wrapped, _ = run(["refuse", {"what": "own wrapper"}], ["train", saved | {"stop": 2}])
    assert all("its gradients would travel as they are" in str(said) for said in wrapped)
    failed = launch(JOB, {"parts": [["train", saved | {"resume": True}]]}, world=1, check=False)
    assert "holds the compression of 2 ranks (here are 1)" in str(failed[0])
    (tmp_path / "checkpoint-2" / "paceline-compression-1-of-2.pt").unlink()
    for failed in launch(JOB, {"parts": [["train", saved | {"resume": True}]]}, check=False):
        assert "RankStateError" in str(failed)
        assert "has no compression state of rank 1: copy paceline-compression-1-of-2.pt" in str(failed)
