"""torchao's MXTensors (read only): X._weight_qdata, X._weight_scale F8_E8M0, perhaps swizzled, as the metadata say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mxfp8_graph.packed.compressed_tensors import FORMATS, SCALE_DTYPES, Pair
from mxfp8_graph.packed.safetensors import Tensors
from mxfp8_ops import formats


def pairs(stored: Tensors, metadata: Mapping[str, str]) -> Iterator[Pair]:
    """Yields the tensors of each weight whose metadata describe an MXTensor in blocks of 32."""
    for elements, tensor in stored.items():
        if tensor.dtype not in FORMATS or not elements.endswith("_qdata"):
            continue
        # X._weight_qdata belongs to X.weight, the name under which the metadata describe it.
        module, _, rest = elements.removesuffix("_qdata").rpartition(".")
        name, scales = f"{module}.{rest[1:]}".lstrip("."), f"{elements.removesuffix('_qdata')}_scale"
        try:
            description = json.loads(metadata[name])
            data = description["_data"]
            kind, size, swizzled = description["_type"], data["block_size"], data["is_swizzled_scales"]
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
        is_mx = kind == "MXTensor" and size == formats.BLOCK_SIZE
        if is_mx and scales in stored and stored[scales].dtype in SCALE_DTYPES:
            yield Pair(name, elements, scales, swizzled=bool(swizzled))
