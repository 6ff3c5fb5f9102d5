"""The inference ops under what torch does: opcheck, export, compile, AOTInductor, vmap, autocast, gradients."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensors
from grids import looped
from tensors import assert_equal

from mxfp8_ops.errors import Mxfp8Error

torch = pytest.importorskip("torch")
pytest.importorskip("mxfp8_ops.torch_ops")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

ops = torch.ops.mxfp8
values = functools.partial(tensors.values, spread=1.5)


# --- What torch asks of an op -------------------------------------------------------------------------------------


def samples() -> dict[str, list[tuple[Any, ...]]]:
    """Returns arguments for each op."""
    x, b = values(6, 45), ops.quantize(values(8, 45, seed=1))
    a, batched, leaf = ops.quantize(x), ops.quantize(values(3, 8, 45, seed=1)), x.clone().requires_grad_()
    return {
        "quantize": [(x.t(),), (x.half(), 0, "e5m2", "floor"), (x[:0],)],
        "dequantize": [(*a, -1, "e4m3", torch.bfloat16)],
        "gemm": [(*a, *b), (*a, *batched, values(8), "e4m3", "e4m3", torch.float16)],
        "weight_gemm": [
            (x.bfloat16(), *batched, values(8)),
            (leaf, *b),
            (leaf, *b, None, "e4m3", torch.float16, torch.bfloat16),
        ],
    }


@looped("name", ["quantize", "dequantize", "gemm", "weight_gemm"])
def test_opcheck(name: str) -> None:
    op = getattr(ops, name).default
    assert torch.Tag.pt2_compliant_tag in op.tags
    for args in samples()[name]:
        torch.library.opcheck(op, args)


class Packed(torch.nn.Module):
    """All four inference ops in one module."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        elements, scales = ops.quantize(values(24, 45))
        self.register_buffer("elements", elements)
        self.register_buffer("scales", scales)
        self.norm = torch.nn.LayerNorm(45) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        y = ops.gemm(*ops.quantize(x), self.elements, self.scales) + ops.weight_gemm(x, self.elements, self.scales)
        return y @ ops.dequantize(self.elements, self.scales)


def test_export_keeps_dynamic_dimensions_dynamic_and_the_errors_of_eager() -> None:
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    program = torch.export.export(Packed(), (values(3, 7, 45),), dynamic_shapes=(dims,)).run_decompositions({})
    for shape in ((3, 7, 45), (5, 2, 45), (0, 4, 45)):
        x = values(*shape)
        assert torch.equal(program.module()(x), Packed()(x))
    with pytest.raises(Exception, match=r"expected \[\.\.\., M, K\] and \[\.\.\., N, K\] with the same K"):
        torch.export.export(Packed(), (values(3, 44),))


def test_a_module_that_quantizes_what_has_parameters_can_be_exported() -> None:
    module, x = Packed(norm=True), values(3, 45)
    program = torch.export.export(module, (x,)).run_decompositions({})
    with torch.no_grad():
        assert torch.equal(program.module()(x), module(x))
    with pytest.raises(Mxfp8Error, match="quantize: x requires a gradient"):
        program.module()(x)


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_compile_fullgraph_gives_the_same_bits(backend: str) -> None:
    def run(x: torch.Tensor, m: Packed) -> torch.Tensor:
        result: torch.Tensor = ops.gemm(*ops.quantize(x.t()), m.elements, m.scales)
        return result

    x, module = values(45, 7), Packed()
    with torch.no_grad():
        assert torch.equal(torch.compile(run, fullgraph=True, backend=backend)(x, module), run(x, module))


