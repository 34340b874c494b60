"""CUDA tensors without a GPU: torch's FakeTensorMode knows shape, type and device of each result, and computes nothing.

An operation of tensors on two devices fails as it would on a GPU; so does every number that is read back (`item`,
`bool(tensor)`, `tolist`, `torch.equal`), for which a GPU would have to be waited for. Two things must be mended for a
build of torch without CUDA, which refuses to guard a CUDA device: indexing is made of `select` and `slice`, and `copy_`
is checked and not done. Backward passes and random fills cannot be walked.
"""

from __future__ import annotations

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class _Indexing(TorchFunctionMode):
    """Indexing by whole numbers and slices, as operations that guard no device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _at(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            place = _at(tensor, index)
            _copy(place, value) if isinstance(value, torch.Tensor) else place.fill_(value)
            return None
        if func is torch.Tensor.copy_:
            return _copy(*args)
        return func(*args, **(kwargs or {}))


def _at(tensor, index):
    dimension = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dimension, part.start, part.stop, part.step or 1)
            dimension += 1
        elif part is None:
            tensor = aten.unsqueeze.default(tensor, dimension)
            dimension += 1
        elif isinstance(part, int):
            tensor = aten.select.int(tensor, dimension, part)
        else:
            raise NotImplementedError(f"an index of {type(part).__name__}: it reads numbers back, or is not walked")
    return tensor


def _copy(tensor, source, non_blocking=False):
    """Check what `copy_` would: shapes that fit, and that nothing comes back from the GPU."""
    if source.device.type == "cuda" and tensor.device.type == "cpu":
        raise ReadBack("a copy from the GPU to the CPU")
    while source.dim() > tensor.dim():
        assert source.shape[0] == 1
        source = source.squeeze(0)
    assert torch.broadcast_shapes(tensor.shape, source.shape) == tensor.shape
    return tensor.fill_(0)


class ReadBack(Exception):  # noqa: N818 - a finding
    """Numbers come back from the GPU: the CPU would have to wait."""


@contextlib.contextmanager
def fake_cuda():
    """In this context tensors of device "cuda" can be made, and are fake."""
    with torch.no_grad(), FakeTensorMode(), _Indexing():
        yield


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, device="cuda")
