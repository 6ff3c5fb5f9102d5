"""How models of opsets 7 to 20 write the ops that changed below opset 21."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from models import node, value
from onnx import helper, numpy_helper

F32 = np.float32
rng = np.random.default_rng(3)

INPUTS = {
    "x": rng.standard_normal((3, 4, 5)).astype(F32),
    "half": rng.standard_normal((3, 4, 5)).astype(np.float16),
    "positive": np.abs(rng.standard_normal((3, 4, 5))).astype(F32) + 1,
    "row": rng.standard_normal((1, 4, 5)).astype(F32),
    "image": np.abs(rng.standard_normal((1, 2, 4, 5))).astype(F32),
    "deep": rng.standard_normal((1, 8, 2, 2)).astype(F32), "sequence": rng.standard_normal((5, 2, 4)).astype(F32),
    "ids": np.array([[0, 2, 1]]), "boxes": np.abs(rng.standard_normal((1, 5, 4))).astype(F32),
    "scores": np.abs(rng.standard_normal((1, 1, 5))).astype(F32), "yes": np.array(True), "times": np.array(3),
    "computed": np.array([1, 1, 2.5, 1.5], F32),
}  # fmt: skip
CONSTANTS = {
    "zero": np.array([0]), "two": np.array([2]), "three": np.array([3]), "axes": np.array([0, 2]),
    "pads": np.array([0, 1, 0, 0, 0, 2]), "value": np.array(1.5, F32), "low": np.array(-0.5, F32),
    "parts": np.array([2, 3]), "up": np.array([1, 1, 2.5, 1.5], F32), "down": np.array([1, 1, 0.6, 0.35], F32),
    "tall": np.array([1, 1, 2, 0.5], F32), "empty": np.zeros(0, F32), "shape": np.array([0, -1]),
    "onoff": np.array([0, 1], F32), "depth": np.array(4), "channels": np.array([0.5, 2], F32),
    "slope": rng.standard_normal(5).astype(F32), "kernel": rng.standard_normal((2, 2, 2, 2)).astype(F32),
    "gates": rng.standard_normal((1, 24, 4)).astype(F32), "recurrence": rng.standard_normal((1, 24, 6)).astype(F32),
    "rows": np.zeros((1, 4, 5), np.int64), "scale": np.array(0.1, F32), "point": np.array(3, np.uint8),
    "grid": (rng.standard_normal((1, 3, 3, 2)) / 3).astype(F32), "region": np.array([[0, 0, 2, 2]], F32),
    "signal": rng.standard_normal((1, 8, 1)).astype(F32), "bytes": np.arange(12, dtype=np.uint8).reshape(3, 4),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A node as models of some opsets have it."""

    op: str
    inputs: str
    first: int = 7
    last: int = 20
    outputs: int = 1
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.op, *self.inputs.split(), *(f"{k}={v}" for k, v in self.attributes)])

    def node(self, outputs: list[str]) -> onnx.NodeProto:
        return node(self.op, self.inputs, " ".join(outputs), self.label, **dict(self.attributes))


def form(op: str, inputs: str, first: int = 7, last: int = 20, outputs: int = 1, **attributes: Any) -> Form:
    return Form(op, inputs, first, last, outputs, tuple(attributes.items()))


