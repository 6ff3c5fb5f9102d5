"""ONNX Runtime sessions, with or without our kernels.

They support dtypes that NumPy lacks (bfloat16, float8), and raise errors in plain words.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from google.protobuf.message import EncodeError

from mxfp8_graph.onnx_pass.float32 import to_float32
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.onnx_pass.prepare import infer
from mxfp8_graph.onnx_pass.protos import iter_graphs
from mxfp8_graph.onnx_pass.save import save, wants_external
from mxfp8_graph.running.inputs import BFLOAT16, PASS_OTHERS, Array, Inputs
from mxfp8_graph.running.profile import NodeProfile, of_session
from mxfp8_ops import cpu, formats, ort, system
from mxfp8_ops.errors import BackendError
from mxfp8_ops.ort import package

_UNNAMED: Final = {
    f"tensor({row.onnx_name.lower()})": np.dtype(row.numpy_name)
    for row in (formats.BFLOAT16, *formats.ELEMENT_FORMATS.values())
}
"""ONNX Runtime's name of a dtype that NumPy lacks -> the dtype of ml_dtypes."""

_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
_KNOWS_FOLDERS: Final = (1, 21)
"""From this release on ONNX Runtime looks in that folder while it optimizes, too; later ones refuse absolute paths."""

_MISSING: Final = re.compile(r"implementation for \w+\(\d+\) node|Type 'tensor\(b?float16\)' of input parameter")
"""ONNX Runtime's message for an op that has no kernel for a dtype, or lacks the dtype in the standard."""


def _runtime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions of ONNX Runtime; its classes have no common base."""
    names = vars(package.onnxruntime().capi.onnxruntime_pybind11_state).values()
    return (*(e for e in names if isinstance(e, type) and issubclass(e, Exception)), RuntimeError, ValueError)


def _serialized(model: Any, folder: Path | None) -> bytes:
    """Returns the bytes of a model whose external data is in `folder`, with locations that ONNX Runtime accepts."""
    knows_folders = package.version(package.onnxruntime()) >= _KNOWS_FOLDERS
    for graph in iter_graphs(model.graph) if folder else ():
        for entry in (entry for tensor in graph.initializer for entry in tensor.external_data):
            if entry.key == "location" and folder and not knows_folders:
                entry.value = str(folder.resolve() / entry.value)
            elif entry.key == "location" and Path(entry.value).is_absolute():  # the model's own file
                entry.value = Path(entry.value).resolve().name
    return bytes(model.SerializeToString())


@dataclass(frozen=True)
class Timing:
    """Outputs of the last run, and the seconds each run took."""

    outputs: Inputs
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


class Runnable(ABC):
    """A model ready to run, whichever framework runs it."""

    name: str
    """Name of the model in errors."""
    output_names: list[str]
    """Names of the outputs that are tensors of numbers, in order."""
    note: str = ""
    """Note on a model that runs as a changed copy."""

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """Returns the outputs by name; bfloat16 and float8 have the dtypes of ml_dtypes.

        Raises:
            BackendError: the model fails on these inputs.
        """
        with self._restored():
            return self._arrays(self._call(self._feeds(inputs)))

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """Returns the outputs of the last of `repeat` runs, and the latencies of all, after a warm-up."""
        feeds = self._feeds(inputs)
        seconds = []
        with self._restored():
            results = self._call(feeds)  # the warm-up
            for _ in range(repeat):
                start = time.perf_counter()
                results = self._call(feeds)
                seconds.append(time.perf_counter() - start)
            return Timing(self._arrays(results), tuple(seconds))

    def _restored(self) -> contextlib.AbstractContextManager[None]:
        """A context that restores the values of the model's tensors at its end."""
        return contextlib.nullcontext()

    @abstractmethod
    def profile(self, inputs: Mapping[str, Array], repeat: int) -> list[NodeProfile]:
        """Returns the nodes of `repeat` runs after a warm-up."""

    @abstractmethod
    def _feeds(self, inputs: Mapping[str, Array]) -> Any:
        """Returns inputs as `_call` takes them."""

    @abstractmethod
    def _call(self, feeds: Any) -> Any:
        """Runs the model once."""

    @abstractmethod
    def _arrays(self, results: Any) -> Inputs:
        """Returns the results of `_call` as arrays, by name."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How ONNX Runtime executes a session."""

    optimize: bool = True
    """Whether it may fuse and fold."""
    profile: Path | None = None
    """Prefix of the path of its profile; None writes no profile."""
    device: str = "cpu"
    """Where our nodes run: one of `ort.DEVICES`."""
    takes_turns: bool = False
    """Whether other sessions run in between: its idle threads then do not spin, which would slow them."""


