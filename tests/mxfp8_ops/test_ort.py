"""The nodes inside ONNX Runtime: every dtype the contract accepts, against `numpy_nodes`."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
from compare import assert_same, assert_within, heavy_tailed
from grids import looped, pairwise
from onnx import TensorProto, helper, numpy_helper

from mxfp8_ops import contract, formats, numerics, numpy_nodes, ort
from mxfp8_ops.errors import BackendError, ContractError

FORMAT_NAMES = {fmt.onnx_dtype: name for name, fmt in formats.ELEMENT_FORMATS.items()}
VALUES = contract.VALUES
FLOAT, UINT8, E4M3 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN
FLOAT8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


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


# --- each node, each dtype -------------------------------------------------------------------------------------------


def gemm_cases(formats):
    return pairwise(x_dtype=[*formats, *VALUES], b_format=formats, y_dtype=VALUES, with_bias=[False, True])


@looped("x_dtype, b_format, y_dtype, with_bias", gemm_cases(FLOAT8))
def test_gemms(x_dtype, b_format, y_dtype, with_bias):
    check_gemm(x_dtype, b_format, y_dtype, with_bias)


@looped("x_dtype, b_format, y_dtype, with_bias", gemm_cases([TensorProto.INT8]))
def test_gemms_of_int8(x_dtype, b_format, y_dtype, with_bias):
    check_gemm(x_dtype, b_format, y_dtype, with_bias)


@looped("x_dtype, b_format", [pair for e in FLOAT8 for pair in ((e, TensorProto.INT8), (TensorProto.INT8, e))])
def test_gemms_of_int8_with_float8(x_dtype, b_format):
    check_gemm(x_dtype, b_format, FLOAT, True)


def check_gemm(x_dtype, b_format, y_dtype, with_bias):
    """Of elements, and of values with a packed weight."""
    x, b = heavy_tailed((2, 5, 2048), 1), heavy_tailed((33, 2048), 2)
    bias = heavy_tailed((33,), 3) if with_bias else None
    qb = numpy_nodes.quantize(b, element_format=FORMAT_NAMES[b_format])
    if x_dtype in FORMAT_NAMES:
        first, op = node("MXFP8Quantize", "x", "xe xs", output_dtype=x_dtype), ("MXFP8Gemm", "xe xs")
        qx = numpy_nodes.quantize(x, element_format=FORMAT_NAMES[x_dtype])
        seen = numpy_nodes.dequantize(*qx, element_format=FORMAT_NAMES[x_dtype])
    else:
        first, op = cast("x", "typed", x_dtype), ("MXFP8WeightGemm", "typed")
        seen = x.astype(numerics.VALUE_DTYPES[contract.VALUE_NAMES[x_dtype]])
    graph = model(
        [
            first,
            node("MXFP8Quantize", "b", "be bs", output_dtype=b_format),
            node(op[0], f"{op[1]} be bs" + " bias" * with_bias, "y", output_dtype=y_dtype),
            cast("y", "wide", FLOAT),
        ],
        {"x": (FLOAT, ["n", None, 2048])},
        {"wide": (FLOAT, None)},
        b=b,
        **({"bias": bias} if with_bias else {}),
    )
    weight = numpy_nodes.dequantize(*qb, element_format=FORMAT_NAMES[b_format])
    bound = numpy_nodes.gemm_error_bound(seen, weight, contract.VALUE_NAMES[y_dtype], bias)
    expected = numpy_nodes.weight_gemm(seen, *qb, bias, b_format=FORMAT_NAMES[b_format])
    assert_within(run(graph, x=x)[0], expected, bound)


def embedding(ids_shape, **initializers: np.ndarray) -> bytes:
    return model(
        [
            node("MXFP8Quantize", "b", "be bs"),
            node("MXFP8Embedding", "ids be bs", "y"),
        ],
        {"ids": (TensorProto.INT64, ids_shape)},
        {"y": (FLOAT, None)},
        **initializers,
    )


@looped("shape, v, d", [((), 1, 33), ((0,), 3, 32), ((2, 0), 3, 5), ((2, 1, 2), 3, 33)])
def test_embedding_of_any_shape(shape, v, d):
    b, ids = heavy_tailed((v, d)), np.random.default_rng(0).integers(-v, v, shape)
    expected = numpy_nodes.embedding(ids, *numpy_nodes.quantize(b))
    assert_same(run(embedding([None] * len(shape), b=b), ids=ids)[0], expected)
    assert_same(run(embedding(None, b=b), ids=ids)[0], expected)


@pytest.mark.parametrize("wrong", [7, -8, 2**40])
def test_embedding_names_an_index_without_a_row(wrong):
    ids = np.array([[0, 1], [wrong, 2]])
    message = rf"MXFP8Embedding 'the_y': index {wrong} at \(1, 0\); expected -7 to 6, for a table of 7 rows; pass ids"
    with pytest.raises(Exception, match=message):
        run(embedding([None, None], b=heavy_tailed((7, 70))), ids=ids)


# --- shapes ----------------------------------------------------------------------------------------------------------


def weight_only(x_shape, **initializers: np.ndarray) -> bytes:
    return model(
        [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y")],
        {"x": (FLOAT, x_shape)},
        {"y": (FLOAT, None)},
        **initializers,
    )


X_SHAPES = ((64,), (3, 64), (2, 3, 64), (0, 64), (5, 1, 3, 64))


@looped("x_shape, b_shape", [*itertools.product(X_SHAPES, ((7, 64), (2, 7, 64), (5, 2, 7, 64)))])
def test_leading_dimensions_broadcast_as_in_numpy(x_shape, b_shape):
    x, b = heavy_tailed(x_shape, 1), heavy_tailed(b_shape, 2)
    qb = numpy_nodes.quantize(b)
    expected = numpy_nodes.weight_gemm(x, *qb)
    (y,) = run(weight_only([None] * x.ndim, b=b), x=x)
    assert_within(y, expected, numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*qb)))


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


def test_a_float32_node_accepts_an_input_of_unknown_rank():
    assert run(weight_only(None, b=heavy_tailed((7, 64))), x=heavy_tailed((2, 3, 64)))[0].shape == (2, 3, 7)


# --- where nodes may stand, and how they run -------------------------------------------------------------------------


def test_nodes_in_both_branches_of_an_if():
    def branch(name: str, weight: str) -> onnx.GraphProto:
        nodes = [
            node("MXFP8Quantize", weight, f"{name}_e {name}_s"),
            node("MXFP8WeightGemm", f"x {name}_e {name}_s", f"{name}_y"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, None)])

    choose = helper.make_node(
        "If", ["which"], ["y"], then_branch=branch("then", "b1"), else_branch=branch("else", "b2")
    )
    weights = {"b1": heavy_tailed((7, 64), 1), "b2": heavy_tailed((9, 64), 2)}
    graph = model([choose], {"which": (TensorProto.BOOL, []), "x": (FLOAT, ["m", 64])}, {"y": (FLOAT, None)}, **weights)
    x = heavy_tailed((3, 64))
    for which, weight in ((True, weights["b1"]), (False, weights["b2"])):
        qb = numpy_nodes.quantize(weight)
        (y,) = run(graph, which=np.array(which), x=x)
        assert_within(y, numpy_nodes.weight_gemm(x, *qb), numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*qb)))


def test_concurrent_runs_of_one_session():
    session = ort.session(weight_only(["m", 512], b=heavy_tailed((300, 512))))
    inputs = [heavy_tailed((m, 512), m) for m in (1, 2, 3, 8, 17, 40)]
    expected = [session.run(None, {"x": x})[0] for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for y, wanted in zip(pool.map(lambda x: session.run(None, {"x": x})[0], inputs), expected, strict=True):
            assert_same(y, wanted)


def test_one_thread_gives_the_same_result():
    graph = weight_only(["m", 512], b=heavy_tailed((300, 512)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    x = heavy_tailed((40, 512))
    assert_same(ort.session(graph, session_options=options).run(None, {"x": x})[0], run(graph, x=x)[0])


def test_subnormals_survive_a_session_that_flushes_them():
    x = np.full((3, 64), 3 * 2.0**-130, np.float32)
    graph = model([node("MXFP8Quantize", "x", "e s")], {"x": (FLOAT, [3, 64])}, {"e": (E4M3, None), "s": (UINT8, None)})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    elements, _ = ort.session(graph, session_options=options).run(None, {"x": x})
    assert_same(elements.view(np.uint8), numpy_nodes.quantize(x)[0])


def test_a_loop_body_runs_the_kernel_each_time():
    body = helper.make_graph(
        [
            node("MXFP8Quantize", "b", "be bs"),
            node("MXFP8WeightGemm", "state be bs", "next"),
            helper.make_node("Identity", ["go"], ["still"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, ["m", 64]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)
    graph = model(
        [loop], {"x": (FLOAT, [3, 64])}, {"y": (FLOAT, None)}, b=2 * np.eye(64, dtype=np.float32), times=np.array(5)
    )
    x = np.full((3, 64), 1.5, np.float32)
    assert_same(run(graph, x=x)[0], x * 2**5)


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


@looped("x, b", [((2**40, 0, 64), (1, 7, 64)), ((1, 3, 64), (2**40, 0, 64)), ((0, 3, 64), (1, 7, 64))])
def test_many_products_of_nothing_take_no_time(x, b):
    """One after the other, 2^40 would never end."""
    graph = model(
        [node("MXFP8Quantize", "b", "be bs"), node("MXFP8WeightGemm", "x be bs", "y")],
        {"x": (FLOAT, [None, None, 64]), "b": (FLOAT, [None, None, 64])},
        {"y": (FLOAT, None)},
    )
    got = run(graph, x=np.ones(x, np.float32), b=np.ones(b, np.float32))[0]
    assert got.shape == (max(x[0], b[0]) if 0 not in (x[0], b[0]) else 0, x[1], b[1])


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"block_size": 16}, "MXFP8Quantize 'the_e': block_size 16; expected 32; "),
        ({"scale_rounding": "up"}, "MXFP8Quantize 'the_e': scale_rounding 'up'; expected ceil, floor or even; "),
        ({"output_dtype": 1}, "MXFP8Quantize 'the_e': output_dtype 1; expected 17 .*, 19 .* or 3"),
    ],
)
def test_a_bad_attribute_is_named_with_its_node(attributes, message):
    graph = model([node("MXFP8Quantize", "x", "e s", **attributes)], {"x": (FLOAT, ["m", 64])}, {"s": (UINT8, None)})
    with pytest.raises(Exception, match=message):
        ort.session(graph)


def test_a_bad_value_dtype_is_named_with_its_node():
    graph = model(
        [node("MXFP8Quantize", "x", "e s"), node("MXFP8Dequantize", "e s", "y", output_dtype=11)],
        {"x": (FLOAT, ["m", 64])},
        {"y": (TensorProto.FLOAT, None)},
    )
    with pytest.raises(Exception, match=r"MXFP8Dequantize 'the_y': output_dtype 11; expected 1 .*, 10 .* or 16"):
        ort.session(graph)


def test_a_narrow_output_of_an_input_without_rank_is_refused():
    graph = model(
        [
            node("MXFP8Quantize", "b", "be bs"),
            node("MXFP8WeightGemm", "x be bs", "y", output_dtype=10),
            cast("y", "z", 1),
        ],
        {"x": (FLOAT, None)},
        {"z": (FLOAT, None)},
        b=heavy_tailed((7, 64)),
    )
    with pytest.raises(
        Exception, match="MXFP8WeightGemm 'the_y': output_dtype 10 on an input of unknown rank; expected"
    ):
        ort.session(graph)


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        ("MXFP8Quantize", {"x": (3,)}, None),
        ("MXFP8Dequantize", {"e": (3, 64), "s": (3, 1)}, r"'the_y': scales has shape \(3, 1\); expected \(3, 2\)"),
        (
            "MXFP8WeightGemm",
            {"x": (3, 32), "be": (7, 64), "bs": (7, 2)},
            r"'the_y': operands \(3, 32\) and \(7, 64\); expected \[..., M, K\] and \[..., N, K\] with the same K",
        ),
        ("MXFP8WeightGemm", {"x": (3, 64), "be": (7, 64), "bs": (7, 1)}, r"'the_y': B_scales has shape \(7, 1\)"),
        (
            "MXFP8WeightGemm",
            {"x": (2, 3, 64), "be": (5, 7, 64), "bs": (5, 7, 2)},
            r"'the_y': operands \(2, 3, 64\) and \(5, 7, 64\); expected leading dimensions that broadcast",
        ),
        (
            "MXFP8WeightGemm",
            {"x": (3, 64), "be": (7, 64), "bs": (7, 2), "bias": (6,)},
            r"'the_y': bias has shape \(6,\); expected \(7,\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_at_run_time(op, inputs, message):
    """Shapes are declared unknown, so that only the kernel can see them. Elements enter as float32 casts."""
    if message is None:
        graph = model([node(op, "x", "e s", axis=1)], {"x": (FLOAT, ["k"])}, {"s": (UINT8, None)})
        with pytest.raises(Exception, match=r"MXFP8Quantize 'the_e': axis 1 of a 1-D tensor; expected -1 <= axis < 1"):
            run(graph, x=np.zeros(inputs["x"], np.float32))
        return
    nodes, names, feeds = [], [], {}
    for name, shape in inputs.items():
        dtype = {"e": E4M3, "be": E4M3, "s": UINT8, "bs": UINT8}.get(name, FLOAT)
        nodes.append(cast(f"{name}_in", name, dtype))
        names.append(name)
        feeds[f"{name}_in"] = np.ones(shape, np.float32)
    nodes.append(node(op, " ".join(names), "y"))
    graph = model(nodes, {name: (FLOAT, [None] * feed.ndim) for name, feed in feeds.items()}, {"y": (FLOAT, None)})
    with pytest.raises(Exception, match=f"{op} {message}"):
        run(graph, **feeds)


def test_session_names_a_missing_file(tmp_path):
    with pytest.raises(ContractError, match=r"model.onnx: no such file; expected an ONNX model; correct the path"):
        ort.session(tmp_path / "model.onnx")


def test_session_opens_a_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(weight_only(["m", 64], b=heavy_tailed((7, 64))))
    session = ort.session(tmp_path / "model.onnx")
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_registering_twice_says_what_to_do():
    options = onnxruntime.SessionOptions()
    ort.register(options)
    with pytest.raises(BackendError, match=r"registered with them already; .* make one SessionOptions per session"):
        ort.register(options)


def test_an_onnxruntime_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    with pytest.raises(BackendError, match=r"onnxruntime 1\.19\.2: too old; expected 1\.20 or later"):
        ort.register(onnxruntime.SessionOptions())