@pytest.mark.slow
@NEEDS_COMPILER
def test_ahead_of_time_inductor_gives_the_same_bits(tmp_path: Path) -> None:
    program = torch.export.export(Packed(), (values(7, 45),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "packed.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for rows in (7, 3):
        x = values(rows, 45)
        # The last matmul is torch's own and may be fused another way; ours feed it the same bits.
        torch.testing.assert_close(run(x), Packed()(x), rtol=1e-6, atol=1e-6 * float(Packed()(x).abs().max()))


def test_autocast_and_inference_mode_leave_the_inference_ops_alone() -> None:
    x, b = values(5, 45), ops.quantize(values(8, 45))
    expected = ops.weight_gemm(x, *b), *ops.quantize(x)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with mode:
            got = ops.weight_gemm(x, *b), *ops.quantize(x)
        assert got[0].dtype == torch.float32
        assert_equal(got, expected)


# --- Gradients of the inference ops --------------------------------------------------------------------------------


@looped("shape, batched", [*itertools.product(((6, 45), (45,), (2, 3, 45)), (False, True))])
def test_weight_gemm_passes_gradients_through_its_frozen_weight(shape: tuple[int, ...], *, batched: bool) -> None:
    x, bias = values(*shape).requires_grad_(), values(8, seed=2).requires_grad_()
    b = ops.quantize(values(*((2,) if batched else ()), 8, 45, seed=1))
    expected = x @ ops.dequantize(*b).transpose(-1, -2) + bias
    upstream = values(*expected.shape, seed=3)
    wanted = torch.autograd.grad(expected, (x, bias), upstream)
    got = torch.autograd.grad(ops.weight_gemm(x, *b, bias), (x, bias), upstream)
    for gradient, reference in zip(got, wanted, strict=True):
        scale = float(reference.abs().max())
        torch.testing.assert_close(gradient, reference, rtol=0, atol=scale * 64 * 2.0**-24)  # sums of at most 48


def test_the_gradient_of_x_passes_its_rounding_to_bfloat16() -> None:
    x, b, upstream = values(6, 45).requires_grad_(), ops.quantize(values(8, 45, seed=1)), values(6, 8, seed=3)
    plain, rounded = (
        torch.autograd.grad(ops.weight_gemm(x, *b, activation_dtype=dtype), x, upstream)[0]
        for dtype in (None, torch.bfloat16)
    )
    assert torch.equal(rounded, plain)


PACKED = *ops.quantize(values(6, 45)), *ops.quantize(values(8, 45, seed=1))
LOSSES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "weight_gemm": (
        lambda x, bias: ops.weight_gemm(x, *PACKED[2:], bias).square().sum(),
        [values(5, 45), values(8)],
    ),
    "gemm": (lambda bias: ops.gemm(*PACKED, bias).square().sum(), [values(8)]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_func_grad_gives_the_gradients_of_backward_and_tangents_are_refused(name: str) -> None:
    loss, operands = LOSSES[name]
    leaves = [t.clone().requires_grad_() for t in operands]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    assert_equal(torch.func.grad(loss, tuple(range(len(operands))))(*operands), wanted)
    if name == "gemm":
        assert torch.equal(wanted[0], 2 * ops.gemm(*PACKED, operands[0]).sum(0))
    with pytest.raises(Mxfp8Error, match=f"{name}: an operand carries a tangent"):
        torch.func.jvp(loss, tuple(operands), tuple(operands))


def test_a_plain_tensor_in_a_level_of_forward_derivatives_is_no_error() -> None:
    with torch.autograd.forward_ad.dual_level():
        assert ops.weight_gemm(values(4, 45), *PACKED[2:]).shape == (4, 8)


CUTS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "backward": lambda f, x: f(x.requires_grad_()),
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f))(x),
}


@looped("name, cut", [*itertools.product(("quantize", "quantize_both"), CUTS)])
def test_quantize_refuses_to_cut_a_derivative(name: str, cut: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        pair = ops.quantize(x) if name == "quantize" else ops.quantize_both(x.reshape(-1, 45))[:2]
        return ops.dequantize(*pair).sum()

    with pytest.raises(Mxfp8Error, match=rf"{name}: x (requires a gradient|carries a tangent).*training=True"):
        CUTS[cut](loss, values(6, 45))
    with torch.no_grad():
        assert loss(values(6, 45).requires_grad_()).isfinite()
