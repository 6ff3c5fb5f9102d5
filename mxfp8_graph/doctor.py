"""diagnose(): the installed packages, the kernels that run, and a test of a session with the custom ops.

diagnose_file(): what a file is, by its nodes and what it records, and what tools have done to it since.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mxfp8_graph import provenance
from mxfp8_graph._version import __version__, installed
from mxfp8_graph.models import kind_of, load
from mxfp8_graph.naming import printable
from mxfp8_graph.onnx_model import child, cpu_provider
from mxfp8_graph.onnx_model.dialect_ops import foreign
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.walk import function_key, iter_nodes
from mxfp8_graph.report.section import STYLES
from mxfp8_ops import contract, cpu, formats, numerics, numpy_nodes
from mxfp8_ops.cuda import build, hardware, planner, system
from mxfp8_ops.errors import BackendError, Mxfp8Error

Array = npt.NDArray[Any]
State = Literal["ok", "missing", "broken", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    state: State
    """missing: optional and not here. broken: optional, here, and does not work. failed: the CPU path does not work."""
    detail: str
    advice: str = ""
    """Advice in words; empty if the state is ok."""


_CUDA_ONLY: Final = "needed for CUDA kernels only"

_ONNXRUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")

_CUPYS: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_GET_CUPY: Final = "cupy-cuda13x (CUDA 13) or cupy-cuda12x (CUDA 12)"

_PORTS: Final = {"x": (2, 40), "y": (2, 3)}
"""Shapes of the input and output of the model that `_session` runs."""

_LOAD_SECONDS: Final = 10
"""Processor time to load the native library."""

_PACKAGES: Final = (
    *((name, (name,), "", name) for name in ("numpy", "ml_dtypes", "onnx", "onnx-graphsurgeon")),
    ("onnxruntime", _ONNXRUNTIMES, "", "onnxruntime"),
    ("torch", ("torch",), "needed for PyTorch models only", "torch onnxscript"),
    ("cupy", _CUPYS, _CUDA_ONLY, _GET_CUPY),
)
"""Name, distributions that provide it, its purpose ("" if everything needs it), names to install."""


def diagnose() -> list[Check]:
    """Returns all checks, in the order of a report. Never raises: an exception becomes a failed check."""
    return [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        Check("platform", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical processors"),
        Check("mxfp8-graph", "ok", __version__),
        Check("node contract", "ok", f"domain {contract.DOMAIN!r}, version {contract.VERSION}"),
        *(_package(*row) for row in _PACKAGES),
        _attempt("native library", lambda: str(cpu.library_path())),
        _attempt("kernels", _kernels),
        _attempt("native mxfp8", _native_mxfp8),
        _attempt("session", _session),
        *_cuda_checks(),
    ]


def _cuda_checks() -> list[Check]:
    """Returns the checks that concern CUDA kernels only."""
    try:
        checks = [Check("cuda driver", "ok", "supports CUDA {}.{}".format(*system.driver_version()))]
        gpus = system.gpus()
        if not gpus:
            checks.append(Check("gpu", "missing", f"none; {_CUDA_ONLY}", "see nvidia-smi -L"))
    except BackendError as error:
        gpus, checks = [], [Check("cuda driver", "missing", f"{error.problem}; {_CUDA_ONLY}", error.advice)]
    count, size = build.cache_contents()
    return [
        *checks,
        *(_attempt(f"gpu {index}", partial(_gpu, gpu), "broken") for index, gpu in enumerate(gpus)),
        _attempt("nvrtc", lambda: "{}.{}".format(*build.nvrtc_version()), "missing"),
        Check("cubin cache", "ok", f"{build.cache_folder()}: {count} kernels, {size} bytes"),
        _cuda_provider(),
        # One line for each kind of GPU, however many there are of it.
        *(
            _attempt("gemm routes", partial(_routes, capability), "missing")
            for capability in dict.fromkeys(gpu.capability for gpu in gpus if gpu.capability >= (8, 0))
        ),
        *([_attempt("gpu session", _gpu_session, "broken")] if gpus else []),
    ]


def table(checks: Iterable[Check]) -> RenderableType:
    """Returns the checks for a terminal, one line each, advice below what is not ok."""
    rows = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        rows.add_column(overflow="fold")
    for check in checks:
        rows.add_row(check.name, Text(check.state, style=STYLES[check.state]), Text(printable(check.detail)))
        if check.advice:
            rows.add_row("", "", Text(f"-> {printable(check.advice)}"))
    return rows


def healthy(checks: Sequence[Check]) -> bool:
    """Returns whether the CPU path works: nothing failed (what is optional may be missing)."""
    return not any(check.state == "failed" for check in checks)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        version = installed(name)
        if version is not None:
            return version if name == distributions[0] else f"{version} ({name})"
    return None


def _package(name: str, distributions: Sequence[str], purpose: str, wanted: str) -> Check:
    version = _version(distributions)
    if version is None:
        detail = f"not installed; {purpose}" if purpose else "not installed"
        return Check(name, "missing" if purpose else "failed", detail, f"pip install {wanted}")
    try:
        # Metadata alone says little: a package may be installed and not importable, for a missing system library.
        importlib.import_module(name.replace("-", "_"))
    except Exception as error:  # a package that is half there may raise anything
        detail = f"{version}, but it cannot be imported: {error}"
        return Check(name, "broken" if purpose else "failed", detail, f"pip install --force-reinstall {wanted}")
    return Check(name, "ok", version)


def _attempt(name: str, step: Callable[[], str], otherwise: State = "failed") -> Check:
    try:
        return Check(name, "ok", step())
    except Mxfp8Error as error:
        detail = f"{error.problem}; expected {error.expected}" if error.expected else error.problem
        return Check(name, otherwise, detail, error.advice)
    except Exception as error:  # ONNX Runtime's and the loader's have no common base
        advice = "reinstall mxfp8-graph with pip" if otherwise == "failed" else "report this, with the output of doctor"
        return Check(name, otherwise, str(error), advice)


def _require_loadable() -> None:
    """Loads the native library in a child process; raises BackendError if that ends it, as a truncated library does."""
    # In a child: a truncated library ends the process that loads it with a signal, which no exception handler sees.
    tried = child.call(lambda: cpu.isa().encode(), _LOAD_SECONDS)
    if isinstance(tried, child.Failure) and not tried.kind:  # what it raises, it raises here too
        what, expected = f"a process that loads it {tried.message.removesuffix(' on it')}", "a whole library"
        raise BackendError(cpu.library_path(), what, expected=expected, advice="reinstall mxfp8-graph with pip")


def _kernels() -> str:
    _require_loadable()
    forced = os.environ.get("MXFP8_ISA")
    why = f"MXFP8_ISA={forced}" if forced else "the best this processor has; MXFP8_ISA overrides it"
    return f"{cpu.isa()} ({why}); available: {', '.join(cpu.available_isas())}"


def _native_mxfp8() -> str:
    """Returns for each device whether it has MXFP8 matmuls in hardware, and why."""
    _require_loadable()
    try:
        gpus = len(system.gpus())
    except BackendError:  # the check of the driver reports it
        gpus = 0
    answers = []
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        answer = "yes" if hardware.is_mxfp8_native(device) else "no"
        answers.append(f"{device}: {answer}, {hardware.native_reason(device)}")
    return "; ".join(answers)


def _session() -> str:
    """Runs MXFP8Quantize and MXFP8Gemm, without function bodies to fall back on, and compares with the reference."""
    from mxfp8_graph.checking.sessions import Session

    _require_loadable()
    _compare("session", lambda model, x: Session(model, kernels=True, where="session").run({"x": x})["y"])
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__} runs the kernels, and they give what the reference gives"


def _gpu_session() -> str:
    """Does on the GPU what `_session` does on the processor."""
    from mxfp8_ops import ort

    device = "cuda" if _cuda_provider().state == "ok" else "cuda-copies"
    _compare(
        "gpu session", lambda model, x: ort.session(model.SerializeToString(), device=device).run(None, {"x": x})[0]
    )
    return f"device {device!r} runs the kernels, and they give what the reference gives"


def _compare(where: str, run: Callable[[Any, Array], Any]) -> None:
    """Raises BackendError if the y of `run`, of an `onnx.ModelProto` and x, is not within the reference's bound."""
    # K = 40 is no multiple of 32, so the last block is partial: the case that a wrong kernel gets wrong.
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 40), np.float32), rng.standard_normal((3, 40), np.float32)
    elements, scales = numpy_nodes.quantize(weight)
    got = np.asarray(run(_model(elements, scales), x))
    expected = numpy_nodes.gemm(*numpy_nodes.quantize(x), elements, scales)
    bound = numpy_nodes.gemm_error_bound(
        numpy_nodes.dequantize(*numpy_nodes.quantize(x)), numpy_nodes.dequantize(elements, scales)
    )
    if not (np.abs(got - expected) <= bound).all():
        what, right = f"a 2 x 3 x 40 gemm gives {got.ravel().tolist()}", str(expected.ravel().tolist())
        raise BackendError(where, what, expected=right, advice="report this, with the output of doctor")


