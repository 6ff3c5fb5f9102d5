"""One binary serves every supported ONNX Runtime: the library, in throw-away environments of several releases."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mxfp8_ops import contract, cpu, numpy_nodes

RELEASES = (
    "1.20.1",
    "1.21.1",
    "1.22.1",
    "1.23.2",
    "1.24.4",
    "1.25.1",
    "1.26.0",
    "1.27.0",
    "1.28.0",
    "1.29.0",
    "1.30.0",
    "1.31.1",
    "1.32.0",
)

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


def ours(op: str, inputs: list[str], outputs: list[str], **attributes) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=contract.DOMAIN, **attributes)


def small_model(weight: np.ndarray) -> onnx.ModelProto:
    """Quantize, dequantize to two dtypes, and multiply. Elements stay inside: older releases cannot hand out float8."""
    nodes = [
        ours("MXFP8Quantize", ["x"], ["elements", "scales"]),
        ours("MXFP8Dequantize", ["elements", "scales"], ["values"]),
        ours("MXFP8Dequantize", ["elements", "scales"], ["half"], output_dtype=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["narrow"], to=TensorProto.FLOAT),
        ours("MXFP8Quantize", ["weight"], ["w_elements", "w_scales"]),
        ours("MXFP8Gemm", ["elements", "scales", "w_elements", "w_scales"], ["y"]),
    ]
    outputs = {"scales": TensorProto.UINT8, "values": 1, "narrow": 1, "y": 1}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", None])],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
        [numpy_helper.from_array(weight, "weight")],
    )
    opsets = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_same_library_runs_in(release: str, tmp_path: Path):
    environment, model, data = tmp_path / "environment", tmp_path / "model.onnx", tmp_path / "data.npz"
    venv.create(environment, with_pip=True)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"onnxruntime=={release}", "numpy"], check=True)

    rng = np.random.default_rng(0)
    x, weight = (rng.standard_t(2, shape).astype(np.float32) for shape in ((5, 2050), (33, 2050)))
    x[3, 100] = np.inf
    onnx.save(small_model(weight), model)
    np.savez(data, x=x)
    subprocess.run([python, "-c", PROGRAM, cpu.library_path(), model, data], check=True)

    elements, scales = numpy_nodes.quantize(x)
    packed = numpy_nodes.quantize(weight)
    with np.load(data) as results:
        assert str(results["version"]) == release
        np.testing.assert_array_equal(results["scales"], scales)
        np.testing.assert_array_equal(results["values"], numpy_nodes.dequantize(elements, scales))
        np.testing.assert_array_equal(results["narrow"], numpy_nodes.dequantize(elements, scales, dtype="float16"))
        finite = [0, 1, 2, 4]
        error = np.abs(results["y"] - numpy_nodes.gemm(elements, scales, *packed))[finite]
        bound = numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(elements, scales), numpy_nodes.dequantize(*packed))[
            finite
        ]
        assert (error <= bound).all()
        assert np.isnan(results["y"][3]).all()
