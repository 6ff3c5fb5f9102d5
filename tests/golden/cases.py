"""The models of the golden files: small, deterministic, one per form, fusion, structure and way of rewriting."""
# ruff: noqa: E501 - a case is a row of a table

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import ml_dtypes
import models as b
import numpy as np
import old_op_forms
import onnx
from attention_models import SIZE, attention, decoder, split, standard
from fused_models import MICROSOFT, activated, graph_model
from models import steps, weight
from onnx import helper, numpy_helper
from structures import NAMES, structure
from upgraded_models import with_linear

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
X, Y, YES = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, {"yes": (np.bool_, [])}
W, V = weight(64, 96), weight(64, 96, seed=1)


@dataclass(frozen=True)
class Case:
    """A model and how it is rewritten."""

    build: Callable[[], onnx.ModelProto]
    recipe: Any = "mxfp8"
    """A preset, or the fields of a recipe."""
    via: Literal["file", "external", "memory", "graphsurgeon", "twice"] = "file"
    """The form of the source: a file, one with external data, a proto, a graph, or a file that is rewritten already."""
    checkpoint: bool = False
    """Whether the packed weights are those of a checkpoint."""
    options: Mapping[str, Any] = field(default_factory=dict)


ALL: dict[str, Any] = {"name": "all", "output_projections": True, "min_dim": 0}
TABLES = {"name": "tables", "embeddings": True}
EXACT = {"activations": "unchanged", "min_dim": 0}


def linear(text: str, x: Any = ("m", 64), y: Any = ("m", 96), *, dtype: Any = F32, **stored: Any) -> onnx.ModelProto:
    """Returns the model of nodes from x to y, with arrays or lists of numbers as initializers."""
    arrays = {"w": W, **stored} if "w" in text.replace(">", " ").split() else stored
    values = {name: np.asarray(array) for name, array in arrays.items()}
    return b.model(steps(text), {"x": (dtype, x)}, {"y": (dtype, y)}, values)


def contrib(text: str, x: Any = ("m", 64), *, ops: str = "", **stored: np.ndarray) -> onnx.ModelProto:
    """Returns the model of nodes from x to y, those of `ops` from com.microsoft."""
    nodes = steps(text)
    for node in nodes:
        node.domain = MICROSOFT if node.op_type in ops.split() else ""
    return graph_model(nodes, stored, inputs={"x": list(x)}, rank=len(x))


def subgraph(text: str, output: str, inputs: Any = (), **stored: np.ndarray) -> onnx.GraphProto:
    outputs = [helper.make_empty_tensor_value_info(name) for name in output.split()]
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    return helper.make_graph(steps(text), "body", list(inputs), outputs, tensors)


def branches(then: onnx.GraphProto, other: onnx.GraphProto, before: str = "", **stored: np.ndarray) -> onnx.ModelProto:
    """y = -(then if yes else other)."""
    choose = b.node("If", "yes", "h", "choose", then_branch=then, else_branch=other)
    nodes = [*(steps(before) if before else ()), choose, b.node("Neg", "h", "y")]
    return b.model(nodes, {**X, **YES}, Y, stored)


def nested() -> onnx.ModelProto:
    deep = [subgraph(f"mm_{t}:MatMul x {w}>{t}", t) for w, t in (("w0", "a"), ("w1", "c"))]
    middle = subgraph("Identity c2>d", "d", w1=V)
    middle.node.insert(0, b.node("If", "yes", "c2", "inner", then_branch=deep[0], else_branch=deep[1]))
    return branches(middle, subgraph("mm_e:MatMul x w0>e", "e"), w0=W)


def loop() -> onnx.ModelProto:
    inputs = [b.value("i", np.int64, []), b.value("go", np.bool_, []), b.value("state", F32, ["m", 64])]
    body = subgraph("mm:MatMul state w>p; Relu p>next; Identity go>on", "on next", inputs)
    nodes = [b.node("Loop", "rounds yes x", "h", "loop", body=body), b.node("Neg", "h", "y")]
    stored = {"w": weight(64, 64), "rounds": np.array(3), "yes": np.array(True)}
    return b.model(nodes, X, {"y": (F32, ["m", 64])}, stored)


