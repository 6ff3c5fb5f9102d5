"""Models of ops of ONNX Runtime's own domain, com.microsoft."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from models import IR_VERSION, steps, value
from onnx import helper, numpy_helper

F32 = np.float32


MICROSOFT = "com.microsoft"


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(F32)


def contrib_model(
    nodes: str | list[onnx.NodeProto], inputs: dict[str, Any], weights: dict[str, np.ndarray], *, opset: int = 21
) -> onnx.ModelProto:
    """Returns a model of y, of the rank of its first input; inputs map names to shapes, or to (dtype, shape)."""
    first = next(iter(inputs.values()))
    typed = {name: spec if isinstance(spec, tuple) else (F32, spec) for name, spec in inputs.items()}
    graph = helper.make_graph(
        steps(nodes) if isinstance(nodes, str) else nodes,
        "contrib",
        [value(name, *spec) for name, spec in typed.items()],
        [value("y", F32, None if first is None else [None] * len(first))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
