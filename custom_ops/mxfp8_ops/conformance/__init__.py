"""Checks whether a quantizer, dequantizer or gemm of MXFP8 agrees with this project's, on the vectors of vectors.npz.

    from mxfp8_ops import conformance
    print(conformance.check("quantize", my_quantize))

`python -m mxfp8_ops.conformance` does it for programs in any language, which read and write files.
"""

from mxfp8_ops.conformance.check import Outcome, Result, check
from mxfp8_ops.conformance.vectors import Case, cases

__all__ = ["Case", "Outcome", "Result", "cases", "check"]
