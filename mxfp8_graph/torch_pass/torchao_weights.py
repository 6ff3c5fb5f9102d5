"""Weights that torchao packed before export: MXTensor parameters, read as they are, never rounded again.

`quantize_(model, MXDynamicActivationMXWeightConfig(...))` makes every linear's weight a tensor subclass: elements
`qdata` float8 [N, K], and `scale` float8_e8m0fnu, either [N, K / 32] or swizzled, see `packing.unswizzled`. A program
exported from such a module keeps `linear` with that parameter.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from mxfp8_graph.packing import unswizzled
from mxfp8_graph.torch_pass.internals import to_numpy
from mxfp8_ops import formats
from mxfp8_ops.checks import scale_count

_FORMATS: Final = {getattr(torch, fmt.numpy_name): fmt.name for fmt in formats.ELEMENT_FORMATS.values()}


def is_mx(tensor: Any) -> bool:
    """Whether `tensor` is torchao's MXTensor."""
    # By name, so that torchao is not imported: most programs have none of its tensors.
    return any(c.__name__ == "MXTensor" and c.__module__.startswith("torchao.") for c in type(tensor).__mro__)


def element_format(tensor: Any) -> str:
    """Returns the element format of an MXTensor, "e4m3" or "e5m2"; torch's name of any other dtype."""
    return _FORMATS.get(tensor.elem_dtype, str(tensor.elem_dtype))


def obstacle(tensor: Any) -> str | None:
    """Returns the reason why the bytes of an MXTensor cannot be kept, or None."""
    if tensor.elem_dtype not in _FORMATS:
        return f"torchao packed this weight as {tensor.elem_dtype}; expected float8_e4m3fn or float8_e5m2"
    if tensor.block_size != formats.BLOCK_SIZE:
        return f"torchao packed this weight in blocks of {tensor.block_size}; expected {formats.BLOCK_SIZE}"
    if tensor.qdata.dim() != 2 or not tensor.qdata.is_contiguous():
        return "torchao packed this weight along another axis than the last; expected [N, K] in one piece"
    return None


def unpacked(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (elements uint8 [N, K], scales uint8 [N, K / 32]) of an MXTensor without an `obstacle`."""
    rows, columns = tensor.qdata.shape
    count = scale_count(columns)
    scales = tensor.scale.detach().contiguous().view(torch.uint8)
    # Swizzled scales are in the tiles that NVIDIA's matmuls read; our kernels read rows.
    if tensor.is_swizzled_scales:
        scales = torch.from_numpy(unswizzled(to_numpy(scales), rows, count))
    return tensor.qdata.detach().view(torch.uint8), scales.reshape(rows, count).contiguous()
