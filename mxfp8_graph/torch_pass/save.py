"""Writes programs to .pt2 files, with a record of the recipe, the tool and the node contract that made them."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from mxfp8_graph import provenance
from mxfp8_graph.files import check_output, output
from mxfp8_graph.naming import first_line
from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.checked_program import check_values
from mxfp8_graph.torch_pass.program import flattened
from mxfp8_ops.errors import ContractError, Mxfp8Error

_PLAIN: Final = frozenset({None, dict, list, tuple, OrderedDict})
"""Containers that torch unpickles without importing a class; None stands for a leaf."""


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a program to a .pt2 file and returns its path; see `mxfp8_graph.save`."""
    path = check_target(path, overwrite=overwrite)
    check_values(program, path)
    program = flattened(program)
    rewrite_record = record.find(program)
    return write(program, path, rewrite_record.recipe if rewrite_record else None, overwrite=overwrite)


def write(program: ExportedProgram, path: Path, recipe: str | None, *, overwrite: bool) -> Path:
    """Writes a program to a .pt2 file and returns its path. Call `check_target` and `check_values` before.

    `recipe` is the JSON of the recipe that rewrote the program, or None.
    """
    entries: dict[str, Any] = provenance.entries(recipe)
    entries[record.MODULES_KEY] = container_modules(program)
    # Sample inputs with containers of transformers would be pickled by class, and `load` unpickles no classes.
    leaves, tree = pytree.tree_flatten(program.example_inputs)
    if tree == program.call_spec.in_spec and not {spec.type for spec in _specs(tree)} <= _PLAIN:
        entries[record.SAMPLES_KEY] = "leaves"
        program = internals.with_samples(program, (tuple(leaves), {}))
    try:
        # In a thread, where no signal raises: torch's writer ends the process when its file raises an exception.
        with (
            output(path, overwrite=overwrite) as folder,
            (folder / path.name).open("wb") as file,
            ThreadPoolExecutor(1) as thread,
        ):
            sink: Any = _Sink(file)
            extra = {record.EXTRA_FILE: json.dumps(entries)}
            thread.submit(torch.export.save, program, sink, extra_files=extra).result()
            if sink.error is not None:
                raise sink.error
    except Mxfp8Error:
        raise
    except Exception as error:
        what = f"torch cannot serialize the program: {first_line(error)}"
        expected = "containers that pytree knows and registered ops"
        raise ContractError(path, what, expected=expected, advice="see the cause above") from error
    return path


class _Sink(io.RawIOBase):
    """A file that stores its first error, and ignores all writes after it. It is written in order only."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: Exception | None = None
        self._file = file
        self._size = self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # torch asks, and seeks to the start at the end

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def write(self, data: Any) -> int:
        if self._position != self._size and self.error is None:
            what = f"torch {torch.__version__} writes byte {self._position} of a .pt2 file after byte {self._size}"
            expected, advice = "a release that writes bytes in order", "install another release of torch"
            self.error = ContractError("save", what, expected=expected, advice=advice)
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        self._size = self._position = self._position + len(data)
        return len(data)


def check_target(path: str | Path, *, overwrite: bool, inputs: Collection[Path] = ()) -> Path:
    """Returns `path` if a program can be written there. Call it before the work, which may take minutes.

    Raises:
        ContractError: the suffix is not .pt2, `path` is one of `inputs`, or as `files.check_output`.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ContractError(path, f"suffix {path.suffix!r}", expected=".pt2", advice="rename it (to_onnx writes ONNX)")
    check_output(path, overwrite=overwrite, inputs=inputs)
    return path


def container_modules(program: ExportedProgram) -> list[str]:
    """Returns the Python modules of the containers (model outputs, caches) that a program takes and returns."""
    modules: set[str] = set()
    for spec in (*_specs(program.call_spec.in_spec), *_specs(program.call_spec.out_spec)):
        # A namedtuple has its class in the context.
        for kind in (spec.type, spec.context):
            if isinstance(kind, type):
                modules.add(kind.__module__)
    return sorted(modules - {"builtins", "collections"})


def _specs(tree: Any) -> Iterator[Any]:
    """Yields the nodes of a tree of containers."""
    stack = [tree] if tree is not None else []
    while stack:
        spec = stack.pop()
        yield spec
        stack += spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
