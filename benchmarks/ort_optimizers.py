"""Claim: an optimization of ONNX Runtime slows models down on the processor, so `mxfp8_ops.ort.session` leaves it out.

A minimal reproduction that needs ONNX Runtime and onnx alone: Add and LayerNormalization (or RMSNormalization), which
SkipLayerNormFusion makes one SkipLayerNormalization of, timed with that fusion and without. The same session otherwise,
taking turns. By default the installed ONNX Runtime; with --versions others too, which pip fetches into a folder.

Floor: x, skip, the sum and the result, once each: 4 * 4 bytes a value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH, ROWS, WIDTHS = 8, 128, (384, 1024, 4096)
"""The fusion takes place on three dimensions only."""

FUSION = "SkipLayerNormFusion"


def child() -> None:
    """Prints the seconds of each case, fused and not, as JSON."""
    import numpy as np
    import onnxruntime
    from harness import options, take_turns
    from onnx import TensorProto, helper, numpy_helper

    def model(op: str, width: int) -> bytes:
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, ROWS, width]) for name in ("x", "skip", "y")
        ]
        rng = np.random.default_rng(0)
        names = ["scale", "bias"] if op == "LayerNormalization" else ["scale"]
        weights = [numpy_helper.from_array(rng.standard_normal(width, np.float32), name) for name in names]
        nodes = [
            helper.make_node("Add", ["x", "skip"], ["sum"]),
            helper.make_node(op, ["sum", *names], ["y"], axis=-1),
        ]
        graph = helper.make_graph(nodes, "skip", values[:2], values[2:], weights)
        opset = 17 if op == "LayerNormalization" else 23
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        return model.SerializeToString()

    rng, result = np.random.default_rng(1), {}
    for op in ("LayerNormalization", "RMSNormalization"):
        for width in WIDTHS:
            feeds = {name: rng.standard_normal((BATCH, ROWS, width), np.float32) for name in ("x", "skip")}
            cases = {}
            for label, disabled in (("fused", None), ("not fused", [FUSION])):
                try:
                    session = onnxruntime.InferenceSession(
                        model(op, width), options(), providers=["CPUExecutionProvider"], disabled_optimizers=disabled
                    )
                except Exception as error:  # an older version without the op
                    print(f"{onnxruntime.__version__} {op}: {str(error)[:80]} ...", file=sys.stderr)
                    break
                cases[label] = lambda s=session, f=feeds: s.run(None, f)
            if len(cases) == 2:
                timings = take_turns(cases, rounds=15)
                result[f"{op} {BATCH} x {ROWS} x {width}"] = {name: t.median for name, t in timings.items()}
    json.dump({"version": onnxruntime.__version__, "cases": result}, sys.stdout)


def run(folder: Path | None) -> dict[str, object]:
    """Returns what a child prints that has the ONNX Runtime in `folder`, or the installed one."""
    path = os.pathsep.join(filter(None, [str(folder or ""), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Times every version that is asked for, and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="*", default=[], help="further versions of onnxruntime, such as 1.20.1")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    from floors import measure
    from harness import THREADS, publish

    floors = measure()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folders: list[Path | None] = [None]
        for version in arguments.versions:
            folder = Path(temporary) / version
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*install, f"onnxruntime=={version}"], check=True)
            folders.append(folder)
        for folder in folders:
            outcome = run(folder)
            for case, times in outcome["cases"].items():
                fused, plain = times["fused"], times["not fused"]
                floor = 4 * 4 * BATCH * ROWS * int(case.split()[-1]) / floors.read
                milliseconds = [f"{1e3 * value:.2f}" for value in (floor, plain, fused)]
                rows.append([outcome["version"], case, *milliseconds, f"{fused / plain:.1f}x"])
    columns = ["onnxruntime", "case", "floor ms", "not fused ms", "fused ms", "fused / not fused"]
    title = f"{FUSION} of ONNX Runtime on the processor, {THREADS} threads"
    publish("ort_optimizers", title, columns, rows, notes=[floors.describe()])


if __name__ == "__main__":
    main()
