"""The folder of a model: the files that the model may name, with a check that they do not change.

The external data of an ONNX model and the shards of a checkpoint's index. The rules are those of onnx (`checker.cc`,
resolve_external_data_location): a file below the folder, no symbolic link, no second hard link. A model that someone
sent can name any file, and through a link it could read one that is not its own.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import BinaryIO

from mxfp8_graph.file_reading import Pins
from mxfp8_ops.errors import ContractError


class ModelFolder:
    """The folder that a model, or the index of a checkpoint, lies in."""

    def __init__(self, model: Path) -> None:
        self.path = model.parent
        self._model = model
        self.files = Pins()
        """The model and the external files, as they were when they were first opened."""
        # In the cache of the Hugging Face hub, model and data are links into one other folder: that counts as inside.
        self._linked = Path(os.path.realpath(model)).parent if model.is_symlink() else None
        self._allowed: dict[str, Path] = {}

    def open(self, name: str, where: str) -> BinaryIO:
        """Opens the file that a model calls `name`; `where` is the part of the model that names it, for errors.

        Raises:
            OSError: there is no such file, or it cannot be read, or is not a regular file.
            ContractError: the model must not name this file, or it changed since it was first opened.
        """
        return self.files.open(self.locate(name, where))

    def open_model(self) -> BinaryIO:
        """Opens the model's own file; errors as `open`."""
        return self.files.open(self._model)

    def check(self, file: BinaryIO) -> None:
        """Raises ContractError if a file that `open` returned, or the model that refers to it, changed."""
        self.files.check_open(file)
        self.files.check(self._model)

    def locate(self, name: str, where: str) -> Path:
        """Returns the path, without links, of the file that a model calls `name`; errors as `open`."""
        if name not in self._allowed:
            self._allowed[name] = self._allow(name, where)
        path = self._allowed[name]
        # Asked on each access, not once: a link can be added between two reads.
        if (links := path.stat().st_nlink) > 1 and path.is_file():
            what = f"external file {name!r} has {links} hard links"
            raise ContractError(where, what, expected="a file with one name, as onnx does", advice="put a copy there")
        return path

    def _allow(self, name: str, where: str) -> Path:
        plain = PurePath(name)
        nameless = not name or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)  # JSON has half surrogates
        # Decided by the name first: realpath of such a name would ask the system about files that are none of the
        # model's.
        outside = nameless or plain.is_absolute() or ".." in plain.parts
        expected = Path(os.path.realpath(self.path)) / plain
        real_path = expected if outside else Path(os.path.realpath(expected))
        cached = self._linked is not None and real_path.is_relative_to(self._linked)
        if outside or not (cached or real_path.is_relative_to(os.path.realpath(self.path))):
            advice = "move the data next to the model"
            raise ContractError(where, f"external file {name!r}", expected=f"a file inside {self.path}", advice=advice)
        if real_path != expected and not cached:
            what = f"external file {name!r} is a symbolic link"
            raise ContractError(where, what, expected="a file, as onnx does", advice="put the file itself there")
        return real_path
