"""The kinds of models, and the public load, save and to_onnx of programs. The import loads neither torch nor onnx.

The three functions import torch when they are called, and raise a BackendError without it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mxfp8_graph.files import data_path_of, is_any_of
from mxfp8_graph.options import ExportOptions, Unpack, check_options
from mxfp8_ops.errors import BackendError, ContractError
from mxfp8_ops.node import MIN_OPSET

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


def to_onnx(
    program: Any,
    path: str | Path,
    *,
    opset: int = MIN_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    **options: Unpack[ExportOptions],
) -> Path:
    """Writes a rewritten program as ONNX, and returns `path`. ONNX Runtime runs the file from version 1.20 on.

    The file is the same as after a rewrite of the program's ONNX export, with the packed bytes of the program. ONNX
    Runtime's CPU provider lacks kernels for bfloat16: a program in bfloat16 gives a warning, unless the recipe has
    runs_on: cpu.

    Args:
        program: a `torch.export.ExportedProgram` that `rewrite` packed, or the path of one that `save` wrote.
        path: file to write.
        opset: version of the default operator domain, at least 21. ONNX Runtime 1.20 reads 21, 1.23 also 23.
        input_names: names of the inputs; by default the program's.
        output_names: names of the outputs; by default the program's.
        dynamic_shapes: names for dynamic axes, as `torch.onnx.export` takes them: `{"x": {0: "batch"}}`. The program
            decides which axes are dynamic; this only names them. By default they have torch's names, such as "s77".
        **options: see `mxfp8_graph.options.ExportOptions`.

    Raises:
        ContractError: the program is not a packed one, an op has no ONNX form, or the file cannot be written.
        BackendError: torch or onnxscript is missing.
    """
    check_options("to_onnx", options, ExportOptions)
    check_opset(opset, "to_onnx")
    # Before the imports, which take seconds.
    names = {"input_names": input_names, "output_names": output_names}
    for kind, wanted in names.items():
        if wanted is not None and not _are_names(wanted):
            expected, advice = "a list of names, each once", f"correct {kind}"
            raise ContractError("to_onnx", f"{kind} is {wanted!r}", expected=expected, advice=advice)
    if kind_of(program) not in {Kind.PROGRAM, Kind.PROGRAM_FILE, Kind.ONNX_FILE}:
        expected, advice = "a rewritten ExportedProgram or the path of one", "pass what mxfp8_graph.rewrite gave back"
        raise ContractError("to_onnx", f"a {type(program).__name__}", expected=expected, advice=advice)
    path, program = Path(path), Path(program) if isinstance(program, str) else program
    if isinstance(program, Path) and any(is_any_of(file, [program]) for file in (path, data_path_of(path))):
        raise ContractError(path, "is the program", expected="another file", advice="pass another path")
    try:
        import onnxscript  # noqa: F401

        from mxfp8_graph.onnx_export.to_onnx import write
    except ImportError as error:
        advice = "pip install torch onnxscript"
        raise BackendError("to_onnx", str(error), expected="torch and onnxscript", advice=advice) from error
    return write(program, path, opset, {**names, "dynamic_shapes": dynamic_shapes}, options)


def check_opset(opset: object, where: str) -> None:
    """Raises ContractError unless onnx knows the version `opset`, and function bodies can be written in it."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not MIN_OPSET <= opset <= newest:
        expected = f"{MIN_OPSET} to {newest}, which onnx {onnx.__version__} knows"
        raise ContractError(where, f"opset {opset}", expected=expected, advice="pass another opset")


def _are_names(names: object) -> bool:
    """Whether `names` is a list of distinct texts that are not empty."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        return False
    return all(isinstance(name, str) and name for name in names) and len({*names}) == len(names)
