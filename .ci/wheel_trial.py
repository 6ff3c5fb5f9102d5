"""Does the first steps of a user of an installed wheel: rewrites a model, runs and verifies it. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import mxfp8_ops
from mxfp8_graph import cli
from mxfp8_ops import conformance, cpu, ort


def model() -> onnx.ModelProto:
    """Returns a feed-forward layer of 256 and 512 columns."""
    rng = np.random.default_rng(0)
    weights = {"up": rng.standard_normal((256, 512), np.float32), "down": rng.standard_normal((512, 256), np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "down"], ["c"], "second"),
        helper.make_node("Add", ["c", "x"], ["y"]),
    ]
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 256])] for name in "xy"]
    tensors = [numpy_helper.from_array(weight / 16, name) for name, weight in weights.items()]
    graph = helper.make_graph(nodes, "layer", *ports, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def conform() -> None:
    """Ends the program if a kernel of this machine differs from the test vectors, which are in the wheel."""
    for isa in cpu.available_isas():
        with cpu.forced_isa(isa):
            for result in (
                conformance.check("quantize", cpu.quantize),
                conformance.check("dequantize", cpu.dequantize),
                conformance.check("gemm", cpu.gemm),
            ):
                if not result.passed:
                    sys.exit(f"{isa}:\n{result}")
        print(f"{isa}: all cases of the conformance kit passed")


def command(*words: object) -> None:
    """Runs the command in this process, as an emulator has to; ends the program if it fails."""
    sys.argv = ["mxfp8-graph", *map(str, words)]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise


def main() -> None:
    """Does it in the folder that the command line names."""
    folder = Path(sys.argv[1])
    conform()
    onnx.save(model(), folder / "layer.onnx")
    command("rewrite", folder / "layer.onnx", "-o", folder / "small.onnx")
    command("verify", folder / "layer.onnx", folder / "small.onnx")
    x = np.random.default_rng(1).standard_normal((5, 256), np.float32)
    [y] = ort.session(folder / "small.onnx").run(None, {"x": x})
    print(f"{Path(mxfp8_ops.__file__).parent}: kernels {cpu.isa()}, output {y.shape}")


if __name__ == "__main__":
    main()
