"""Whether a quantizer, dequantizer or gemm of MXFP8 computes what this project's do: test vectors, and a runner.

    from mxfp8_ops import conformance
    print(conformance.check_quantizer(my_quantize))

Or `python -m mxfp8_ops.conformance`, which takes Python functions, and files that a program in any language wrote.

vectors.npz  inputs and answers, from the NumPy reference; vectors.py reads them
check.py     compares; result.py: what was found
rules.py     how others quantize: whose answers are these?
folder.py    the same vectors as raw files, for programs in other languages
"""

from __future__ import annotations

from mxfp8_ops.conformance.check import check_dequantizer, check_gemm, check_quantizer
from mxfp8_ops.conformance.result import Outcome, Result
from mxfp8_ops.conformance.vectors import Case, cases

__all__ = ["Case", "Outcome", "Result", "cases", "check_dequantizer", "check_gemm", "check_quantizer"]
