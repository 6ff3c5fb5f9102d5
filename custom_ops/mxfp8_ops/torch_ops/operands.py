"""Shared by the torch ops: the row that registers an op, the checks of operands, the codes of dtypes in the library.

The checks work on symbolic shapes, so torch.export and torch.compile see the same rules and messages as an eager call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mxfp8_ops import checks, formats, native
from mxfp8_ops.checks import dtype_name
from mxfp8_ops.errors import ShapeError

Pair = tuple[Tensor, Tensor]
"""Elements and scales, both uint8."""


class Op(NamedTuple):
    """One op of namespace `mxfp8`.

    An op that is made of others needs a schema and one kernel for "CompositeExplicitAutograd": torch gets its fake
    results from this kernel on fake tensors.
    """

    schema: str
    """In the syntax of torch. The kernels have its defaults: torch leaves out arguments that equal them."""
    kernels: Mapping[str, Callable[..., Any]]
    """By dispatch key. The kernel for "Autograd" takes the keys of the call first. An op that has a kernel for "CPU"
    and is not made of others has a kernel for "CUDA" in cuda.py, by the same name."""
    fake: Callable[..., Any] | None = None
    """Returns empty results for operands without data."""
    vmap: Callable[..., Any] | None = None
    """The rule of torch.vmap; None for a loop, of which torch warns."""

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self.schema.partition("(")[0]


class _Codes(dict[str, int]):
    """Codes by name."""

    def __init__(self, codes: Mapping[str, int], refuse: Callable[[str], Any]) -> None:
        super().__init__(codes)
        self._refuse = refuse

    def __missing__(self, name: str) -> int:
        # `refuse` raises an error that lists the choices; a hit costs no call, and most lookups are hits.
        self._refuse(name)
        raise KeyError(name)


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the native library; its calls with a number of threads run on the threads of torch from now on.

    Raises:
        BackendError: it is missing or cannot be loaded.
    """
    # torch's own threads wait busily for work and would block the threads of the library: native.use_openmp.
    native.use_openmp(on=True)
    return native.load()


DTYPE_CODES: Final = {getattr(torch, row.numpy_name): row.onnx_dtype for row in formats.VALUE_DTYPES.values()}
"""Code of each value dtype in the native library."""

FORMAT_CODES: Final = _Codes(
    {name: row.onnx_dtype for name, row in formats.ELEMENT_FORMATS.items()}, formats.element_format
)
"""Code of each element format; ContractError for an unknown one."""

ROUNDING_CODES: Final = _Codes(
    {name: code for code, name in enumerate(formats.SCALE_ROUNDINGS)},
    lambda name: formats.scale_increment(formats.E4M3, name),
)
"""Code of each rounding of scales; ContractError for an unknown one."""


with torch._C._DisableTorchDispatch():  # real tensors, also if this is imported under a FakeTensorMode
    EMPTY: Final = {dtype: torch.empty(0, dtype=dtype, device="cpu").new_empty for dtype in (torch.uint8, *DTYPE_CODES)}
"""Makes a CPU tensor of a dtype: EMPTY[dtype](*sizes), in half the time of torch.empty."""


def check_dtype(where: str, dtype: torch.dtype) -> None:
    """Raises ShapeError unless `dtype` is float32, float16 or bfloat16."""
    if dtype not in DTYPE_CODES:
        checks.check_value_dtype(where, dtype)


def check_codes(where: str, elements: Tensor, scales: Tensor, axis: int) -> None:
    """Raises ShapeError unless both are uint8 and `scales` has one code per block of `elements` along `axis`."""
    # Not float8, which torch has: `module.to(dtype)` converts float8 buffers, and leaves uint8 alone.
    if elements.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ShapeError(
            where,
            f"elements have dtype {dtype_name(elements.dtype)} and scales {dtype_name(scales.dtype)}",
            expected="uint8 codes",
            advice="pass .view(torch.uint8)",
        )
    checks.check_scales(where, tuple(elements.shape), tuple(scales.shape), axis)


def check_devices(where: str, *tensors: Tensor | None) -> None:
    """Raises ShapeError unless all tensors are on one device. CPU kernels need not ask: they get CPU tensors only."""
    devices = [tensor.device for tensor in tensors if tensor is not None]
    if devices.count(devices[0]) < len(devices):
        names = ", ".join(sorted({*map(str, devices)}))
        raise ShapeError(where, f"tensors on {names}", expected="one device", advice="move them with .to(device)")


def plain(itemsize: int, *tensors: Tensor) -> bool:
    """Returns True if all tensors are contiguous and their storages have all their values, of `itemsize` bytes each."""
    for t in tensors:
        if t.untyped_storage().nbytes() < (t.numel() + t.storage_offset()) * itemsize or not t.is_contiguous():
            return False
    return True


def readable(where: str, operands: str, *tensors: Tensor) -> list[Tensor]:
    """Returns the tensors, contiguous; `operands` are their names, for the error: "x b b_scales".

    Raises:
        ShapeError: a storage does not have all its tensor's values. Torch does not check this; if a resize made a
            storage smaller than its tensor, the rest of the memory may belong to other objects.
    """
    for name, tensor in zip(operands.split(), tensors, strict=True):
        check_memory(where, name, tensor)
    return [tensor.contiguous() for tensor in tensors]


def check_memory(where: str, name: str, tensor: Tensor) -> None:
    """Raises the errors of `readable`, for one tensor of any strides."""
    if tensor.numel() == 0 or plain(tensor.itemsize, tensor):
        return
    # The offset of the last value that the strides reach; torch's strides are never negative.
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed, has = (last + 1) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if has < needed:
        raise ShapeError(
            where,
            f"the storage of {name} has {has} bytes",
            expected=f"{needed} for shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            advice="give the storage its size back (resize_) before the call",
        )
