"""linear_packed: what inference computes, bit for bit, with a gradient that passes through the packed weight."""

from __future__ import annotations

from typing import Any

import pytest
from grids import looped, pairwise
from tensors import array, assert_equal, assert_is_mxfp8_product, step, values

from mxfp8_ops import numpy_nodes
from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError

torch = pytest.importorskip("torch")
pytest.importorskip("mxfp8_ops.torch_ops")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

ops = torch.ops.mxfp8
Tensor = torch.Tensor
B = ops.quantize(values(70, 45, seed=1))


@looped(
    "shape, dtype, b_format",
    pairwise(
        shape=[(45,), (40, 45), (2, 3, 45)],
        dtype=[torch.float32, torch.float16, torch.bfloat16],
        b_format=["e4m3", "e5m2"],
    ),
)
def test_forward_is_quantize_and_gemm(shape: tuple[int, ...], dtype: torch.dtype, b_format: str) -> None:
    x, b, bias = values(*shape).to(dtype), ops.quantize(values(70, 45, seed=1), -1, b_format), values(70, seed=2)
    got = ops.linear_packed(x, *b, bias, "e5m2", b_format, "HYBRID", "floor")
    wanted = ops.gemm(*ops.quantize(x, -1, "e5m2", "floor"), *b, bias, "e5m2", b_format, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    assert ops.linear_packed(x, *b, b_format=b_format, dtype=torch.float32).dtype == torch.float32


@looped(
    "shape, scale_rounding, fp8_format",
    pairwise(shape=[(45,), (77, 45), (2, 3, 45)], rounding=["ceil", "floor", "even"], fp8_format=["E4M3", "HYBRID"]),
)
def test_backward_multiplies_by_the_weight_quantized_along_n(
    shape: tuple[int, ...], scale_rounding: str, fp8_format: str
) -> None:
    x, bias = values(*shape).requires_grad_(), values(70).requires_grad_()
    y = ops.linear_packed(x, *B, bias, fp8_format=fp8_format, scale_rounding=scale_rounding)
    y.backward(dy := values(*y.shape, seed=3))
    rows, options = dy.reshape(-1, 70), {"scale_rounding": scale_rounding}
    options["a_format"] = {"E4M3": "e4m3", "HYBRID": "e5m2"}[fp8_format]
    assert_is_mxfp8_product(x.grad.reshape(-1, 45), rows, ops.dequantize(*B).t(), **options)
    torch.testing.assert_close(bias.grad, rows.sum(0))


def test_a_second_quantization_of_a_packed_weight_costs_next_to_nothing() -> None:
    """The numbers of the module: what dgrad multiplies by, against what the forward pass multiplied by."""
    w, dy = values(1024, 1024), values(64, 1024, seed=1)
    packed = ops.quantize(w)
    dense = ops.dequantize(*packed)
    again = ops.dequantize(*ops.quantize(dense.t())).t()
    assert float((again - dense).norm() / dense.norm()) < 1e-6
    assert 0 < int((again != dense).sum()) < 4e-4 * w.numel()
    x = torch.zeros(64, 1024).requires_grad_()
    (dx,) = torch.autograd.grad(ops.linear_packed(x, *packed), x, dy)
    exact = dy.double() @ dense.double()
    rounded = torch.from_numpy(numpy_nodes.dequantize(*numpy_nodes.quantize(array(dy)))).double()
    one_rounding = float((rounded @ dense.double() - exact).norm() / exact.norm())
    assert float((dx.double() - exact).norm() / exact.norm()) == pytest.approx(one_rounding, rel=1e-3)
    assert one_rounding < 0.03


def test_a_stack_of_weights_passes_the_sum_of_its_gradients() -> None:
    x, b = values(5, 45).requires_grad_(), ops.quantize(values(3, 8, 45, seed=1))
    dy = values(3, 5, 8, seed=2)
    (got,) = torch.autograd.grad(ops.linear_packed(x, *b), x, dy)
    each = [torch.autograd.grad(ops.linear_packed(x, b[0][i], b[1][i]), x, dy[i])[0] for i in range(3)]
    torch.testing.assert_close(got, sum(each))


def test_opcheck() -> None:
    x, bias = values(6, 45), values(70)
    for args in ((x, *B), (x.clone().requires_grad_(), *B, bias.clone().requires_grad_()), (x.bfloat16(), *B, bias)):
        torch.library.opcheck(ops.linear_packed.default, args)
    torch.library.opcheck(ops.product.default, (x.clone().requires_grad_(), values(8, 45).requires_grad_()))


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter = torch.nn.Linear(45, 45)
        for name, codes in zip(("b", "b_scales"), B, strict=True):
            self.register_buffer(name, codes)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_packed(self.adapter(x), self.b, self.b_scales)


def test_it_compiles_and_exports_with_its_gradient() -> None:
    module, x = Adapted(), values(6, 45)
    wanted = step(module, module, x)
    program = torch.export.export(module, (x,)).run_decompositions({}).module()
    assert_equal(step(program, program, x), wanted)
    assert_equal(step(torch.compile(module, backend="aot_eager", fullgraph=True), module, x), wanted)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "format": (
        lambda: ops.linear_packed(values(6, 45), *B, fp8_format="E5M2"),
        ContractError,
        "fp8_format: 'E5M2'; expected one of E4M3, HYBRID",
    ),
    "K": (lambda: ops.linear_packed(values(6, 44), *B), ShapeError, r"operands \(6, 44\) and \(70, 45\)"),
    "tangent": (
        lambda: torch.func.jvp(lambda x: ops.linear_packed(x, *B), (values(6, 45),), (values(6, 45),)),
        Mxfp8Error,
        "linear_packed: an operand carries a tangent",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
