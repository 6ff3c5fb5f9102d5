"""ONNX Runtime sessions, with or without our kernels.

What they add: dtypes NumPy has no name for, and errors a user can read.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import EncodeError
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from mxfp8_graph.checking.inputs import BFLOAT16, Array, Inputs
from mxfp8_ops.errors import BackendError

RUNTIME_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(e for e in vars(_state).values() if isinstance(e, type) and issubclass(e, Exception)),
    RuntimeError,
    ValueError,
)
"""What ONNX Runtime raises; its classes have no common base of their own."""

_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"


class Session:
    """A model ready to run.

    Args:
        model: a path, or a proto (then `folder` is where its external data lies).
        kernels: whether our native kernels are registered; without them ONNX Runtime runs the function bodies.
        where: what to call the model in errors.
        folder: where the external data of a proto lies.
        optimize: whether ONNX Runtime may fuse and fold.

    Raises:
        BackendError: ONNX Runtime refuses the model, or the native library is missing.
    """

    def __init__(
        self,
        model: Path | onnx.ModelProto,
        *,
        kernels: bool,
        where: str = "model",
        folder: Path | None = None,
        optimize: bool = True,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised, and told in our words
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if folder is not None:
            options.add_session_config_entry(_FOLDER_KEY, str(folder.resolve()))
        if kernels:
            from mxfp8_ops import ort

            ort.register(options)
        self.where = where
        try:
            content = str(model) if isinstance(model, Path) else model.SerializeToString()
        except (EncodeError, ValueError):
            raise BackendError(
                where,
                "more than 2 GB in memory",
                expected="at most that",
                advice="save it with external data, pass the path",
            ) from None
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except RUNTIME_ERRORS as error:
            version = onnxruntime.__version__
            raise BackendError(
                f"{where}: ONNX Runtime {version} refuses the model; expected one it runs. {clean(error)}"
            ) from None

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs that are tensors of numbers, in order."""
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        return [name for name, kind in kinds.items() if kind.startswith("tensor(") and kind != "tensor(string)"]

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """Returns the outputs by name; bfloat16 as ml_dtypes has it, float8 as uint8.

        Raises:
            BackendError: the model fails on these inputs.
        """
        names = self.output_names
        return {name: _array(value) for name, value in zip(names, self._run(names, _feeds(inputs)), strict=True)}

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """Returns outputs and latencies of `repeat` runs after one that is not counted."""
        names, feeds = self.output_names, _feeds(inputs)
        values = self._run(names, feeds)
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            values = self._run(names, feeds)
            seconds.append(time.perf_counter() - start)
        outputs = {name: _array(value) for name, value in zip(names, values, strict=True)}
        return Timing(outputs, tuple(seconds))

    def _run(self, names: list[str], feeds: dict[str, Any]) -> list[Any]:
        try:
            return list(self._session.run_with_ort_values(names, feeds))
        except RUNTIME_ERRORS as error:
            shapes = ", ".join(f"{name} {list(value.shape())}" for name, value in feeds.items()) or "no inputs"
            raise BackendError(
                self.where,
                f"ONNX Runtime cannot run it on {shapes}",
                expected="inputs the model accepts",
                advice=f"pass --inputs FILE.npz or --dim NAME=SIZE. {clean(error)}",
            ) from None


@dataclass(frozen=True)
class Timing:
    """Outputs of the last run, and the seconds each run took."""

    outputs: Inputs
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def clean(error: Exception) -> str:
    """Returns ONNX Runtime's message in one line, without its error-code prefix and source lines."""
    text = " ".join(str(error).split())
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text


def _feeds(inputs: Mapping[str, Array]) -> dict[str, Any]:
    feeds = {}
    for name, array in inputs.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        raw = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes a scalar 1-D
        if array.dtype.kind == "V" or array.dtype == BFLOAT16:
            raw = raw.view(np.dtype(f"u{array.dtype.itemsize}"))
            feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, kind)
        else:
            feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy(raw)
    return feeds


def _array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    # ONNX Runtime does not give bfloat16 to NumPy, so the bytes are copied from where they lie.
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * BFLOAT16.itemsize
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), BFLOAT16).reshape(shape)
