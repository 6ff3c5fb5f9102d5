"""What a killed process left of a result is finished or removed by the next run that writes to the folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections import defaultdict
from pathlib import Path
from typing import Final

from mxfp8_graph.file_drafts import finish_pair
from mxfp8_graph.file_locks import LOCK, locked
from mxfp8_graph.file_reading import open_regular

_DRAFT: Final = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.mxfp8-(?P<role>new|data|bridge|link)", re.DOTALL)


def clean_up(folder: Path) -> None:
    """Finishes or removes the drafts of dead processes in a folder, if it can be written to.

    A draft is ours if it has our kind of name and our user's id, and its process is dead if no process holds its lock.
    """
    with contextlib.suppress(OSError, ValueError):  # whoever writes there next will say what is wrong with it
        if any(_DRAFT.fullmatch(path.name) or path.name == LOCK for path in folder.iterdir()):
            with locked(folder):
                for drafts in _together(folder):
                    _finish_or_remove(drafts)


def _together(folder: Path) -> list[dict[str, Path]]:
    """Returns the drafts of dead processes by role, those of one token together."""
    found: defaultdict[str, dict[str, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if (match := _DRAFT.fullmatch(path.name)) and _is_ours(path):
            found[match["token"]][match["role"]] = path
    return [drafts for drafts in found.values() if not any(map(_in_use, drafts.values()))]


def _finish_or_remove(drafts: dict[str, Path]) -> None:
    data, model = drafts.get("data"), drafts.get("new")
    if data is not None and model is not None:
        data_path, path = _final(data), _final(model)
        if _names(path, data.name):
            finish_pair(data, data_path, model, path)
        elif not os.path.lexists(path) and _same(data, data_path):
            data_path.unlink()  # new data, without its model
    for draft in drafts.values():
        draft.unlink(missing_ok=True)


def _final(draft: Path) -> Path:
    match = _DRAFT.fullmatch(draft.name)
    assert match is not None
    return draft.with_name(match["name"])


def _is_ours(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _in_use(draft: Path) -> bool:
    """Whether a process holds the lock of a draft, or may hold it."""
    try:
        with open_regular(draft) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _names(model: Path, name: str) -> bool:
    """Whether a model says that its data lies in the file called `name`: the token in it is found nowhere else."""
    wanted, before = os.fsencode(name), b""
    with contextlib.suppress(OSError), open_regular(model) as file:
        while chunk := file.read(1 << 20):
            if wanted in before + chunk:
                return True
            before = chunk[-len(wanted) :]
    return False


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False
