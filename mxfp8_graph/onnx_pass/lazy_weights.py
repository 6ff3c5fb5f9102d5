"""Weights that are packed when they are read: `save` writes them one by one, so only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.views import Static, apply, cast_to, in_stored_order
from mxfp8_graph.packing import QuantizedWeight, Rows, checked_codes, pack, packed_bytes
from mxfp8_graph.policy.checkpoint_weights import StoredWeight
from mxfp8_ops import contract, formats
from mxfp8_ops.checks import scale_count
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """How a static operand is packed; see `packing.pack`."""

    transposed: bool
    factor: float | Array
    """A number, or one for each row of a matrix."""
    element_format: str
    scale_rounding: str
    allow_nonfinite: bool


class LazyWeight:
    """A static operand as elements and scales, two tensors of onnx_ir. A read of either packs the weight."""

    def __init__(
        self,
        static: Static,
        shape: Sequence[int],
        settings: PackSettings,
        stored: StoredWeight | None,
        done: Callable[[], None],
    ) -> None:
        """Makes the tensors; nothing is packed yet.

        Args:
            static: the weight [..., N, K], or [..., K, N].
            shape: of the elements; its last size is K.
            settings: how the weight is packed.
            stored: a weight of a checkpoint, whose bytes are taken instead.
            done: called after each packing.
        """
        self._static, self._settings, self._stored, self._done = static, settings, stored, done
        self.byte_size: Final = packed_bytes(static.shape, transposed=settings.transposed)
        self._relative_l2: float | None = None
        self._scales: Array | None = None
        """Scales from the last read of the elements. `save` writes them next, so the weight is packed once."""
        dtype = ir.DataType(formats.element_format(settings.element_format).onnx_dtype)
        self._shape = tuple(shape)
        self._scales_shape = (*shape[:-1], scale_count(shape[-1]))
        self.elements: Final = ir.LazyTensor(self._read_elements, dtype, ir.Shape(self._shape))
        self.scales: Final = ir.LazyTensor(self._read_scales, ir.DataType(contract.UINT8), ir.Shape(self._scales_shape))

    @property
    def relative_l2(self) -> float | None:
        """Rounding error of the weight; None for a weight of a checkpoint. Packs the weight, unless a read has."""
        if self._relative_l2 is None and self._stored is None:
            self._packed()
        return self._relative_l2

    def _read_elements(self) -> ir.TensorProtocol:
        packed = self._packed()
        self._scales = packed.scales.reshape(self._scales_shape)
        elements = packed.elements.reshape(self._shape)
        return ir.Tensor(elements.view(self.elements.dtype.numpy()), dtype=self.elements.dtype)

    def _read_scales(self) -> ir.TensorProtocol:
        scales, self._scales = self._scales, None
        return ir.Tensor(self._packed().scales.reshape(self._scales_shape) if scales is None else scales)

    def _packed(self) -> QuantizedWeight:
        settings = self._settings
        if self._stored is not None:
            packed = checked_codes(self._stored, allow_nonfinite=settings.allow_nonfinite)
        else:
            rows, flipped = rows_of(self._static)
            # Rows that are columns of the weight, and a weight that is packed transposed, cancel.
            packed = pack(rows, **vars(replace(settings, transposed=settings.transposed != flipped)))
            self._relative_l2 = packed.relative_l2
        self._done()
        return packed


def rows_of(static: Static) -> tuple[Rows, bool]:
    """Returns (the values of a static operand as rows, whether these rows are the columns of the operand).

    Where the views leave the values in their stored order, rows are read from the file; otherwise all of it is read.
    """
    tensor, dims = static.tensor, tuple(static.tensor.shape.numpy())
    straight = in_stored_order(dims, static.steps)
    if straight is None:
        data = np.ascontiguousarray(apply(static.steps, tensor.numpy()))
        read_all = lambda at, start, stop: np.asarray(data[at][start:stop])  # noqa: E731
        return Rows(shape=data.shape, name=static.name, read=read_all), False
    shape, flipped, casts = straight
    height, width = shape[-2:]
    fetch = _reader(tensor)

    def index(at: tuple[int, ...]) -> list[int]:
        return [int(i) for i in np.unravel_index(np.ravel_multi_index(at, shape), dims)]

    def read(at: tuple[int, ...], start: int, stop: int) -> Array:
        matrix = int(np.ravel_multi_index(at, shape[:-2])) if at else 0
        values = fetch((matrix * height + start) * width, (stop - start) * width)
        return cast_to(values, casts).reshape(stop - start, width)

    return Rows(shape=shape, name=static.name, read=read, index=index), flipped


def _reader(tensor: ir.TensorProtocol) -> Callable[[int, int], Array]:
    """Returns a function (first, count) -> that many values of a tensor, from the first on.

    External data is read and not mapped: the pages of a mapped file would count as memory of the process.
    """
    # Values below 8 bits share bytes, so they have no place of their own in the file.
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        values = tensor.numpy().reshape(-1)
        return lambda first, count: values[first : first + count]
    dtype, path = tensor.dtype.numpy(), Path(tensor.path)

    def fetch(first: int, count: int) -> Array:
        size = count * dtype.itemsize
        content = np.fromfile(path, np.uint8, size, offset=(tensor.offset or 0) + first * dtype.itemsize)
        if content.size < size:
            what = f"became shorter while tensor {tensor.name!r} was read"
            raise ContractError(path, what, expected="the whole file", advice="rewrite the model again")
        return content.view(dtype)

    return fetch