def scan() -> onnx.ModelProto:
    inputs = [b.value("sum", F32, [64]), b.value("row", F32, [64])]
    text = "mm:MatMul row w>p; Add sum p>next; Neg p>out"
    body = subgraph(text, "next out", inputs, w=weight(64, 64))
    nodes = [b.node("Scan", "zero x", "total rows", "scan", num_scan_inputs=1, body=body), b.node("Neg", "total", "y")]
    outputs = {"y": (F32, [64]), "rows": (F32, [5, 64])}
    return b.model(nodes, {"x": (F32, [5, 64])}, outputs, {"zero": np.zeros(64, F32)})


def functions(*, opset: int = 21, block: bool = False) -> onnx.ModelProto:
    """Calls local functions: one holds a matmul, with `block` by way of another; one does not."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    bodies = {"Linear": ("a b", "inner:MatMul a b>r"), "Twice": ("a", "Add a a>r"), "Block": ("a b", "Linear a b>r")}
    local = []
    for name, (inputs, text) in itertools.islice(bodies.items(), 3 if block else 2):
        nodes = steps(text)
        nodes[0].domain = "local" if name == "Block" else ""
        local.append(helper.make_function("local", name, inputs.split(), ["r"], nodes, imports))
    nodes = steps(f"first:{'Block' if block else 'Linear'} x w>h; Twice h>t; second:Linear t v>u; Neg u>y")
    for node in nodes[:3]:
        node.domain = "local"
    stored = [numpy_helper.from_array(array, name) for name, array in {"w": W, "v": weight(96, 64)}.items()]
    y = b.value("y", F32, ["m", 64])
    graph = helper.make_graph(nodes, "main", [b.value("x", F32, ["m", 64])], [y], stored)
    main = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, functions=local, opset_imports=main, ir_version=b.IR_VERSION)


def weights_are_inputs(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Lists the initializers among the inputs: IR 3 must, and later ones let a caller override them."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.ir_version = version
    return model


def constant_weight() -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["w"], "stored", value=numpy_helper.from_array(W))
    return b.neg_model("MatMul", ("m", 64), ("m", 96), {}, before=[constant])


def old(opset: int) -> onnx.ModelProto:
    """Returns nodes that changed since `opset`, beside a linear; without Upsample and Resize, which may be refused."""
    last = [
        f for f in old_op_forms.FORMS if f.first <= opset <= f.last and f.op not in ("Upsample", "Resize", "Scatter")
    ]
    return with_linear(old_op_forms.old_model(last[::2], opset)[0])


def described() -> onnx.ModelProto:
    """Returns a model with texts, metadata, dead code and other fields that a rewrite keeps."""
    text = "layers.0.up:MatMul x w>h; Neg h>y; dead:Identity other>unused; again:MatMul x w>h2; Abs h2>z"
    model = linear(text, other=weight(3))
    model.graph.output.append(b.value("z", F32, ["m", 96]))
    model.producer_name, model.producer_version, model.doc_string, model.graph.doc_string = "p", "1", "model", "graph"
    helper.set_model_props(model, {"author": "test"})
    for thing in (model.graph.node[0], model.graph.node[1], model.graph.initializer[0], model.graph.input[0]):
        thing.doc_string = "described"
        thing.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0', 'layers.0.up']")
    model.graph.value_info.append(b.value("h", F32, ["m", 96]))
    return model


def packed_attention(**attributes: Any) -> onnx.ModelProto:
    stored = {"w": weight(64, 192), "b": weight(192, seed=1), "o": weight(64, 64, seed=2)}
    model = contrib(
        "attention:Attention x w b>a; o:MatMul a o>r; Add x r>y", ("batch", "n", 64), ops="Attention", **stored
    )
    model.graph.node[0].attribute.extend(helper.make_attribute(k, v) for k, v in {"num_heads": 4, **attributes}.items())
    return model


def looked_up(text: str, ids: Any = ("batch", "n"), **stored: Any) -> onnx.ModelProto:
    values = {"table": weight(96, 70), **{name: np.asarray(array) for name, array in stored.items()}}
    return b.model(steps(f"{text}; Neg h>y"), {"ids": (np.int64, ids)}, {"y": (F32, [*ids, None])}, values)


def experts(text: str, x: Any = ("s", 1, 70), index: Any = ("s",), **stored: Any) -> onnx.ModelProto:
    stack = weight(4, 70, 40, seed=1).transpose(0, 2, 1).copy()
    values = {"stack": stack, **{name: np.asarray(array) for name, array in stored.items()}}
    inputs = {"x": (F32, x), "i": (np.int64, index)}
    return b.model(steps(f"{text}; Neg h>y"), inputs, {"y": (F32, [None] * len(x))}, values)


def act(text: str, **numbers: Any) -> Callable[[], onnx.ModelProto]:
    return partial(activated, *steps(text), **numbers)


def gated(dtype: Any = F32) -> onnx.ModelProto:
    stored = {name: weight(64, 96, seed=i, dtype=dtype) for i, name in enumerate("gv")}
    stored["d"] = weight(96, 64, seed=2, dtype=dtype)
    text = "gate:MatMul x g>h; Sigmoid h>t; Mul h t>s; up:MatMul x v>u; Mul s u>p; down:MatMul p d>o; Neg o>y"
    return graph_model(steps(text), stored, dtype=dtype)


GELU = {"root": 2**0.5, "one": 1, "half": 0.5}
TANH = {"three": 3, "k": 0.044715, "root": (2 / np.pi) ** 0.5, "one": 1, "half": 0.5}
SIZES = (
    "Shape x>batch|start=0 end=1; Concat batch rest>sizes|axis=0; Expand w sizes>wide; linear:MatMul x wide>h; Neg h>y"
)
RULES = [{"name": "layers.1", "quantize": False}, {"op": "MatMul", "min_n": 100, "activations": "e5m2"}]
TIED = "first:MatMul x w>a; Relu a>b; down:Gemm b w>c|transB=1; second:MatMul c w>d; Neg d>y"
SPLIT = "Split w sizes>w0 w1|axis=0; Transpose w0>t0; Transpose w1>t1; a:MatMul x t0>h0; b:MatMul x t1>h1; Concat h0 h1>h|axis=1; Neg h>y"
CHAIN = b.chain_model
ONE = {"min_dim": 0, "exclude": ("mm_b",), "name": "one"}
TWO = [subgraph(f"mm_{t}:MatMul x w>{t}", t) for t in "ab"]

NETWORK = {
    "w": weight(32, 40, 3, 3),
    "v": weight(32, 32, 3, 3),
    "t": weight(32, 24, 4, 4),
    "s": weight(32),
    "a": np.float32(0.1),
}
"""Weights of a network of convolutions."""
NETWORK |= {"m": weight(32), "o": weight(32), "n": np.full(32, 0.5, np.float32)}


def network() -> onnx.ModelProto:
    """Returns Conv, BatchNormalization and Relu; a residual block; a transposed convolution."""
    first = "one:Conv x w>a1|pads=[1,1,1,1] strides=[2,2]; BatchNormalization a1 s o m n>b1; Relu b1>c1"
    block = "two:Conv c1 v>d1|pads=[1,1,1,1]; Add d1 c1>e1; LeakyRelu e1>f1|alpha=0.25"
    last = "up:ConvTranspose f1 t>g1|strides=[2,2] pads=[1,1,1,1]; Mul g1 a>y"
    return linear(f"{first}; {block}; {last}", (1, 40, 8, 8), (1, 24, 8, 8), **NETWORK)


CASES: dict[str, Case] = {
    # Forms of products
    "matmul": Case(b.matmul_model),
    "matmul with bias": Case(partial(b.matmul_model, bias=True)),
    "matmul, weight on the left": Case(partial(b.matmul_model, left=True, bias=True)),
    "matmul, K of 70": Case(partial(b.matmul_model, 70, 50)),
    "matmul of three axes of weights": Case(lambda: linear("mm:MatMul x w>h; Neg h>y", (4, "m", 64), (4, "m", 96), w=weight(4, 64, 96))),
    "matmul of a vector": Case(lambda: linear("mm:MatMul x w>h; Neg h>y", (64,), (96,))),
    "matmul in float16": Case(partial(b.matmul_model, bias=True, dtype=F16)),
    "matmul in bfloat16": Case(partial(b.matmul_model, bias=True, dtype=BF16)),
    "gemm": Case(b.gemm_model),
    "gemm, transA, transB, alpha, beta": Case(partial(b.gemm_model, transA=1, transB=1, alpha=0.5, beta=2.0)),
    "gemm without bias, alpha": Case(partial(b.gemm_model, bias=False, alpha=0.25)),
    "einsum": Case(lambda: linear("linear:Einsum x w>h|equation='bsk,khd->bhsd'; Neg h>y", (2, 3, 70), (2, 4, 3, 24), w=weight(70, 96).reshape(70, 4, 24))),
    "einsum, weight first": Case(lambda: linear("linear:Einsum w x>h|equation='nk,bks->bns'; Neg h>y", (2, 70, 3), (2, 96, 3), w=weight(96, 70))),
    "einsum, contraction over heads": Case(lambda: linear("linear:Einsum x w>h|equation='bshd,hdn->bsn'; Neg h>y", (2, 3, 4, 24), (2, 3, 64), w=weight(96, 64).reshape(4, 24, 64))),
    "FusedMatMul": Case(lambda: contrib("linear:FusedMatMul x w>h|alpha=0.5 transB=1; Neg h>y", ops="FusedMatMul", w=weight(96, 64))),
    "FusedMatMul, transA": Case(lambda: contrib("linear:FusedMatMul x w>h|transA=1; Neg h>y", ("b", 64, "s"), ops="FusedMatMul", w=W)),
    "FusedGemm": Case(lambda: contrib("linear:FusedGemm x w c>h|activation='LeakyRelu' activation_alpha=0.25 transB=1; Neg h>y", ops="FusedGemm", w=weight(96, 64), c=weight(96))),
    "com.microsoft Attention": Case(packed_attention),
    "com.microsoft Attention, causal, scale": Case(partial(packed_attention, unidirectional=1, scale=0.25)),
    "com.microsoft Attention, all": Case(packed_attention, "all"),
    "experts by Gather": Case(lambda: experts("Gather stack i>w; Transpose w>wt|perm=[0,2,1]; linear:MatMul x wt>h")),
    "experts by GatherND": Case(lambda: experts("Unsqueeze i end>i1; GatherND stack i1>w; Transpose w>wt|perm=[0,2,1]; linear:MatMul x wt>h", end=[-1])),
    "experts, weight-only": Case(lambda: experts("Gather stack i>w; Transpose w>wt|perm=[0,2,1]; linear:MatMul x wt>h"), "mxfp8-weight-only"),
    "one expert": Case(lambda: experts("Gather stack i>w; Transpose w>wt|perm=[1,0]; linear:MatMul x wt>h", ("m", 70), ())),
    "embedding": Case(lambda: looked_up("look:Gather table ids>h"), TABLES),
    "embedding behind Transpose and Slice": Case(lambda: looked_up("Transpose table>t; Slice t two six>s; Transpose s>u; look:Gather u ids>h", two=[2], six=[66]), TABLES),
    "embedding by GatherND": Case(lambda: looked_up("Unsqueeze ids end>i; look:GatherND table i>h", end=[-1]), TABLES),
    "tied table": Case(lambda: b.model(steps("Gather table ids>e; Transpose table>head|perm=[1,0]; lm_head:MatMul e head>y"), {"ids": (np.int64, ["m"])}, Y, {"table": weight(96, 64)}), "all"),
    "convolutions": Case(network, "mxint8"),
    "convolutions, weight-only": Case(network, "mxint8-weight-only"),
    "convolutions, kept": Case(lambda: linear("Conv x w>h; Neg h>y", (1, 40, 8, 8), (1, 32, 6, 6), w=weight(32, 40, 3, 3))),
    "language model": Case(b.language_model),
    "language model, all": Case(b.language_model, "all"),
    "attention block": Case(b.attention_model),
    "attention block, attention recipe": Case(b.attention_model, {"fp8_dpa": True, "min_dim": 0, "name": "dpa"}),
    "attention block, scores only": Case(b.attention_model, {"attention_scores": True, "min_dim": 0}),
    "two activations": Case(lambda: linear("Transpose x>t|perm=[0,2,1]; mm:MatMul x t>h; Neg h>y", (2, 40, 64), (2, 40, 40)), {"rules": [{"op": "MatMul"}]}),
    # Views and shared weights
    "Constant node": Case(constant_weight),
    "Transpose": Case(lambda: linear("Transpose w>wt; linear:MatMul x wt>h; Neg h>y", w=weight(96, 64))),
    "Reshape, Cast, Squeeze": Case(lambda: linear("Cast w>a|to=1; Reshape a shape>c; Squeeze c axis>wt; linear:MatMul x wt>h; Neg h>y", w=weight(96, 64, dtype=F16), shape=[1, 64, -1], axis=[0])),
    "Split": Case(lambda: linear(SPLIT, y=("m", 160), w=weight(160, 64), sizes=[64, 96])),
    "Slice": Case(lambda: linear("Slice w two end>wt; linear:MatMul x wt>h; Neg h>y", w=weight(68, 96), two=[2], end=[66])),
    "Expand": Case(lambda: linear(SIZES, ("b", 3, 64), ("b", 3, 96), rest=[64, 96])),
    "shared weight, both ways": Case(lambda: linear(TIED)),
    "shared weight, one kept": Case(lambda: linear("one:MatMul x w>a; Neg a>b; kept:MatMul x w>c; Add b c>y"), {"exclude": ("kept",)}),
    "gemms on one activation, other formats": Case(b.attention_model, {"rules": [{"name": "^k$", "activations": "e5m2", "weight_format": "e5m2"}]}),
    "quantized already": Case(lambda: linear("DequantizeLinear w s>a; mm:MatMul x a>h; Neg h>y", w=W.astype(np.int8), s=np.array(0.5, F32))),
    "texts, metadata, dead code": Case(described),
    "overridable initializers": Case(lambda: weights_are_inputs(b.matmul_model(bias=True), 10)),
    # Fusions
    "relu": Case(act("Relu h>y"), ALL),
    "gelu op": Case(act("Gelu h>y"), ALL),
    "gelu": Case(act("Div h root>a; Erf a>b1; Add b1 one>c; Mul h c>d; Mul d half>y", **GELU), ALL),
    "gelu_tanh": Case(act("Pow h three>a; Mul a k>b1; Add h b1>c; Mul c root>d; Tanh d>e; Add e one>f; Mul h half>g; Mul g f>y", **TANH), ALL),
    "silu": Case(act("Sigmoid h>s; Mul h s>y"), ALL),
    "silu, not fused": Case(act("Sigmoid h>s; Mul h s>y"), {**ALL, "fuse": False}),
    "gelu between gemms": Case(lambda: linear("up:MatMul x w>h; Gelu h>g; down:MatMul g v>d; Neg d>y", y=("m", 64), v=weight(96, 64))),
    "gelu between, an output too": Case(lambda: linear("up:MatMul x w>h; Gelu h>g; down:MatMul g v>d; Concat g d>y|axis=1", y=("m", 160), v=weight(96, 64)), ALL),
    "gated": Case(gated),
    "gated, weight-only": Case(gated, "mxfp8-weight-only"),
    "gated in float16": Case(partial(gated, F16)),
    "attention as BERT": Case(attention, EXACT),
    "attention without mask": Case(lambda: attention(mask=[], softmax=steps("Softmax scaled>weights")), EXACT),
    "attention, a condition": Case(lambda: attention(mask=steps("Where seen scaled lowest>masked"), inputs={"seen": (np.bool_, ["batch", 1, "rows", "keys"])}, constants={"lowest": np.array(np.finfo(F32).min, F32)}), EXACT),
    "attention, scaled on both sides": Case(lambda: attention(scores=steps("Mul q2 half>q3; Div k2 root>k3; MatMul q3 k3>scores"), scale=[], mask=steps("Add scores mask>masked"), constants={"half": np.array(0.5, F32)}), EXACT),
    "attention, keys turned": Case(lambda: attention(k=[*split("k"), *steps("Transpose k2>k3|perm=[0,1,3,2]")], scores=steps("MatMul q2 k3>scores")), EXACT),
    "attention, one head of keys": Case(lambda: attention(k=steps("Transpose kh>k2|perm=[0,1,3,2]"), v=[], inputs={name: (F32, ["batch", 1, "keys", SIZE]) for name in ("kh", "v2")}), EXACT),
    "attention, grouped, with past": Case(decoder, EXACT),
    "attention, heads in another order": Case(partial(decoder, axis=1), EXACT),
    "attention, MXFP8 products": Case(attention, {"fp8_dpa": True, "min_dim": 0}),
    "ONNX Attention": Case(standard, EXACT),
    "ONNX Attention, causal, past": Case(lambda: standard("q k v - past_key past_value", "a present_key present_value", is_causal=1), EXACT),
    "ONNX Attention, heads, mask, scale": Case(lambda: standard("q k v mask", heads=True, scale=0.25), EXACT),
    "ONNX Attention, MXFP8 products": Case(lambda: standard("q k v bool_mask"), {"fp8_dpa": True, "min_dim": 0}),
    "attention heads of float16": Case(partial(b.attention_model, dtype=F16)),
    # Subgraphs and functions
    "If, outer weight": Case(lambda: branches(*TWO, w=W)),
    "If, inner weights of one name": Case(lambda: branches(*(subgraph("mm:MatMul x w>a", "a", w=w) for w in (W, V)))),
    "If, a kept site": Case(lambda: branches(*TWO, w=W), ONE),
    "If, a matmul in front": Case(lambda: branches(subgraph("Add h0 b>t", "t"), subgraph("Gelu h0>e", "e"), "mm:MatMul x w>h0", w=W, b=weight(96, seed=1))),
    "If, views and bias inside": Case(lambda: branches(subgraph("Transpose w>wt; mm:MatMul x wt>a; Add a b>s", "s", w=weight(96, 64)), subgraph("mm2:MatMul x v>z", "z"), b=weight(96, seed=1), v=V)),
    "If in If": Case(nested),
    "Loop": Case(loop),
    "Scan": Case(scan),
    "functions": Case(functions),
    "functions that call functions": Case(partial(functions, block=True)),
    "functions of another opset": Case(partial(functions, opset=17)),
    # Old models
    **{f"opset {opset}": Case(partial(old, opset)) for opset in (7, 9, 11, 13, 17)},
    "opset 7, IR 3": Case(lambda: weights_are_inputs(CHAIN(opset=7), 3)),
    # Recipes
    "MXFP8BlockScaling": Case(CHAIN, "MXFP8BlockScaling"),
    **{f"chain, {name}": Case(partial(CHAIN, (64, 128, 96), head=True), name) for name in ("mxfp8-bf16", "mxfp8-weight-only", "ocp", "all")},
    "hybrid, rounding even": Case(CHAIN, {"fp8_format": "HYBRID", "scale_rounding": "even", "name": "hybrid"}),
    "rules": Case(partial(CHAIN, (64, 128, 96, 64)), {"name": "rules", "rules": RULES}),
    "include and exclude": Case(partial(CHAIN, (64, 128, 96, 64)), {"include": ("layers",), "exclude": ("layers.2",)}),
    "weight-only in float16": Case(partial(CHAIN, dtype=F16), "mxfp8-weight-only"),
    "for cpu, bfloat16": Case(lambda: b.attention_model(dtype=BF16), {"runs_on": "cpu"}),
    "for cpu, bfloat16, weight-only": Case(partial(CHAIN, head=True, dtype=BF16), {"runs_on": "cpu", "activations": "unchanged"}),
    "for cpu, experts and tables": Case(b.language_model, {"runs_on": "cpu", "embeddings": True}),
    # Ways of rewriting
    "external data": Case(partial(CHAIN, head=True), via="external"),
    "external data to one file": Case(CHAIN, via="external", options={"external_data": "never"}),
    "one file to external data": Case(partial(b.matmul_model, bias=True), options={"external_data": "always"}),
    "in memory": Case(CHAIN, via="memory"),
    "graphsurgeon": Case(b.language_model, via="graphsurgeon"),
    "dry run": Case(b.attention_model, options={"dry_run": True}),
    "dry run, external": Case(b.language_model, "all", via="external", options={"dry_run": True}),
    "rewritten already": Case(CHAIN, via="twice"),
    "weights of a checkpoint": Case(partial(CHAIN, (64, 128, 96)), checkpoint=True),
    "NaN in a weight": Case(lambda: linear("mm:MatMul x w>h; Neg h>y", w=np.where(W > 0.3, np.nan, W).astype(F32))),
    "NaN in a weight, allowed": Case(lambda: linear("mm:MatMul x w>h; Neg h>y", w=np.where(W > 0.3, np.nan, W).astype(F32)), options={"allow_nonfinite": True}),
    "nothing eligible": Case(lambda: linear("head:MatMul x w>y")),
    "no matmul": Case(lambda: linear("Relu x>y", y=("m", 64))),
    "a rule that matches nothing": Case(CHAIN, {"rules": [{"name": "nowhere"}]}),
    # Structures of exporters
    **{name: Case(partial(structure, name)) for name in NAMES if name not in ("minilm", "t5", "whisper")},
    "llama, all": Case(partial(structure, "sharp_llama_18"), "all"),
    "gpt2, weight-only": Case(partial(structure, "sharp_gpt2_18"), "mxfp8-weight-only"),
}  # fmt: skip
