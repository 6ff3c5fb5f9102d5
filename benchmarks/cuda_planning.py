"""Claim: a CUDA op takes at most 8 us of the processor before the driver, of which its plan takes 3; it needs no GPU.

Floor: a call of the same library that does nothing. `plan` is what a product costs until its plan is there. `op` is a
whole call of torch's op but for torch's dispatcher, on tensors in the memory of the processor and on a CUDA driver
whose functions do nothing: checks, results, plan and launches.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import noise_notes, publish, take_turns

from mxfp8_ops import native
from mxfp8_ops.cuda import device, dispatch, loader, planner
from mxfp8_ops.cuda.planner import CODES, Gemm
from mxfp8_ops.torch_ops import cuda as torch_cuda

GPU = SimpleNamespace(index=-1, capability=(9, 0), processors=132)
MUST = {"plan": 3.0, "op": 8.0}
"""Microseconds."""
CASES = {"skinny": ("bfloat16", 1), "large": ("e4m3", 512), "parts": ("float32", 512), "float32": ("float32", 0)}
"""Row of the dispatch table -> kind of x, M."""
FUNCTIONS = (
    "cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuLaunchKernel cuMemAlloc_v2 cuMemFree_v2 cuMemcpyHtoDAsync_v2 "
    "cuMemcpyDtoHAsync_v2 cuMemsetD32Async cuStreamSynchronize cuGetErrorName cuFuncSetAttribute"
)


def plan(kind: str, m: int) -> planner.Plan:
    """Plans a product with an 8192 x 8192 weight, as the front ends do; for M = 0, one by ordinary cores."""
    k = 8192 if m else 8191
    codes = CODES[kind], CODES["e4m3"], CODES["bfloat16"]
    product = Gemm(*codes, 1 << 40, 1 << 41, 1 << 42, 1 << 43, 0, 1 << 44, m or 64, 8192, k)
    return planner.gemm(dispatch.place(GPU, planner.BFLOAT16_PRODUCTS if m else 0), product)


def connect() -> list[Any]:
    """Gives the library a driver whose functions do nothing; returns what must stay alive."""

    @loader._GPU
    def gpu(_index: int, properties: Any, *_: int) -> int:
        properties[0].context, properties[0].processors, properties[0].capability = 1, GPU.processors, 90
        return 0

    @loader._KERNELS
    def kernels(_index: int, count: int, _names: Any, functions: Any, *_: int) -> int:
        for i in range(count):
            functions[i] = 1
        return 0

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("cuda_planning: no C compiler; expected cc or gcc, for the driver that does nothing")
    with tempfile.TemporaryDirectory() as folder:
        source, driver = Path(folder, "driver.c"), Path(folder, "driver.so")
        source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in FUNCTIONS.split()))
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(driver)], check=True)
        callbacks, message = loader._Loader(gpu, kernels), ctypes.create_string_buffer(1024)
        if native.load().mxfp8_cuda_open(str(driver).encode(), ctypes.byref(callbacks), message, len(message)):
            raise SystemExit(f"cuda_planning: {message.value.decode()}")
    return [gpu, kernels]


def ops() -> dict[str, Callable[[], Any]]:
    """Returns calls of the ops of CUDA tensors, one launch each but the last, which needs scratch memory and two."""
    loader.connect = lambda: None
    device.device = lambda index: GPU
    torch_cuda._stream = lambda index: 0
    torch_cuda._allocate = lambda size, index: (t := torch.empty(size, dtype=torch.uint8), t.data_ptr())
    x, w = torch.randn(8, 1024, dtype=torch.bfloat16), torch.randn(1024, 1024)
    a, b, deep = torch_cuda.quantize(x), torch_cuda.quantize(w), torch_cuda.quantize(torch.randn(64, 16384))
    values = torch.randn(1, 16384, dtype=torch.bfloat16)
    return {
        "op, weight_gemm": lambda: torch_cuda.weight_gemm(x, *b),
        "op, gemm": lambda: torch_cuda.gemm(*a, *b),
        "op, quantize": lambda: torch_cuda.quantize(x),
        "op, dequantize": lambda: torch_cuda.dequantize(*a),
        "weight_gemm with K split": lambda: torch_cuda.weight_gemm(values, *deep),
    }


def main() -> None:
    """Measures and writes cuda_planning.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    alive = connect()
    contenders: dict[str, Callable[[], Any]] = {"floor: an empty call": native.load().mxfp8_contract_version}
    for row, (kind, m) in CASES.items():
        assert planner.routes()[plan(kind, m).route].kernel == row
        contenders[f"plan, {row}"] = lambda kind=kind, m=m: plan(kind, m)
    times = take_turns(contenders | ops(), rounds=arguments.rounds)
    rows = []
    for name, timing in times.items():
        spent, must = 1e6 * timing.median, MUST.get(name.partition(",")[0])
        verdict = "" if must is None else "ok" if spent <= must else "MISSED"
        rows.append([name, f"{spent:.2f}", f"{timing.spread / timing.median:.0%}", must or "", verdict])
    columns = ["contender", "us", "spread", "at most", ""]
    title = "The processor's time for a CUDA op before the driver: plans with K = N = 8192, ops with K = N = 1024"
    publish("cuda_planning", title, columns, rows, notes=noise_notes(times))
    del alive


if __name__ == "__main__":
    main()
