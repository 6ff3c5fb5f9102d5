"""`mxfp8::conv`: the bytes of the CPU kernels, and what torch expects of an op."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensors
from compare import assert_same, assert_within
from grids import looped
from tensors import array, name

from mxfp8_ops import cpu, numpy_nodes
from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError
from mxfp8_ops.nodes.conv import EPILOGUES, Settings, conv_error_bound

torch = pytest.importorskip("torch")

from mxfp8_ops.torch_ops import constant_weights  # noqa: E402
from mxfp8_ops.torch_ops.conv import composed  # noqa: E402

ops = torch.ops.mxfp8
values = functools.partial(tensors.values, spread=1.5)


def weight(*shape: int, fmt: str = "int8") -> tuple[torch.Tensor, torch.Tensor]:
    elements, scales = ops.quantize(values(*shape, seed=1), -1, fmt)
    return elements, scales


X, B, B2 = values(2, 40, 9, 8), weight(6, 3, 2, 40), weight(4, 3, 3, 6)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "2-D": (X, B, {}),
    "1-D": (values(2, 64, 30), weight(5, 3, 64), {"strides": [2], "dilations": [3], "pads": [3, 1]}),
    "groups": (values(1, 64, 7, 7), weight(6, 3, 3, 32), {"group": 2, "pads": [1]}),
    "float16": (X.half(), B, {"dtype": torch.float16, "pads": [0, 1, 2, 1], "strides": [2, 1]}),
    "E4M3": (X.bfloat16(), weight(6, 3, 2, 40, fmt="e4m3"), {"x_format": "e4m3", "dtype": torch.bfloat16}),
    "channels last": (X.to(memory_format=torch.channels_last), B, {"scale_rounding": "floor"}),
    "strided": (X[:, :, ::2, 1:], [t.mT.contiguous().mT for t in B], {"epilogue": "relu"}),
    "nothing": (X[:0], B, {}),
    **{each: (X, B, {"epilogue": each, "alpha": 0.25, "beta": 0.75, "residual_at": "after"}) for each in EPILOGUES},
}


def operands(case: str) -> tuple[tuple[Any, ...], dict[str, Any], Settings]:
    """Returns the tensors of a case, its settings as keywords of the op, and as those of the reference."""
    x, b, more = CASES[case]
    keywords = {"b_format": more.get("x_format", "int8"), **more}
    settings = Settings(**{**keywords, "dtype": name(more.get("dtype", torch.float32))})
    y = ops.conv(x, *b, **keywords)
    return (x, *b, values(b[0].shape[0], seed=2), values(*y.shape, seed=3).to(x.dtype)), keywords, settings


@looped("case", CASES)
def test_the_bytes_are_those_of_the_kernels_and_what_a_gpu_runs_is_within_the_bound(case: str) -> None:
    args, keywords, settings = operands(case)
    for count in (3, 5):
        got = ops.conv(*args[:count], **keywords)
        assert got.is_contiguous()
        assert_same(array(got), cpu.conv(*map(array, args[:count]), settings=settings), case)
    x, w = (numpy_nodes.dequantize(*map(array, t), axis=axis, element_format=settings.x_format) for t, axis in (
        (ops.quantize(args[0], 1, settings.x_format, settings.scale_rounding), 1), (args[1:3], -1)))  # fmt: skip
    optional = {"bias": array(args[3]), "residual": array(args[4])}
    bound = conv_error_bound(x, w, **optional, settings=settings)
    defaults = {a.name: a.default_value for a in ops.conv.default._schema.arguments[5:]}
    got = composed(*args, *{**defaults, **keywords}.values())
    assert_within(array(got), numpy_nodes.conv(*map(array, args), settings=settings), bound, case)


def test_a_constant_weight_is_kept_and_gives_the_same_bytes() -> None:
    for x, b, keywords in (CASES["2-D"], CASES["groups"]):
        constant_weights.set_prepack("never")
        expected = ops.conv(x, *b, b_format="int8", **keywords)
        constant_weights.set_prepack("auto")
        tensors.assert_equal([ops.conv(x, *b, b_format="int8", **keywords) for _ in range(3)], [expected] * 3)
        assert next(iter(constant_weights._known[b[0].untyped_storage()][b[1].untyped_storage()].values()))[1]


# --- What torch asks of an op -------------------------------------------------------------------------------------


@looped("case", ["2-D", "1-D", "float16"])
def test_opcheck(case: str) -> None:
    args, keywords, _ = operands(case)
    torch.library.opcheck(ops.conv.default, args, keywords)


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ops.conv(x.relu(), *B, b_format="int8", strides=[2, 1], pads=[1])
        return ops.conv(y, *B2, None, y[:, :4], b_format="int8", pads=[1], epilogue="relu")


def test_it_exports_and_compiles_whole_with_any_sizes() -> None:
    dims = {at: torch.export.Dim(f"d{at}", min=least) for at, least in ((0, 1), (2, 4), (3, 4))}
    program = torch.export.export(Net(), (X,), dynamic_shapes=(dims,))
    compiled = torch.compile(Net(), backend="aot_eager", fullgraph=True, dynamic=True)
    for x in (X, values(5, 40, 12, 6)):
        tensors.assert_equal((program.module()(x), compiled(x)), [Net()(x)] * 2)


def test_vmap_loops() -> None:
    x = values(3, 1, 40, 5, 5)
    got = torch.vmap(lambda x: ops.conv(x, *B, b_format="int8"))(x)
    assert torch.equal(got, torch.stack([ops.conv(each, *B, b_format="int8") for each in x]))


@looped("at, named", [(0, "x"), (3, "bias"), (4, "residual")])
def test_it_refuses_to_cut_a_derivative(at: int, named: str) -> None:
    args = [X, *B, values(6), values(2, 6, 7, 7)]
    args[at] = args[at].clone().requires_grad_()
    with torch.no_grad():
        ops.conv(*args)
    with pytest.raises(Mxfp8Error, match=f"conv: {named} requires a gradient, and a packed convolution passes"):
        ops.conv(*args)


@looped("change, kind, message", [
    ({"bias": values(6).half()}, ShapeError, "bias has dtype float16; expected float32"),
    ({"bias": values(5)}, ShapeError, r"bias has shape \(5,\); expected \(6,\)"),
    ({"residual": values(2, 6, 7, 1)}, ShapeError, r"residual has shape \(2, 6, 7, 1\); expected \(2, 6, 7, 7\)"),
    ({"x": X[:, :, 0, 0]}, ShapeError, r"operands \(2, 40\) and \(6, 3, 2, 40\)"),
    ({"b_scales": B[1][:5]}, ShapeError, "scales have shape"),
    ({"dtype": torch.float64}, ShapeError, "conv: dtype float64"),
    ({"x_format": "e3m4"}, ContractError, "e3m4"),
    ({"epilogue": "tanh"}, ContractError, "epilogue: 'tanh'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], kind: type[Mxfp8Error], message: str) -> None:
    arguments = {"x": X, "b": B[0], "b_scales": B[1], **change}
    for device in ("cpu", "meta"):
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        with pytest.raises(kind, match=message):
            ops.conv(**moved)
