"""The safetensors file format: an 8-byte little-endian length, that many bytes of JSON, then the data without gaps.

The safetensors package checks headers. Data are read and written here, one tensor at a time: the package writes only
checkpoints that are in memory as a whole, has no float8 for NumPy, and hides the offsets that external data of ONNX
needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mxfp8_graph.files import output
from mxfp8_graph.packed.contents import Array, Codes
from mxfp8_ops.errors import ContractError

E4M3, E5M2, E8M0, U8 = "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"

_PLAIN: Final = map(np.dtype, ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"))

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    E5M2: np.dtype(ml_dtypes.float8_e5m2),
    E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"{dtype.kind.upper()}{8 * dtype.itemsize}": dtype for dtype in _PLAIN},
}
"""The format's dtypes that NumPy and ml_dtypes can hold."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""dtype -> its name in the format."""

_METADATA: Final = "__metadata__"


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * int(DTYPES[self.dtype].itemsize)


@dataclass(frozen=True)
class Entry(_Tensor):
    """A tensor to write; `read` is called just before."""

    name: str
    read: Callable[[], Array]


@dataclass(frozen=True)
class Stored(_Tensor):
    """A tensor in a file."""

    path: Path
    offset: int
    """Position of the data in the file."""

    def bytes(self) -> Codes:
        """Returns the data, read now.

        Raises:
            ContractError: the file cannot be read, or is shorter than its header says.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                content = file.read(self.byte_size)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        if len(content) < self.byte_size:
            raise _damaged(self.path, "ends within a tensor")
        return np.frombuffer(content, np.uint8)


Tensors = Mapping[str, Stored]
"""Tensors of files by name."""


def write(
    path: Path,
    entries: Iterable[Entry],
    metadata: Mapping[str, str],
    *,
    overwrite: bool,
    inputs: Collection[Path] = (),
) -> None:
    """Writes a file, completely or not at all, with one tensor in memory at a time.

    Raises:
        ContractError: the file exists and `overwrite` is false, it is one of `inputs`, or it cannot be written.
    """
    ordered = sorted(entries, key=lambda e: (-int(DTYPES[e.dtype].itemsize), e.name))  # wide dtypes first: all aligned
    with output(path, overwrite=overwrite, inputs=inputs) as folder, (folder / path.name).open("xb") as file:
        file.write(_header(ordered, metadata))
        for entry in ordered:
            data = np.ascontiguousarray(entry.read())
            # The header is written first, so a tensor of another size would shift all that follow it.
            if data.nbytes != entry.byte_size:
                what = f"tensor {entry.name!r} has {data.nbytes} bytes"
                expected = f"{entry.byte_size} for its shape"
                raise ContractError(path, what, expected=expected, advice="the model it comes from is damaged")
            file.write(data.reshape(-1).view(np.uint8).data)


def read(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns (the tensors of a file by name, its metadata); no tensor is read.

    Tensors of dtypes that NumPy cannot hold are left out.

    Raises:
        ContractError: the file cannot be read, or is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            # Checks the header. "pread" does not map the file: cutting a mapped file ends the process that reads it.
            safe_open(path, "np", backend="pread")
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
    except OSError as error:
        raise _unreadable(path, error) from None
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, f"is refused: {error}") from None
    metadata = header.pop(_METADATA, None) or {}
    tensors = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), path, start + entry["data_offsets"][0])
        for name, entry in header.items()
        if entry["dtype"] in DTYPES
    }
    return tensors, metadata


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


def _unreadable(path: Path, error: OSError) -> ContractError:
    return ContractError.unreadable(path, error, "a readable safetensors file")


def _damaged(path: Path, what: str) -> ContractError:
    return ContractError(path, what, expected="a safetensors file", advice="check that it is one and was copied whole")