def _model(elements: numerics.Codes, scales: numerics.Codes) -> Any:
    """Returns y = gemm(quantize(x), weight) as a model that needs the native kernels."""
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(s)) for name, s in _PORTS.items())
    stored = [ir.Value(name=name) for name in ("elements", "scales")]
    for value, codes, dtype in zip(stored, (elements, scales), (formats.E4M3.numpy_name, "uint8"), strict=True):
        value.const_value = ir.tensor(codes.view(dtype), name=value.name)
    node = partial(ir.node, domain=contract.DOMAIN)
    quantize = node(contract.QUANTIZE.name, [x], dict(contract.QUANTIZE.attributes), num_outputs=2)
    gemm = node(contract.GEMM.name, [*quantize.outputs, *stored], dict(contract.GEMM.attributes), outputs=[y])
    versions = {"": contract.MIN_OPSET, contract.DOMAIN: contract.VERSION}
    graph = ir.Graph([x], [y], nodes=[quantize, gemm], initializers=stored, opset_imports=versions, name="doctor")
    return ir.to_proto(ir.Model(graph, ir_version=10))


def _gpu(gpu: system.Gpu) -> str:
    capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]} ({build.target(gpu.capability)})"
    return f"{gpu.name}, {gpu.processors} multiprocessors, {gpu.memory / 1e9:.0f} GB, {capability}"


