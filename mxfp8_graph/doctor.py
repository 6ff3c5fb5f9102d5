"""diagnose(): what is installed, which kernels run, and whether a custom-op session really works here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Literal

import numpy as np
import onnx

import mxfp8_graph
from mxfp8_ops import contract, numerics
from mxfp8_ops.errors import BackendError, Mxfp8Error

State = Literal["ok", "missing", "failed"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the diagnosis."""

    name: str
    state: State
    """missing: optional and not here. failed: the CPU path does not work without it."""
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
_OPTIONAL: Final = (
    ("torch", ("torch",), "needed for PyTorch models only", "pip install 'mxfp8-graph[torch]'"),
    (
        "cupy",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "needed for CUDA kernels only",
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


def _attempt(name: str, step: Callable[[], str]) -> Check:
    try:
        return Check(name=name, state="ok", detail=step())
    except Mxfp8Error as error:
        # Our messages end in what to do.
        *what, advice = str(error).split("; ")
        return Check(name=name, state="failed", detail="; ".join(what) or advice, advice=advice)
    except (ImportError, OSError) as error:
        return Check(name=name, state="failed", detail=str(error), advice="reinstall mxfp8-graph with pip")


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

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 40), np.float32), rng.standard_normal((3, 40), np.float32)
    elements, scales = numerics.quantize(weight)
    got = Session(_model(elements, scales), kernels=True, where="session").run({"x": x})["y"]
    expected = numerics.gemm(*numerics.quantize(x), elements, scales)
    bound = numerics.gemm_error_bound(numerics.dequantize(*numerics.quantize(x)), numerics.dequantize(elements, scales))
    if not (np.abs(got - expected) <= bound).all():
        raise BackendError(
            f"session: a 2 x 3 x 40 gemm gives {got.ravel().tolist()}; expected {expected.ravel().tolist()}; "
            "report this, with the output of doctor"
        )
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__} runs the kernels, and they give what the reference gives"


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
