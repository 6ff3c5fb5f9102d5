"""`MXFP8Tensor` and `MXFP8Quantizer`: layout, worked numbers of the sources, ops, views, bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_programs import as_numpy, relative_l2, values  # noqa: E402

from mxfp8_graph import te  # noqa: E402
from mxfp8_graph.packing import unswizzled  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError, ShapeError  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def block(*first: float) -> Tensor:
    """One block of 32 values, the rest 0."""
    return torch.tensor([[*first, *[0.0] * (32 - len(first))]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (40, 100), (1, 5), (3, 7, 33), (0, 32), (5, 0), (17,)])
@pytest.mark.parametrize("fp8_dtype", [te.DType.kFloat8E4M3, torch.float8_e5m2])
def test_both_directions_are_quantized_from_the_values(shape: tuple[int, ...], dtype: Any, fp8_dtype: Any) -> None:
    x = values(*shape, seed=3, dtype=dtype)
    t = te.MXFP8Quantizer(fp8_dtype, rowwise=True, columnwise=True)(x)
    assert (t.shape, t.dtype, t.device) == (x.shape, dtype, x.device)
    matrix, name = as_numpy(x).reshape(math.prod(shape[:-1]), shape[-1]), te.DType.cast(fp8_dtype).value
    for axis, elements, scales in (
        (1, t._rowwise_data, t._rowwise_scale_inv),
        (0, t._columnwise_data, t._columnwise_scale_inv),
    ):
        wanted = numpy_nodes.quantize(matrix, axis=axis, element_format=name)
        np.testing.assert_array_equal(elements.numpy().reshape(matrix.shape), wanted[0].view(np.uint8))
        np.testing.assert_array_equal(scales.numpy(), wanted[1])


@pytest.mark.parametrize(
    ("amax", "code"), [(448.0, 127), (448.5, 128), (2.8, 120), (0.0, 0), (2.0**127, 246), (2.0**-126, 0)]
)
def test_worked_scales_of_the_sources(amax: float, code: int) -> None:
    """127 + ceil(log2(amax / 448)): the walkthrough's floor(log2(2.8 / 448)) would be 119."""
    t = te.MXFP8Quantizer("e4m3")(block(amax, amax / 3))
    assert t.rowwise_scales.tolist() == [[code]]


def test_floor_of_the_quotient_would_saturate() -> None:
    """With 2^-8 the amax 2.8 would need an element of 716.8, and the greatest is 448."""
    x = block(2.8, -1.2, 0.5)
    floor = (x * 2.0**8).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 2.0**8
    assert floor[0, 0] == 1.75
    assert te.MXFP8Quantizer()(x).dequantize()[0, :3].tolist() == [2.75, -1.25, 0.5]


def test_bytes_are_those_of_the_sources() -> None:
    """1.03125 bytes a value, 3.88x; in both directions 51.56 % of float32, and one is 51.56 % of bfloat16."""
    x = torch.randn(1024, 1024)
    one, both = te.MXFP8Quantizer(columnwise=False)(x), te.MXFP8Quantizer()(x)
    assert one.nbytes == 1.03125 * x.numel()
    assert x.nbytes / one.nbytes == pytest.approx(3.88, abs=0.005)
    assert both.nbytes / x.nbytes == pytest.approx(0.515, abs=0.001)


def test_scales_are_padded_and_swizzled_as_the_matmuls_of_nvidia_read_them() -> None:
    t = te.MXFP8Quantizer()(values(200, 96))
    assert t.padded_scales().shape == (256, 4)
    assert t.padded_scales(columnwise=True).shape == (8, 128)
    assert torch.equal(t.padded_scales()[:200, :3], t.rowwise_scales)
    assert torch.equal(t.padded_scales(columnwise=True)[:7, :96], t.columnwise_scales)
    assert np.array_equal(unswizzled(t.padded_scales(swizzled=True).numpy(), 200, 3), t.rowwise_scales.numpy())
    turned = unswizzled(t.padded_scales(columnwise=True, swizzled=True).numpy(), 96, 7)
    assert np.array_equal(turned.T, t.columnwise_scales.numpy())


def test_one_percent_of_each_element_is_out_of_reach_of_a_product() -> None:
    """An element keeps four significant bits: 2.7 % of error an operand, sqrt(2) of it a product, whatever K is."""
    torch.manual_seed(0)
    x, w = torch.randn(128, 512), torch.randn(256, 512)
    a, b = (te.MXFP8Quantizer("e4m3", columnwise=False)(each) for each in (x, w))
    pairs = a.rowwise_elements, a.rowwise_scales, b.rowwise_elements, b.rowwise_scales
    y = torch.ops.mxfp8.gemm(*pairs)
    torch.testing.assert_close(y, a.dequantize() @ b.dequantize().T, rtol=1e-4, atol=1e-4)
    assert relative_l2(y, x @ w.T) == pytest.approx(0.0375, abs=0.002)
    within = torch.isclose(y, x @ w.T, rtol=1e-2, atol=1e-3).float().mean()
    assert 0.15 < float(within) < 0.3


def test_quantizers_have_no_state_and_set_usage() -> None:
    quantizer, x = te.MXFP8Quantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=False), values(64, 64)
    first = quantizer(x).dequantize()
    quantizer(x * 1000)
    assert torch.equal(quantizer(x).dequantize(), first)
    assert quantizer(x).get_usages() == {"rowwise": True, "columnwise": False}
    quantizer.set_usage(rowwise=False, columnwise=True)
    only = quantizer(x)
    assert torch.equal(only.dequantize().T, te.MXFP8Quantizer(columnwise=False)(x.T.contiguous()).dequantize())
    # TransformerEngine's rule is a question here; every size works.
    shapes = {(64, 32): True, (2, 16, 32): True, (33, 32): False, (32, 33): False, (32,): False}
    assert {shape: quantizer.is_quantizable(torch.ones(*shape)) for shape in shapes} == shapes
    with pytest.raises(ContractError, match=r"fp8_dtype: 'int3'; expected one of e4m3, e5m2"):
        te.MXFP8Quantizer("int3")


