"""The public load and save, which can be imported without torch; without torch a call raises a BackendError."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def load(path: str | Path, *, trust_pickle: bool = False) -> ExportedProgram:
    """Returns the program in a .pt2 file, rewritten or not. No other import is needed before.

    No code of the file is run: tensors are read as bytes, and a file that needs a pickle is refused.

    Args:
        path: the file.
        trust_pickle: read the file with torch.export's own reader, which runs code in the file: pickles
            with classes of their own, custom objects, compiled libraries. For files of people you trust.

    Raises:
        ContractError: the file is missing, not a .pt2, cut short, of a newer contract, could run code, or torch cannot
            read it.
        BackendError: torch is not installed.
    """
    from mxfp8_graph import torch_program

    return torch_program.load(path, trust_pickle=trust_pickle)


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Returns the .pt2 file a program was written to; `mxfp8_graph.load` reads it, in any process.

    After an error an existing file is unchanged, and no part of a new one is left.

    Args:
        program: rewritten or not.
        path: ends in .pt2.
        overwrite: whether an existing file may be replaced.

    Raises:
        ContractError: another suffix, the file exists, it cannot be written, or torch cannot serialize the program.
        BackendError: torch is not installed.
    """
    from mxfp8_graph import torch_program

    return torch_program.save(program, path, overwrite=overwrite)
