"""Products and bases have the same bits whoever computes them, and are what torch's are, within rounding."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import low_rank, machine_code
from tests.contracts.codec_variants import seeded

SIZES = [(1, 1, 1), (7, 5, 3), (64, 576, 4), (100, 2100, 5), (33, 4097, 1), (40, 90, 17), (12, 12, 12), (9, 3000, 8)]


def factors(rows, columns, rank, seed=0):
    generator = seeded(seed)
    return torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)


@pytest.mark.parametrize(("rows", "columns", "rank"), SIZES)
def test_a_product_rounds_every_operation_for_itself_from_left_to_right(rows, columns, rank):
    """A fused multiply-add, or another order, would differ from torch's single operations somewhere in so many."""
    p, q = factors(rows, columns, rank)
    found = low_rank.multiply(p, q, torch.empty(rows * columns))
    assert torch.equal(found, low_rank.product_by_torch(p, q).view(-1))
    assert torch.allclose(found.view(rows, columns), p @ q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 9, 10, 11, 25, 29, 30])
def test_of_a_product_as_much_is_written_as_there_is_room_for(elements):
    p, q = factors(3, 10, 2)
    memory = torch.full((40,), 7.0)
    low_rank.multiply(p, q, memory[:elements])
    assert torch.equal(memory[:elements], low_rank.product_by_torch(p, q).view(-1)[:elements])
    assert bool((memory[elements:] == 7).all())


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_bit(monkeypatch, threads):
    monkeypatch.setattr(machine_code, "LEAST_ELEMENTS", 1)
    p, q = factors(101, 3001, 6)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append((low_rank.multiply(p, q, torch.empty(101 * 3001)), low_rank.orthonormal(p)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (5, 3), (70, 4), (130, 2)])
def test_a_basis_is_the_same_to_the_bit_as_by_single_operations_in_python(rows, rank):
    """Python has no fused multiply-add and no vectors."""
    p = torch.randn(rows, rank, generator=seeded(rows))
    p[:, -1] = p[:, 0] if rank == 3 else p[:, -1]  # one that must be replaced
    q = torch.randn(rank, rows, generator=seeded(1))
    plain = {name: getattr(low_rank, name).py_func for name in ("dot", "project_out", "orthonormalise", "normalise")}
    with mock.patch.multiple(low_rank, **plain):
        expected = low_rank.orthonormal(p), low_rank.unit_rows(q)
    assert torch.equal(low_rank.orthonormal(p), expected[0])
    assert torch.equal(low_rank.unit_rows(q), expected[1])


@settings(max_examples=60)
@given(
    rows=st.integers(1, 200), columns=st.integers(1, 12), rank=st.integers(0, 12), seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 1e-45, 2.0**-140, 1e-20, 1e20, 1e37]),
)  # fmt: skip
def test_a_basis_is_orthonormal_and_spans_the_columns_whatever_their_rank_and_size(rows, columns, rank, seed, scale):
    columns, rank = min(rows, columns), min(rows, columns, rank)
    p = torch.randn(rows, columns, generator=seeded(seed)) * scale
    p[:, rank:] = p[:, :1] if rank else 0.0  # equal ones and zeros are spanned already
    basis = low_rank.orthonormal(p)
    wide = basis.double()
    assert bool(torch.isfinite(basis).all())
    assert (wide.T @ wide - torch.eye(columns)).abs().max() <= 1e-6
    left = p.double() - wide @ (wide.T @ p.double())
    assert left.abs().max() <= 1e-6 * p.double().abs().max()


def test_rows_have_length_one_but_for_those_of_zeros():
    q = torch.randn(3, 1000, generator=seeded(0)) * torch.tensor([[1e-40], [0.0], [1e30]])
    lengths = low_rank.unit_rows(q).double().norm(dim=1)
    assert lengths.tolist() == pytest.approx([1, 0, 1], rel=1e-6)


@pytest.mark.parametrize("kernel", ["product_rows", "dot", "project_out", "orthonormalise", "normalise"])
def test_no_kernel_may_fuse_or_reorder(kernel):
    """What the optimiser is allowed to do is written at every operation: here nothing."""
    import numba

    array = np.ones((4, 80), np.float32 if kernel == "product_rows" else np.float64)
    arguments = {
        "product_rows": (0, 1, array[:, :4].copy(), array, np.ones(80, np.float32)),
        "dot": (array[0], array[1], np.empty(64)),
        "project_out": (array, 2, np.empty(64)),
    }.get(kernel, (array,))
    compiled = numba.njit(nogil=True, error_model="numpy")(getattr(low_rank, kernel).py_func)
    compiled(*arguments)
    (code,) = compiled.inspect_llvm().values()
    assert "fmul" in code or kernel in ("orthonormalise", "normalise")
    assert not any(word in code for word in ("llvm.fma", "llvm.fmuladd", "contract ", " fast ", "reassoc"))
