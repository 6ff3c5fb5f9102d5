"""Runs the nodes inside ONNX Runtime: registers the native library with a session.

A rewritten file also runs without the library, slowly, on the function bodies it has. With the library registered, its
kernels run every node of the domain: on the processor, or on a GPU (`DEVICES`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mxfp8_ops import cpu, native
from mxfp8_ops.errors import BackendError, ContractError

if TYPE_CHECKING:
    import onnxruntime

MIN_ORT: Final = (1, 20)
"""Oldest ONNX Runtime the binding is tested with."""

DEVICES: Final = ("cpu", "cuda", "cuda-copies")
"""Where the nodes run.

cpu          on the processor.
cuda         on the CUDA execution provider, on its stream: needs onnxruntime-gpu, CuPy and a GPU. Nodes that ONNX
             Runtime leaves to the CPU provider run there.
cuda-copies  on GPU 0, with operands copied there and results back at each node; weights are copied once. For a GPU
             beside an ONNX Runtime that has no CUDA provider; needs CuPy.
"""

_CUDA_PROVIDER: Final = "CUDAExecutionProvider"
_DEVICE: Final = "mxfp8.device"
"""Configuration entry with the device of the nodes (src/cuda_host/mxfp8_cuda.h)."""

_KEEP_WIDE: Final = "mxfp8.keep_wide"
"""Configuration entry for weights in bfloat16 besides MXFP8."""

_PREPACK: Final = "mxfp8.prepack"
"""Configuration entry for what is kept of constant weights on the processor."""

FASTER_WITHOUT: Final[Mapping[str, tuple[int, int]]] = {"SkipLayerNormFusion": (1, 30)}
"""Optimizations of ONNX Runtime that make models slower on the processor, each with the first version in which it does.

SkipLayerNormalization takes 2 to 5 times what Add and LayerNormalization take since the latter was vectorized, and less
than them before: benchmarks/ort_optimizers.py, up to 1.31.
"""

DISABLE: Final = "optimization.disable_specified_optimizers"
"""ONNX Runtime's configuration entry with the optimizations that a session leaves out, separated by semicolons."""

_REGISTERED: Final = "mxfp8.registered"
"""Configuration entry that marks session options which have the library."""


def register(session_options: Any, *, device: str = "cpu", keep_wide: bool = False, prepack: str = "auto") -> None:
    """Registers the nodes with an `onnxruntime.SessionOptions`, once per object.

    On the processor, the session also leaves out the optimizations of `FASTER_WITHOUT`, unless the options have the
    entry `DISABLE` already (set it to "" to have them all).

    Args:
        session_options: options to make one session with.
        device: one of `DEVICES`.
        keep_wide: see `session`.
        prepack: see `session`.

    Raises:
        BackendError: the library is missing, ONNX Runtime is too old, the options already have it, the device cannot
            be used, weights are to be kept on another device than "cuda", or `prepack` is none of its values.
    """
    ort = _onnxruntime()
    _check_device(ort, device)
    if keep_wide and device != "cuda":
        raise BackendError(
            f"keep_wide on device {device!r}",
            expected="device 'cuda', whose products of many rows read such weights",
            advice="omit keep_wide",
        )
    native.check_prepack(prepack)
    cpu.isa()  # raises for a wrong MXFP8_ISA here, and not at the first node
    if _has_entry(session_options, _REGISTERED):
        raise BackendError(
            "session options",
            "the library is registered with them already",
            expected="options without it (ONNX Runtime refuses a domain that is registered twice)",
            advice="make one SessionOptions per session",
        )
    if device != "cpu":
        session_options.add_session_config_entry(_DEVICE, device)
    if keep_wide:
        session_options.add_session_config_entry(_KEEP_WIDE, "1")
    if prepack != "auto":
        session_options.add_session_config_entry(_PREPACK, prepack)
    slow = ";".join(name for name, since in FASTER_WITHOUT.items() if _installed(ort) >= since)
    if device == "cpu" and slow and not _has_entry(session_options, DISABLE):
        session_options.add_session_config_entry(DISABLE, slow)
    try:
        session_options.register_custom_ops_library(str(cpu.library_path()))
    except Exception as error:
        raise BackendError(
            f"onnxruntime {ort.__version__}",
            f"cannot register {cpu.library_path()} ({error})",
            expected=f"a library that it can load, and onnxruntime {_version(MIN_ORT)} or later",
            advice="reinstall the project",
        ) from error
    session_options.add_session_config_entry(_REGISTERED, "1")


