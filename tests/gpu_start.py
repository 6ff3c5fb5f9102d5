"""The first checks on a GPU, each in a process of its own: a failure names its place.

install   which packages there are, the providers of ONNX Runtime, the libraries of CUDA
session   a tiny model in ONNX Runtime's CUDA provider, against the processor
products  a tiny product by each row of the dispatch table, against float64
"""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

PACKAGES = "onnxruntime onnxruntime-gpu cupy-cuda13x cupy-cuda12x torch nvidia-cublas nvidia-cuda-nvrtc"


def install() -> None:
    """Prints versions and providers; raises BackendError with the command that mends an installation."""
    from mxfp8_ops.errors import BackendError
    from mxfp8_ops.ort import package

    versions = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    print(*(f"{name} {versions[name]}" for name in PACKAGES.split() if name in versions), sep="\n")
    if text := package.both(package.installed()):
        raise BackendError("onnxruntime", text, expected="one of them", advice=package.mend(package.installed()))
    ort = package.onnxruntime()
    print("providers:", *ort.get_available_providers())
    package.check_cuda(ort)
    print(package.libraries(ort))


def session(device: str) -> None:
    """Compares a model on a device with the processor; raises AssertionError with what differs."""
    import models

    import mxfp8_graph
    from mxfp8_ops import ort

    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path, _ = mxfp8_graph.rewrite(models.save(models.chain_model(), Path(folder) / "m.onnx"))
        found, expected = (ort.session(path, device=each).run(None, {"x": x})[0] for each in (device, "cpu"))
    print(f"session on {device}: largest difference from the processor {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def products(device: str) -> None:
    """Multiplies by every row of the dispatch table; raises AssertionError if one is wrong, or none runs."""
    import torch

    from mxfp8_ops import numpy_nodes
    from mxfp8_ops.cuda import dispatch, planner
    from mxfp8_ops.errors import BackendError
    from mxfp8_ops.torch_ops import cuda

    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape, np.float32) for shape in ((16, 256), (64, 256)))
    codes, weight = numpy_nodes.quantize(x), numpy_nodes.quantize(w)
    values = {True: numpy_nodes.dequantize(*codes), False: x}
    y = {quantized: each.astype(np.float64) @ numpy_nodes.dequantize(*weight).T for quantized, each in values.items()}
    done = 0
    for row in planner.routes():
        quantized = row.kernel != "parts"  # it splits values in float32
        operands = [torch.from_numpy(each).to(device) for each in (*(codes if quantized else (x,)), *weight)]
        try:
            with dispatch.forced_route(row.kernel):
                result = (cuda.gemm if quantized else cuda.weight_gemm)(*operands)
        except BackendError as error:
            print(f"{row.kernel:13} does not run: {error}")
            continue
        error = np.linalg.norm(result.cpu().numpy() - y[quantized]) / np.linalg.norm(y[quantized])
        print(f"{row.kernel:13} relative L2 difference from float64 {error:.1e}")
        assert error < 1e-5, row.kernel
        done += 1
    assert done, "no row of the dispatch table ran"


if __name__ == "__main__":
    check, *rehearsal = sys.argv[1:]
    if not rehearsal:
        {"install": install, "session": lambda: session("cuda"), "products": lambda: products("cuda")}[check]()