class Session(Runnable):
    """A model in ONNX Runtime.

    Args:
        model: a path or an `onnx.ModelProto`.
        kernels: whether our native kernels are registered; without them ONNX Runtime runs the function bodies.
        where: name of the model in errors.
        folder: where the external data of a proto is.
        float32: whether a copy in float32 runs if ONNX Runtime lacks kernels for 16-bit floats; `note` then names the
            change.
        execution: see `Execution`.

    Raises:
        BackendError: ONNX Runtime refuses the model, or it or the native library is missing.
    """

    def __init__(
        self,
        model: Any,
        *,
        kernels: bool,
        where: str = "model",
        folder: Path | None = None,
        float32: bool = False,
        execution: Execution = Execution(),
    ) -> None:
        self._model = model
        # A profile needs a session of its own: profiling cannot be turned on later.
        self._again = functools.partial(Session, model, kernels=kernels, where=where, folder=folder, float32=float32)
        self._execution = execution
        onnxruntime = package.onnxruntime()
        options = onnxruntime.SessionOptions()
        if execution.takes_turns:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 4  # errors are raised, so a log would repeat them
        if not execution.optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if folder is not None:
            options.add_session_config_entry(_FOLDER_KEY, str(folder.resolve()))
        if execution.profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(execution.profile)
        if kernels:
            ort.register(options, device=execution.device)
        self.name = where
        try:
            content = str(model) if isinstance(model, (str, Path)) else _serialized(model, folder)
        except (EncodeError, ValueError):
            advice = "save it with external data, pass the path"
            raise BackendError(where, "more than 2 GB in memory", expected="at most that", advice=advice) from None
        self._session = self._load(content, options, float32)
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        self.output_names = [n for n, kind in kinds.items() if kind.startswith("tensor(") and kind != "tensor(string)"]
        if not self.output_names:  # ONNX Runtime returns all outputs for an empty list
            what = f"has no output that is a tensor of numbers: {', '.join(map(' '.join, kinds.items()))}"
            raise BackendError(where, what, expected="one that can be fetched", advice="add one to the graph's outputs")

    def _load(self, content: bytes | str, options: Any, float32: bool) -> Any:
        providers = [*([package.CUDA_PROVIDER] if self._execution.device == "cuda" else []), "CPUExecutionProvider"]
        try:
            # Without its fallback: that prints the reason, and opens the session on the CPU.
            session = package.onnxruntime().InferenceSession(content, options, providers=providers, enable_fallback=0)
        except _runtime_errors() as error:
            reason, missing = _in_one_line(error), _MISSING.search(str(error))
        else:
            if self._execution.device == "cuda":
                ort.check_started(session, providers)
            return session
        # ONNX Runtime refuses a 16-bit model at the first node without a kernel. A copy in float32 runs.
        if missing and float32:
            infer(model := load(self._model))
            self.note = "".join(f"{self.name} runs as a copy that {change}" for change in to_float32(model))
            with system.temporary_folder() as folder:  # after loading, the session no longer needs the file
                path = folder / "model.onnx"
                save(model, path, external=wants_external(model, path, "auto", as_source=False), overwrite=False)
                return self._load(str(path), options, False)
        what = f"ONNX Runtime {package.onnxruntime().__version__} refuses the model"
        advice = "rewrite the original with --for cpu (runs_on: cpu) for a model that does" if missing else ""
        raise BackendError(self.name, what, expected=f"one it runs. {reason}", advice=advice)

    def profile(self, inputs: Mapping[str, Array], repeat: int) -> list[NodeProfile]:
        """Returns the nodes of `repeat` runs after a warm-up, in a second session of the same model."""
        model = load(self._model)
        with system.temporary_folder() as folder, cpu.profiled() as written:
            session = self._again(execution=replace(self._execution, profile=folder / "profile"))
            # One run before the calls are recorded: the first one prepares the kernels.
            session.run(inputs)
            written.clear()
            session.time(inputs, repeat - 1)
            return of_session(model, session._events(), written.calls(), repeat)

    def _events(self) -> Any:
        """Returns the events of a profiled session, and ends its profiling."""
        text = Path(self._session.end_profiling()).read_text(encoding="utf-8")
        try:
            return json.loads(text)
        except ValueError:
            what = f"ONNX Runtime {package.onnxruntime().__version__} wrote a profile that is not JSON"
            expected = "names without quotes, backslashes and line breaks, which releases before 1.24 do not escape"
            advice = "upgrade onnxruntime, or run it without a profile"
            raise BackendError(self.name, what, expected=expected, advice=advice) from None

    def _feeds(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        return {name: _ort_value(array) for name, array in inputs.items()}

    def _arrays(self, results: Iterable[Any]) -> Inputs:
        return {name: _array(value) for name, value in zip(self.output_names, results, strict=True)}

    def _call(self, feeds: dict[str, Any]) -> list[Any]:
        try:
            return list(self._session.run_with_ort_values(self.output_names, feeds))
        except _runtime_errors() as error:
            shapes = ", ".join(f"{name} {list(value.shape())}" for name, value in feeds.items()) or "no inputs"
            what = f"ONNX Runtime cannot run it on {shapes}"
            advice = (*PASS_OTHERS, f". {_in_one_line(error)}")
            raise BackendError(self.name, what, expected="inputs the model accepts", advice=advice) from None


def _in_one_line(error: Exception) -> str:
    """Returns ONNX Runtime's message in one line, without its error-code prefix and source lines."""
    text = " ".join(str(error).split())
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text


def _ort_value(array: Array) -> Any:
    raw = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes a scalar 1-D
    if array.dtype.kind != "V" and array.dtype != BFLOAT16:
        return package.onnxruntime().OrtValue.ortvalue_from_numpy(raw)
    kind = int(ir.DataType.from_numpy(array.dtype))
    raw = raw.view(np.dtype(f"u{array.dtype.itemsize}"))
    return package.onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(raw, kind)


def _array(value: Any) -> Array:
    dtype = _UNNAMED.get(value.data_type())
    if dtype is None:
        return np.asarray(value.numpy())
    # ONNX Runtime does not convert these to NumPy, so their bytes are copied.
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)
