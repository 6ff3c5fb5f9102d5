"""Claim: one MXFP8 linear on the CPU against ONNX Runtime (fp32, 8-bit, int8) and torch (fp32, bf16), by M."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from floors import measure
from harness import THREADS, noise_notes, options, publish, take_turns
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

Call = Callable[[], Any]

CACHE = (
    "One weight is multiplied again and again, so what the last-level cache holds is read from there: "
    "8-bit weights may fit, float32 ones do not. Rates above the read bandwidth are cache rates; "
    "a model's many weights come from memory."
)


def models(k: int, n: int, folder: Path) -> dict[str, onnxruntime.InferenceSession]:
    """Returns one session per contender, all computing the same y = relu(x @ w)."""
    weight = (np.random.default_rng(0).standard_normal((k, n)) / k**0.5).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="linear"), helper.make_node("Relu", ["h"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", 1, ["m", k])],
        [helper.make_tensor_value_info("y", 1, ["m", n])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sessions = {"ORT fp32": onnxruntime.InferenceSession(model.SerializeToString(), options())}
    for name, recipe in (("mxfp8", Recipe()), ("mxfp8 weight-only", Recipe(weight_only=True))):
        rewritten, _ = mxfp8_graph.rewrite(model, recipe)
        sessions[name] = ort.session(rewritten.SerializeToString(), session_options=options())
    bits8 = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    bits8.process()
    sessions["ORT MatMulNBits 8"] = onnxruntime.InferenceSession(bits8.model.model.SerializeToString(), options())
    dynamic = folder / "dynamic.onnx"
    quantize_dynamic(model, dynamic, weight_type=QuantType.QInt8)
    sessions["ORT int8 dynamic"] = onnxruntime.InferenceSession(dynamic, options())
    return sessions


def torch_calls(k: int, n: int, x: np.ndarray) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, dtype in (("torch fp32", torch.float32), ("torch bf16", torch.bfloat16)):
        values, weight = torch.from_numpy(x).to(dtype), torch.randn(n, k).to(dtype) / k**0.5
        calls[name] = lambda values=values, weight=weight: torch.nn.functional.linear(values, weight)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    arguments = parser.parse_args()
    k, n = arguments.k, arguments.n
    torch.set_num_threads(THREADS)
    floors = measure()
    packed = n * k * 33 / 32
    rows, notes = [], [floors.describe(), CACHE]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sessions = models(k, n, Path(folder))
        for m in arguments.m:
            x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
            calls: dict[str, Call] = {name: lambda s=s, x=x: s.run(None, {"x": x}) for name, s in sessions.items()}
            timings = take_turns(calls | torch_calls(k, n, x), rounds=7 if m >= 256 else 11)
            notes += [f"M = {m}: {note}" for note in noise_notes(timings)]
            ours = timings["mxfp8"].median
            for name, timing in timings.items():
                rate = packed / timing.median / floors.read
                peak = m * n * k / timing.median / (floors.bf16 or floors.fp32)
                is_ours = name.startswith("mxfp8")
                rows.append(
                    [
                        name,
                        m,
                        f"{timing.median * 1e3:.2f}",
                        f"{timing.spread / timing.median:.0%}",
                        f"{2 * m * n * k / timing.median / 1e9:.0f}",
                        f"{timing.median / ours:.2f}x",
                        f"{rate:.0%}" if is_ours and m <= 16 else "",
                        f"{peak:.0%}" if is_ours and m >= 64 else "",
                    ]
                )
    columns = ["contender", "M", "ms", "spread", "GFLOP/s", "mxfp8 is faster by", "of read bandwidth", "of peak FMA"]
    publish("gemm", f"One linear, K = {k}, N = {n}, {THREADS} threads", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
