"""`mxfp8::embedding` against the reference: rows of a packed table, in eager torch and under its transforms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from compare import assert_same
from grids import looped, pairwise
from tensors import array, name, values

torch = pytest.importorskip("torch")

from mxfp8_ops import formats, numpy_nodes, torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ShapeError  # noqa: E402
from mxfp8_ops.torch_ops import cuda  # noqa: E402

ops = torch.ops.mxfp8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TABLE = ops.quantize(values(7, 45))
IDS = torch.tensor([[3, 0, -1], [6, -7, 3]])


def check(
    ids: torch.Tensor, table: Any = TABLE, b_format: str = "e4m3", dtype: Any = torch.float32, op: Any = ops.embedding
) -> None:
    rows = numpy_nodes.embedding(ids.numpy(), *map(array, table), b_format=b_format, dtype=name(dtype))
    assert_same(array(op(ids, *table, b_format, dtype)), rows)


@looped(
    "index, b_format, dtype",
    pairwise(index=[torch.int32, torch.int64], b_format=formats.ELEMENT_FORMATS, dtype=DTYPES),
)
def test_rows_are_those_of_the_reference(index: torch.dtype, b_format: str, dtype: torch.dtype) -> None:
    check(IDS.to(index), ops.quantize(values(7, 45), -1, b_format), b_format, dtype)
    codes = torch.arange(256, dtype=torch.uint8)
    check(torch.arange(256).flip(0), (codes.tile(256, 1), codes[:, None].tile(1, 8)), b_format, dtype)


@looped("ids, d", [*itertools.product((IDS % 2, IDS[0, 0] * 0, IDS[:0], IDS[:, :0]), (0, 1, 31, 32, 33, 64, 100))])
def test_any_shape(ids: torch.Tensor, d: int) -> None:
    check(ids, ops.quantize(values(2, d)))


def test_a_table_of_one_row() -> None:
    check(torch.tensor([0, -1, 0]), tuple(t[:1] for t in TABLE))


def test_float32_and_e4m3_are_what_is_left_open() -> None:
    assert torch.equal(ops.embedding(IDS, *TABLE), ops.embedding(IDS, *TABLE, b_format="e4m3", dtype=torch.float32))


def test_strided_operands_are_read_as_what_they_stand_for() -> None:
    table = tuple(t.t().contiguous().t() for t in TABLE)
    assert torch.equal(ops.embedding(IDS.t(), *table), ops.embedding(IDS, *TABLE).transpose(0, 1))
    every_other = tuple(t[::2] for t in TABLE)
    for op in (ops.embedding, cuda.embedding):
        assert torch.equal(op(torch.tensor([2, 1]), *every_other), ops.embedding(torch.tensor([4, 2]), *TABLE))


@looped("ids, dtype", [*itertools.product((IDS, IDS.int(), IDS[0, 2], IDS[:0]), DTYPES)])
def test_what_a_gpu_runs_gives_the_same(ids: torch.Tensor, dtype: torch.dtype) -> None:
    """Made of torch's ops and of dequantize, which have their kernels by the device of the tensors."""
    check(ids, dtype=dtype, op=cuda.embedding)


# --- What torch asks of an op -------------------------------------------------------------------------------------


@looped("ids", [IDS, IDS.int()[0, 0], IDS[:0]])
def test_opcheck(ids: torch.Tensor) -> None:
    torch.library.opcheck(ops.embedding.default, (ids, *ops.quantize(values(7, 45), -1, "e5m2"), "e5m2", torch.half))


class Embedding(torch.nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(ids, *TABLE)


def test_it_exports_and_compiles_whole_with_any_number_of_indices() -> None:
    compiled = torch.compile(Embedding(), backend="aot_eager", fullgraph=True)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    program = torch.export.export(Embedding(), (IDS,), dynamic_shapes=(dims,))
    for ids in (IDS, IDS[:1], IDS[:, :2], IDS[:0]):
        for module in (program.module(), compiled):
            assert torch.equal(module(ids), Embedding()(ids))


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
