"""One binary serves every supported ONNX Runtime: the library, in throw-away environments of several releases."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from compare import assert_same, assert_within
from onnx import TensorProto
from ort_models import FLOAT, UINT8, cast, model, node

from mxfp8_ops import cpu, numpy_nodes

# fmt: off
RELEASES = [
    "1.20.1", "1.21.1", "1.22.1", "1.23.2", "1.24.4", "1.25.1", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.30.0",
    "1.31.1", "1.32.0",
]
# fmt: on

# Runs in the other environment, with nothing of ours but the library.
PROGRAM = """
import sys
import numpy, onnxruntime
library, model, data = sys.argv[1:]
x = numpy.load(data)["x"]
names = ["scales", "values", "narrow", "y"]

def run(device):
    options = onnxruntime.SessionOptions()
    if device:
        options.add_session_config_entry("mxfp8.device", device)
    options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(names, {"x": x})

results = run(None)
for a, b in zip(results, run("cuda")):  # also registers kernels for a provider that is not there
    numpy.testing.assert_array_equal(a, b)
try:
    run("cuda-copies")
    raise SystemExit("nodes ran on a GPU without a driver")
except Exception as error:
    assert "the CUDA driver is not open" in str(error), error
numpy.savez(data, x=x, version=onnxruntime.__version__, **dict(zip(names, results)))
"""


def small_model(weight: np.ndarray) -> bytes:
    """Quantize, dequantize to two dtypes, and multiply. Elements stay inside: older releases cannot hand out float8."""
    nodes = [
        node("MXFP8Quantize", "x", "elements scales"),
        node("MXFP8Dequantize", "elements scales", "values"),
        node("MXFP8Dequantize", "elements scales", "half", output_dtype=TensorProto.FLOAT16),
        cast("half", "narrow", FLOAT),
        node("MXFP8Quantize", "weight", "w_elements w_scales"),
        node("MXFP8Gemm", "elements scales w_elements w_scales", "y"),
    ]
    outputs = {"scales": (UINT8, None), **dict.fromkeys(("values", "narrow", "y"), (FLOAT, None))}
    return model(nodes, {"x": (FLOAT, ["m", None])}, outputs, weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_one_library_runs_in_every_release(release: str, tmp_path: Path):
    environment, path, data = tmp_path / "environment", tmp_path / "model.onnx", tmp_path / "data.npz"
    venv.create(environment, with_pip=True)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"onnxruntime=={release}", "numpy"], check=True)

    rng = np.random.default_rng(0)
    x, weight = (rng.standard_t(2, shape).astype(np.float32) for shape in ((5, 2050), (33, 2050)))
    x[3, 100] = np.inf
    path.write_bytes(small_model(weight))
    np.savez(data, x=x)
    subprocess.run([python, "-c", PROGRAM, cpu.library_path(), path, data], check=True)

    a, b = numpy_nodes.quantize(x), numpy_nodes.quantize(weight)
    values = numpy_nodes.dequantize(*a)
    with np.load(data) as results:
        assert str(results["version"]) == release
        assert_same(results["scales"], a[1])
        assert_same(results["values"], values)
        assert_same(results["narrow"], numpy_nodes.dequantize(*a, dtype="float16").astype(np.float32))
        bound = numpy_nodes.gemm_error_bound(values, numpy_nodes.dequantize(*b))
        assert_within(results["y"], numpy_nodes.gemm(*a, *b), bound)
