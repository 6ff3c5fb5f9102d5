"""Claim: MXFP8Attention takes less time than ONNX Runtime's Attention, and nears what the processor can do.

Both run in this process, in turns, in sessions whose inputs and outputs are bound. ONNX Runtime's is its op of opset
23 on the same 3-D inputs. Column "of floor": the multiply-adds that are needed (half of them if causal) at the rate
of a large float32 product here, or the bytes that are needed at that of memcpy, whichever takes longer, over the time
of the case. Dot products of bfloat16, in registers or in AMX tiles, multiply faster than that floor knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnxruntime
from floors import copy_bandwidth
from harness import THREADS, noise_notes, options, publish, take_turns
from onnx import helper

from mxfp8_ops import contract, ort
from mxfp8_ops.nodes.attention import NO_MASK, NO_PAST

PEER = "ONNX Runtime"


@dataclass(frozen=True)
class Sizes:
    """One attention; `rows` new keys behind `past`."""

    batch: int
    rows: int
    past: int
    heads: int
    kv_heads: int
    d: int
    causal: bool = False
    masked: bool = False
    """A mask of keys, which hides none here, expanded to every row as torch's exporter writes it."""

    @property
    def products(self) -> float:
        """Multiply-adds."""
        seen = self.rows / 2 if self.causal and not self.past else self.rows
        return 2 * self.batch * self.heads * self.rows * (self.past + seen) * self.d

    @property
    def bytes(self) -> int:
        """Bytes of q and y, and of keys and values."""
        queries = 2 * self.rows * self.heads
        return 4 * self.batch * self.d * (queries + 2 * (self.past + self.rows) * self.kv_heads)


CASES = {
    "MiniLM, 8 x 128": Sizes(8, 128, 0, 12, 12, 32),
    "ViT-B, 8 x 197": Sizes(8, 197, 0, 12, 12, 64),
    "encoder, 1 x 1024": Sizes(1, 1024, 0, 12, 12, 32, masked=True),
    "encoder, 1 x 4096": Sizes(1, 4096, 0, 12, 12, 32, masked=True),
    "prefill, 256": Sizes(1, 256, 0, 16, 16, 128, causal=True),
    "decode, 256 keys": Sizes(1, 1, 255, 16, 16, 128),
    "decode, 4096 keys, 4 to a head": Sizes(1, 1, 4095, 16, 4, 128),
}


def session(sizes: Sizes, activation_dtype: int | None) -> Callable[[], object]:
    """Returns a call of one node, ONNX Runtime's if `activation_dtype` is None; that cannot leave out presents."""
    rng = np.random.default_rng(0)
    length, kv = sizes.past + sizes.rows, sizes.kv_heads * sizes.d
    arrays = {
        name: rng.standard_normal((sizes.batch, sizes.rows, width), np.float32)
        for name, width in (("q", sizes.heads * sizes.d), ("k", kv), ("v", kv))
    }
    past = (sizes.batch, sizes.kv_heads, sizes.past, sizes.d)
    attributes = {"q_num_heads": sizes.heads, "kv_num_heads": sizes.kv_heads, "is_causal": int(sizes.causal)}
    ours = activation_dtype is not None
    if sizes.masked:
        arrays["mask"] = np.ones((sizes.batch, 1, sizes.rows, length), np.bool_)
    elif ours:
        arrays["mask"] = NO_MASK
    if ours:
        attributes |= {"activation_dtype": activation_dtype or 0}
    if ours or sizes.past:
        for name in ("past_key", "past_value"):
            arrays[name] = rng.standard_normal(past if sizes.past else NO_PAST, np.float32)
    inputs = [*arrays] if "mask" in arrays else [*list(arrays)[:3], *([""] * bool(sizes.past)), *list(arrays)[3:]]
    presents = ["present_key", "present_value"] if sizes.past and not ours else ["", ""] if ours else []
    node = helper.make_node(
        "MXFP8Attention" if ours else "Attention",
        inputs,
        ["y", *presents],
        domain="mxfp8" if ours else "",
        **attributes,
    )
    code = {np.dtype(np.float32): contract.FLOAT, np.dtype(np.bool_): contract.BOOL}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, code[x.dtype], x.shape) for name, x in arrays.items()],
        [helper.make_tensor_value_info(name, contract.FLOAT, None) for name in ("y", *presents) if name],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    content = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    if ours:
        inference_session = ort.session(content, session_options=options())
    else:
        inference_session = onnxruntime.InferenceSession(content, options(), providers=["CPUExecutionProvider"])
    binding = inference_session.io_binding()
    shapes = {"y": (sizes.batch, sizes.rows, sizes.heads * sizes.d)}
    shapes |= dict.fromkeys((name for name in presents if name), (*past[:2], length, sizes.d))
    alive = [binding, arrays, inference_session]
    for name, x in arrays.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x))
    for name, shape in shapes.items():
        room = np.zeros(shape, np.float32)
        alive.append(room)
        binding.bind_output(name, "cpu", 0, np.float32, shape, room.ctypes.data)
    return lambda: (inference_session.run_with_iobinding(binding), alive)[0]


def main() -> None:
    """Times each case, and writes results/attention."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    copy = copy_bandwidth(np.ones(256 << 20, np.uint8), THREADS)
    a = np.ones((1536, 1536), np.float32)
    rate = a.shape[0] ** 3 / take_turns({"product": lambda: a @ a}, rounds=11)["product"].median
    rows, every = [], {}
    for name, sizes in CASES.items():
        calls = {
            PEER: session(sizes, None),
            "MXFP8Attention, float32": session(sizes, contract.FLOAT),
            "MXFP8Attention, bfloat16": session(sizes, contract.BFLOAT16),
        }
        timings = take_turns(calls, rounds=21)
        floor = max(sizes.products / rate, sizes.bytes / copy)
        for kind, timing in timings.items():
            every[f"{name}: {kind}"] = timing
            faster = timings[PEER].median / timing.median
            cells = f"{timing.median * 1e3:.2f}", f"{timing.spread / timing.median:.0%}", f"{floor / timing.median:.0%}"
            rows.append([name, kind, *cells, f"{faster:.2f}x"])
    columns = ["case", "node", "ms", "spread", "of floor", "faster"]
    notes = [
        f"Floors measured in this run: {2 * rate / 1e9:.0f} GFLOP/s, the float32 product of 1536 x 1536 matrices, and "
        f"{copy / 1e9:.1f} GB/s, memcpy.",
        *noise_notes(every),
    ]
    publish("attention", "Attention, one node in a session", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
