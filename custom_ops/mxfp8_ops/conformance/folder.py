"""The vectors as raw files, for programs in other languages: inputs are written, answers are read and judged.

Every file holds one array, row by row, without a header: bytes, or little-endian float32.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from mxfp8_ops.conformance.check import Answer, judge
from mxfp8_ops.conformance.result import Result
from mxfp8_ops.conformance.vectors import Array, Case, cases
from mxfp8_ops.errors import ContractError

KINDS: Final = ("quantize", "dequantize", "gemm")
LIST: Final = "cases.txt"
_INPUTS: Final = {"dequantize": ("elements", "scales"), "gemm": ("a", "a_scales", "b", "b_scales", "bias")}
_ANSWERS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "quantize": (("elements", "u1"), ("scales", "u1")),
    "dequantize": (("values", "<f4"),),
    "gemm": (("y", "<f4"),),
}
_HEAD: Final = """\
# A line per case. Files are raw arrays, row by row: bytes, or little-endian float32. Answers go beside the inputs, of
# quantize into FORMAT-ROUNDING/.
#
# quantize GROUP FORMAT ROUNDING ROWS K AXIS
#   in quantize/GROUP: x.bin float32 [ROWS, K]; blocks are along K for AXIS -1, along the rows for AXIS 0
#   answer in quantize/GROUP/FORMAT-ROUNDING: elements.bin [ROWS, K]; scales.bin, one for each block
# dequantize GROUP FORMAT ROWS K
#   in dequantize/GROUP/FORMAT: elements.bin [ROWS, K], scales.bin [ROWS, ceil(K / 32)]
#   answer there: values.bin float32 [ROWS, K]
# gemm GROUP A_FORMAT B_FORMAT M N K BIAS
#   in gemm/GROUP/A_FORMAT-B_FORMAT: a.bin [M, K], a_scales.bin, b.bin [N, K], b_scales.bin; if BIAS is 1, bias.bin
#   float32 [N]
#   answer there: y.bin float32 [M, N]
"""


def export(folder: Path) -> None:
    """Writes the inputs of every case, and cases.txt, to a new folder.

    Raises:
        ContractError: it exists, or cannot be written.
    """
    if folder.exists():
        raise ContractError(folder, "it exists", expected="a path without a folder", advice="choose another")
    chosen = [case for kind in KINDS for case in cases(kind)]
    try:
        # Beside the folder and renamed at the end: a folder with the name of the result is complete.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as parent:
            draft = Path(parent) / folder.name
            for case in chosen:
                (draft / case.name).mkdir(parents=True)
                for path, array in _inputs(draft, case).items():
                    path.write_bytes(array.astype(array.dtype.newbyteorder("<")).tobytes())
            (draft / LIST).write_text(_HEAD + "".join(f"{_line(case)}\n" for case in chosen), encoding="utf-8")
            draft.rename(folder)
    except OSError as error:
        raise ContractError.unwritable(folder, error) from None


def check(folder: Path) -> Result:
    """Returns which answers in a folder are right; cases without an answer are left out.

    Raises:
        ContractError: the folder is not one of `export`, or has no answer.
    """
    if not (folder / LIST).is_file():
        raise ContractError(folder, f"has no {LIST}", expected="a folder that `export` wrote", advice="write it first")
    chosen = [case for kind in KINDS for case in cases(kind)]
    answered = [case for case in chosen if any(path.exists() for path in _answers(folder, case))]
    if not answered:
        raise ContractError(
            folder,
            "has no answer",
            expected=f"a file that {LIST} names",
            advice="run your program",
        )
    return judge([(case, _read(folder, case)) for case in answered])


def _inputs(folder: Path, case: Case) -> dict[Path, Array]:
    if case.kind == "quantize":
        return {folder / case.kind / case.group / "x.bin": case.inputs[0]}
    return {
        folder / case.name / f"{name}.bin": array
        for name, array in zip(_INPUTS[case.kind], case.inputs, strict=False)  # a gemm may lack its bias
    }


def _answers(folder: Path, case: Case) -> dict[Path, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each file of an answer; the bound of a gemm is not part of it."""
    shapes = (array.shape for array in case.expected)
    names = zip(_ANSWERS[case.kind], shapes, strict=False)
    return {folder / case.name / f"{name}.bin": (dtype, shape) for (name, dtype), shape in names}


def _read(folder: Path, case: Case) -> Answer:
    arrays = []
    for path, (dtype, shape) in _answers(folder, case).items():
        try:
            content = path.read_bytes()
        except OSError as error:
            return f"{path.name}: {error.strerror or error}"
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if len(content) != size:
            return f"{path.name} has {len(content)} bytes instead of {size}"
        arrays.append(np.frombuffer(content, dtype).reshape(shape))
    return tuple(arrays)


def _line(case: Case) -> str:
    words = [case.kind, case.group, *case.settings.split("-")]
    rows, k = case.inputs[0].shape
    if case.kind == "gemm":
        return " ".join(map(str, [*words, rows, len(case.inputs[2]), k, int(len(case.inputs) == 5)]))
    return " ".join(map(str, [*words, rows, k, *([case.options["axis"]] if case.kind == "quantize" else [])]))
