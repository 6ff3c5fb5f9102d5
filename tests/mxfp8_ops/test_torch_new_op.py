"""What the torch op of a new node takes: its row of the contract, and a function made of other ops."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import pytest

from mxfp8_ops import contract
from mxfp8_ops.contract import FLOAT, VALUES, Port

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("mxfp8_ops.torch_ops")

from mxfp8_ops.errors import Mxfp8Error  # noqa: E402
from mxfp8_ops.torch_ops import gradients, operands, schemas  # noqa: E402

ops = torch.ops.mxfp8

NODE = contract.Op(
    "MXFP8ScaledGemm",
    (Port("X", VALUES, "[M, K]"), *contract.GEMM.inputs[2:4], Port("bias", (FLOAT,), "[N]", optional=True)),
    (Port("Y", VALUES, "[M, N]"),),
    MappingProxyType({"factor": 2.0, "repeat": 1, "output_dtype": FLOAT, "kind": "plain"}),
    "(X @ transpose(B) + bias) * factor.",
    contract.WEIGHT_GEMM.body,
    is_gemm=True,
)


def scaled_gemm(  # noqa: PLR0917 - the schema of the op
    x, b, b_scales, bias=None, b_format="e4m3", dtype=None, factor=2.0, repeat=1, kind="plain"
):
    return factor * ops.weight_gemm.default(x, b, b_scales, bias, b_format, dtype)


def _backward(ctx, grad):
    (weight,) = ctx.saved_tensors
    return (ctx.factor * grad @ weight,)


def _save(ctx, inputs, output):
    _, b, b_scales, _, b_format, _, ctx.factor, *_ = inputs
    ctx.save_for_backward(ops.dequantize.default(b, b_scales, -1, b_format))


@pytest.fixture(scope="module")
def op() -> Iterator[object]:
    library = torch.library.Library("mxfp8", "FRAGMENT")
    record = gradients.recorder("scaled_gemm", (0,), _save, _backward)
    kernels = {
        "CompositeExplicitAutograd": scaled_gemm,
        "Autograd": gradients.kernel("scaled_gemm", (0,), record, "use weight_gemm"),
    }
    torch_ops.register(operands.Op(schemas.schema("scaled_gemm", NODE), kernels), library)
    yield ops.scaled_gemm.default
    library._destroy()


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
WEIGHT = ops.quantize(torch.randn(3, 64, generator=torch.Generator().manual_seed(1)))


def test_its_schema_follows_from_its_row(op) -> None:
    assert str(op._schema) == (
        "mxfp8::scaled_gemm(Tensor x, Tensor b, Tensor b_scales, Tensor? bias=None, "
        'str b_format="e4m3", ScalarType? dtype=None, float factor=2., int repeat=1, str kind="plain") -> Tensor'
    )


def test_it_runs_with_its_gradient_and_torch_accepts_it(op) -> None:
    assert torch.equal(op(X, *WEIGHT), 2 * ops.weight_gemm(X, *WEIGHT))
    torch.library.opcheck(op, (X, *WEIGHT), {"factor": 3.0})
    x = X.clone().requires_grad_()
    torch.library.opcheck(op, (x, *WEIGHT))
    op(x, *WEIGHT, factor=3.0).sum().backward()
    torch.testing.assert_close(x.grad, 3 * ops.dequantize(*WEIGHT).sum(0).expand_as(X))
    with pytest.raises(Mxfp8Error, match=r"scaled_gemm: an operand carries a tangent; .* or use weight_gemm"):
        torch.func.jvp(lambda x: op(x, *WEIGHT), (X,), (X,))
