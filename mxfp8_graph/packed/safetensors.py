"""The safetensors file format: an 8-byte little-endian length, that many bytes of JSON, then the data without gaps.

Written and read here rather than with the safetensors package: its NumPy interface wants every tensor in memory at
once and has no float8 before version 0.6. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeGuard

import ml_dtypes
import numpy as np

from mxfp8_graph.file_reading import Pins
from mxfp8_graph.files import is_taken, replacing, write_early
from mxfp8_graph.packed.weight import Array, Codes
from mxfp8_ops.errors import ContractError, Option

E4M3, E5M2, E8M0, U8 = "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"

DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        U8: np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
        E5M2: np.dtype(ml_dtypes.float8_e5m2),
        E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
        "I16": np.dtype(np.int16),
        "U16": np.dtype(np.uint16),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "I32": np.dtype(np.int32),
        "U32": np.dtype(np.uint32),
        "F32": np.dtype(np.float32),
        "I64": np.dtype(np.int64),
        "U64": np.dtype(np.uint64),
        "F64": np.dtype(np.float64),
        "C64": np.dtype(np.complex64),
    }
)
"""The format's dtypes that NumPy and ml_dtypes can hold."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""dtype -> its name in the format."""

_METADATA: Final = "__metadata__"
LONGEST_HEADER: Final = 100_000_000
"""Bytes of a header, the limit of the safetensors package."""


@dataclass(frozen=True)
class Entry:
    """One tensor to be written; `read` is called just before."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def byte_size(self) -> int:
        """Bytes of its data."""
        return _byte_size(self.dtype, self.shape)


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    files: Pins
    """Notices if `path` changed since its header was read."""
    offset: int
    """Position of the data in the file."""

    @property
    def byte_size(self) -> int:
        """Bytes of its data."""
        return _byte_size(self.dtype, self.shape)

    def bytes(self) -> Codes:
        """Returns the data, read now.

        Raises:
            ContractError: the file cannot be read, or changed.
        """
        size = self.byte_size
        try:
            with self.files.open(self.path) as file:
                file.seek(self.offset)
                content = file.read(size)
                # After the read, so that a change during it is noticed too.
                self.files.check_open(file)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        # The file was cut after its header was read.
        if len(content) < size:
            raise _damaged(self.path, f"ends before byte {self.offset + size}")
        return np.frombuffer(content, np.uint8)


def write(
    path: Path, entries: Iterable[Entry], metadata: Mapping[str, str], *, overwrite: bool, check: Callable[[], None]
) -> None:
    """Writes a file atomically, one tensor in memory at a time. `check` is called at the end, and may refuse the file.

    Raises:
        ContractError: the file exists and `overwrite` is false, or it cannot be written.
    """
    if not overwrite and is_taken(path):
        raise _exists(path)
    ordered = sorted(entries, key=lambda e: (-int(DTYPES[e.dtype].itemsize), e.name))  # wide dtypes first: all aligned
    try:
        with replacing(path, overwrite=overwrite) as file:
            file.write(_header(ordered, metadata))
            for entry in ordered:
                data = np.ascontiguousarray(entry.read())
                # The header is written first, so a tensor of another size would shift all that follow it.
                if data.nbytes != entry.byte_size:
                    what = f"tensor {entry.name!r} has {data.nbytes} bytes"
                    expected = f"{entry.byte_size} for its shape"
                    raise ContractError(path, what, expected=expected, advice="the model it comes from is damaged")
                write_early(file, data.reshape(-1).view(np.uint8).data)
            check()
    except FileExistsError:  # since it was checked
        raise _exists(path) from None
    except OSError as error:
        raise ContractError.unwritable(path, error) from None


def _exists(path: Path) -> ContractError:
    advice = ("pass ", Option("overwrite", True), " or another path")
    return ContractError(path, "exists already", expected="a new file", advice=advice)


def read(path: Path, files: Pins) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns (the tensors of a file by name, its metadata); no tensor is read.

    Tensors of dtypes that NumPy cannot hold are left out. `files` notices when the file changes.

    Raises:
        ContractError: the file cannot be read, or is not a safetensors file.
    """
    try:
        with files.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if 2 <= length <= min(size - 8, LONGEST_HEADER) else None
    except OSError as error:
        raise _unreadable(path, error) from None
    # A length that the file cannot have: the bytes are not allocated.
    if content is None:
        raise _damaged(path, f"its header of {length} bytes does not fit into {size}")
    header = _parsed(path, content)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata is not a mapping of names to text")
    # All entries are checked, also those of dtypes that are left out: their bytes are in the file.
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, (start, stop)) in sorted(entries.items(), key=lambda item: item[1][2]):
        # The format forbids gaps and overlaps, which could hide other data in the file.
        if start != end or 8 + length + stop > size:
            expected = f"from {end} on, and {size - 8 - length} at most"
            raise _damaged(path, f"tensor {name!r} claims bytes {start} to {stop}; expected them {expected}")
        end = stop
    tensors = {
        n: Stored(d, s, path, files, 8 + length + start) for n, (d, s, (start, _)) in entries.items() if d in DTYPES
    }
    return tensors, metadata


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    """Returns the header as a dict; a name that occurs twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError("a name occurs twice")
        return names

    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise _damaged(path, "its header is nested too deeply") from None
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns (dtype, shape, (first byte, last byte + 1)) of a tensor, as the header describes it."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)) or len(offsets) != 2:
        text = repr(entry) if len(repr(entry)) <= 200 else f"{repr(entry)[:200]}..."
        raise _damaged(path, f"tensor {name!r} is not described as the format says ({text})")
    start, stop = offsets
    if start > stop or (dtype in DTYPES and stop - start != _byte_size(dtype, shape)):
        raise _damaged(path, f"tensor {name!r} of {dtype} {shape} claims bytes {start} to {stop}")
    return dtype, tuple(shape), (start, stop)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes before the data: a length, and that many bytes of JSON, with blanks that align the data."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for entry in entries:
        start, end = end, end + entry.byte_size
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _byte_size(dtype: str, shape: Iterable[int]) -> int:
    return math.prod(shape) * int(DTYPES[dtype].itemsize)


def _unreadable(path: Path, error: OSError) -> ContractError:
    return ContractError.unreadable(path, error, "a readable safetensors file")


def _damaged(path: Path, what: str) -> ContractError:
    return ContractError(path, what, expected="a safetensors file", advice="check that it is one and was copied whole")
