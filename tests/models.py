"""Tiny ONNX models for tests: three lines each, deterministic, at opset 21 by default.

`model` makes any graph from node tuples; the others are the shapes that tests keep needing.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

IR_VERSION = 10
"""The IR version of opset 21, which every ONNX Runtime from 1.18 on reads."""

Shape = Sequence[int | str | None]


def model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, tuple[Any, Shape | None]],
    outputs: Mapping[str, tuple[Any, Shape | None]],
    initializers: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 21,
    name: str = "test",
    checked: bool = True,
) -> ModelProto:
    """Returns a model; inputs and outputs map names to (NumPy dtype, shape with dim_params as strings).

    onnx.checker accepts it; not `checked` is a model whose functions `calling` adds.
    """
    graph = helper.make_graph(
        list(nodes),
        name,
        [value(key, *spec) for key, spec in inputs.items()],
        [value(key, *spec) for key, spec in outputs.items()],
        [numpy_helper.from_array(array, key) for key, array in (initializers or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)
    if checked:
        onnx.checker.check_model(proto)
    return proto


def value(name: str, dtype: Any, shape: Shape | None) -> onnx.ValueInfoProto:
    """Returns a tensor's name, dtype and shape; None is an unknown shape."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    """Returns a node; inputs and outputs are names separated by spaces, - is an input that is absent."""
    names = ["" if each == "-" else each for each in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=name or f"{op}_{outputs}", **attributes)


def steps(text: str) -> list[NodeProto]:
    """Returns nodes written as "name:Op inputs>outputs|key=value ...; ..."; a name and attributes may be left out.

    An op of another domain is written domain.Op.
    """
    nodes = []
    for step in text.split(";"):
        head, _, tail = step.partition(">")
        op, *inputs = head.split()
        outputs, _, pairs = tail.partition("|")
        attributes = {key: ast.literal_eval(value) for key, _, value in (pair.partition("=") for pair in pairs.split())}
        name, _, op = op.rpartition(":")
        domain, _, op = op.rpartition(".")
        attributes |= {"domain": domain} if domain else {}
        nodes.append(node(op, " ".join(inputs), outputs.strip(), name, **attributes))
    return nodes