def _cuda_provider() -> Check:
    try:
        import onnxruntime

        available = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    except Exception:  # the check of the package reports it
        available = False
    detail = "ONNX Runtime has it" if available else "not in this build of ONNX Runtime; needed for device 'cuda' only"
    advice = "" if available else "pip uninstall onnxruntime && pip install onnxruntime-gpu"
    return Check("cuda provider", "ok" if available else "missing", detail, advice)


def _routes(capability: tuple[int, int]) -> str:
    rows = []
    for row in planner.routes():
        if row.kernel == "slices":  # for machines without cuBLAS, which torch and CuPy bring
            continue
        if capability < row.capability or (row.alone and capability != row.capability):
            continue
        conditions = [f"M <= {row.most_rows}"] if row.most_rows else []
        conditions += ["K % 32 = 0"] * row.whole_blocks
        conditions += ["with torch or nvmath-python"] * bool(row.libraries & planner.CUBLASLT)
        conditions += ["on request"] * row.opt_in
        rows.append(f"{row.kernel} ({', '.join(conditions)})" if conditions else row.kernel)
    return f"{build.target(capability)}: the first that fits of {'; '.join(rows)}"


_MODEL: Final = "model"


def diagnose_file(path: str | Path) -> Check:
    """Returns the check of one file. Never raises: a file that cannot be read is a check that says so."""
    try:
        if kind_of(path).is_program:
            return _program(path)
        model = open_model(Path(path)).proto
    except Mxfp8Error as error:
        return Check(_MODEL, "broken", error.problem, error.advice)
    recorded = {entry.key: entry.value for entry in model.metadata_props}
    written = recorded.get(provenance.DIALECT_KEY, "mxfp8" if provenance.CONTRACT_KEY in recorded else None)
    # Our own dialect has the name of the nodes' domain, and says nothing of the element formats.
    dialect = "" if written == "mxfp8" else f" as {written}"
    recipe = f" with recipe {provenance.recipe_name(recorded.get(provenance.RECIPE_KEY))}"
    by = f"written by mxfp8-graph {recorded.get(provenance.VERSION_KEY, '')}{dialect}{recipe}" if written else ""
    if by and provenance.LOST_KEY in recorded:
        by += f"; lost in conversion: {recorded[provenance.LOST_KEY]}"
    used = {node.op_type for node in iter_nodes(model.graph.node) if node.domain == contract.DOMAIN}
    if used:
        return _rewritten(path, model, used, by)
    if written == "mxfp8":
        detail = f"{path}: {by}, and has no node of domain {contract.DOMAIN!r} any more: a tool has inlined them"
        advice = "our kernels do not run it, and weights may be float32 again: take the file from before that tool"
        return Check(_MODEL, "broken", detail, advice)
    if found := foreign(model):
        advice = f"for our kernels: mxfp8-graph convert {path} --to mxfp8"
        # Packed weights: MXFP8 or MXINT8, which one dialect may have both of.
        form = f"as {found[0]}" if written in {None, found[0]} else f"in standard ops (as {found[0]})"
        what = f"packed weights {form}"
        return Check(_MODEL, "ok", "; ".join(filter(None, (f"{path}: {what}", by))), advice)
    return _loadable(model, (by and f"{path}: {by}") or f"{path}: no MXFP8 in it", "")


