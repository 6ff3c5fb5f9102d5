"""Compares the results of a program in any language with the reference: `python -m mxfp8_ops.conformance FOLDER`.

The program reads the arrays of vectors.npz and writes its own to FOLDER/KIND/GROUP/SETTINGS/ARRAY.bin, row by row:
bytes, or little-endian float32. The exit code is 0 if all its results are right, 1 if not, 2 if there are none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from mxfp8_ops.conformance import KINDS, Answer, Case, Result, cases, outcome


def _read(folder: Path, case: Case) -> Answer:
    """Returns the arrays of a case from its folder, or the reason why one cannot be read."""
    arrays = []
    for name, right in case.expected.items():
        try:
            array = np.fromfile(folder / f"{name}.bin", "u1" if right.dtype == np.uint8 else "<f4")
            arrays.append(array.reshape(right.shape))
        except (OSError, ValueError) as error:
            return f"{name}.bin: {error}"
    return tuple(arrays)


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mxfp8_ops.conformance", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    # A program may implement a part of the cases: those without a folder are not counted.
    every = [case for kind in KINDS for case in cases(kind) if (folder / case.name).is_dir()]
    if not every:
        what = f"error: {folder}: has no answer; expected folders such as {cases('gemm')[0].name}; run your program"
        print(what, file=sys.stderr)
        return 2
    result = Result(tuple(outcome(case, _read(folder / case.name, case)) for case in every))
    print(result)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
