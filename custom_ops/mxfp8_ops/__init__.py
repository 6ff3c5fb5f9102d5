"""The MXFP8 nodes: formats, reference numerics, kernels and their bindings.

Importing this package loads no native code, no ONNX, no ONNX Runtime and no torch; import the module you need:
`numpy_nodes` (the reference), `cpu` (native kernels), `ort` (ONNX Runtime), `onnx_functions` (portable bodies).

`is_mxfp8_native(device)` and `native_reason(device)` say whether a device multiplies MXFP8 itself (`cuda/hardware.py`);
`is_mxfp8_available(return_reason=False)` says it of GPU 0, as TransformerEngine's function of that name.
"""

from __future__ import annotations

import importlib
from typing import Any

_OF_HARDWARE = ("is_mxfp8_native", "native_reason", "is_mxfp8_available")


def __getattr__(name: str) -> Any:
    """Loads a function of `cuda.hardware` on first use, so that `import mxfp8_ops` stays light."""
    if name not in _OF_HARDWARE:
        raise AttributeError(f"module 'mxfp8_ops' has no attribute {name!r}; it has {', '.join(_OF_HARDWARE)}")
    return getattr(importlib.import_module("mxfp8_ops.cuda.hardware"), name)


def __dir__() -> list[str]:
    return [*globals(), *_OF_HARDWARE]
