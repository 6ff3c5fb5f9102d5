"""What a session holds in memory: the packed weights, once, as they lie or in the layout of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from test_ort import model, node

from mxfp8_ops import contract

K = 4096
LAYERS = 8
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
session = ort.session(sys.argv[1], prepack=sys.argv[2])
session.run(None, {"x0": np.ones((4, 4096), np.float32)})
print(resident() - before)
"""


def packed_model() -> onnx.ModelProto:
    elements = np.random.default_rng(0).integers(0, 0x70, (K, K), np.uint8).view(ml_dtypes.float8_e4m3fn)
    weights, nodes = {}, []
    for i in range(LAYERS):
        weights |= {f"b{i}": elements, f"s{i}": np.full((K, K // 32), 110, np.uint8)}
        nodes.append(node("MXFP8WeightGemm", f"x{i} b{i} s{i}", f"x{i + 1}", activation_dtype=TensorProto.BFLOAT16))
    packed = model(nodes, {"x0": (contract.FLOAT, ["m", K])}, {f"x{LAYERS}": (contract.FLOAT, ["m", K])}, **weights)
    return onnx.load_from_string(packed)


@pytest.mark.parametrize(("external", "prepack"), [(False, "never"), (True, "never"), (True, "auto")])
def test_a_session_holds_the_packed_weights_once(tmp_path, external, prepack):
    path = tmp_path / "model.onnx"
    onnx.save(packed_model(), path, save_as_external_data=external, location="model.onnx.data")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), prepack],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    held = int(done.stdout) / PACKED_BYTES
    assert held <= MOST_BYTES_HELD, f"the session holds {held:.2f}x the packed weights"
