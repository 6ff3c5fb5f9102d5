"""The MXFP8 nodes: formats, reference numerics, kernels and their bindings.

`import mxfp8_ops` is cheap: it loads no native code, ONNX, ONNX Runtime or torch. Import the module that you need:
`numpy_nodes` (the reference), `cpu` (native kernels), `ort` (ONNX Runtime), `onnx_functions` (portable bodies).

`is_mxfp8_native(device)` and `native_reason(device)` tell if a device multiplies MXFP8 itself (`cuda/hardware.py`).
`is_mxfp8_available(return_reason=False)` tells it of GPU 0, like TransformerEngine's function of the same name.
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