REDUCTIONS = ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
FORMS = (
    *(form(op, "x", axis=axis) for op in ("Softmax", "LogSoftmax") for axis in (0, 1, 2)),
    *(form(op, "x") for op in ("Softmax", "LogSoftmax", "Identity", "Relu", "LeakyRelu", "Elu", "Selu", "HardSigmoid")),
    form("Hardmax", "x", axis=2),
    form("Clip", "x", 7, 10, min=-0.5, max=0.5),
    form("Clip", "half", 7, 10, min=-0.5, max=0.5),
    form("Clip", "half", 7, 10, max=0.5),
    form("Clip", "x low", 11),
    form("Pad", "x", 7, 10, pads=[0, 1, 0, 0, 0, 2], value=1.5),
    form("Pad", "half", 7, 10, pads=[0, 1, 0, 0, 0, 2], value=1.5),
    form("Pad", "x", 7, 10, pads=[0, 1, 0, 0, 0, 2], mode="reflect"),
    form("Pad", "x pads value", 11),
    form("Dropout", "x", 7, 11, ratio=0.3),
    form("Dropout", "x", outputs=2, last=11),
    form("Dropout", "x", 12),
    form("Slice", "x", 7, 9, axes=[0, 2], starts=[1, -3], ends=[3, 9999]),
    form("Slice", "x", 7, 9, starts=[1, 0], ends=[3, -1]),
    form("Slice", "x zero two", 10),
    form("TopK", "x", 7, 9, 2, k=2, axis=1),
    form("TopK", "x two", 10, 20, 2, axis=1),
    *(form(f"Reduce{kind}", "positive", 7, 17, axes=[1, 2]) for kind in (*REDUCTIONS,)),
    *(form(f"Reduce{kind}", "positive", keepdims=0) for kind in (*REDUCTIONS, "Sum")),
    *(form(f"Reduce{kind}", "positive axes", 18) for kind in REDUCTIONS),
    form("ReduceSum", "x", 7, 12, axes=[1], keepdims=0),
    form("ReduceSum", "x axes", 13),
    form("Squeeze", "row", 7, 12, axes=[0]),
    form("Squeeze", "row"),
    form("Squeeze", "row zero", 13),
    form("Unsqueeze", "x", 7, 12, axes=[0, 2]),
    form("Unsqueeze", "x axes", 13),
    form("Split", "x", 7, 12, 2, axis=2, split=[2, 3]),
    form("Split", "x", 7, 17, 2, axis=1),
    form("Split", "x parts", 13, 20, 2, axis=2),
    form("Split", "x", 18, 20, 2, axis=1, num_outputs=2),
    *(form("Upsample", "image", 7, 8, mode=mode, scales=[1.0, 1.0, 2.5, 1.5]) for mode in ("nearest", "linear")),
    *(form("Upsample", f"image {s}", 9, 9, mode=mode) for mode in ("nearest", "linear") for s in ("up", "computed")),
    *(form("Resize", f"image {s}", 10, 10, mode=mode) for mode in ("nearest", "linear") for s in ("up", "down")),
    form("Resize", "image computed", 10, 10, mode="nearest"),
    form("Resize", "image tall", 10, 10, mode="linear"),
    form("Resize", "image empty up", 11, mode="linear"),
    form("Resize", "image - up", 13, mode="nearest", coordinate_transformation_mode="align_corners"),
    form("BatchNormalization", "image channels channels channels channels"),
    form("BatchNormalization", "image channels channels channels channels", 7, 8, spatial=1),
    form("InstanceNormalization", "image channels channels"),
    form("LayerNormalization", "x slope slope", 17),
    form("AveragePool", "image", kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1),
    form("MaxPool", "image", 8, 20, 2, kernel_shape=[2, 2]),
    form("LpPool", "image", kernel_shape=[2, 2], p=2),
    form("LRN", "image", size=3),
    form("MeanVarianceNormalization", "image", 9),
    form("Conv", "image kernel"),
    form("ConvTranspose", "image kernel", strides=[2, 2]),
    form("PRelu", "x slope"),
    *(form(op, "positive slope") for op in ("Add", "Mul", "Sub", "Div", "Pow")),
    *(form(op, "x positive x") for op in ("Max", "Min", "Sum", "Mean")),
    *(form(op, "x", axis=1) for op in ("ArgMax", "ArgMin", "Flatten")),
    form("Concat", "x x", axis=1),
    form("Gather", "x ids", axis=1),
    form("DepthToSpace", "deep", blocksize=2),
    form("SpaceToDepth", "image", 13, blocksize=1),
    form("OneHot", "ids depth onoff", 9),
    form("Scatter", "x rows row", 9, 10),
    form("ScatterElements", "x rows row", 11),
    form("CumSum", "x zero", 11),
    form("NonMaxSuppression", "boxes scores three", 10),
    form("RoiAlign", "image region zero", 10, 20, output_height=2, output_width=2),
    form("GridSample", "image grid", 16),
    form("GridSample", "image grid", 16, 19, mode="bicubic"),
    form("DFT", "signal", 17, 19, axis=1),
    form("ThresholdedRelu", "x"),
    form("QuantizeLinear", "x scale point", 10),
    form("DequantizeLinear", "bytes scale point", 10),
    form("Reshape", "x shape"),
    form("Cast", "x", to=7),
    form("Shape", "x"),
    form("NonZero", "x", 9),
    form("LSTM", "sequence gates recurrence", outputs=2, hidden_size=6),
)


def old_model(forms: list[Form], opset: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """Returns a model of these nodes side by side, what to feed it, and the label of each output."""
    nodes, labels = [], []
    for index, each in enumerate(forms):
        outputs = [f"y{index}.{k}" for k in range(each.outputs)]
        nodes.append(each.node(outputs))
        shown = outputs[:1] if each.op == "Dropout" else outputs
        labels += [(name, each.label) for name in shown]
    read = {name for each in forms for name in each.inputs.split()}
    feeds = {name: array for name, array in INPUTS.items() if name in read}
    graph = helper.make_graph(
        nodes,
        "old",
        [value(name, array.dtype, array.shape) for name, array in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name, _ in labels],
        [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items() if name in read],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    return proto, feeds, [label for _, label in labels]
