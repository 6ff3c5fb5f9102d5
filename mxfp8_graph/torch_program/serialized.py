"""Reads a program from a .pt2 archive without running anything the file brings.

torch's own reader unpickles weights and sample inputs, evaluates text and loads compiled libraries. Here tensors are
read as bytes, pickles with torch's weights-only unpickler, and torch's deserializer gets text that
`code_in_programs.py` passed. The layout is that of torch 2.10 to 2.15.

The file is a zip archive that torch writes without compression. Archives are inspected with `zipfile` and read with
torch's own reader: what is checked of a record's content must be the bytes that are used, whatever another zip reader
would have found under that name.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import struct
import threading
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch._export.serde import schema, serialize
from torch.export import ExportedProgram

from mxfp8_graph.torch_program.code_in_programs import TRUST, refuse_code, refuse_code_in_keys
from mxfp8_graph.torch_program.containers import unpickled_as
from mxfp8_ops.errors import ContractError

PROGRAM: Final = "models/model.json"
_SAMPLES: Final = "data/sample_inputs/model.pt"
_WEIGHTS: Final = "data/weights/"
_CONSTANTS: Final = "data/constants/"

_LOCK: Final = threading.Lock()
"""torch deserializes one program at a time, and says so with an assertion."""

_TORCHAO: Final = ("torchao", "torchao.prototype.mx_formats")
"""Modules that tell torch which of torchao's tensors are safe to unpickle."""

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

    def __init__(self, path: Path) -> None:
        self.path = path
        expected = "what mxfp8_graph.save or torch.export.save writes"
        try:
            with path.open("rb") as file:
                is_zip = file.read(4) == b"PK\x03\x04"
                if not _check(file, path.stat().st_size, path):
                    if is_zip:
                        raise self._damaged("cut short", "copy it again")
                    raise ContractError(path, "not a .pt2 file", expected=expected, advice="check the path")
        except OSError as error:
            raise ContractError.unreadable(path, error, "a readable .pt2 file") from None
        try:
            self._reader = torch._C.PyTorchFileReader(str(path))
            self.names = frozenset(self._reader.get_all_records())
        except (RuntimeError, UnicodeError) as error:
            what = f"torch {torch.__version__} cannot read the program: {str(error).splitlines()[0]}"
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


def read_program(archive: Archive) -> ExportedProgram | None:
    """Returns the program in a file, or None if there is none (a compiled package).

    Raises:
        ContractError: the file could run code, or is damaged.
    """
    if PROGRAM not in archive.names:
        return None
    for name, wanted in (("archive_format", b"pt2"), ("archive_version", b"0")):
        if archive.read(name).strip() != wanted:
            what = f"{name} {archive.read(name)[:20]!r}"
            raise ContractError(archive.path, what, expected=repr(wanted), advice="export with another torch")
    program = _parsed(schema.ExportedProgram, archive.json(PROGRAM))
    refuse_code(program, archive.path)
    samples = _sample_inputs(archive)
    weights, constants = (_tensors(archive, folder) for folder in (_WEIGHTS, _CONSTANTS))
    with _LOCK:
        read: ExportedProgram = serialize.ExportedProgramDeserializer().deserialize(
            program, weights, constants, samples
        )
    return read


def _parsed(kind: Any, data: Any) -> Any:
    """Returns JSON as an object of torch's serialization schema."""
    return serialize._dict_to_dataclass(kind, data)  # type: ignore[no-untyped-call]


def _sample_inputs(archive: Archive) -> Any:
    content = archive.read(_SAMPLES)
    samples = _unpickled(archive, content, "its sample inputs are") if content else None
    if not isinstance(samples, (tuple, dict, type(None))):
        what = f"sample inputs that are a {type(samples).__name__}"
        raise ContractError(archive.path, what, expected="arguments", advice="save it again")
    refuse_code_in_keys(samples, archive.path)
    return samples


