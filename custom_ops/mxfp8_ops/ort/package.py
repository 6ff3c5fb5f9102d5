"""The package onnxruntime: which distributions provide it, what mends it, and the libraries of its CUDA provider.

Several distributions write the same folder `onnxruntime`. The last one that pip installs overwrites the files of the
others, and to uninstall one deletes files of the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from mxfp8_ops.cuda.system import INSTALL as INSTALL_CUDA
from mxfp8_ops.errors import BackendError

MIN_ORT: Final = (1, 20)
"""Oldest version of ONNX Runtime that the tests run."""

CUDA_PROVIDER: Final = "CUDAExecutionProvider"

DISTRIBUTIONS: Final = ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime")
"""The distributions that provide onnxruntime. If several are installed, the first one is to stay: onnxruntime is often
there only because another package requires it."""

INSTALL: Final = "pip install 'mxfp8-graph[cpu]' (for a GPU [cuda13] or [cuda12])"
"""Advice if no distribution is installed."""

_LIBRARIES: Final = (
    *("libcuda.so.1", "libcudart.so.{major}", "libcublasLt.so.{major}", "libcublas.so.{major}"),
    *("libcurand.so.10", "libcudnn.so.9"),
)
"""What the CUDA provider loads; `major` is the version of CUDA."""


def onnxruntime() -> Any:
    """Returns the module onnxruntime, imported on first use.

    Raises:
        BackendError: it is missing, incomplete or too old.
    """
    try:
        import onnxruntime
    except ImportError as error:
        # Half of a distribution may be left.
        expected, advice = f"version {_text(MIN_ORT)} or later", mend(installed()) if installed() else INSTALL
        raise BackendError("onnxruntime", f"cannot be imported ({error})", expected=expected, advice=advice) from error
    if not hasattr(onnxruntime, "InferenceSession"):  # a folder without __init__.py is a module without names
        what, expected = "has no InferenceSession: files of it are deleted", "a complete package"
        raise BackendError("onnxruntime", what, expected=expected, advice=mend(installed()) or INSTALL)
    if version(onnxruntime) < MIN_ORT:
        where, expected = f"onnxruntime {onnxruntime.__version__}", f"{_text(MIN_ORT)} or later"
        advice = f"pip install --upgrade {next(iter(installed()), 'onnxruntime')}"
        raise BackendError(where, "too old", expected=expected, advice=advice)
    return onnxruntime


def version(ort: Any) -> tuple[int, ...]:
    """Returns the major and minor version of the module onnxruntime."""
    return tuple(int(part) for part in ort.__version__.split(".")[:2])


def installed() -> dict[str, str]:
    """Returns the installed distributions of `DISTRIBUTIONS` and their versions, in that order; imports none."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def mend(versions: Mapping[str, str]) -> str:
    """Returns the command that leaves the first of some distributions of one package, complete; "" if there is none."""
    if not versions:
        return ""
    name, number = next(iter(versions.items()))
    if len(versions) == 1:
        return f"pip install --force-reinstall --no-deps {name}=={number}"
    return f"pip uninstall -y {' '.join(versions)} && pip install --no-deps {name}=={number}"


def both(versions: Mapping[str, str]) -> str:
    """Returns that several distributions of one package are installed, in words; "" if there is at most one."""
    names = " and ".join(f"{name} {number}" for name, number in versions.items())
    return f"{names} write the same files" if len(versions) > 1 else ""


def check_cuda(ort: Any) -> None:
    """Checks that this onnxruntime has the CUDA provider, and loads the libraries of that.

    Raises:
        BackendError: it has no CUDA provider.
    """
    if CUDA_PROVIDER in ort.get_available_providers():
        _preload(ort)
        return
    versions = installed()
    what = f"onnxruntime {ort.__version__} has no {CUDA_PROVIDER}"
    advice = f"pip uninstall -y onnxruntime && {INSTALL_CUDA}"
    if "onnxruntime-gpu" in versions:
        what, advice = ": ".join(filter(None, (what, both(versions)))), mend(versions)
    advice += ", or use device='cuda-copies'"
    raise BackendError("device 'cuda'", what, expected="a build with CUDA", advice=advice)


@functools.cache
def _preload(ort: Any) -> None:
    """Loads the CUDA libraries of the pip packages, whose folders no loader searches; once per process.

    CuPy and `cuda.build` find theirs by themselves.
    """
    if hasattr(ort, "preload_dlls"):  # from 1.21 on
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what is missing; `libraries` says it if it matters
            ort.preload_dlls()


def libraries(ort: Any) -> str:
    """Returns which libraries the CUDA provider looks for, where, and which of them cannot be loaded, for an error."""
    if sys.platform != "linux":
        return ""
    major = (getattr(ort, "cuda_version", "") or "13").partition(".")[0]
    packages, missing = Path(ort.__file__).parents[1] / "nvidia", []
    names = [name.format(major=major) for name in _LIBRARIES]
    for name in names:
        try:
            ctypes.CDLL(str(next(packages.glob(f"*/lib/{name}"), name)))
        except OSError as error:
            missing.append(f"{name} ({error})")
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return (
        f"{CUDA_PROVIDER} needs {', '.join(names)}, looked for in {packages}/*/lib, LD_LIBRARY_PATH={path!r} and the "
        f"system's folders; not loaded: {', '.join(missing) or 'none, so see the messages of ONNX Runtime'}"
    )


def _text(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
