"""Runs the nodes inside ONNX Runtime: registers the native library with a session.

Without the library a rewritten file runs slowly, on its function bodies. With it, the kernels of the library run all
nodes of the domain, on the processor or on a GPU (`DEVICES`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mxfp8_ops import cpu, native
from mxfp8_ops.errors import BackendError, ContractError
from mxfp8_ops.ort import package
from mxfp8_ops.ort.package import CUDA_PROVIDER

if TYPE_CHECKING:
    import onnxruntime

DEVICES: Final = ("cpu", "cuda", "cuda-copies")
"""The devices on which nodes run.

cpu          the processor.
cuda         the GPU of the CUDA execution provider, on its stream. It needs onnxruntime-gpu, CuPy and a GPU. Nodes that
             ONNX Runtime assigns to the CPU provider run on the processor.
cuda-copies  GPU 0, for an ONNX Runtime without the CUDA provider. Each node copies its operands to the GPU and its
             results back; weights are copied once. It needs CuPy.
"""

_DEVICE: Final = "mxfp8.device"
"""Configuration entry with the device of the nodes (src/cuda_host/mxfp8_cuda.h)."""

_KEEP_WIDE: Final = "mxfp8.keep_wide"
"""Configuration entry: keep weights in bfloat16, too."""

_PREPACK: Final = "mxfp8.prepack"
"""Configuration entry: the copies of constant weights that the processor keeps."""

FASTER_WITHOUT: Final[Mapping[str, tuple[int, int]]] = {"SkipLayerNormFusion": (1, 30)}
"""Optimizations of ONNX Runtime that make models slower on the processor, each with its first slow version.

SkipLayerNormalization takes 2 to 5 times as long as Add and LayerNormalization since LayerNormalization is vectorized;
before, it took less. benchmarks/ort_optimizers.py measures it, up to version 1.31.
"""

_SESSION_ARGUMENTS: Final = frozenset(
    {"provider_options", "disabled_optimizers", "enable_fallback", "read_config_from_model"}
)
"""What onnxruntime.InferenceSession reads from its keyword arguments, besides those of `session`; it ignores others."""
DISABLE: Final = "optimization.disable_specified_optimizers"
"""ONNX Runtime's configuration entry that lists the optimizations to leave out, separated by semicolons."""

_REGISTERED: Final = "mxfp8.registered"
"""Configuration entry: the library is registered with these session options."""


