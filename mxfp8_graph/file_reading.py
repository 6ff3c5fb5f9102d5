"""Finds the files that a model or the index of a checkpoint names: they lie in its folder, by the rules of onnx.

The rules (`checker.cc`, resolve_external_data_location): below the folder, no symbolic link, no second hard link. A
model from a stranger can name any file, and through a link it could read one that is not its own.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from mxfp8_ops.errors import ContractError


class ModelFolder:
    """The folder that a model, or the index of a checkpoint, lies in."""

    def __init__(self, model: Path) -> None:
        self.path = model.parent
        self.model = model
        # In the cache of the Hugging Face hub, model and data are links into one other folder: that counts as inside.
        self._linked = Path(os.path.realpath(model)).parent if model.is_symlink() else None

    def locate(self, name: str, where: str) -> Path:
        """Returns the path, without links, of the file that a model calls `name`.

        Args:
            name: as the model has it.
            where: the part of the model that names it, for errors.

        Raises:
            OSError: there is no such file.
            ContractError: the model must not name this file.
        """
        plain = PurePath(name)
        nameless = not name or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)  # JSON has half surrogates
        # Decided by the name first: realpath of such a name would ask the system about files that are none of the
        # model's.
        outside = nameless or plain.is_absolute() or ".." in plain.parts
        folder = os.path.realpath(self.path)
        expected = Path(folder, plain)
        path = expected if outside else Path(os.path.realpath(expected))
        cached = self._linked is not None and path.is_relative_to(self._linked)
        if outside or not (cached or path.is_relative_to(folder)):
            advice = "move the data next to the model"
            raise ContractError(where, f"external file {name!r}", expected=f"a file inside {self.path}", advice=advice)
        if path != expected and not cached:
            what = f"external file {name!r} is a symbolic link"
            raise ContractError(where, what, expected="a file, as onnx does", advice="put the file itself there")
        if (links := path.stat().st_nlink) > 1 and path.is_file():
            what = f"external file {name!r} has {links} hard links"
            raise ContractError(where, what, expected="a file with one name, as onnx does", advice="put a copy there")
        return path
