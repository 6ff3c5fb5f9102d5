"""Finds the files that the index of a checkpoint, or a description of a model, names: they lie in its folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from mxfp8_ops.errors import ContractError


def locate(named_in: Path, name: str, where: str) -> Path:
    """Returns the path, without links, of the file beside `named_in` that it calls `name`; `where` is for errors.

    Raises OSError if there is none, and ContractError if it lies outside: an index from a stranger can name any file.
    """
    folder = Path(os.path.realpath(named_in.parent))
    # In the cache of the Hugging Face hub, index and shards are links into one other folder: that counts as inside.
    folders = [folder, Path(os.path.realpath(named_in)).parent] if named_in.is_symlink() else [folder]
    plain = PurePath(name)
    # Decided by the name first: realpath of such a name would ask the system about files that are none of the model's.
    # Windows has anchors that are not absolute: C:name and \\name lead out of the folder too.
    outside = bool(not name or not name.isprintable() or plain.anchor or ".." in plain.parts)
    path = Path(folder, plain) if outside else Path(os.path.realpath(Path(folder, plain), strict=True))
    if outside or not any(map(path.is_relative_to, folders)):
        advice = "move the data next to the model"
        expected = f"a file inside {named_in.parent}"
        raise ContractError(where, f"external file {name!r}", expected=expected, advice=advice)
    return path
