"""Reads a program from a .pt2 archive without running anything the file brings.

torch's own reader unpickles weights and sample inputs, evaluates text and loads compiled libraries. Here tensors are
read as bytes, pickles with torch's weights-only unpickler, and torch's deserializer gets text that
`code_in_programs.py` passed. The layout is that of torch 2.10 to 2.15.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from typing import Any, Final

import torch
from torch._export.serde import schema, serialize
from torch.export import ExportedProgram

from mxfp8_graph.torch_program.archive import Archive, check_inner
from mxfp8_graph.torch_program.code_in_programs import TRUST, refuse_code, refuse_code_in_keys
from mxfp8_graph.torch_program.containers import unpickled_as
from mxfp8_ops.errors import ContractError

_FORMAT: Final = ("archive_format", b"pt2")
_VERSION: Final = ("archive_version", b"0")
PROGRAM: Final = "models/model.json"
_SAMPLES: Final = "data/sample_inputs/model.pt"
_WEIGHTS: Final = "data/weights/"
_CONSTANTS: Final = "data/constants/"

_LOCK: Final = threading.Lock()
"""torch deserializes one program at a time, and says so with an assertion."""

_TORCHAO: Final = ("torchao", "torchao.prototype.mx_formats")
"""Modules that tell torch which of torchao's tensors are safe to unpickle."""


def read_program(archive: Archive) -> ExportedProgram | None:
    """Returns the program in a file, or None if there is none (a compiled package).

    Raises:
        ContractError: the file could run code, or is damaged.
    """
    if PROGRAM not in archive.names:
        return None
    for name, wanted in (_FORMAT, _VERSION):
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
    sizes, strides = ([_integer(size) for size in values] for values in (layout.sizes, layout.strides))
    offset = _integer(layout.storage_offset)
    _check_bounds(archive, name, (sizes, strides, offset), flat[record, dtype].numel())
    tensor = torch.as_strided(flat[record, dtype], sizes, strides, offset)
    device = torch.device(layout.device.type, layout.device.index)
    tensor = tensor if device.type == "cpu" else tensor.to(device)
    if meta.is_param:
        return torch.nn.Parameter(tensor, requires_grad=bool(layout.requires_grad))
    return tensor.requires_grad_() if layout.requires_grad else tensor


def _integer(size: Any) -> int:
    return int(size.as_int)


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
    check_inner(content, archive.path)
    try:
        needs = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        if any(name.startswith("torchao.") for name in needs):
            with contextlib.suppress(ImportError):
                for module in _TORCHAO:
                    importlib.import_module(module)
        with torch.serialization.safe_globals(unpickled_as(needs)):
            return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        found = f"{what} a pickle of more than tensors: {_reason(content, error)}"
        raise ContractError(archive.path, found, expected="tensors in plain containers", advice=TRUST) from None


def _reason(content: bytes, error: Exception) -> str:
    try:
        needs = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    except Exception:  # whatever a pickle that is none raises
        needs = []
    return f"it calls {', '.join(sorted(needs)[:5])}" if needs else next(iter(str(error).splitlines()), "")[:200]
