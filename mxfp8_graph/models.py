"""The kinds of models, and the public load and save of programs. The import loads neither torch nor onnx.

The two functions import torch when they are called, and raise a BackendError without it.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class Kind(enum.Enum):
    """The kinds of models that functions of the package take."""

    ONNX_FILE = enum.auto()
    """The path of an ONNX file, which may not exist."""
    PROGRAM_FILE = enum.auto()
    """The path of a .pt2 file."""
    ONNX_MODEL = enum.auto()
    """An `onnx.ModelProto`."""
    GRAPHSURGEON = enum.auto()
    """An `onnx_graphsurgeon.Graph`."""
    PROGRAM = enum.auto()
    """A `torch.export.ExportedProgram`."""
    UNKNOWN = enum.auto()

    @property
    def is_file(self) -> bool:
        """Whether the model is in a file."""
        return self in {Kind.ONNX_FILE, Kind.PROGRAM_FILE}

    @property
    def is_program(self) -> bool:
        """Whether the model is a torch program, in a file or in memory."""
        return self in {Kind.PROGRAM_FILE, Kind.PROGRAM}


_CLASSES: Final = (
    ("onnx", "ModelProto", Kind.ONNX_MODEL),
    ("onnx_graphsurgeon", "Graph", Kind.GRAPHSURGEON),
    ("torch.export", "ExportedProgram", Kind.PROGRAM),
)


def kind_of(model: Any) -> Kind:
    """Returns the kind of `model`. A path that ends in .pt2 is a program's, any other an ONNX model's."""
    if isinstance(model, (str, Path)):
        return Kind.PROGRAM_FILE if Path(model).suffix == ".pt2" else Kind.ONNX_FILE
    # By sys.modules, without an import: an object of a class exists only if its module was imported.
    for module, name, kind in _CLASSES:
        if isinstance(model, getattr(sys.modules.get(module), name, ())):
            return kind
    return Kind.UNKNOWN


def load(path: str | Path) -> ExportedProgram:
    """Returns the program in a .pt2 file, rewritten or not. No other import is needed before the call.

    A program is code: open only files that you trust. Unlike torch's own reader, this one runs no code from pickles.

    Raises:
        ContractError: the file is missing, not a .pt2, cut short, of a newer contract, holds pickles of more than
            tensors or a compiled library, or torch cannot read it.
        BackendError: torch is not installed.
    """
    from mxfp8_graph.torch_pass import load

    return load.load(path)


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a program to a .pt2 file for `mxfp8_graph.load`, and returns the path.

    After an error an existing file is unchanged, and no part of a new one is left.

    Args:
        program: rewritten or not.
        path: ends in .pt2.
        overwrite: whether an existing file may be replaced.

    Raises:
        ContractError: another suffix, the file exists, it cannot be written, or torch cannot serialize the program.
        BackendError: torch is not installed.
    """
    from mxfp8_graph.torch_pass import save

    return save.save(program, path, overwrite=overwrite)