def weight(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Returns normal values scaled so that a matmul over the second-to-last axis keeps the variance."""
    fan_in = shape[-2] if len(shape) > 1 else 1
    return (np.random.default_rng(seed).standard_normal(shape) / max(fan_in, 1) ** 0.5).astype(dtype)


def matmul_model(
    k: int = 64, n: int = 96, *, dtype: Any = np.float32, opset: int = 21, bias: bool = False, left: bool = False
) -> ModelProto:
    """y = relu(x @ w + b): one MatMul called "linear". With `left`, y = relu(w @ x)."""
    x, y = (["batch", k, 8], ["batch", n, 8]) if left else (["batch", "seq", k], ["batch", "seq", n])
    nodes = [node("MatMul", "w x" if left else "x w", "h", "linear")]
    if bias:
        nodes.append(node("Add", "h b", "hb", "bias"))
    nodes.append(node("Relu", "hb" if bias else "h", "y", "relu"))
    weights = {"w": weight(n, k, dtype=dtype) if left else weight(k, n, dtype=dtype)}
    if bias:
        weights["b"] = weight(*((n, 1) if left else (n,)), seed=1, dtype=dtype)
    return model(nodes, {"x": (dtype, x)}, {"y": (dtype, y)}, weights, opset=opset)


def gemm_model(
    k: int = 64, n: int = 96, *, bias: bool = True, dtype: Any = np.float32, **attributes: Any
) -> ModelProto:
    """y = relu(Gemm(x, w, b)): one Gemm called "linear"; transA, transB, alpha and beta as given."""
    shape = (n, k) if attributes.get("transB") else (k, n)
    x = [k, "batch"] if attributes.get("transA") else ["batch", k]
    nodes = [node("Gemm", "x w b" if bias else "x w", "h", "linear", **attributes), node("Relu", "h", "y", "relu")]
    weights = {"w": weight(*shape, dtype=dtype), **({"b": weight(n, seed=1, dtype=dtype)} if bias else {})}
    return model(nodes, {"x": (dtype, x)}, {"y": (dtype, ["batch", n])}, weights)


def neg_model(
    op: str,
    x: Shape,
    y: Shape,
    weights: Mapping[str, np.ndarray],
    inputs: str = "x w",
    *,
    dtype: Any = np.float32,
    before: Sequence[NodeProto] = (),
    **attributes: Any,
) -> ModelProto:
    """y = -op(inputs): one product called "linear" that is not an output projection, its sign checked too."""
    nodes = [*before, node(op, inputs, "h", "linear", **attributes), node("Neg", "h", "y", "neg")]
    return model(nodes, {"x": (dtype, x)}, {"y": (dtype, y)}, weights)


def chain_model(
    sizes: Sequence[int] = (64, 128, 64), *, head: bool = False, dtype: Any = np.float32, opset: int = 21
) -> ModelProto:
    """x -> MatMul + Relu per pair of sizes ("layers.0.linear", ...). With `head` the last MatMul is the output."""
    nodes, weights, last = [], {}, len(sizes) - 2
    current = "x"
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        weights[f"layers.{i}.weight"] = weight(k, n, seed=i, dtype=dtype)
        result, bare = "y" if i == last else f"x{i}", head and i == last
        nodes.append(node("MatMul", f"{current} layers.{i}.weight", result if bare else f"h{i}", f"layers.{i}.linear"))
        if not bare:
            nodes.append(node("Relu", f"h{i}", result, f"layers.{i}.relu"))
        current = result
    shapes = {"x": (dtype, ["batch", sizes[0]])}, {"y": (dtype, ["batch", sizes[-1]])}
    return model(nodes, *shapes, weights, opset=opset)


def matmul_stack(count: int) -> ModelProto:
    """Returns relu(... relu(x0 @ w0) @ w1 ...) with `count` weights of 32 x 32."""
    nodes, weights = [], {}
    for i in range(count):
        weights[f"w{i}"] = weight(32, 32, seed=i)
        nodes += [node("MatMul", f"x{i} w{i}", f"h{i}"), node("Relu", f"h{i}", f"x{i + 1}")]
    return model(nodes, {"x0": (np.float32, ["m", 32])}, {f"x{count}": (np.float32, ["m", 32])}, weights)


def attention_model(hidden: int = 64, heads: int = 2, *, dtype: Any = np.float32) -> ModelProto:
    """One self-attention block with a residual add: linears q, k, v, o and products scores, values."""
    weights: dict[str, np.ndarray] = {
        "heads": np.array([0, 0, heads, hidden // heads], np.int64),
        "merged": np.array([0, 0, hidden], np.int64),
        "root": np.array((hidden // heads) ** 0.5, dtype),
    }
    weights |= {f"{name}.weight": weight(hidden, hidden, seed=seed, dtype=dtype) for seed, name in enumerate("qkvo")}
    text = "{0}:MatMul x {0}.weight>{0}0; Reshape {0}0 heads>{0}1; Transpose {0}1>{0}2|perm={1}; "
    nodes = steps(
        "".join(text.format(name, perm) for name, perm in (("q", "[0,2,1,3]"), ("k", "[0,2,3,1]"), ("v", "[0,2,1,3]")))
        + "scores:MatMul q2 k2>s0; Div s0 root>s1; Softmax s1>p|axis=-1; values:MatMul p v2>a0; "
        "Transpose a0>a1|perm=[0,2,1,3]; Reshape a1 merged>a2; o:MatMul a2 o.weight>a3; Add x a3>y"
    )
    shape = ["batch", "seq", hidden]
    return model(nodes, {"x": (dtype, shape)}, {"y": (dtype, shape)}, weights)


def language_model(vocab: int = 100, hidden: int = 64, *, positions: int = 32) -> ModelProto:
    """input_ids, attention_mask, position_ids -> logits: two embeddings, an FFN behind a residual add, an LM head."""
    weights = {
        "wte": weight(vocab, hidden, seed=0),
        "wpe": weight(positions, hidden, seed=1),
        "ffn.up.weight": weight(hidden, 2 * hidden, seed=2),
        "ffn.down.weight": weight(2 * hidden, hidden, seed=3),
        "lm_head.weight": weight(hidden, vocab, seed=4),
        "last": np.array([-1], np.int64),
    }
    nodes = steps(
        "Gather wte input_ids>tokens; Gather wpe position_ids>places; Add tokens places>embedded; "
        "Cast attention_mask>mask0|to=1; Unsqueeze mask0 last>mask; Mul embedded mask>x; "
        "ffn.up:MatMul x ffn.up.weight>up; Relu up>act; ffn.down:MatMul act ffn.down.weight>down; Add x down>h; "
        "lm_head:MatMul h lm_head.weight>logits"
    )
    ids = (np.int64, ["batch_size", "sequence_length"])
    inputs = {"input_ids": ids, "attention_mask": ids, "position_ids": ids}
    outputs = {"logits": (np.float32, ["batch_size", "sequence_length", vocab])}
    return model(nodes, inputs, outputs, weights)


def save(proto: ModelProto, path: Path, *, external: bool = False) -> Path:
    """Writes the model, with tensors from 1 kB on in `path`.data when `external`; returns the path."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    onnx.save(copy, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=1024)
    return path


def write_large(path: Path, *, layers: int, k: int = 4096, n: int = 4096) -> Path:
    """Writes relu(... relu(x @ w0) @ w1 ...) with float32 external data, never more than 32 MB of it in memory."""
    names = [f"layers.{i}.weight" for i in range(layers)]
    shapes = [(k, n) if i % 2 == 0 else (n, k) for i in range(layers)]
    nodes, current = [], "x"
    for i, name in enumerate(names):
        last = "y" if i == layers - 1 else f"x{i}"
        nodes += [node("MatMul", f"{current} {name}", f"h{i}", f"layers.{i}"), node("Relu", f"h{i}", last)]
        current = last
    graph = helper.make_graph(
        nodes, "large", [value("x", np.float32, ["m", k])], [value("y", np.float32, ["m", shapes[-1][1]])]
    )
    block = (np.random.default_rng(0).standard_normal(8 << 20) / k**0.5).astype(np.float32)
    with path.with_name(f"{path.name}.data").open("wb") as file:
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            tensor = graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            count = shape[0] * shape[1]
            entries = {"location": f"{path.name}.data", "offset": file.tell(), "length": 4 * count}
            for key, entry in entries.items():
                tensor.external_data.add(key=key, value=str(entry))
            rest = np.roll(block, 977 * i)
            while count > 0:
                count -= file.write(rest[:count].data) // 4
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=IR_VERSION)
    path.write_bytes(proto.SerializeToString())
    return path