def register(session_options: Any, *, device: str = "cpu", keep_wide: bool = False, prepack: str = "auto") -> None:
    """Registers the nodes with an `onnxruntime.SessionOptions`; call it once per object.

    On the processor, the session also leaves out the optimizations of `FASTER_WITHOUT`, unless the options already have
    the entry `DISABLE` (set it to "" to keep all optimizations).

    Args:
        session_options: the options of one session.
        device: one of `DEVICES`.
        keep_wide: see `session`.
        prepack: see `session`.

    Raises:
        BackendError: the library is missing, ONNX Runtime is too old, the library is registered with these options
            already, the device cannot be used, `keep_wide` is on for a device other than "cuda", or `prepack` is
            unknown.
    """
    ort = package.onnxruntime()
    _check_device(ort, device)
    if keep_wide and device != "cuda":
        raise BackendError(
            f"keep_wide on device {device!r}",
            expected="device 'cuda', whose products of many rows read such weights",
            advice="omit keep_wide",
        )
    native.check_prepack(prepack)
    cpu.isa()  # a wrong MXFP8_ISA raises here, rather than at the first node
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
    slow = ";".join(name for name, since in FASTER_WITHOUT.items() if package.version(ort) >= since)
    if device == "cpu" and slow and not _has_entry(session_options, DISABLE):
        session_options.add_session_config_entry(DISABLE, slow)
    try:
        session_options.register_custom_ops_library(str(cpu.library_path()))
    except Exception as error:
        raise BackendError(
            f"onnxruntime {ort.__version__}",
            f"cannot register {cpu.library_path()} ({error})",
            expected="a library that it can load",
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
    If "cuda" cannot be used, they run on the processor and a warning tells why.

    Args:
        model: path of an ONNX file, or its bytes. Prefer a path: a session then holds the weights once, and weights in
            an external data file only as mapped pages. With bytes it holds them twice, as ONNX Runtime keeps the bytes.
        providers: execution providers, first choice first; by default the CPU, after CUDA if `device` is "cuda".
        session_options: an `onnxruntime.SessionOptions` to start from. The library is registered with it, so use it
            for one session.
        device: one of `DEVICES`. If the nodes cannot run there, you get an error instead of a warning.
        keep_wide: on "cuda", keep constant weights in bfloat16 too. This takes two more bytes a value; products of many
            rows in bfloat16 then skip the dequantization at each run. Products on FP8 tensor cores do not use it.
        prepack: the copy of a constant weight that the processor keeps from the first run on. "auto": its codes in the
            layout of the kernel, 1.03 bytes a value; if the weight is mapped from an external data file, its pages are
            released. "never": no copy; each run rearranges the weight.
        **kwargs: further arguments of InferenceSession, such as `provider_options`.

    Raises:
        ContractError: the file does not exist.
        TypeError: InferenceSession has no such argument, which it would ignore.
        BackendError: the library is missing, ONNX Runtime is too old, or `device`, `keep_wide` or `prepack` cannot be
            used.
    """
    for name in kwargs.keys() - _SESSION_ARGUMENTS:
        raise TypeError(f"session() got an unexpected keyword argument {name!r}")
    ort = package.onnxruntime()
    if not isinstance(model, bytes):
        if not os.path.isfile(model):
            raise ContractError(os.fspath(model), "no such file", expected="an ONNX model", advice="correct the path")
        model = os.fspath(model)
    if providers is None:
        providers = [*([CUDA_PROVIDER] if device == "cuda" else []), "CPUExecutionProvider"]
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    options = ort.SessionOptions() if session_options is None else session_options
    used = _device(ort, names) if device is None else device
    register(options, device=used, keep_wide=keep_wide, prepack=prepack)
    if device == "cuda":  # ONNX Runtime's fallback prints why CUDA does not start, and opens the session on the CPU
        kwargs.setdefault("enable_fallback", 0)
    inference_session = ort.InferenceSession(model, sess_options=options, providers=list(providers), **kwargs)
    if used == "cuda":
        try:
            check_started(inference_session, names)
        except BackendError as error:
            if device == "cuda":
                raise
            warnings.warn(f"the MXFP8 nodes run on the CPU: {error}", stacklevel=2)
    return inference_session


def check_started(inference_session: onnxruntime.InferenceSession, providers: Sequence[str]) -> None:
    """Checks that a session which was to have these providers has CUDA's: it opens without one that does not start.

    Raises:
        BackendError: it does not have it.
    """
    started = inference_session.get_providers()
    if CUDA_PROVIDER in started:
        return
    what, advice = f"the session has the providers {', '.join(started)}", "name it in `providers`"
    if CUDA_PROVIDER in providers:
        what = f"{what}. {package.libraries(package.onnxruntime())}"
        advice = "install what is missing (`mxfp8-graph doctor`)"
    raise BackendError("device 'cuda'", what, expected=str(CUDA_PROVIDER), advice=advice)


def _device(ort: Any, providers: Sequence[str]) -> str:
    """Returns the default device of the nodes; warns if it is the processor although `providers` names CUDA."""
    if CUDA_PROVIDER not in providers:
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
    if device == "cuda":
        package.check_cuda(ort)
    if device != "cpu":
        # Here, because a session on the processor needs no CuPy.
        from mxfp8_ops.cuda import loader

        loader.connect()


def _has_entry(session_options: Any, key: str) -> bool:
    try:
        session_options.get_session_config_entry(key)
    except RuntimeError:  # no such entry
        return False
    return True
