"""Runs the nodes inside ONNX Runtime: registers the native library with a session.

A file of ours also runs without this, on the standard-op bodies it carries; slowly. With the library registered, its
kernels win wherever a node of the domain appears.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mxfp8_ops import contract, cpu
from mxfp8_ops.errors import BackendError, ContractError

MIN_ORT: Final = (1, 20)
"""Oldest ONNX Runtime the binding is tested with."""

_REGISTERED: Final = "mxfp8.registered"
"""Configuration entry that marks session options which have the library."""


@dataclass(frozen=True)
class Description:
    """What runs, and where it lies; `doctor` prints it."""

    library: Path
    isa: str
    """Instruction set in use."""
    available_isas: tuple[str, ...]
    contract_version: int
    """Version of the nodes the library implements."""
    onnxruntime: str
    """Version of ONNX Runtime."""


def describe() -> Description:
    """Returns which library, instruction set and ONNX Runtime are in use.

    Raises:
        BackendError: the library is missing, or MXFP8_ISA names an instruction set this machine does not have.
    """
    return Description(
        library=cpu.library_path(),
        isa=cpu.isa(),
        available_isas=cpu.available_isas(),
        contract_version=contract.VERSION,
        onnxruntime=_onnxruntime().__version__,
    )


def register(session_options: Any) -> None:
    """Registers the nodes with an `onnxruntime.SessionOptions`, once per object.

    Raises:
        BackendError: the library is missing, ONNX Runtime is too old, or the options already have it.
    """
    ort = _onnxruntime()
    cpu.isa()  # surfaces a wrong MXFP8_ISA here rather than at the first node
    try:
        session_options.get_session_config_entry(_REGISTERED)
    except RuntimeError:  # no such entry
        pass
    else:
        raise BackendError(
            "session options: the library is registered with them already; expected fresh ones (ONNX Runtime refuses "
            "a domain that is registered twice); make one SessionOptions per session"
        )
    try:
        session_options.register_custom_ops_library(str(cpu.library_path()))
    except Exception as error:
        raise BackendError(
            f"onnxruntime {ort.__version__}: cannot register {cpu.library_path()} ({error}); expected a library it can "
            f"load, and onnxruntime {_version(MIN_ORT)} or later; reinstall the project"
        ) from error
    session_options.add_session_config_entry(_REGISTERED, "1")


def session(
    model: str | os.PathLike[str] | bytes,
    *,
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
    **kwargs: Any,
) -> Any:
    """Returns an `onnxruntime.InferenceSession` of a model, with the nodes registered.

    Args:
        model: path of an ONNX file, or its bytes. From a file a session holds the weights once - those in an external
            data file only as pages of it -, from bytes twice: ONNX Runtime keeps the bytes.
        providers: execution providers, first choice first; the CPU by default.
        session_options: an `onnxruntime.SessionOptions` to start from. The library is registered with it, so use it
            for one session.
        **kwargs: passed on to InferenceSession.

    Raises:
        ContractError: there is no such file.
        BackendError: the library is missing, or ONNX Runtime is too old.
    """
    ort = _onnxruntime()
    if not isinstance(model, bytes):
        if not Path(model).is_file():
            raise ContractError(f"{os.fspath(model)}: no such file; expected an ONNX model; correct the path")
        model = os.fspath(model)
    options = ort.SessionOptions() if session_options is None else session_options
    register(options)
    return ort.InferenceSession(
        model, sess_options=options, providers=list(providers or ["CPUExecutionProvider"]), **kwargs
    )


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            f"onnxruntime: cannot be imported ({error}); expected version {_version(MIN_ORT)} or later; "
            "pip install onnxruntime"
        ) from error
    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if found < MIN_ORT:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__}: too old; expected {_version(MIN_ORT)} or later; "
            "pip install --upgrade onnxruntime"
        )
    return onnxruntime


def _version(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
