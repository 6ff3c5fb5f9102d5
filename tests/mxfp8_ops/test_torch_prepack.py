"""torch keeps a constant weight from its second read on, until it changes or is freed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed

torch = pytest.importorskip("torch")

from mxfp8_ops import native, numpy_nodes, torch_ops  # noqa: E402
from mxfp8_ops.errors import BackendError  # noqa: E402
from mxfp8_ops.torch_ops import constant_weights  # noqa: E402


def weight_of(seed: int = 2) -> list[torch.Tensor]:
    codes = numpy_nodes.quantize(heavy_tailed((40, 96), seed), element_format="int8")
    return [torch.from_numpy(each) for each in codes]


@pytest.fixture(params=native.PREPACK)
def torch_prepack(request: pytest.FixtureRequest):
    torch_ops.set_prepack(request.param)
    yield request.param
    torch_ops.set_prepack("auto")


def test_torch_products_follow_changes_of_a_weight(torch_prepack):
    """A change in place, other scales, a view and a new tensor: each product reads what is there."""
    b = weight_of()
    x = torch.from_numpy(heavy_tailed((20, 96), 1))

    def products_are_right() -> None:
        for part in (b, [t[8:24] for t in b]):
            for _ in range(3):
                y = torch.ops.mxfp8.weight_gemm(x, *part, None, "int8", None, torch.bfloat16)
                codes = [t.numpy() for t in part]
                expected = numpy_nodes.weight_gemm(x.numpy(), *codes, b_format="int8", activation_dtype="bfloat16")
                wide = numpy_nodes.dequantize(*codes, element_format="int8")
                assert_within(y.numpy(), expected, numpy_nodes.gemm_error_bound(x.numpy(), wide), "the product")

    products_are_right()
    b[0][3] = 0
    products_are_right()
    b[1].add_(1)
    products_are_right()
    b[1] = b[1] - 1
    products_are_right()
    b[0] = weight_of(5)[0]
    products_are_right()


def test_torch_keeps_a_weight_that_is_read_twice_until_it_is_freed():
    kept = constant_weights._known
    kept.clear()
    b = weight_of()
    few, many = torch.ones(2, 96), torch.ones(3, 96)
    for x, weights in ((few, []), (many, [None]), (few, [None]), (many, [native.ConstantWeight])):
        torch.ops.mxfp8.weight_gemm(x, *b, None, "int8", None, torch.bfloat16)
        copies = [each for of_b in kept.values() for of_scales in of_b.values() for _, each in of_scales.values()]
        assert [each and type(each) for each in copies] == weights
    del copies
    [of_b] = kept.values()
    b[1] = b[1].clone()  # the scales are freed first
    assert not of_b
    del b, of_b
    assert not kept


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_torch_reads_scales_that_are_new_at_each_call(fmt):
    """They get the memory of the last call's scales, with the same version."""
    x, (b, scales) = torch.from_numpy(heavy_tailed((5, 64), 1)), torch.ops.mxfp8.quantize(torch.randn(96, 64), -1, fmt)
    expected = torch.ops.mxfp8.weight_gemm(x, b, scales, None, fmt)
    for power in range(8):
        y = torch.ops.mxfp8.weight_gemm(x, b, scales + power, None, fmt)
        assert_same(y.numpy(), (expected * 2**power).numpy(), f"the product with scales times 2^{power}")


def product(b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.ops.mxfp8.weight_gemm(torch.ones(4, 96), b, scales, None, "int8", None, torch.bfloat16)


def convolution(b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the convolution with a weight [40, 1, 96] in two groups."""
    return torch.ops.mxfp8.conv(torch.ones(1, 192, 4), b[:, None], scales[:, None], b_format="int8", group=2)


@pytest.mark.parametrize("multiply", [product, convolution])
def test_torch_modules_that_threads_make_and_free_multiply_with_their_own_weights(multiply):
    """The memory of a freed weight is used again at once, also while other threads multiply."""
    weights = [weight_of(seed) for seed in range(6)]

    def run(index: int) -> torch.Tensor:
        b, scales = (t.clone() for t in weights[index])
        return [multiply(b, scales) for _ in range(3)][-1]

    expected = [run(index) for index in range(len(weights))]
    order = np.random.default_rng(0).integers(0, len(weights), 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        wrong = [i for i, y in zip(order, pool.map(run, order), strict=True) if not torch.equal(y, expected[i])]
    assert not wrong
    assert not constant_weights._known


def test_torch_prepack_is_one_of_two():
    with pytest.raises(BackendError, match="prepack 'always'; expected one of auto, never; correct the name"):
        torch_ops.set_prepack("always")