def session(
    model: str | os.PathLike[str] | bytes,
    *,
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
    device: str | None = None,
    keep_wide: bool = False,
    prepack: str = "auto",
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """Returns an `onnxruntime.InferenceSession` of a model, with the nodes registered.

    Without `device`, the nodes run on "cuda" if `providers` has CUDAExecutionProvider, and on the processor otherwise.
    If they cannot run there, a warning says why, and they run on the processor.

    Args:
        model: path of an ONNX file, or its bytes. From a file a session holds the weights once - those in an external
            data file only as pages of it -, from bytes twice: ONNX Runtime keeps the bytes.
        providers: execution providers, first choice first; by default the CPU, after CUDA if `device` is "cuda".
        session_options: an `onnxruntime.SessionOptions` to start from. The library is registered with it, so use it
            for one session.
        device: one of `DEVICES`: the nodes run there, or an error says why not.
        keep_wide: on "cuda", keep constant weights in bfloat16 too: two more bytes a value, and products of many rows
            need not dequantize them at each run.
        prepack: what the processor keeps of a constant weight from the first run on, besides the weight itself.
            "auto": its codes in the layout of the kernel, 1.03 bytes a value; where the weight is mapped from an
            external data file, its own pages are given back. "decoded": bfloat16 numbers where the kernel multiplies
            those, two bytes a value. "never": nothing, and every run turns the weight.
        **kwargs: passed on to InferenceSession.

    Raises:
        ContractError: there is no such file.
        BackendError: the library is missing, ONNX Runtime is too old, or `device`, `keep_wide` or `prepack` cannot be
            used.
    """
    ort = _onnxruntime()
    if not isinstance(model, bytes):
        if not os.path.isfile(model):
            raise ContractError(os.fspath(model), "no such file", expected="an ONNX model", advice="correct the path")
        model = os.fspath(model)
    if providers is None:
        providers = [*([_CUDA_PROVIDER] if device == "cuda" else []), "CPUExecutionProvider"]
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    options = ort.SessionOptions() if session_options is None else session_options
    used = _device(ort, names) if device is None else device
    register(options, device=used, keep_wide=keep_wide, prepack=prepack)
    inference_session = ort.InferenceSession(model, sess_options=options, providers=list(providers), **kwargs)
    if device == "cuda" and _CUDA_PROVIDER not in inference_session.get_providers():
        raise BackendError(
            "device 'cuda'",
            f"the session has the providers {', '.join(inference_session.get_providers())}",
            expected=str(_CUDA_PROVIDER),
            advice="name it in `providers`, and read the warnings of ONNX Runtime",
        )
    return inference_session


def _device(ort: Any, providers: Sequence[str]) -> str:
    """Returns where the nodes run by default; warns if that is the processor in spite of the CUDA provider."""
    if _CUDA_PROVIDER not in providers:
        return "cpu"
    try:
        _check_device(ort, "cuda")
    except BackendError as error:
        warnings.warn(f"the MXFP8 nodes run on the CPU: {error}", stacklevel=3)
        return "cpu"
    return "cuda"


def _check_device(ort: Any, device: str) -> None:
    """Makes the device ready; raises BackendError if it cannot be used."""
    if device not in DEVICES:
        raise BackendError(f"device {device!r}", expected=f"one of {', '.join(DEVICES)}", advice="correct the name")
    if device == "cuda" and _CUDA_PROVIDER not in ort.get_available_providers():
        raise BackendError(
            "device 'cuda'",
            f"onnxruntime {ort.__version__} has no {_CUDA_PROVIDER}",
            expected="a build with CUDA",
            advice="pip uninstall onnxruntime && pip install onnxruntime-gpu, or use device='cuda-copies'",
        )
    if device != "cpu":
        from mxfp8_ops.cuda import loader

        loader.connect()


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "onnxruntime",
            f"cannot be imported ({error})",
            expected=f"version {_version(MIN_ORT)} or later",
            advice="pip install onnxruntime",
        ) from error
    if _installed(onnxruntime) < MIN_ORT:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__}",
            "too old",
            expected=f"{_version(MIN_ORT)} or later",
            advice="pip install --upgrade onnxruntime",
        )
    return onnxruntime


def _installed(ort: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in ort.__version__.split(".")[:2])


def _has_entry(session_options: Any, key: str) -> bool:
    try:
        session_options.get_session_config_entry(key)
    except RuntimeError:  # no such entry
        return False
    return True


def _version(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
