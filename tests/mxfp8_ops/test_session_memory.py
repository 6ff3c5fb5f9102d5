"""What a session holds in memory: the packed weights, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mxfp8_ops import contract

K = 4096
LAYERS = 18
PACKED_BYTES = LAYERS * K * K * 33 // 32
MOST_BYTES_HELD = 1.15

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from mxfp8_ops import ort
import onnxruntime

def resident():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

before = resident()
session = ort.session(sys.argv[1])
session.run(None, {"x": np.ones((4, 4096), np.float32)})
print(resident() - before)
"""


def packed_model() -> onnx.ModelProto:
    nodes, initializers, last = [], [], "x"
    elements = np.random.default_rng(0).integers(0, 0x70, (K, K), np.uint8)
    for i in range(LAYERS):
        weight = numpy_helper.from_array(elements, f"b{i}")
        weight.data_type = TensorProto.FLOAT8E4M3FN
        initializers += [weight, numpy_helper.from_array(np.full((K, K // 32), 110, np.uint8), f"s{i}")]
        nodes.append(helper.make_node("MXFP8WeightGemm", [last, f"b{i}", f"s{i}"], [f"y{i}"], domain=contract.DOMAIN))
        last = f"y{i}"
    value = helper.make_tensor_value_info
    float32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", [value("x", float32, ["m", K])], [value(last, float32, ["m", K])], initializers
    )
    opsets = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
def test_a_session_holds_the_packed_weights_once(tmp_path, external):
    path = tmp_path / "model.onnx"
    onnx.save(packed_model(), path, save_as_external_data=external, location="model.onnx.data")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    held = int(done.stdout) / PACKED_BYTES
    assert held <= MOST_BYTES_HELD, f"the session holds {held:.2f}x the packed weights"
