"""torch keeps a constant weight from its second read on, until it changes or is freed."""

from __future__ import annotations

import pytest
from compare import assert_within, heavy_tailed

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
        entries = [each for of_storage in kept.values() for _, each in of_storage.values()]
        assert [each and type(each) for each in entries] == weights
    del b, entries
    assert not kept


def test_torch_prepack_is_one_of_three():
    with pytest.raises(BackendError, match="prepack 'always'; expected one of auto, never, decoded; correct the name"):
        torch_ops.set_prepack("always")
