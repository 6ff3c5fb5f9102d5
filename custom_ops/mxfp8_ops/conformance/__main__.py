"""Checks programs in any language: `python -m mxfp8_ops.conformance export FOLDER`, run the program, then `check`.

The exit code is 0 if everything passed, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from mxfp8_ops.conformance.check import Result, judge
from mxfp8_ops.conformance.vectors import KINDS, Array, Case, cases
from mxfp8_ops.errors import ContractError, Mxfp8Error

LIST = """\
# A line per file: what it is, its path, dtype and shape. Files are raw arrays, row by row: bytes, or little-endian
# float32. Read the inputs, and write the answers. Folders are KIND/GROUP/SETTINGS. Blocks of 32 are along the last
# axis, in quantize/columnwise along the first.
"""


def export(folder: Path) -> None:
    """Writes the inputs of every case, and cases.txt, to a new folder."""
    lines = {}
    try:
        folder.mkdir()
        for case in (case for kind in KINDS for case in cases(kind)):
            for what, arrays in (("input", case.inputs), ("answer", case.expected)):
                for path, array in arrays.items():
                    file, raw = folder / f"{path}.bin", array.astype(_dtype(array))
                    file.parent.mkdir(parents=True, exist_ok=True)
                    lines[path] = " ".join(map(str, (what, f"{path}.bin", raw.dtype.name, *raw.shape)))
                    if what == "input":
                        raw.tofile(file)
        (folder / "cases.txt").write_text(LIST + "\n".join([*lines.values(), ""]), encoding="utf-8")
    except OSError as error:
        raise ContractError.unwritable(folder, error) from None


def check(folder: Path) -> Result:
    """Returns which answers in a folder are right; cases without an answer are left out."""
    every = [case for kind in KINDS for case in cases(kind)]
    answered = [case for case in every if any((folder / f"{path}.bin").exists() for path in case.expected)]
    if not answered:
        raise ContractError(folder, "has no answer", expected="files of cases.txt", advice="export, run your program")
    return judge((case, _read(folder, case)) for case in answered)


def _read(folder: Path, case: Case) -> tuple[Array, ...] | str:
    arrays = []
    for path, right in case.expected.items():
        try:
            array = np.fromfile(folder / f"{path}.bin", _dtype(right))
            arrays.append(array.reshape(right.shape))
        except (OSError, ValueError) as error:
            return f"{path}.bin: {error}"
    return tuple(arrays)


def _dtype(array: Array) -> str:
    return "u1" if array.dtype == np.uint8 else "<f4"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mxfp8_ops.conformance", description=__doc__)
    parser.add_argument("command", choices=("export", "check"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "export":
            export(options.folder)
            return 0
        result = check(options.folder)
    except Mxfp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