def subgraph(
    nodes: str | Sequence[NodeProto],
    outputs: str = "",
    inputs: Sequence[onnx.ValueInfoProto] = (),
    **stored: np.ndarray,
) -> onnx.GraphProto:
    """Returns a graph inside a node; `nodes` may be text as `steps` reads it, `outputs` are those of the last one."""
    nodes = steps(nodes) if isinstance(nodes, str) else list(nodes)
    names = outputs.split() or nodes[-1].output
    results = [helper.make_empty_tensor_value_info(name) for name in names]
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    return helper.make_graph(nodes, "body", list(inputs), results, tensors)


def choose(
    then: str | onnx.GraphProto, other: str | onnx.GraphProto, output: str = "h", name: str = "choose", yes: str = "yes"
) -> NodeProto:
    """Returns an If; a branch is a subgraph or its nodes as `steps` reads them."""
    branches = [subgraph(each) if isinstance(each, str) else each for each in (then, other)]
    return node("If", yes, output, name, then_branch=branches[0], else_branch=branches[1])


def local_function(name: str, inputs: str, nodes: str | Sequence[NodeProto], opset: int = 21) -> onnx.FunctionProto:
    """Returns a function of the domain "local" whose result is called r."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function(
        "local", name, inputs.split(), ["r"], steps(nodes) if isinstance(nodes, str) else nodes, imports
    )


def calling(proto: ModelProto, *functions: onnx.FunctionProto) -> ModelProto:
    """Adds local functions to a model, in place; the nodes that have their names call them."""
    names = {function.name for function in functions}
    for each in proto.graph.node:
        if each.op_type in names:
            each.domain = "local"
    proto.functions.extend(functions)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    onnx.checker.check_model(proto)
    return proto


def text_model(
    nodes: str | Sequence[NodeProto],
    x: Shape = ("m", 64),
    y: Shape = ("m", 96),
    *,
    inputs: Mapping[str, tuple[Any, Shape | None]] | None = None,
    outputs: Mapping[str, tuple[Any, Shape | None]] | None = None,
    dtype: Any = np.float32,
    opset: int = 21,
    **stored: Any,
) -> ModelProto:
    """Returns the model of nodes from x to y; `stored` are arrays or numbers, w is a weight of 64 x 96 by default."""
    nodes = steps(nodes) if isinstance(nodes, str) else list(nodes)
    arrays = {name: np.asarray(array) for name, array in stored.items()}
    if "w" in read_by(nodes) - arrays.keys():
        arrays["w"] = weight(64, 96, dtype=dtype)
    ends = {"x": (dtype, x), **(inputs or {})}, {"y": (dtype, y), **(outputs or {})}
    return model(nodes, *ends, arrays, opset=opset)


def read_by(nodes: Sequence[NodeProto]) -> set[str]:
    """Returns the names that nodes read of the graph around them, also inside their subgraphs."""
    names = {name for each in nodes for name in each.input}
    for graph in (attribute.g for each in nodes for attribute in each.attribute if attribute.HasField("g")):
        names |= read_by(graph.node) - {tensor.name for tensor in graph.initializer}
    return names - {name for each in nodes for name in each.output}
