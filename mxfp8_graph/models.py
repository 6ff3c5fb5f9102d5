"""Finds the kind of a model without importing torch or onnx: a model in memory has imported its library."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any, Final


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
    """Returns what `model` is. A path is a program's if it ends in .pt2, an ONNX model's otherwise."""
    if isinstance(model, (str, Path)):
        return Kind.PROGRAM_FILE if Path(model).suffix == ".pt2" else Kind.ONNX_FILE
    # Through sys.modules: an object of a class exists only if its module was imported.
    for module, name, kind in _CLASSES:
        if isinstance(model, getattr(sys.modules.get(module), name, ())):
            return kind
    return Kind.UNKNOWN
