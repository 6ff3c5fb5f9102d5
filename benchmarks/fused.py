"""Claim: a fused node takes a fraction of the time of the nodes it stands for.

The shapes are those of MiniLM on 8 x 128 tokens, as many nodes in one session as the model has. Both sides have our
kernels; the composition's other nodes are ONNX Runtime's. The floor is the time of these gemms without an activation.

`together` is what is not fused, and why: the gemms on one activation (Q, K, V; gate, up) apart, as they are, against
one gemm with all their weights, whose result stays as it is, or is split into theirs. On 2 cores without AMX no model
that whole_models.py measures gains 3% by it: MiniLM 0.7%, ViT-B 1.3%, a decode step 1.1%. One text of 16 tokens would:
0.6 ms of 5.7 of MiniLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnxruntime
from harness import Timing, noise_notes, options, publish, take_turns
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mxfp8_ops import contract, cpu, numpy_nodes, ort

TOKENS, WIDTH, INNER = 1024, 384, 1536
GEMMS = 6
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
    outputs = [helper.make_tensor_value_info(name, dtype_of(name), None) for name in results.split()]
    graph = helper.make_graph(nodes, "nodes", ports, outputs, tensors)
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


def gemms(activation: list[NodeProto] | str | None) -> Call:
    """Returns a call of GEMMS gemms: alone, with an epilogue of that name, or with these nodes behind them."""
    nodes = [node("MXFP8Quantize", "x", "a a_s")]
    rng, constants = np.random.default_rng(0), {"bias": np.zeros(INNER, np.float32)}
    for i in range(GEMMS):
        elements, scales = numpy_nodes.quantize(rng.standard_normal((INNER, WIDTH), np.float32) / 20)
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


@dataclass(frozen=True)
class Products:
    """Gemms on one activation: how many values a row of it has, and a row of each result."""

    name: str
    k: int
    widths: tuple[int, ...]
    rows: tuple[int, ...]


SHARED = (
    Products("Q, K, V of MiniLM", 384, (384, 384, 384), (1, 16, 1024, 4096)),
    Products("Q, K, V of ViT-B", 768, (768, 768, 768), (197, 1576)),
    Products("Q, K, V of a decoder", 2048, (2048, 256, 256), (1, 16, 256)),
    Products("gate and up of a decoder", 2048, (5632, 5632), (1, 16, 256)),
)
FEW_ROWS = 16
CACHED_BYTES = 280 << 20
"""More than the caches hold: with few rows, products read their weights from memory."""


def layers_of(products: Products, rows: int) -> int:
    """Returns how many layers a session has."""
    return 2 if rows > FEW_ROWS else min(48, CACHED_BYTES // (products.k * sum(products.widths)))


def layers(products: Products, rows: int, how: str) -> Call:
    """Returns a call of these products "apart", as "one" gemm or as one that is "split"; each layer has weights."""
    rng, sizes = np.random.default_rng(0), np.array(products.widths, np.int64)
    constants: dict[str, np.ndarray] = {"sizes": sizes} if how == "split" else {}
    widths = products.widths if how == "apart" else (sum(products.widths),)
    nodes, inputs, results = [], {}, []
    for layer in range(layers_of(products, rows)):
        inputs[f"x{layer}"] = rng.standard_normal((rows, products.k), np.float32)
        nodes.append(node("MXFP8Quantize", f"x{layer}", f"a{layer} a{layer}_s"))
        for i, width in enumerate(widths):
            weight = rng.standard_normal((width, products.k), np.float32) / 20
            constants |= dict(zip((f"w{layer}_{i}", f"w{layer}_{i}_s"), cpu.quantize(weight), strict=True))
            constants[f"b{layer}_{i}"] = np.zeros(width, np.float32)
            output = f"y{layer}_{i}"
            nodes.append(node("MXFP8Gemm", f"a{layer} a{layer}_s w{layer}_{i} w{layer}_{i}_s b{layer}_{i}", output))
            results.append(output)
        if how == "split":
            parts = [f"z{layer}_{i}" for i in range(len(sizes))]
            nodes.append(node("Split", f"{results.pop()} sizes", " ".join(parts), axis=-1))
            results += parts
    return session(nodes, inputs, constants, " ".join(results))


def together() -> None:
    """Times gemms on one activation, apart and as one, and writes results/together."""
    rows, notes = [], []
    for products in SHARED:
        for count in products.rows:
            cases = {how: layers(products, count, how) for how in ("apart", "one", "split")}
            timings = take_turns(cases, rounds=15)
            apart, *others = (timings[how].median * 1e3 / layers_of(products, count) for how in cases)
            gains = [cell for each in others for cell in (f"{each:.3f}", f"{apart / each:.2f}x")]
            rows.append([products.name, str(count), f"{apart:.3f}", *gains])
            notes += [f"{products.name}, {count} rows: {note}" for note in noise_notes(timings)]
    columns = ["gemms", "rows", "apart, ms", "one, ms", "faster", "one and Split, ms", "faster"]
    publish("together", "Gemms on one activation, a layer", columns, rows, notes=notes)


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("fused", "together"))
    only = parser.parse_args().only
    if only != "together":
        fused_nodes()
    if only != "fused":
        together()


def fused_nodes() -> None:
    """Times each fused node beside what it stands for, and writes results/fused."""
    compositions = {
        "gelu": [node("Gelu", "h", "y")],
        "gelu_tanh": [node("Gelu", "h", "y", approximate="tanh")],
        "silu": [node("Sigmoid", "h", "t"), node("Mul", "h t", "y")],
        "relu": [node("Relu", "h", "y")],
    }
    cases = {"gemms": gemms(None)}
    for name, nodes in compositions.items():
        cases |= {name: gemms(nodes), f"{name}, fused": gemms(name)}
    timings = take_turns(cases, rounds=15)
    floor = timings["gemms"].median
    rows = [row(timings, f"{GEMMS} x gemm, {name}", name, floor) for name in compositions]
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
