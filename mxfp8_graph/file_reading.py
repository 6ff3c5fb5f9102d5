"""locate(): finds a file that a model or the index of a checkpoint names; the file must be in the same folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from mxfp8_ops.errors import ContractError


def locate(named_in: Path, name: str, where: str) -> Path:
    """Returns the path, without links, of the file `name` that the file `named_in` refers to.

    Args:
        named_in: a model, or the index of a checkpoint.
        name: a path relative to the folder of `named_in`.
        where: place in error messages.

    Raises:
        OSError: there is no such file.
        ContractError: the file lies outside of the folder. An index of unknown origin can name any file.
    """
    folder = Path(os.path.realpath(named_in.parent))
    # In the cache of the Hugging Face hub, index and shards are links into one other folder, which counts as inside.
    folders = [folder, Path(os.path.realpath(named_in)).parent] if named_in.is_symlink() else [folder]
    plain = PurePath(name)
    # First by the name alone: realpath of an outside name would ask the system about files of others.
    # Windows has anchors that are not absolute: C:name and \\name lead out of the folder too.
    outside = bool(not name or not name.isprintable() or plain.anchor or ".." in plain.parts)
    path = Path(folder, plain) if outside else Path(os.path.realpath(Path(folder, plain), strict=True))
    if outside or not any(map(path.is_relative_to, folders)):
        advice = "move the data next to the model"
        expected = f"a file inside {named_in.parent}"
        raise ContractError(where, f"external file {name!r}", expected=expected, advice=advice)
    return path
