"""diagnose(): what is installed, which kernels run, and whether a custom-op session really works here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Final, Literal

import numpy as np
import onnx

import mxfp8_graph
from mxfp8_ops import contract, numerics
from mxfp8_ops.errors import BackendError, Mxfp8Error

State = Literal["ok", "missing", "broken", "failed"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the diagnosis."""

    name: str
    state: State
    """missing: optional and not here. broken: optional, here, and does not work. failed: the CPU path does not work."""
    detail: str
    advice: str = ""
    """What to do about it; empty if it is ok."""


_REQUIRED: Final = (
    ("numpy", ("numpy",)),
    ("ml_dtypes", ("ml_dtypes",)),
    ("onnx", ("onnx",)),
    ("onnx-graphsurgeon", ("onnx-graphsurgeon",)),
    ("onnxruntime", ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")),
)
_CUDA_ONLY: Final = "needed for CUDA kernels only"
_OPTIONAL: Final = (
    ("torch", ("torch",), "needed for PyTorch models only", "pip install 'mxfp8-graph[torch]'"),
    (
        "cupy",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        _CUDA_ONLY,
        "pip install cupy-cuda13x (CUDA 13) or cupy-cuda12x (CUDA 12)",
    ),
)
"""Name, distributions that provide it, what it is for, how to get it."""


def diagnose() -> list[Check]:
    """Returns every check, in the order a reader needs them. Never raises: what goes wrong is a check that failed."""
    checks = [
        Check(name="python", state="ok", detail=f"{platform.python_version()} ({sys.executable})"),
        Check(
            name="platform",
            state="ok",
            detail=f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical processors",
        ),
        Check(name="mxfp8-graph", state="ok", detail=mxfp8_graph.__version__),
        Check(name="node contract", state="ok", detail=f"domain {contract.DOMAIN!r}, version {contract.VERSION}"),
    ]
    checks += [_required(name, distributions) for name, distributions in _REQUIRED]
    checks += [_optional(*row) for row in _OPTIONAL]
    checks += [
        _attempt("native library", _library),
        _attempt("kernels", _kernels),
        _attempt("session", _session),
    ]
    return checks + cuda_checks()


def cuda_checks() -> list[Check]:
    """Returns the checks of what only CUDA kernels need."""
    from mxfp8_ops.cuda import build as cuda_build
    from mxfp8_ops.cuda import system as cuda_system

    try:
        major, minor = cuda_system.driver_version()
        gpus = cuda_system.gpus()
        checks = [Check(name="cuda driver", state="ok", detail=f"supports CUDA {major}.{minor}")]
        if not gpus:
            checks.append(Check(name="gpu", state="missing", detail=f"none; {_CUDA_ONLY}", advice="see nvidia-smi -L"))
    except BackendError as error:
        what, _, advice = _parts(error)
        gpus, checks = [], [Check(name="cuda driver", state="missing", detail=f"{what}; {_CUDA_ONLY}", advice=advice)]
    for index, gpu in enumerate(gpus):
        text = f"{gpu.name}, {gpu.processors} multiprocessors, {gpu.memory / 1e9:.0f} GB, compute capability"
        checks.append(_attempt(f"gpu {index}", partial(_gpu, text, gpu.capability), otherwise="broken"))
    checks.append(_attempt("nvrtc", lambda: "{}.{}".format(*cuda_build.nvrtc_version()), otherwise="missing"))
    count, size = cuda_system.cache_contents()
    detail = f"{cuda_build.cache_folder()}: {count} kernels, {size} bytes"
    checks += [Check(name="cubin cache", state="ok", detail=detail), _cuda_provider()]
    for capability in dict.fromkeys(gpu.capability for gpu in gpus if gpu.capability >= (8, 0)):
        checks.append(_attempt("gemm routes", partial(_routes, capability), otherwise="missing"))
    if gpus:
        checks.append(_attempt("gpu session", _gpu_session, otherwise="broken"))
    return checks


def healthy(checks: Sequence[Check]) -> bool:
    """Returns whether the CPU path works: nothing failed (what is optional may be missing)."""
    return not any(check.state == "failed" for check in checks)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return None


def _required(name: str, distributions: Sequence[str]) -> Check:
    version = _version(distributions)
    if version is None:
        return Check(name=name, state="failed", detail="not installed", advice=f"pip install {name}")
    return Check(name=name, state="ok", detail=version)


def _optional(name: str, distributions: Sequence[str], purpose: str, command: str) -> Check:
    version = _version(distributions)
    if version is None:
        return Check(name=name, state="missing", detail=f"not installed; {purpose}", advice=command)
    return Check(name=name, state="ok", detail=version)


def _attempt(name: str, step: Callable[[], str], otherwise: State = "failed") -> Check:
    try:
        return Check(name=name, state="ok", detail=step())
    except Mxfp8Error as error:
        what, expected, advice = _parts(error)
        detail = "; ".join(filter(None, (what, expected)))
        return Check(name=name, state=otherwise, detail=detail or advice, advice=advice)
    except Exception as error:  # ONNX Runtime's and the loader's have no common base
        advice = "reinstall mxfp8-graph with pip" if otherwise == "failed" else "report this, with the output of doctor"
        return Check(name=name, state=otherwise, detail=str(error), advice=advice)


def _parts(error: Mxfp8Error) -> tuple[str, str, str]:
    """Returns what is, what was expected, and what to do: our messages have these parts."""
    *what, advice = str(error).split("; ")
    return "; ".join(what[:-1]), what[-1] if what else "", advice


def _library() -> str:
    from mxfp8_ops import cpu

    return str(cpu.library_path())


def _kernels() -> str:
    from mxfp8_ops import cpu

    forced = os.environ.get("MXFP8_ISA")
    why = f"MXFP8_ISA={forced}" if forced else "the best this processor has; MXFP8_ISA overrides it"
    return f"{cpu.isa()} ({why}); available: {', '.join(cpu.available_isas())}"


def _session() -> str:
    """Runs MXFP8Quantize and MXFP8Gemm, without function bodies to fall back on, and compares with the reference.

    Raises:
        BackendError: ONNX Runtime cannot run them, or the result is wrong.
    """
    from mxfp8_graph.checking.sessions import Session

    def run(model: onnx.ModelProto, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = Session(model, kernels=True, where="session").run({"x": x})["y"]
        return result

    _compare("session", run)
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__} runs the kernels, and they give what the reference gives"


def _compare(where: str, run: Callable[[onnx.ModelProto, np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    """Raises BackendError unless `run` gives what the reference gives."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 40), np.float32), rng.standard_normal((3, 40), np.float32)
    elements, scales = numerics.quantize(weight)
    got = run(_model(elements, scales), x)
    expected = numerics.gemm(*numerics.quantize(x), elements, scales)
    bound = numerics.gemm_error_bound(numerics.dequantize(*numerics.quantize(x)), numerics.dequantize(elements, scales))
    if not (np.abs(got - expected) <= bound).all():
        raise BackendError(
            where,
            f"a 2 x 3 x 40 gemm gives {got.ravel().tolist()}",
            expected=str(expected.ravel().tolist()),
            advice="report this, with the output of doctor",
        )


def _gpu(text: str, capability: tuple[int, int]) -> str:
    from mxfp8_ops.cuda import build as cuda_build

    return f"{text} {capability[0]}.{capability[1]} ({cuda_build.target(capability)})"


def _cuda_provider() -> Check:
    try:
        import onnxruntime

        found = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    except ImportError:
        found = False
    detail = "ONNX Runtime has it" if found else "not in this build of ONNX Runtime; needed for device 'cuda' only"
    advice = "" if found else "pip uninstall onnxruntime && pip install onnxruntime-gpu"
    return Check(name="cuda provider", state="ok" if found else "missing", detail=detail, advice=advice)


def _routes(capability: tuple[int, int]) -> str:
    from mxfp8_ops.cuda import build as cuda_build
    from mxfp8_ops.cuda import planner

    rows = []
    for row in planner.routes():
        if row.kernel == "slices":  # for who has no cuBLAS, which torch and CuPy bring
            continue
        if capability < row.capability or (row.alone and capability != row.capability):
            continue
        conditions = [f"M <= {row.most_rows}"] if row.most_rows else []
        conditions += ["K % 32 = 0"] * row.whole_blocks
        conditions += ["with torch or nvmath-python"] * bool(row.libraries & planner.CUBLASLT)
        conditions += ["on request"] * row.opt_in
        rows.append(f"{row.kernel} ({', '.join(conditions)})" if conditions else row.kernel)
    return f"{cuda_build.target(capability)}: the first that fits of {'; '.join(rows)}"


def _gpu_session() -> str:
    """Does on the GPU what `_session` does on the processor."""
    from mxfp8_ops import ort

    device = "cuda" if _cuda_provider().state == "ok" else "cuda-copies"

    def run(model: onnx.ModelProto, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = ort.session(model.SerializeToString(), device=device).run(None, {"x": x})[0]
        return result

    _compare("gpu session", run)
    return f"device {device!r} runs the kernels, and they give what the reference gives"


def _model(elements: numerics.Codes, scales: numerics.Codes) -> onnx.ModelProto:
    """Returns y = gemm(quantize(x), weight) as a model that needs the native kernels."""
    from onnx import TensorProto, helper

    def node(op: contract.Op, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
        attributes: dict[str, Any] = dict(op.attributes)
        return helper.make_node(op.name, inputs, outputs, domain=contract.DOMAIN, **attributes)

    nodes = [node(contract.QUANTIZE, ["x"], ["xe", "xs"]), node(contract.GEMM, ["xe", "xs", "we", "ws"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "doctor",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
        [
            helper.make_tensor("we", contract.FLOAT8E4M3FN, elements.shape, elements.tobytes(), raw=True),
            helper.make_tensor("ws", contract.UINT8, scales.shape, scales.tobytes(), raw=True),
        ],
    )
    imports = [helper.make_opsetid("", contract.MIN_OPSET), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