def _tensors(archive: Archive, folder: str) -> dict[str, Any]:
    """Returns the tensors in a folder of the archive by name; those that share memory share it again."""
    legacy = f"{folder}model.pt"
    if legacy in archive.names:
        found = _unpickled(archive, archive.read(legacy), f"its {legacy} is")
        if not isinstance(found, dict):
            raise ContractError(archive.path, f"no tensors in {legacy}", expected="a dict", advice="save it again")
        return found
    kind = folder.split("/")[1]
    config = _parsed(schema.PayloadConfig, archive.json(f"{folder}model_{kind}_config.json"))
    flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
    return {name: _tensor(archive, folder, name, meta, flat) for name, meta in config.config.items()}


def _tensor(archive: Archive, folder: str, name: str, meta: Any, flat: dict[tuple[str, torch.dtype], Any]) -> Any:
    refuse_code([name], archive.path)
    record = f"{folder}{meta.path_name}"
    if meta.use_pickle or meta.tensor_meta is None:
        if meta.path_name.startswith(("custom_obj_", "opaque_obj_")):
            what = f"constant {name!r} is an object of a custom class"
            raise ContractError(archive.path, what, expected="tensors", advice=TRUST)
        return _unpickled(archive, archive.read(record), f"tensor {name!r} is")
    layout = meta.tensor_meta
    dtype = serialize._SERIALIZE_TO_TORCH_DTYPE[layout.dtype]
    if (record, dtype) not in flat:
        flat[record, dtype] = archive.storage(record, dtype)
    sizes, strides = ([int(size.as_int) for size in values] for values in (layout.sizes, layout.strides))
    offset = int(layout.storage_offset.as_int)
    _check_bounds(archive, name, (sizes, strides, offset), flat[record, dtype].numel())
    tensor = torch.as_strided(flat[record, dtype], sizes, strides, offset)
    device = torch.device(layout.device.type, layout.device.index)
    tensor = tensor if device.type == "cpu" else tensor.to(device)
    if meta.is_param:
        return torch.nn.Parameter(tensor, requires_grad=bool(layout.requires_grad))
    return tensor.requires_grad_() if layout.requires_grad else tensor


def _check_bounds(archive: Archive, name: str, layout: tuple[list[int], list[int], int], stored: int) -> None:
    sizes, strides, offset = layout
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if min((*sizes, *strides, offset, 0)) < 0 or (0 not in sizes and last >= stored):
        what = f"tensor {name!r} of shape {sizes} has {stored} values"
        raise ContractError(
            archive.path, what, expected="as many as its shape takes", advice="save it again, with data"
        )


def _unpickled(archive: Archive, content: bytes, what: str) -> Any:
    """Returns the tensors in a pickle, which is read without calling anything but what makes tensors."""
    _check_inner(content, archive.path)
    needs: list[str] = []
    try:
        needs = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        if any(name.startswith("torchao.") for name in needs):
            with contextlib.suppress(ImportError):
                for module in _TORCHAO:
                    importlib.import_module(module)
                needs = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        with torch.serialization.safe_globals(unpickled_as(needs)):
            return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        reason = f"it calls {', '.join(sorted(needs)[:5])}" if needs else reason
        found = f"{what} a pickle of more than tensors: {reason}"
        raise ContractError(archive.path, found, expected="tensors in plain containers", advice=TRUST) from None


def _check_inner(content: bytes, where: object) -> None:
    """Refuses a zip archive inside another that is made to exhaust memory; anything else passes.

    Raises:
        ContractError: it is; called `where`.
    """
    if content.startswith(b"PK") and not _check(io.BytesIO(content), len(content), where):
        raise ContractError(where, "damaged", expected="a whole archive", advice="save it again")


def _check(file: IO[bytes], size: int, where: object) -> bool:
    """Refuses an archive with records that hide others or exhaust memory; returns whether it is a whole zip archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, EOFError, ValueError, OverflowError, NotImplementedError, struct.error):
        return False
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
    return True
