"""The functions of src/mxfp8_ops.h: name -> (type of the result, types of the arguments), for ctypes.

Written by custom_ops/generate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from types import MappingProxyType
from typing import Any, Final

i, n, f, t, p = c_int, c_int64, c_float, c_char_p, c_void_p

SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = MappingProxyType(
    {
        "mxfp8_last_error": (t, (i,)),
        "mxfp8_contract_version": (i, ()),
        "mxfp8_isa_available": (t, ()),
        "mxfp8_isa": (t, ()),
        "mxfp8_isa_force": (i, (t,)),
        "mxfp8_use_openmp": (None, (p,)),
        "mxfp8_quantize": (i, (i, p, n, n, n, i, i, p, p, i)),
        "mxfp8_dequantize": (i, (i, p, p, n, n, n, i, p, i)),
        "mxfp8_embedding": (i, (i, p, n, i, p, p, n, n, i, p, i)),
        "mxfp8_gemm": (i, (i, p, p, i, p, p, p, n, n, n, i, p, n, i)),
        "mxfp8_weight_gemm": (i, (i, p, n, i, i, p, p, p, n, n, n, i, p, n, i)),
        "mxfp8_fused_gemm": (i, (i, p, p, i, p, p, p, i, i, p, n, n, n, i, p, n, i)),
        "mxfp8_fused_weight_gemm": (i, (i, p, n, i, i, p, p, p, i, i, p, n, n, n, i, p, n, i)),
        "mxfp8_gemm_quantize": (i, (i, p, p, i, p, p, p, i, n, n, n, i, i, p, p, p, i)),
        "mxfp8_norm_quantize": (i, (i, p, p, p, p, n, n, i, f, i, i, p, p, p, p, i)),
        "mxfp8_grouped_gemm": (i, (i, p, p, i, p, p, p, n, n, n, n, i, p, i)),
        "mxfp8_grouped_weight_gemm": (i, (i, p, i, i, p, p, p, n, n, n, n, i, p, i)),
        "mxfp8_attention": (i, (p, i)),
        "mxfp8_pack": (i, (i, p, n, i, n, n, i, i, p, p, p, i)),
        "mxfp8_profile": (i, (i,)),
        "mxfp8_profile_text": (t, ()),
    }
)
