"""Sessions with the library: files, options, what ONNX Runtime optimizes, nodes without a kernel for a GPU, memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from compare import heavy_tailed
from grids import looped
from node_examples import example, model_of
from one_node import from_ort, to_ort
from onnx import TensorProto, helper
from ort_models import FLOAT, model, node, weight_only
from releases import release

from mxfp8_ops import contract, native, ort
from mxfp8_ops.errors import BackendError, ContractError


def test_a_session_names_a_missing_file(tmp_path):
    with pytest.raises(ContractError, match=r"model.onnx: no such file; expected an ONNX model; correct the path"):
        ort.session(tmp_path / "model.onnx")


def test_a_session_opens_a_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(weight_only(["m", 64], b=heavy_tailed((7, 64))))
    assert ort.session(tmp_path / "model.onnx").get_providers() == ["CPUExecutionProvider"]


def test_an_argument_that_onnxruntime_would_ignore_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'options'"):
        ort.session(weight_only(["m", 64], b=heavy_tailed((7, 64))), options=onnxruntime.SessionOptions())


def test_registering_twice_says_what_to_do():
    options = onnxruntime.SessionOptions()
    ort.register(options)
    with pytest.raises(BackendError, match=r"registered with them already; .* make one SessionOptions per session"):
        ort.register(options)


def test_an_onnxruntime_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    with pytest.raises(BackendError, match=r"onnxruntime 1\.19\.2: too old; expected 1\.20 or later"):
        ort.register(onnxruntime.SessionOptions())


SINCE = ort.FASTER_WITHOUT["SkipLayerNormFusion"]
UNFUSED, FUSED = {"Add": 1, "LayerNormalization": 1}, {"SkipLayerNormalization": 1}


@pytest.mark.parametrize(
    ("version", "entry", "arguments", "ops"),
    [
        pytest.param(None, None, {}, UNFUSED, id="a release in which the fusion is slower", marks=pytest.mark.skipif(
            release("onnxruntime") < SINCE, reason=f"the fusion is slower since {SINCE}")),
        pytest.param("1.29.0", None, {}, FUSED, id="a release in which it is faster"),
        pytest.param(None, "", {}, FUSED, id="an entry of the user"),
        pytest.param(None, None, {"disabled_optimizers": ["GeluFusion"]}, FUSED, id="an argument of ONNX Runtime"),
    ],
)  # fmt: skip
def test_a_session_leaves_out_a_fusion_that_is_slower_unless_the_user_decides(
    version, entry, arguments, ops, *, tmp_path, monkeypatch
):
    nodes = [
        helper.make_node("Add", ["x", "skip"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["y"], axis=-1),
    ]
    shape, ones = (FLOAT, [2, 4, 64]), np.ones(64, np.float32)
    proto = model(nodes, {"x": shape, "skip": shape}, {"y": shape}, scale=ones, bias=ones)
    if version is not None:
        monkeypatch.setattr(onnxruntime, "__version__", version)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    if entry is not None:
        options.add_session_config_entry(ort.DISABLE, entry)
    ort.session(proto, session_options=options, **arguments)
    assert Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node) == ops


# --- devices ---------------------------------------------------------------------------------------------------------


BODIES_ON_A_GPU = ("MXFP8Attention", "MXFP8FusedGemm", "MXFP8Conv")


@looped("op, device", itertools.product(BODIES_ON_A_GPU, (None, "cuda", "cuda-copies")))
def test_the_nodes_without_a_kernel_for_a_gpu_are_their_bodies_there(op, device):
    """ONNX Runtime then takes the body apart, whose ops the CUDA provider has."""
    one = example(op)
    proto, fed = model_of([one])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if device is not None:
        options.add_session_config_entry("mxfp8.device", device)
    options.register_custom_ops_library(str(native.library_path()))

    def session() -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    if op == "MXFP8Attention":  # a fused node's body has gemms, which need a GPU on device "cuda-copies"
        names = [output.name for output in proto.graph.output]
        values = session().run_with_ort_values(
            names, {port.name: to_ort(*fed[port.name]) for port in session().get_inputs()}
        )
        one.check([from_ort(value, dtype) for value, dtype in zip(values, one.outputs.values(), strict=True)])
    del proto.functions[:]
    if device is None:
        session()
    else:
        with pytest.raises(Exception, match=rf"{op}\(-?1\) is not a registered function/op"):
            session()


# --- memory ----------------------------------------------------------------------------------------------------------

K = 4096
LAYERS = 8
PACKED_BYTES = LAYERS * K * K * 33 // 32
MOST_BYTES_HELD = 1.15

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
    proto = model(nodes, {"x0": (contract.FLOAT, ["m", K])}, {f"x{LAYERS}": (contract.FLOAT, ["m", K])}, **weights)
    return onnx.load_from_string(proto)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
@pytest.mark.parametrize(("external", "prepack"), [(False, "never"), (True, "auto")])
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
