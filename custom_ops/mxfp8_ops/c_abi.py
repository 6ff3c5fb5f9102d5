"""The functions of the headers of src: name -> (type of the result, types of the arguments), for ctypes.

custom_ops/generate.py writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from types import MappingProxyType
from typing import Any, Final

i, n, z, f, t, p = c_int, c_int64, c_size_t, c_float, c_char_p, c_void_p

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
        "mxfp8_conv": (i, (i, p, n, n, n, n, p, i, i, i, p, p, p, i, p, i, i, f, f, i, p, n, i)),
        "mxfp8_gemm": (i, (i, p, p, i, p, p, p, n, n, n, i, p, n, n, i)),
        "mxfp8_weight_gemm": (i, (i, p, n, i, i, p, p, p, n, n, n, i, p, n, n, i)),
        "mxfp8_fused_gemm": (i, (i, p, p, i, p, p, p, i, i, p, n, n, n, i, p, n, n, i)),
        "mxfp8_fused_weight_gemm": (i, (i, p, n, i, i, p, p, p, i, i, p, n, n, n, i, p, n, n, i)),
        "mxfp8_weight_new": (i, (p,)),
        "mxfp8_weight_free": (None, (n,)),
        "mxfp8_grouped_gemm": (i, (i, p, p, i, p, p, p, n, n, n, n, i, p, i)),
        "mxfp8_grouped_weight_gemm": (i, (i, p, i, i, p, p, p, n, n, n, n, i, p, i)),
        "mxfp8_attention": (i, (p, i)),
        "mxfp8_pack": (i, (i, p, n, i, n, n, i, i, p, p, p, i)),
        "mxfp8_profile": (i, (i,)),
        "mxfp8_profile_text": (t, ()),
        "mxfp8_cuda_open": (i, (t, p, p, z)),
        "mxfp8_cuda_plan_gemm": (i, (p, p, p, p)),
        "mxfp8_cuda_plan_quantize": (i, (p, p, p)),
        "mxfp8_cuda_plan_dequantize": (i, (p, p, p)),
        "mxfp8_cuda_plan_embedding": (i, (p, p, p)),
        "mxfp8_cuda_plan_grouped": (i, (p, p, p)),
        "mxfp8_cuda_run": (i, (p, p)),
        "mxfp8_cuda_swizzled_bytes": (n, (n, n)),
        "mxfp8_cuda_kernel": (t, (i,)),
        "mxfp8_cuda_route_at": (p, (i,)),
    }
)
