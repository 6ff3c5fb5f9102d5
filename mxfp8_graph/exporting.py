"""to_onnx(): checks the arguments and calls the exporter. The import loads neither torch nor onnx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxfp8_graph.files import data_path_of, is_any_of
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.options import ExportOptions, Unpack, check_options
from mxfp8_ops.errors import BackendError, ContractError
from mxfp8_ops.node import MIN_OPSET


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
