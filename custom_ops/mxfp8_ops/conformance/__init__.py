"""Checks whether a quantizer, dequantizer or gemm of MXFP8 agrees with this project's: test vectors, and a runner.

    from mxfp8_ops import conformance
    print(conformance.check_quantizer(my_quantize))

Or `python -m mxfp8_ops.conformance`, which takes Python functions, and files that a program in any language wrote.

vectors.npz  inputs and answers, from the NumPy reference; vectors.py reads them
check.py     compares; result.py has the results
rules.py     the rules of other quantizers, to name the one that gives the same answers
folder.py    the same vectors as raw files, for programs in other languages
"""

from __future__ import annotations

from mxfp8_ops.conformance.check import check_dequantizer, check_gemm, check_quantizer
from mxfp8_ops.conformance.result import Outcome, Result
from mxfp8_ops.conformance.vectors import Case, cases

__all__ = ["Case", "Outcome", "Result", "cases", "check_dequantizer", "check_gemm", "check_quantizer"]
