"""What a search measured, in a file of JSON lines: after a kill, the same search continues from it.

The first line says what is measured, every other line is one measurement. The search decides by these values alone, so
that it decides the same again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, Field, TypeAdapter

from mxfp8_graph.checking.runner import is_program
from mxfp8_graph.checking.samples import Samples
from mxfp8_graph.file_reading import open_regular
from mxfp8_graph.files import uninterrupted
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.write import input_files
from mxfp8_graph.tools.metrics import Metric
from mxfp8_ops.errors import ContractError, Option

NAME: Final = "measurements.jsonl"
"""Name of the file in the folder of a search."""

_SCHEMA: Final = 1
_Bytes = Annotated[int, Field(ge=0, le=2**63)]
_Seconds = Annotated[float, Field(gt=0, le=1e9)]


class _Trial(BaseModel, strict=True, extra="forbid"):
    scores: dict[str, list[float]]
    bytes: _Bytes
    packed: list[tuple[str, str, _Bytes, _Bytes]]


_KINDS: Final = {
    "trial": TypeAdapter[Any](_Trial),
    "latency": TypeAdapter[Any](tuple[_Seconds, _Seconds]),
    "alone": TypeAdapter[Any](list[float] | None),
}
"""Type of a measurement, by the first word of its name: of `Trials.trial`, `Trials.seconds` and `Damages`."""


class Measurements:
    """Measurements by name."""

    def __init__(self, file: BinaryIO | None, subject: Mapping[str, str], scores: Mapping[str, int]) -> None:
        """Reads what an earlier search left.

        Args:
            file: open for reading and appending; None keeps everything in memory.
            subject: what is measured: of the model, the samples and so on, what tells them from others.
            scores: how many numbers a trial has of each metric.

        Raises:
            ContractError: the file is of another subject, or not one of these.
        """
        self._file = file
        self._values: dict[str, Any] = {}
        if file is not None:
            self._read(file, dict(subject), scores)
        self.resumed = len(self._values)
        """How many measurements an earlier search made."""

    def __contains__(self, name: str) -> bool:
        """Returns whether something was measured under that name."""
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """Returns what was measured under that name."""
        return self._values[name]

    def recall(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns what was measured before under that name, or measures it and writes it down; of JSON types only."""
        if name not in self._values:
            # As JSON gives it back: a search that continues has the same values as one that was never killed.
            value = json.loads(json.dumps(measure()))
            self._append({"name": name, "value": value, "crc32": _checksum(name, value)})
            self._values[name] = value
        return self._values[name]

    def damaged(self) -> ContractError:
        """Returns the error for measurements that do not fit what is measured."""
        return self._error("not the measurements of a search", "a file that tune wrote")

    def _error(self, what: str, expected: str) -> ContractError:
        path = Path(NAME if self._file is None else self._file.name)
        advice = f"remove the folder {path.parent} to begin anew, or choose another output"
        return ContractError(path, what, expected=expected, advice=advice)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                with uninterrupted():
                    self._file.write(json.dumps(line).encode() + b"\n")
                    self._file.flush()
                    os.fsync(self._file.fileno())
            except OSError as error:
                raise ContractError.unwritable(self._file.name, error, ("pass another ", Option("output"))) from None

    def _read(self, file: BinaryIO, subject: dict[str, str], scores: Mapping[str, int]) -> None:
        header = {"schema": _SCHEMA, "subject": subject}
        file.seek(0)
        first, *lines = file.read().split(b"\n")
        if not lines and json.dumps(header).encode().startswith(first):  # new, or killed in its first line
            file.truncate(0)
            self._append(header)
            return
        try:
            found = json.loads(first)
            schema, before = found["schema"], {**found["subject"]}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self.damaged() from None
        if schema != _SCHEMA or before.keys() != subject.keys():
            raise self._error("of another version", f"schema {_SCHEMA}")
        if others := [name for name in subject if before[name] != subject[name]]:
            raise self._error(
                f"measurements of a search with another {', another '.join(others)}", "those of this search"
            )
        if not lines:
            raise self.damaged()
        left = lines.pop()  # what a kill left of a line
        try:
            self._values = dict(_measurement(line, scores) for line in lines)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self.damaged() from None
        file.truncate(file.tell() - len(left))


def _measurement(line: bytes, scores: Mapping[str, int]) -> tuple[str, Any]:
    """Returns (name, value) of a line, the value with the types of `_KINDS`; an error if it cannot be one."""
    found = json.loads(line)
    name, value = found["name"], found["value"]
    if found["crc32"] != _checksum(name, value):
        raise ValueError("changed since it was written")
    checked = _KINDS[name.split(" ", maxsplit=1)[0]].validate_json(json.dumps(value), strict=True)
    if not isinstance(checked, _Trial):
        return name, checked
    if {metric: len(values) for metric, values in checked.scores.items()} != scores:
        raise ValueError("scores of other metrics, or of other samples")
    return name, checked.model_dump()


def _checksum(name: str, value: Any) -> int:
    return zlib.crc32(json.dumps([name, value]).encode())


def model_digest(model: Any) -> str:
    """Returns the SHA-256 of a model: of its files, or of what it holds in memory."""
    if isinstance(model, (str, Path)):
        files = [Path(model)] if is_program(model) else sorted(input_files(open_model(Path(model))))
        return _digest(piece for file in files for piece in _pieces(file))
    if not is_program(model):
        return _digest([model.SerializeToString(deterministic=True)])
    from mxfp8_graph.torch_program.values import to_numpy

    tensors = sorted({**model.state_dict, **model.constants}.items())
    values = (to_numpy(t.detach().contiguous()).tobytes() if hasattr(t, "detach") else b"" for _, t in tensors)
    names = " ".join(name for name, _ in tensors)
    return _digest([model.graph_module.code.encode(), names.encode(), *values])


def samples_digest(samples: Samples) -> str:
    """Returns the SHA-256 of what is in the samples, in their order."""
    arrays = (pair for feeds in samples.feeds for pair in sorted(feeds.items()))
    return _digest(piece for name, a in arrays for piece in (f"{name} {a.dtype} {a.shape}".encode(), a.tobytes()))


def metric_digest(metric: Metric) -> str:
    """Returns the name of a metric; of a user's own with the SHA-256 of the file that defines it."""
    file = getattr(sys.modules.get(metric.name.partition(":")[0]), "__file__", None)
    if ":" not in metric.name or file is None:
        return metric.name
    return f"{metric.name} {_digest(_pieces(Path(file)))[:16]}"


def _pieces(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while piece := file.read(2**20):
            yield piece


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
