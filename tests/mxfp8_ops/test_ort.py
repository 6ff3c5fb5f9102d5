"""The nodes inside ONNX Runtime: shapes, places, sessions, and errors. Their results are in test_bodies.py."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from compare import assert_same, heavy_tailed
from grids import looped
from node_examples import example, model_of
from one_node import from_ort, to_ort
from onnx import TensorProto, helper, numpy_helper
from releases import release

from mxfp8_ops import contract, native, numpy_nodes, ort
from mxfp8_ops.errors import BackendError, ContractError

FLOAT, UINT8, E4M3 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN


def node(op: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """A node of ours called after its first output; inputs and outputs are separated by spaces."""
    return helper.make_node(
        op,
        inputs.split(),
        outputs.split(),
        domain=contract.DOMAIN,
        name=f"the_{outputs.split(maxsplit=1)[0]}",
        **attributes,
    )


def cast(source: str, target: str, dtype: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], to=dtype)


def model(nodes, inputs, outputs, **initializers) -> bytes:
    """A model. Inputs and outputs map names to (dtype, shape); bfloat16 and float8 reach NumPy through Cast nodes."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    opsets = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def run(model_bytes: bytes, **feeds: np.ndarray) -> list[np.ndarray]:
    return ort.session(model_bytes).run(None, feeds)


# --- shapes ----------------------------------------------------------------------------------------------------------


