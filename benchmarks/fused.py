"""Claim: a fused node takes a fraction of the time of the nodes it stands for, and a norm runs near memory speed.

The shapes are those of MiniLM on 8 x 128 tokens, as many nodes in one session as the model has. Both sides have our
kernels; the composition's other nodes are ONNX Runtime's. The floor is the time that memcpy, on all threads, takes to
move as many bytes as the fused nodes read and write; for gemms, the same gemms without an activation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import onnxruntime
from floors import copy_bandwidth
from harness import THREADS, Timing, noise_notes, options, publish, take_turns
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mxfp8_ops import contract, numerics, ort

TOKENS, WIDTH, INNER = 1024, 384, 1536
NORMS, GEMMS = 13, 6
OPSET = 23

Call = Callable[[], object]


def node(op: str, inputs: str, outputs: str, **attributes: object) -> NodeProto:
    """Returns a node of ours, or of ONNX; names are separated by single spaces, and may be empty."""
    domain = contract.DOMAIN if op in contract.OPS else ""
    return helper.make_node(op, inputs.split(" "), outputs.split(" "), domain=domain, **attributes)


def session(
    nodes: list[NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray], results: str
) -> Call:
    """Returns a call of a session with these nodes, which computes `results`, whose names are separated by spaces."""
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items() if array.dtype != np.uint8]
    for name, array in constants.items():
        if array.dtype == np.uint8:
            dtype = TensorProto.UINT8 if name.endswith("_s") else TensorProto.FLOAT8E4M3FN
            tensors.append(helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()]
    made = [helper.make_tensor_value_info(name, dtype_of(name), None) for name in results.split()]
    graph = helper.make_graph(nodes, "nodes", ports, made, tensors)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    chosen = options()
    ort.register(chosen)
    running = onnxruntime.InferenceSession(model.SerializeToString(), chosen, providers=["CPUExecutionProvider"])
    feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    return lambda: running.run_with_ort_values(results.split(), feeds)


def dtype_of(name: str) -> int:
    """Returns the dtype of a result: elements are called e, scales s."""
    return {"e": TensorProto.FLOAT8E4M3FN, "s": TensorProto.UINT8}.get(name[0], TensorProto.FLOAT)


def norms(*, fused: bool) -> Call:
    """Returns a call of NORMS norms of a sum, each of what the one before it gave, as in an encoder."""
    nodes: list[NodeProto] = []
    for i in range(NORMS):
        if fused:
            nodes.append(node("MXFP8AddNormQuantize", f"x{i} r scale bias", f"e{i} s{i} x{i + 1} "))
            continue
        nodes.append(node("Add", f"x{i} r", f"sum{i}"))
        nodes.append(node("LayerNormalization", f"sum{i} scale bias", f"x{i + 1}", epsilon=1e-5))
        nodes.append(node("MXFP8Quantize", f"x{i + 1}", f"e{i} s{i}"))
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((TOKENS, WIDTH), np.float32) for name in ("x0", "r")}
    constants = {name: rng.standard_normal(WIDTH, np.float32) for name in ("scale", "bias")}
    return session(nodes, inputs, constants, " ".join(f"e{i} s{i}" for i in range(NORMS)))


def gemms(activation: list[NodeProto] | str | None) -> Call:
    """Returns a call of GEMMS gemms: alone, with an epilogue of that name, or with these nodes behind them."""
    nodes = [node("MXFP8Quantize", "x", "a a_s")]
    rng, constants = np.random.default_rng(0), {"bias": np.zeros(INNER, np.float32)}
    for i in range(GEMMS):
        elements, scales = numerics.quantize(rng.standard_normal((INNER, WIDTH), np.float32) / 20)
        constants |= {f"w{i}": elements, f"w{i}_s": scales}
        operands = f"a a_s w{i} w{i}_s bias"
        if isinstance(activation, str):
            nodes.append(node("MXFP8FusedGemm", operands, f"y{i}", epilogue=activation))
            continue
        nodes.append(node("MXFP8Gemm", operands, f"h{i}" if activation else f"y{i}"))
        for step in activation or ():
            own = {"h": f"h{i}", "t": f"t{i}", "y": f"y{i}"}
            copy = NodeProto()
            copy.CopyFrom(step)
            copy.input[:], copy.output[:] = ([own[name] for name in names] for names in (step.input, step.output))
            nodes.append(copy)
    x = {"x": rng.standard_normal((TOKENS, WIDTH), np.float32)}
    return session(nodes, x, constants, " ".join(f"y{i}" for i in range(GEMMS)))


def main() -> None:
    """Times each fused node beside what it stands for, and writes results/fused."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    values = TOKENS * WIDTH
    moved = NORMS * (3 * 4 * values + values + values // 32)  # x, the residual and normalized; elements and scales
    compositions = {
        "gelu": [node("Gelu", "h", "y")],
        "gelu_tanh": [node("Gelu", "h", "y", approximate="tanh")],
        "silu": [node("Sigmoid", "h", "t"), node("Mul", "h t", "y")],
        "relu": [node("Relu", "h", "y")],
    }
    cases = {"norms": norms(fused=False), "norms, fused": norms(fused=True), "gemms": gemms(None)}
    for name, nodes in compositions.items():
        cases |= {name: gemms(nodes), f"{name}, fused": gemms(name)}
    timings = take_turns(cases, rounds=15)
    copied = copy_bandwidth(np.ones((TOKENS, WIDTH), np.float32), THREADS)
    rows = [row(timings, f"{NORMS} x add, layer norm, quantize", "norms", moved / copied)]
    floor = timings["gemms"].median
    rows += [row(timings, f"{GEMMS} x gemm, {name}", name, floor) for name in compositions]
    columns = ["nodes", "ms", "fused, ms", "faster", "floor, ms", "fused / floor"]
    title = f"Fused nodes, {TOKENS} tokens, {WIDTH} and {INNER} wide"
    publish("fused", title, columns, rows, notes=noise_notes(timings))


def row(timings: dict[str, Timing], title: str, name: str, floor: float) -> list[str]:
    """Returns a row of the table; `floor` is in seconds."""
    apart, fused = timings[name].median, timings[f"{name}, fused"].median
    times = (f"{seconds * 1e3:.2f}" for seconds in (apart, fused))
    return [title, *times, f"{apart / fused:.2f}x", f"{floor * 1e3:.2f}", f"{fused / floor:.2f}"]


if __name__ == "__main__":
    main()
