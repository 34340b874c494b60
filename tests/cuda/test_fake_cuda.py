"""The paths for CUDA, walked with fake tensors: no operation mixes devices, and no number is read back on the way.

Nothing here computes: that the numbers are right is tested on the CPU, where the same code runs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import paceline
from paceline.codecs import QSGD, one_bit, qsgd, tensors, top_k
from paceline.codecs.layout import in_rows
from paceline.events import Share, Step
from paceline.strategies.averaging import make_averaging
from paceline.strategies.combine import Combiner
from paceline.training.contributions import MessageLayout, RankGradients, VectorPool
from paceline.training.rank_model import RankModel
from paceline.training.replica import GradientReplica, Replica
from tests.cuda.fake_cuda import ReadBack, fake_cuda, ones

ELEMENTS = 5003


def on_gpu(*found):
    assert all(tensor.device.type == "cuda" for tensor in found)


# -- the walk itself finds what it is for ---------------------------------------------------------------------------


@pytest.mark.parametrize("read", [bool, float, torch.Tensor.item, torch.Tensor.tolist])
def test_a_number_that_is_read_back_is_found(read):
    with fake_cuda(), pytest.raises(RuntimeError):
        read(ones(1))


def test_mixed_devices_and_copies_to_the_cpu_are_found():
    with fake_cuda():
        with pytest.raises(RuntimeError, match="device"):
            ones(3) + torch.ones(3)
        with pytest.raises(ReadBack):
            torch.ones(3).copy_(ones(3))


# -- optimisers -----------------------------------------------------------------------------------------------------

LARS = {
    "as it is": {},
    "nesterov": {"nesterov": True},
    "clip": {"clip": True},
    "all tensors": {"exclude_bias_and_norm": False},
    "no trust": {"trust_coefficient": None},
    "no momentum": {"momentum": 0.0},
    "no decay": {"weight_decay": 0.0},
    "climbing": {"maximize": True},
    "one by one": {"foreach": False},
    "many at once": {"foreach": True},
    "everything": {"nesterov": True, "clip": True, "maximize": True, "exclude_bias_and_norm": False},
}


@pytest.mark.parametrize("rate", ["a number", "a tensor on the GPU", "a tensor on the CPU"])
@pytest.mark.parametrize("name", LARS)
def test_lars_steps(name, rate):
    """Without trust the step is torch's own SGD, which reads a rate on the GPU back."""
    settings, rate = LARS[name], "a number" if name == "no trust" else rate
    with fake_cuda():
        parameters = [torch.nn.Parameter(ones(4, 3)), torch.nn.Parameter(ones(4)), torch.nn.Parameter(ones(2, 2, 3, 3))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = paceline.LARS(parameters, lr=1.0, **settings)
        if rate != "a number":  # as a schedule may set it; the check of the constructor reads it, once
            optimizer.param_groups[0]["lr"] = torch.tensor(1.0, device="cuda" if "GPU" in rate else "cpu")
        for _ in range(3):
            optimizer.step()
        on_gpu(*parameters, *(value for state in optimizer.state.values() for value in state.values()))


# -- codecs ---------------------------------------------------------------------------------------------------------

LEVELS = [QSGD(), QSGD(levels=1, bucket=100, norm="l2"), QSGD(levels=127, bucket=5000, norm="l2"), QSGD(bucket=0)]


@pytest.mark.parametrize("codec", LEVELS, ids=str)
def test_the_twin_of_qsgd_rounds_packs_and_unpacks(codec):
    """All but the rest of up to 31 elements, which the CPU packs, and the check that the norms are finite."""
    with fake_cuda():
        vector, bucket = ones(ELEMENTS), codec._bucket(ELEMENTS)
        norms = ones(codec._buckets(ELEMENTS)).copy_(tensors.bucket_norms(vector, bucket, codec.norm))
        codes = tensors.codes_of(vector, norms, bucket, codec.levels, codec.width, 1, 2)
        words = tensors.pack(codes, codec.width)
        out = ones(ELEMENTS)
        qsgd._unpack_by_torch(codec, norms, words, [0] * (ELEMENTS - in_rows(ELEMENTS)), out)
        on_gpu(norms, codes, words, out)


@pytest.mark.parametrize("bucket", [512, ELEMENTS])
def test_the_twin_of_int8_sum_rounds_and_scales(bucket):
    with fake_cuda():
        vector = ones(ELEMENTS)
        norms = tensors.bucket_norms(vector, bucket, "max")
        levels = tensors.int8_levels(vector, norms, bucket, 31, 1, 2)
        on_gpu(norms, levels, tensors.int8_values(levels, norms, bucket, 31))


def test_the_twin_of_one_bit_encodes_and_decodes():
    with fake_cuda():
        vector, means = ones(ELEMENTS), ones(2)
        words = ones(in_rows(ELEMENTS) // 32, dtype=torch.int32)
        one_bit._encode_by_torch(vector, words, means)
        one_bit._decode_by_torch(words, means, vector)
        on_gpu(vector, words, means)


def test_top_k_reads_back_how_many_are_above_the_floor_and_nothing_before():
    """Which elements are kept is a list of data-dependent length: the GPU is waited for there."""
    with fake_cuda(), pytest.raises((DataDependentOutputException, NotImplementedError, ReadBack)):
        top_k._select_by_torch(ones(ELEMENTS), ones(50, dtype=torch.int32), ones(50, dtype=torch.int32))


# -- averaging ------------------------------------------------------------------------------------------------------

MEMBERS = {
    "local-sgd": {},
    "psgd": {},
    "hpsgd": {},
    "hpsgd, the paper": {"rebase": False},
    "bmuf": {},
    "bmuf, overlap": {"overlap": True},
    "diloco": {},
    "diloco, overlap": {"overlap": True, "rebase": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("member", MEMBERS)
def test_a_replica_packs_its_change_and_merges_buffers_included(member, dtype):
    with fake_cuda():
        parameters = [ones(4, 3, dtype=dtype), ones(4, dtype=dtype)]
        buffers = [ones(4), ones((), dtype=torch.int64)]
        name = member.partition(",")[0]
        replica = Replica(parameters, buffers, make_averaging(name, **MEMBERS[member]), workers=2)
        message = torch.empty(replica.size, dtype=replica.dtype, device="cuda")
        for open_steps in (0, 1, 0):
            for tensor in (*parameters, *buffers):
                tensor.add_(1)
            replica.pack_change(message, scale=0.5, brings=True)
            replica.merge(message, weight=0.5, open_steps=open_steps)
            replica.catch_up()
        on_gpu(replica.shared, message, *replica.state_dict().values())
        replica.load_state_dict(replica.state_dict())


def test_a_replica_of_gradients_reads_back_who_has_one_and_nothing_else():
    """Whether a parameter has a gradient at all decides about `.grad is None`: one number each, once a step."""
    with fake_cuda():
        parameter = torch.nn.Parameter(ones(4, 3))
        parameter.grad = ones(4, 3)
        replica = GradientReplica([parameter], [ones(4)], workers=2, step=lambda: None)
        message = torch.empty(replica.size, device="cuda")
        replica.pack_change(message, scale=1.0, brings=True)
        with pytest.raises(DataDependentOutputException):
            replica.merge(message, weight=0.5, open_steps=0)


# -- the one summation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remembers", [True, False])
def test_a_combiner_adds_fresh_and_late_and_compensates(remembers):
    with fake_cuda():
        combiner, out = Combiner(remembers=remembers), ones(10)
        for version in range(4):
            shares = tuple(Share(worker=worker, version=version, weight=0.5) for worker in range(3))
            again = 0.2 if remembers and version else 0.0
            step = Step(version=version, fresh=shares[:2], late=shares[2:], previous_mean_weight=again)
            on_gpu(
                combiner.update(step, lambda share: ones(10)), combiner.update(step, lambda share: ones(10), out=out)
            )
        if remembers:
            other = Combiner()
            other.load_state_dict(combiner.state_dict())
            on_gpu(other.update(step, lambda share: ones(10)))


# -- rounds on ranks ------------------------------------------------------------------------------------------------
# The exchange itself needs a stream and a process group of a GPU, and is not walked.


class FlagsRead(MessageLayout):
    """A layout whose flags are known: what comes after they were read back can be walked."""

    def flags_of(self, message):
        return SimpleNamespace(tolist=lambda: [1.0] * self.flags)


def rank_model(dtype, step=lambda: None):
    parameters = [torch.nn.Parameter(ones(4, 3, dtype=dtype)), torch.nn.Parameter(ones(5, dtype=dtype))]
    return RankModel(parameters, [ones(4), ones((), dtype=torch.int64)], step), parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rank_packs_its_gradient_and_applies_an_update(dtype):
    """Which parameters have a gradient is read back once for each update, and nothing else is, before or after."""
    with fake_cuda():
        found = []
        model, parameters = rank_model(dtype, lambda: found.extend(parameter.grad for parameter in parameters))
        parameters[0].grad = ones(4, 3, dtype=dtype)
        message = torch.empty(model.layout.size, dtype=model.dtype, device="cuda")
        on_gpu(model.pack(message))
        assert all(parameter.grad is None for parameter in parameters)
        with pytest.raises(DataDependentOutputException):
            model.apply(message)
        layout = model.layout
        model.layout = FlagsRead(gradient=layout.gradient, buffers=layout.buffers, flags=layout.flags)
        model.apply(message)
        on_gpu(*found)
        assert [grad.dtype for grad in found] == [dtype, dtype]
        model.restore_buffers()
        model.take_buffers()


def test_a_fingerprint_is_read_back_once_for_all_parameters():
    with fake_cuda():
        model, _ = rank_model(torch.float32)
        with pytest.raises(RuntimeError) as error:
            model.fingerprint()
        assert "word_sums" not in [entry.name for entry in error.traceback]  # none of which is read alone


@pytest.mark.parametrize("compensates", [True, False])
def test_a_rank_contributes_without_a_look_at_its_numbers(compensates):
    """Fresh, late and compensated, absent, and fresh again."""
    with fake_cuda():
        layout = MessageLayout(gradient=6, buffers=2, flags=2)
        pool = VectorPool(layout.size, torch.float32, torch.device("cuda"))
        mine = RankGradients(0, layout, pool, compensates=compensates)
        for version in range(4):
            share, other = (Share(worker=worker, version=version, weight=0.5) for worker in (0, 1))
            late = (Share(worker=0, version=version - 1, weight=0.3),) if compensates and version == 3 else ()
            again = 0.3 if compensates and version in (1, 3) else 0.0
            mine.keep(version, ones(layout.size))
            fresh = (other,) if version == 2 else (share, other)
            on_gpu(mine.contribute(Step(version=version, fresh=fresh, late=late, previous_mean_weight=again)))
        state = mine.state_dict()
        on_gpu(*state["kept"].values())
        mine.load_state_dict(state)