def _rewritten(path: str | Path, model: Any, used: set[str], by: str) -> Check:
    there = {name for domain, name, _ in map(function_key, model.functions) if domain == contract.DOMAIN}
    detail = "; ".join(filter(None, (f"{path}: {', '.join(sorted(used))}", by)))
    if not there and any((e.key, e.value) == (provenance.BODIES_KEY, "none") for e in model.metadata_props):
        advice = f"for runtimes without our library: mxfp8-graph convert {path} --to mxfp8"
        return _loadable(
            model, f"{detail}; without function bodies, as asked", f": runs with our library only; {advice}"
        )
    if lost := sorted(used - there):
        detail += f"; without the function bodies of {', '.join(lost)}, so it runs with our library only"
        advice = f"a tool has dropped them; put them back: mxfp8-graph convert {path} --to mxfp8"
        return Check(_MODEL, "broken", detail, advice)
    return _loadable(model, f"{detail}; with function bodies", ": runs everywhere in ONNX Runtime")


def _loadable(model: Any, detail: str, otherwise: str) -> Check:
    """Returns the check of a whole file: whether a CPU runs it; `otherwise` is what there is to say then."""
    notes = [note.partition("; ") for note in cpu_provider.note(model)]
    said = "".join(f"; {what}" for what, _, _ in notes) or otherwise
    return Check(_MODEL, "ok", f"{detail}{said}", "".join(advice for _, _, advice in notes))


def _program(path: str | Path) -> Check:
    """Returns the check of a .pt2 file, which is loaded."""
    program = load(path)  # says what to install, if torch is not here
    from mxfp8_graph.torch_pass import record

    made = record.find(program)
    if made is None:
        return Check(_MODEL, "ok", f"{path}: a program that loads; no MXFP8 in it")
    weights = "packed weights" if made.packed else "weights to train in MXFP8"
    detail = f"{path}: a program that loads, with {weights}, by recipe {provenance.recipe_name(made.recipe)}"
    return Check(_MODEL, "ok", detail)
