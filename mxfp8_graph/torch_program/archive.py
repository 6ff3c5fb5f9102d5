"""A .pt2 file as named records, whose sizes are checked before anything is unpacked.

The file is a zip archive that torch writes without compression. Archives are inspected with `zipfile` and read with
torch's own reader: what is checked of a record's content must be the bytes that are used, whatever another zip reader
would have found under that name.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import torch

from mxfp8_graph.file_reading import Pins, is_folder
from mxfp8_ops.errors import ContractError

_MOST_RECORDS: Final = 1_000_000
_LARGEST_JSON: Final = 128 * 2**20
"""Bytes; the graph of a program of 400 billion parameters takes a quarter of that, and Python ten times as much."""
_UNPACKED: Final = 64 * 2**20
_RATIO: Final = 100
"""An archive may unpack to `_UNPACKED` bytes or to `_RATIO` times its size. Weights compress by far less."""


class Archive:
    """The records of one .pt2 file.

    Raises:
        ContractError: it cannot be read, is no zip archive, or is made to exhaust memory.
    """

    def __init__(self, path: Path, pins: Pins) -> None:
        self.path = path
        if is_folder(path):
            raise ContractError(path, "a directory", expected="a .pt2 file", advice="name the file inside it")
        start = b""
        try:
            with pins.open(path) as file:
                start = file.read(4)
                _check(file, path.stat().st_size, path)
        except OSError as error:
            raise ContractError.unreadable(path, error, "a readable .pt2 file") from None
        except ContractError:
            raise
        except _NO_ZIP:
            if start == b"PK\x03\x04":
                raise ContractError(path, "cut short", expected="a whole .pt2 file", advice="copy it again") from None
            expected = "what mxfp8_graph.save or torch.export.save writes"
            raise ContractError(path, "not a .pt2 file", expected=expected, advice="check the path") from None
        try:
            self._reader = torch._C.PyTorchFileReader(str(path))
            self.names = frozenset(self._reader.get_all_records())
        except (RuntimeError, UnicodeError) as error:
            what = f"torch {torch.__version__} cannot read the program: {str(error).splitlines()[0]}"
            expected = "what mxfp8_graph.save or torch.export.save writes"
            raise ContractError(path, what, expected=expected, advice="check the path") from None

    def size(self, name: str) -> int:
        """Returns the bytes of a record, unpacked, as torch's reader has it; an older one has to unpack it to know."""
        self._require(name)
        if hasattr(self._reader, "get_record_size"):  # torch 2.13 has it, torch 2.10 has not
            return int(self._reader.get_record_size(name))
        return len(self.read(name))

    def read(self, name: str) -> bytes:
        """Returns the content of a record."""
        self._require(name)
        try:
            content: bytes = self._reader.get_record(name)
        except RuntimeError:
            raise self._damaged(f"{name} cannot be unpacked", "copy it again") from None
        return content

    def storage(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the content of a record as a 1-D tensor on the CPU, without a copy."""
        size = self.size(name)
        if size % dtype.itemsize:
            raise self._damaged(f"{name} has {size} bytes, which {dtype} does not divide", "copy it again")
        try:
            raw = self._reader.get_storage_from_record(name, size // dtype.itemsize, dtype)
        except RuntimeError:
            raise self._damaged(f"{name} cannot be unpacked", "copy it again") from None
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (size // dtype.itemsize,), (1,))

    def json(self, name: str) -> Any:
        """Returns what a record holds as JSON."""
        if self.size(name) > _LARGEST_JSON:
            what = f"{name} has {self.size(name)} bytes"
            raise ContractError(self.path, what, expected=f"at most {_LARGEST_JSON}", advice="do not use the file")
        try:
            return json.loads(self.read(name))
        except RecursionError:
            raise self._damaged(f"{name} is nested too deeply") from None
        except ValueError as error:
            raise self._damaged(f"{name} is not JSON ({error})", "save again") from None

    def _require(self, name: str) -> None:
        if name not in self.names:
            raise self._damaged(f"has no {name}")

    def _damaged(self, what: str, advice: str = "save it again") -> ContractError:
        return ContractError(self.path, what, expected="a whole .pt2 file", advice=advice)


def check_inner(content: bytes, where: object) -> None:
    """Refuses a zip archive inside another that is made to exhaust memory; anything else passes.

    Raises:
        ContractError: it is; called `where`.
    """
    if content.startswith(b"PK"):
        try:
            _check(io.BytesIO(content), len(content), where)
        except ContractError:
            raise
        except _NO_ZIP:
            raise ContractError(where, "damaged", expected="a whole archive", advice="save it again") from None


_NO_ZIP: Final = (zipfile.BadZipFile, EOFError, ValueError, OverflowError, NotImplementedError, struct.error)
"""Exceptions of `zipfile` for a damaged archive, or a file that is none."""


def _check(file: IO[bytes], size: int, where: object) -> None:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    names = {record.filename for record in records}
    expected, advice = "what torch.export.save writes", "do not use the file"
    if len(records) > _MOST_RECORDS or len(names) < len(records):
        what = f"{len(records)} records under {len(names)} names"
        raise ContractError(where, what, expected=expected, advice=advice)
    if outside := next((name for name in names if name.startswith("/") or ".." in name.split("/")), None):
        raise ContractError(where, f"a record named {outside!r}", expected=expected, advice=advice)
    unpacked = sum(record.file_size for record in records)
    if unpacked > max(_UNPACKED, _RATIO * size):
        what = f"{size} bytes that unpack to {unpacked}"
        raise ContractError(where, what, expected=f"at most {_RATIO} times the size", advice=advice)