def test_update_quantized_stores_in_place() -> None:
    quantizer = te.MXFP8Quantizer()
    t = quantizer.make_empty((64, 96), requires_grad=True)
    data = t.rowwise_elements
    x = values(64, 96)
    assert quantizer.update_quantized(x, t) is t
    assert torch.equal(data, quantizer(x).rowwise_elements)
    for bad in (torch.ones(64, 96), quantizer.make_empty((96, 64)), te.MXFP8Quantizer("e5m2").make_empty((64, 96))):
        with pytest.raises(ContractError, match=r"expected an MXFP8Tensor kFloat8E4M3 \[64, 96\]"):
            quantizer.update_quantized(x, bad)


def test_usages_can_be_dropped_but_not_made() -> None:
    t = te.MXFP8Quantizer()(values(64, 96))
    t.update_usage(columnwise_usage=False)
    assert t.nbytes == 64 * (96 + 3)
    for usage in ({"columnwise_usage": True}, {"rowwise_usage": False}):
        with pytest.raises(ContractError, match=r"no (columnwise|rowwise) codes"):
            t.update_usage(**usage)
    x = values(8, 96).requires_grad_()
    y = torch.ops.mxfp8.linear_train(x, t)
    with pytest.raises(ContractError, match=r"no columnwise codes; expected columnwise=True"):
        y.sum().backward()
    with pytest.raises(RecipeError, match=r"asked for e4m3, floor"):
        torch.ops.mxfp8.linear_train(x, t, None, "E4M3", "floor")


def test_views_keep_blocks_whole() -> None:
    x = values(4, 16, 96)
    t = te.MXFP8Quantizer()(x)
    assert torch.equal(t.view(64, 96).dequantize(), t.dequantize().view(64, 96))
    assert torch.equal(t.view(-1, 96).columnwise_scales, t.columnwise_scales)
    with pytest.raises(ShapeError, match=r"a view \[64, 3, 32\] of \[4, 16, 96\]; expected the same last size"):
        t.view(64, 3, 32)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, x: t.add_(1),
        lambda t, x: t.mul_(x),
        lambda t, x: t.copy_(x * 2),
        lambda t, x: t.data.copy_(x * 3),
        lambda t, x: torch.add(x, x, out=t),
        lambda t, x: torch._foreach_mul_([t, t.clone()], 0.5),
        lambda t, x: t.__setitem__(slice(0, 2), 7.0),
    ],
)
def test_an_op_that_writes_quantizes_the_result(change: Any) -> None:
    x = values(64, 96)
    t, plain = te.MXFP8Quantizer()(x), te.MXFP8Quantizer()(x).dequantize()
    change(t, x), change(plain, x)
    wanted = te.MXFP8Quantizer()(plain)
    for mine, theirs in zip(t.state_dict().values(), wanted.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "change", [lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.resize_(32, 128), lambda t: t.transpose_(0, 1)]
)
def test_an_op_that_changes_the_shape_in_place_is_refused(change: Any) -> None:
    t = te.MXFP8Quantizer()(values(64, 64))
    with pytest.raises(ShapeError, match="in place; expected the same shape"):
        change(t)


def test_data_takes_values_of_the_shape_and_dtypes_that_it_can_hold() -> None:
    t, x = te.MXFP8Quantizer()(values(64, 96)), values(64, 96, seed=5)
    t.data = x
    assert torch.equal(t.rowwise_elements, te.MXFP8Quantizer()(x).rowwise_elements)
    for bad in (x.T, x.double()):
        with pytest.raises(ShapeError, match=r"MXFP8Tensor.data: .* expected float32, float16, bfloat16 \[64, 96\]"):
            t.data = bad


@pytest.mark.parametrize(
    "copied", [lambda t: t.to(torch.bfloat16), lambda t: t.half(), lambda t: t.to("cpu", copy=True)]
)
def test_copies_have_codes_of_their_own(copied: Any) -> None:
    t = te.MXFP8Quantizer()(values(64, 96))
    before = t.dequantize()
    copied(t).zero_()
    assert torch.equal(t.dequantize(), before)
    t.t().zero_()  # a transpose has the same
    assert not t.dequantize().any()


def test_inference_mode_reads_a_tensor_from_outside() -> None:
    t = te.MXFP8Quantizer()(values(64, 96))
    with torch.inference_mode():
        assert torch.equal(t.detach().clone().dequantize(), t.dequantize())
        assert "MXFP8Tensor(kFloat8E4M3" in repr(t)


def test_gradients_pass_through_quantize_and_dequantize() -> None:
    x = values(64, 96).requires_grad_()
    (te.MXFP8Quantizer()(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((64, 96), 3.0))


def test_codes_survive_safetensors(tmp_path: Path) -> None:
    t = te.MXFP8Quantizer()(values(40, 100))
    save_file(t.state_dict(), tmp_path / "codes.safetensors")
    again = te.MXFP8Quantizer().make_empty((40, 100))
    again.load_state_dict(load_file(tmp_path / "codes.safetensors"))
    assert torch.equal(again.dequantize(), t.dequantize())
    assert torch.equal(again.columnwise_elements, t.columnwise_elements)
    with pytest.raises(ShapeError, match=r"MXFP8Tensor: codes .* make a tensor of that shape"):
        te.MXFP8Quantizer().make_empty((40, 64)).load_state_dict(t.state_dict())
