"""The matrix products that a gemm with leading dimensions is made of, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor

from mxfp8_ops.torch_ops.operands import Pair

Product = tuple[int, int, int, int, int, int]
"""M, then the addresses of a, its scales, b, its scales, y."""


def products(y: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Iterable[Product]:
    """Returns M and the addresses of each matrix product in `y` [..., N]; all tensors are contiguous.

    An empty `y` has no products, for any number of leading indices.
    """
    if not (values := y.numel()):
        return ()
    if b.dim() == 2:
        m = values // b.shape[0]
        return ((m, a.data_ptr(), a_scales.data_ptr(), b.data_ptr(), b_scales.data_ptr(), y.data_ptr()),)
    return _batched(y, (a, a_scales), (b, b_scales))


def _batched(y: Tensor, a: Pair, b: Pair) -> Iterator[Product]:
    # Addresses instead of views: a view of each matrix would be a call into torch.
    vector = a[0].dim() == 1
    leading = tuple(y.shape[: -1 if vector else -2])
    operands = [t[None] if vector else t for t in a] + list(b)
    m = operands[0].shape[-2]
    operands = [t.expand(*leading, *t.shape[-2:]) for t in operands]
    layout = [(t.data_ptr(), [s * t.element_size() for s in t.stride()[: len(leading)]]) for t in (*operands, y)]
    for index in itertools.product(*map(range, leading)):
        x, x_scales, w, w_scales, out = (data + sum(map(int.__mul__, index, strides)) for data, strides in layout)
        yield m, x, x_scales, w, w_scales, out