def weight_only(x_shape, **initializers: np.ndarray) -> bytes:
    return model(
        [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y")],
        {"x": (FLOAT, x_shape)},
        {"y": (FLOAT, None)},
        **initializers,
    )


def test_one_session_serves_every_batch_size():
    session = ort.session(weight_only(["batch", 64], b=heavy_tailed((7, 64))))
    for rows in (1, 17, 0, 300):
        assert session.run(None, {"x": heavy_tailed((rows, 64))})[0].shape == (rows, 7)


def test_output_shapes_and_symbols_are_inferred():
    graph = model(
        [
            node("MXFP8Quantize", "x", "e s"),
            node("MXFP8Quantize", "b", "be bs"),
            node("MXFP8Gemm", "e s be bs", "y"),
        ],
        {"x": (FLOAT, ["batch", 10, 70])},
        {"s": (UINT8, None), "y": (FLOAT, None)},
        b=heavy_tailed((7, 70)),
    )
    session = ort.session(graph)
    assert {output.name: output.shape for output in session.get_outputs()} == {
        "s": ["batch", 10, 3],
        "y": ["batch", 10, 7],
    }


def test_an_unnamed_dimension_stays_unknown():
    """Read literally as -1, it would break this Reshape."""
    nodes = [
        node("MXFP8Quantize", "b", "be bs"),
        node("MXFP8WeightGemm", "x be bs", "y"),
        helper.make_node("Reshape", ["y", "flat"], ["z"]),
    ]
    graph = model(
        nodes, {"x": (FLOAT, [None, None, 64])}, {"z": (FLOAT, None)}, b=heavy_tailed((7, 64)), flat=np.int64([-1])
    )
    assert run(graph, x=heavy_tailed((2, 3, 64)))[0].shape == (42,)


# --- where nodes may stand, and how they run -------------------------------------------------------------------------


def test_subnormals_survive_a_session_that_flushes_them():
    x = np.full((3, 64), 3 * 2.0**-130, np.float32)
    graph = model([node("MXFP8Quantize", "x", "e s")], {"x": (FLOAT, [3, 64])}, {"e": (E4M3, None), "s": (UINT8, None)})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    elements, _ = ort.session(graph, session_options=options).run(None, {"x": x})
    assert_same(elements.view(np.uint8), numpy_nodes.quantize(x)[0])


@looped("dtype", [FLOAT, TensorProto.FLOAT16])
def test_a_wrongly_declared_rank_is_not_believed(dtype):
    """ONNX Runtime runs such a model where the nodes are function bodies."""
    nodes = [
        helper.make_node("Reshape", ["typed", "shape"], ["r"]),  # of any rank, by inference
        node("MXFP8Quantize", "r", "e s", axis=1),
        node("MXFP8Dequantize", "e s", "y", axis=1),
    ]
    graph = onnx.load_from_string(
        model([cast("x", "typed", dtype), *nodes], {"x": (FLOAT, [192]), "shape": (7, ["rank"])}, {"y": (FLOAT, None)})
    )
    graph.graph.value_info.append(helper.make_tensor_value_info("r", dtype, [192]))
    x = heavy_tailed((192,)).astype(np.float16 if dtype != FLOAT else np.float32)
    expected = numpy_nodes.dequantize(*numpy_nodes.quantize(x.reshape(3, 64)))
    got = run(graph.SerializeToString(), x=x.astype(np.float32), shape=np.array([3, 64]))[0]
    assert_same(got, expected)


def test_a_wrongly_declared_rank_in_a_scan_body_is_not_believed():
    body = helper.make_graph(
        [node("MXFP8Quantize", "row", "e s", axis=1), node("MXFP8Dequantize", "e s", "back", axis=1)],
        "body",
        [helper.make_tensor_value_info("row", FLOAT, [64])],
        [helper.make_tensor_value_info("back", FLOAT, ["a", "b"])],
    )
    scan = helper.make_node("Scan", ["r"], ["y"], body=body, num_scan_inputs=1)
    reshape = helper.make_node("Reshape", ["x", "shape"], ["r"])
    graph = model([reshape, scan], {"x": (FLOAT, [384]), "shape": (7, ["rank"])}, {"y": (FLOAT, None)})
    x = heavy_tailed((384,))
    got = run(graph, x=x, shape=np.array([2, 3, 64]))[0]
    assert_same(got, numpy_nodes.dequantize(*numpy_nodes.quantize(x.reshape(2, 3, 64))))


# --- messages --------------------------------------------------------------------------------------------------------


X = np.ones((3, 64), np.float32)
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], str]] = {
    # the op, its attributes, its operands, the error
    "block_size": ("Quantize", {"block_size": 16}, {"x": X}, "block_size 16; expected 32; "),
    "scale_rounding": ("Quantize", {"scale_rounding": "up"}, {"x": X},
                       "scale_rounding 'up'; expected ceil, floor or even; "),
    "dtype of elements": ("Quantize", {"output_dtype": 1}, {"x": X}, "output_dtype 1; expected 17 .*, 19 .* or 3"),
    "dtype of values": ("Dequantize", {"output_dtype": 11}, {"e": X, "s": X[:, :2]},
                        "output_dtype 11; expected 1 .*, 10 .* or 16"),
    "dtype of activations": ("WeightGemm", {"activation_dtype": 10}, {"x": X, "be": X, "bs": X[:, :2]},
                             r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"),
    "epilogue": ("FusedWeightGemm", {"epilogue": "swish"}, {"x": X, "be": X, "bs": X[:, :2]},
                 "epilogue 'swish'; expected none, relu, gelu, gelu_tanh or silu;"),
    "axis": ("Quantize", {"axis": 1}, {"x": X[0]}, "axis 1 of a 1-D tensor; expected -1 <= axis < 1"),
    "scales": ("Dequantize", {}, {"e": X, "s": X[:, :1]}, r"scales has shape \(3, 1\); expected \(3, 2\)"),
    "K": ("WeightGemm", {}, {"x": X[:, :32], "be": X, "bs": X[:, :2]},
          r"operands \(3, 32\) and \(3, 64\); expected \[..., M, K\] and \[..., N, K\] with the same K"),
    "scales of B": ("WeightGemm", {}, {"x": X, "be": X, "bs": X[:, :1]}, r"B_scales has shape \(3, 1\)"),
    "leading dimensions": ("WeightGemm", {}, {"x": np.ones((2, 3, 64), np.float32),
                                              "be": np.ones((5, 7, 64), np.float32),
                                              "bs": np.ones((5, 7, 2), np.float32)},
                           r"operands \(2, 3, 64\) and \(5, 7, 64\); expected leading dimensions that broadcast"),
    "bias": ("WeightGemm", {}, {"x": X, "be": X, "bs": X[:, :2], "bias": X[0, :6]},
             r"bias has shape \(6,\); expected \(3,\), one value per output column"),
    "factor": ("GatedWeightGemm", {}, {"x": X, "be": X, "bs": X[:, :2], "factor": X[0, :7]},
               r"factor has shape \(7,\); expected \(3, 3\), .* of the result; broadcast it first"),
    "index above": ("Embedding", {}, {"ids": np.array([[0], [3]]), "be": X, "bs": X[:, :2]},
                    r"index 3 at \(1, 0\); expected -3 to 2, for a table of 3 rows; pass ids"),
    "index below": ("Embedding", {}, {"ids": np.array([0, -4]), "be": X, "bs": X[:, :2]}, r"index -4 at \(1,\)"),
    "index beyond int32": ("Embedding", {}, {"ids": np.array([2**40]), "be": X, "bs": X[:, :2]}, "index 1099511627776"),
    "expert": ("GroupedWeightGemm", {}, {"x": X[:, None], "be": X[None], "bs": X[None, :, :2],
                                         "experts": np.array([0, 1, 2])},
               "expert 2 of 1; expected -1 to 0, or 1 for none; "),
    "rows of experts": ("GroupedWeightGemm", {}, {"x": X[:, None], "be": X[None], "bs": X[None, :, :2],
                                                  "experts": np.array([0, 0])},
                        r"operands .*; expected leading dimensions that broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_names_what_does_not_fit(fault: str) -> None:
    """The model has no shapes, so that only the kernel sees them. Elements and scales are cast from float32."""
    op, attributes, operands, message = FAULTS[fault]
    nodes, inputs, feeds = [], {}, {}
    for name, value in operands.items():
        dtype = {"e": E4M3, "be": E4M3, "s": UINT8, "bs": UINT8}.get(name)
        fed = f"{name}_in" if dtype else name
        nodes += [cast(fed, name, dtype)] if dtype else []
        feeds[fed] = value
        inputs[fed] = (FLOAT if value.dtype == np.float32 else TensorProto.INT64, [None] * value.ndim)
    y = "y s" if op == "Quantize" else "y"
    nodes.append(node(f"MXFP8{op}", " ".join(operands), y, **attributes))
    graph = model(nodes, inputs, {"s": (UINT8, None)} if op == "Quantize" else {"y": (FLOAT, None)})
    with pytest.raises(Exception, match=f"MXFP8{op} 'the_y': {message}"):
        run(graph, **feeds)


def test_a_narrow_output_of_an_input_without_rank_is_refused():
    nodes = [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y", output_dtype=10)]
    graph = model([*nodes, cast("y", "z", 1)], {"x": (FLOAT, None)}, {"z": (FLOAT, None)}, b=heavy_tailed((7, 64)))
    with pytest.raises(Exception, match="'the_y': output_dtype 10 on an input of unknown rank; expected"):
        ort.session(graph)


@looped("op, device", itertools.product(("MXFP8Attention", "MXFP8FusedGemm"), (None, "cuda", "cuda-copies")))
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


# --- sessions --------------------------------------------------------------------------------------------------------


def test_session_names_a_missing_file(tmp_path):
    with pytest.raises(ContractError, match=r"model.onnx: no such file; expected an ONNX model; correct the path"):
        ort.session(tmp_path / "model.onnx")


def test_session_opens_a_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(weight_only(["m", 64], b=heavy_tailed((7, 64))))
    assert ort.session(tmp_path / "model.onnx").get_providers() == ["CPUExecutionProvider"]


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
