"""Claim: picking rows of a packed table takes no longer than ONNX Runtime's Gather of float32, reading a quarter of it.

Every call picks rows that no call before it picked, until all were: they come from memory, as those of a vocabulary do.
Tables, indices and results are bound once, so no case allocates. Results are written whole by every case of a dtype;
memcpy of as many bytes is the floor.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import onnxruntime
from floors import copy_bandwidth
from harness import THREADS, noise_notes, options, publish, take_turns
from onnx import helper

from mxfp8_ops import contract, cpu, onnx_functions, ort
from mxfp8_ops.formats import E4M3

V, D, IDS = 32768, 4096, 512
OPSET = contract.MIN_OPSET
PEER = "ONNX Runtime Gather f32"

Case = tuple[Callable[[], object], float, float]
"""A call, the bytes it reads of the table, and those it writes."""

Bound = dict[str, tuple[onnxruntime.OrtValue, int]]
"""Inputs of a model and their dtypes."""


def ids() -> itertools.cycle[onnxruntime.OrtValue]:
    """Returns all rows in random order, IDS at a time, again and again."""
    every = np.random.default_rng(0).permutation(V).reshape(-1, IDS)
    return itertools.cycle([onnxruntime.OrtValue.ortvalue_from_numpy(each) for each in every])


def picker(op: str, table: Bound, dtype: int, *, kernels: bool) -> Callable[[], object]:
    """Returns a call that picks the next rows with a node `op`, in a session of its own."""
    ours = op == contract.EMBEDDING.name
    node = helper.make_node(op, ["ids", *table] if ours else [*table, "ids"], ["y"], domain="mxfp8" if ours else "")
    if ours:
        node.attribute.append(helper.make_attribute("output_dtype", dtype))
    types = {name: (code, list(value.shape())) for name, (value, code) in table.items()} | {"ids": (7, ["n"])}
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, *spec) for name, spec in types.items()],
        [helper.make_tensor_value_info("y", dtype, ["n", D])],
    )
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(onnx_functions.functions(model))
    content = model.SerializeToString()
    session = (
        ort.session(content, session_options=options())
        if kernels
        else onnxruntime.InferenceSession(content, options(), providers=["CPUExecutionProvider"])
    )
    binding, bits, chosen = session.io_binding(), 4 if dtype == contract.FLOAT else 2, ids()
    room = np.zeros((IDS, D), f"u{bits}")
    for name, (value, _) in table.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cpu", 0, dtype, room.shape, room.ctypes.data)

    def call(kept: np.ndarray = room) -> None:
        binding.bind_ortvalue_input("ids", next(chosen))
        session.run_with_iobinding(binding)

    return call


def main() -> None:
    """Times each case, and writes results/embedding."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    wide = np.random.default_rng(0).standard_normal((V, D), np.float32)
    elements, scales = cpu.quantize(wide)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    typed = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(elements, E4M3.onnx_dtype)
    packed: Bound = {"b": (typed, E4M3.onnx_dtype), "s": (value(scales), contract.UINT8)}
    f32: Bound = {"b": (value(wide), contract.FLOAT)}
    f16: Bound = {"b": (value(wide.astype(np.float16)), contract.FLOAT16)}
    few, many, ours = IDS * (D + D // 32), IDS * D * 4, contract.EMBEDDING.name
    cases: dict[str, Case] = {
        PEER: (picker("Gather", f32, contract.FLOAT, kernels=False), many, many),
        "ONNX Runtime Gather f16": (picker("Gather", f16, contract.FLOAT16, kernels=False), many / 2, many / 2),
        "MXFP8Embedding to f32": (picker(ours, packed, contract.FLOAT, kernels=True), few, many),
        "MXFP8Embedding to f16": (picker(ours, packed, contract.FLOAT16, kernels=True), few, many / 2),
        "MXFP8Embedding to bf16": (picker(ours, packed, contract.BFLOAT16, kernels=True), few, many / 2),
    }
    copy = copy_bandwidth(np.ones(256 << 20, np.uint8), THREADS)
    timings = take_turns({name: call for name, (call, *_) in cases.items()}, rounds=21)
    rows = []
    for name, timing in timings.items():
        _, read, written = cases[name]
        cells = f"{timing.median * 1e3:.2f}", f"{timing.spread / timing.median:.0%}", f"{read / 1e6:.1f}"
        floor = (read + written) / copy / timing.median
        faster = timings[PEER].median / timing.median
        rows.append([name, *cells, f"{written / 1e6:.1f}", f"{floor:.0%}", f"{faster:.2f}x"])
    columns = ["case", "ms", "spread", "MB read", "MB written", "of memcpy", "faster than Gather f32"]
    notes = [
        f"Floor measured in this run: memcpy moves {copy / 1e9:.1f} GB/s, read and written.",
        'Column "of memcpy": the time that memcpy would take for as many bytes, over that of the case.',
        *noise_notes(timings),
    ]
    publish("embedding", f"{IDS} random rows of a table of {V} x {D}", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
