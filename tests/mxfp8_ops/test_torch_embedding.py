"""`mxfp8::embedding` against the reference: rows of a packed table, in eager torch and under its transforms."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from grids import looped
from tensors import values

torch = pytest.importorskip("torch")

from mxfp8_ops import formats, numerics, numpy_nodes, torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ShapeError  # noqa: E402

ops = torch.ops.mxfp8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


TABLE = ops.quantize(values(7, 45))
IDS = torch.tensor([[3, 0, -1], [6, -7, 3]])


def expected(ids: torch.Tensor, table: Any = TABLE, b_format: str = "e4m3", dtype: Any = torch.float32) -> torch.Tensor:
    name = str(dtype).removeprefix("torch.")
    rows = numpy_nodes.embedding(ids.numpy(), *(t.numpy() for t in table), b_format=b_format, dtype=name)
    return torch.from_numpy(rows.astype(np.float32)).to(dtype)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fails unless the bits are the same, but for those of a NaN."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got) & ~got.isnan(), torch.signbit(wanted) & ~wanted.isnan())


@looped("index, b_format, dtype", [*itertools.product((torch.int32, torch.int64), formats.ELEMENT_FORMATS, DTYPES)])
def test_rows_are_those_of_the_reference(index: torch.dtype, b_format: str, dtype: torch.dtype) -> None:
    table = ops.quantize(values(7, 45), -1, b_format)
    got = ops.embedding(IDS.to(index), *table, b_format, dtype)
    assert_same(got, expected(IDS, table, b_format, dtype))


@looped("b_format, dtype", [*itertools.product(formats.ELEMENT_FORMATS, DTYPES)])
def test_every_code_at_every_scale(b_format: str, dtype: torch.dtype) -> None:
    table = torch.arange(256, dtype=torch.uint8).tile(256, 1), torch.arange(256, dtype=torch.uint8)[:, None].tile(1, 8)
    ids = torch.arange(256).flip(0)
    assert_same(ops.embedding(ids, *table, b_format, dtype), expected(ids, table, b_format, dtype))


@looped("ids, d", [*itertools.product((IDS % 2, IDS[0, 0] * 0, IDS[:0], IDS[:, :0]), (0, 1, 31, 32, 33, 64, 100))])
def test_any_shape(ids: torch.Tensor, d: int) -> None:
    table = ops.quantize(values(2, d))
    assert_same(ops.embedding(ids, *table), expected(ids, table))


def test_a_table_of_one_row() -> None:
    table = tuple(t[:1] for t in TABLE)
    ids = torch.tensor([0, -1, 0])
    assert_same(ops.embedding(ids, *table), expected(ids, table))


def test_float32_and_e4m3_are_what_is_left_open() -> None:
    assert torch.equal(ops.embedding(IDS, *TABLE), ops.embedding(IDS, *TABLE, b_format="e4m3", dtype=torch.float32))


def test_it_picks_the_rows_that_torch_picks_from_the_dequantized_table() -> None:
    ids = IDS % 7
    wide = torch.nn.functional.embedding(ids, ops.dequantize(*TABLE), padding_idx=3, scale_grad_by_freq=True)
    assert torch.equal(ops.embedding(ids, *TABLE), wide)


def test_strided_operands_are_read_as_what_they_stand_for() -> None:
    table = tuple(t.t().contiguous().t() for t in TABLE)
    assert torch.equal(ops.embedding(IDS.t(), *table), ops.embedding(IDS, *TABLE).transpose(0, 1))
    every_other = tuple(t[::2] for t in TABLE)
    assert torch.equal(ops.embedding(torch.tensor([2, 1]), *every_other), ops.embedding(torch.tensor([4, 2]), *TABLE))


@looped("ids, dtype", [*itertools.product((IDS, IDS.int(), IDS[0, 2], IDS[:0]), DTYPES)])
def test_what_a_gpu_runs_gives_the_same(ids: torch.Tensor, dtype: torch.dtype) -> None:
    """Made of torch's ops and of dequantize, which have their kernels by the device of the tensors."""
    from mxfp8_ops.torch_ops import cuda

    assert_same(cuda.embedding(ids, *TABLE, "e4m3", dtype), expected(ids, dtype=dtype))
    every_other = tuple(t[::2] for t in TABLE)
    assert_same(cuda.embedding(ids % 4, *every_other), expected(ids % 4 * 2))


# --- What torch asks of an op -------------------------------------------------------------------------------------


@looped("ids", [IDS, IDS.int(), IDS[0, 0], IDS[:0]])
def test_opcheck(ids: torch.Tensor) -> None:
    torch.library.opcheck(ops.embedding.default, (ids, *TABLE))
    torch.library.opcheck(ops.embedding.default, (ids, *ops.quantize(values(7, 45), -1, "e5m2"), "e5m2", torch.half))


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", TABLE[0])
        self.register_buffer("scales", TABLE[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(ids, self.table, self.scales)


def test_it_exports_and_compiles_whole_with_any_number_of_indices() -> None:
    compiled = torch.compile(Embedding(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS), expected(IDS))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    program = torch.export.export(Embedding(), (IDS,), dynamic_shapes=(dims,))
    for ids in (IDS, IDS[:1], IDS[:, :2], IDS[:0]):
        assert torch.equal(program.module()(ids), expected(ids))


# --- What is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "least": ((torch.tensor([-(2**63)]), *TABLE), ShapeError, r"embedding: index -9223372036854775808 at \(0,\)"),
    "float ids": ((torch.ones(2), *TABLE), ShapeError, "indices have dtype float32; expected one of int32, int64"),
    "float8": ((IDS, TABLE[0].view(torch.float8_e4m3fn), TABLE[1]), ShapeError, "expected uint8 codes"),
    "dtype": ((IDS, *TABLE, "e4m3", torch.float64), ShapeError, "embedding: dtype float64; expected one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    args, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ops.embedding(*args)
