"""diagnose(): checks the installed packages, the kernels, and a session with the custom ops, on CPU and GPU."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir
from rich.console import Group
from rich.text import Text

from mxfp8_graph._version import __version__, installed
from mxfp8_graph.naming import printable
from mxfp8_graph.policy import presets
from mxfp8_graph.report import section
from mxfp8_ops import contract, cpu, formats, numpy_nodes
from mxfp8_ops.cuda import build, system
from mxfp8_ops.cuda.hardware import native_reason
from mxfp8_ops.errors import BackendError, Mxfp8Error
from mxfp8_ops.ort import package

State = Literal["ok", "missing", "broken", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    state: State
    """missing: optional, not installed. broken: optional, installed, does not work. failed: the CPU path needs it."""
    detail: str
    advice: str = ""
    """Advice in words; empty if the state is ok."""


_CUDA_ONLY: Final = "needed for CUDA kernels only"

_NEEDED: Final = ("numpy", "ml_dtypes", "onnx", "onnx-graphsurgeon")
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def diagnose() -> list[Check]:
    """Returns all checks, in the order of a report. Never raises: an exception becomes a failed check."""
    return [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"),
        Check("mxfp8-graph", "ok", f"{__version__}, nodes of {contract.DOMAIN!r} version {contract.VERSION}"),
        *(_package(name, _versions(name)) for name in _NEEDED),
        _package("onnxruntime", package.installed(), "needed to run and verify models", package.INSTALL),
        _package("torch", _versions("torch"), "needed for PyTorch models only"),
        _attempt("native library", lambda: str(cpu.library_path())),
        _attempt("kernels", lambda: f"{cpu.isa()}; MXFP8_ISA sets one of {', '.join(cpu.available_isas())}"),
        _attempt("recipe", _recipe),
        _attempt("session", partial(_session, "cpu"), "failed" if package.installed() else "missing"),
        *_cuda_checks(),
    ]


def table(checks: Iterable[Check]) -> Group:
    """Returns the checks for a terminal, one line each, with advice below a line that is not ok."""
    lines = []
    for check in checks:
        detail = printable(check.detail)
        if check.advice:
            detail += f"\n{'':28}-> {printable(check.advice)}"
        state = (f"{check.state:9}", section.STYLES[check.state])
        # No folding, so that a path can be copied.
        line = Text.assemble(f"{check.name:19}", state, detail, no_wrap=True, overflow="ignore")
        lines.append(line)
    return Group(*lines)


def healthy(checks: Sequence[Check]) -> bool:
    """Whether the CPU path works: no check failed (optional packages may be missing)."""
    return not any(check.state == "failed" for check in checks)


def _versions(*distributions: str) -> dict[str, str]:
    return {name: version for name in distributions if (version := installed(name))}


def _package(name: str, versions: Mapping[str, str], purpose: str = "", advice: str = "") -> Check:
    """Checks a package that the distributions `versions` provide; `purpose` is "" if it is always needed."""
    if not versions:
        detail = f"not installed; {purpose or 'needed always'}"
        return Check(name, "missing" if purpose else "failed", detail, advice or f"pip install {name}")
    found = ", ".join(version if each == name else f"{version} ({each})" for each, version in versions.items())
    # PyTorch and CUDA are not on the CPU path.
    state: State = "broken" if purpose and name != "onnxruntime" else "failed"
    try:
        # Metadata alone says little: a package may be installed and not importable, for a missing system library.
        module = package.onnxruntime() if name == "onnxruntime" else importlib.import_module(name.replace("-", "_"))
    except Mxfp8Error as error:
        return Check(name, state, f"{found}, but {error.what}", error.advice)
    except Exception as error:  # an incomplete package may raise anything
        return Check(name, state, f"{found}, but it cannot be imported: {error}", package.mend(versions))
    if several := package.both(versions):
        with_cuda = f"; providers: {', '.join(module.get_available_providers())}" if name == "onnxruntime" else ""
        return Check(name, "broken", several + with_cuda, package.mend(versions))
    return Check(name, "ok", found)


def _attempt(name: str, step: Callable[[], str], otherwise: State = "failed") -> Check:
    try:
        return Check(name, "ok", step())
    except Mxfp8Error as error:
        return Check(name, otherwise, "; expected ".join(filter(None, (error.problem, error.expected))), error.advice)
    except Exception as error:  # exceptions of ONNX Runtime and of the loader have no common base
        advice = "reinstall mxfp8-graph with pip" if otherwise == "failed" else "report this, with the output of doctor"
        return Check(name, otherwise, str(error), advice)


def _cuda_checks() -> list[Check]:
    """Returns the checks of the CUDA path; without a GPU one check, since most such machines lack all CUDA packages."""
    try:
        gpus = system.gpus()
    except BackendError as error:
        return [Check("cuda", "missing", f"{error.problem}; {_CUDA_ONLY}", error.advice)]
    if not gpus:
        return [Check("cuda", "missing", f"no GPU; {_CUDA_ONLY}", "see nvidia-smi -L")]
    device = "cuda" if installed("onnxruntime-gpu") else "cuda-copies"
    return [
        _package("cupy", _versions(*_CUPY), _CUDA_ONLY, system.INSTALL),
        *(_attempt(f"gpu {i}", partial(native_reason, f"cuda:{i}"), "broken") for i in range(len(gpus))),
        _attempt("nvrtc", lambda: "{}.{}".format(*build.nvrtc_version()), "missing"),
        _attempt("gpu session", partial(_session, device), "broken"),
    ]


def _recipe() -> str:
    isa = cpu.isa()
    return "; ".join(filter(None, [presets.answer(isa), presets.convolution_advice(isa)]))


def _session(device: str) -> str:
    """Runs y = gemm(quantize(x), weight) in ONNX Runtime, without function bodies, and compares with the reference."""
    from mxfp8_ops import ort

    # K = 40 is no multiple of 32, so the last block is partial: the case that a wrong kernel gets wrong.
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 40), np.float32), rng.standard_normal((3, 40), np.float32)
    stored, quantized = numpy_nodes.quantize(weight), numpy_nodes.quantize(x)
    got = ort.session(_model(*stored), device=device).run(None, {"x": x})[0]
    expected = numpy_nodes.gemm(*quantized, *stored)
    bound = numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(*quantized), numpy_nodes.dequantize(*stored))
    if not (np.abs(got - expected) <= bound).all():
        what, right = f"a 2 x 3 x 40 gemm gives {got.ravel().tolist()}", str(expected.ravel().tolist())
        raise BackendError(device, what, expected=right, advice="report this, with the output of doctor")
    return f"ONNX Runtime runs the kernels on {device!r}, with the results of the reference"


def _model(elements: Any, scales: Any) -> bytes:
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x, y = (ir.Value(name=n, type=float32, shape=ir.Shape(s)) for n, s in (("x", (2, 40)), ("y", (2, 3))))
    tensors = (ir.tensor(elements.view(formats.E4M3.numpy_name), name="elements"), ir.tensor(scales, name="scales"))
    stored = [ir.Value(name=tensor.name, const_value=tensor) for tensor in tensors]
    node = partial(ir.node, domain=contract.DOMAIN)
    quantize = node(contract.QUANTIZE.name, [x], dict(contract.QUANTIZE.attributes), num_outputs=2)
    gemm = node(contract.GEMM.name, [*quantize.outputs, *stored], dict(contract.GEMM.attributes), outputs=[y])
    versions = {"": contract.MIN_OPSET, contract.DOMAIN: contract.VERSION}
    graph = ir.Graph([x], [y], nodes=[quantize, gemm], initializers=stored, opset_imports=versions, name="doctor")
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
