"""Wherever constants are stored, and whatever else reads a value between nodes, fusing changes no result.

A constant is an initializer or a Constant node; a node, a branch or a caller of the model reads a value once more.
"""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
import pytest
from attention_models import EXACT, HEADS, HIDDEN, SIZE, attention, decoder, feeds
from fused_models import activated, both_ways, check_same, graph_model
from grids import looped
from models import choose, node, steps, weight
from onnx import helper, numpy_helper
from oracle import kinds, rewrite, run

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


def reader(random: Random, read: onnx.ValueInfoProto) -> onnx.NodeProto:
    """Returns a node that gives a value once more, perhaps from its branches; it may need a constant `no`."""
    name = read.name
    if random.random() < 0.5:
        return node("Identity", name, f"{name}_also")
    return choose(f"Identity {name}>{name}_then", f"Identity {name}>{name}_else", f"{name}_also", f"{name}_if", "no")


def scattered(random: Random, original: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with some constants as nodes, and some values read once more or returned."""
    proto = onnx.ModelProto()
    proto.CopyFrom(original)
    graph = proto.graph
    tensors = [*graph.initializer]
    known = {each.name: each for each in onnx.shape_inference.infer_shapes(original).graph.value_info}
    for tensor in tensors:
        known[tensor.name] = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    del graph.initializer[:]
    for tensor in tensors:
        if random.random() < 0.5:
            graph.initializer.append(tensor)
        else:
            graph.node.insert(0, node("Constant", "", tensor.name, value=tensor))
    graph.initializer.append(numpy_helper.from_array(np.array(False), "no"))
    for name, info in known.items():
        if (chance := random.random()) < 0.15:
            graph.node.append(reader(random, info))
            graph.output.add().CopyFrom(info)
            graph.output[-1].name = f"{name}_also"
        elif chance < 0.25:
            graph.output.append(info)
    return proto


FORMS = {
    "gelu": activated(
        *steps("Div h root>d; Erf d>e; Add e one>f; Mul h f>g; Mul g half>y"), root=2**0.5, one=1, half=0.5
    ),
    "silu and gate": graph_model(
        steps("MatMul x w>h; Sigmoid h>s; Mul h s>g; MatMul x up>u; Mul g u>m; MatMul m down>d; Neg d>y"),
        {"w": weight(64, 96), "up": weight(64, 96, seed=1), "down": weight(96, 64, seed=2)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_gemms_give_the_same_fused_or_not(form: str) -> None:
    fused_once = 0
    for seed in range(8):
        proto = scattered(Random(seed), FORMS[form])
        fused, plain, report = both_ways(proto)
        check_same(proto, fused, plain, limit=2e-3)  # an element may be rounded to the other side
        fused_once += bool(report.fusions)
    assert fused_once > 0


ATTENTIONS = {
    "an added mask": attention(),
    "a condition": attention(mask="Where seen scaled lowest>masked"),
    "shapes with -1": attention(constants={"split": [0, -1, HEADS, SIZE], "merged": [0, -1, HIDDEN]}),
    "rows merged": attention(
        merge="Transpose heads>apart|perm=[0,2,1,3]; Reshape apart flat>a",
        constants={"flat": [-1, HIDDEN]},
        outputs={"y": ["all", HIDDEN]},
    ),
    "a cache": decoder(),
}


@looped("form", ATTENTIONS)
def test_attention_gives_the_same_fused_or_not(form: str) -> None:
    fused_once, recipe = 0, EXACT.model_copy(update={"output_projections": True})
    for seed in range(6):
        proto = scattered(Random(seed), ATTENTIONS[form])
        inputs = feeds(proto)
        plain, (fused, report) = rewrite(proto, recipe)[0], rewrite(proto, recipe, fuse=True)
        assert kinds(fused).get("MXFP8Attention", 0) == len(report.fusions)
        for before, after in zip(run(plain, inputs), run(fused, inputs), strict=True):
            np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max(), err_msg=str(seed))
        fused_once += bool(report.fusions)
    assert fused_once > 0
