"""Every kernel of src/cuda, as C++ writes it: what tests compile and emulate, and what measurements compile first."""

from __future__ import annotations

from mxfp8_ops.cuda import fused as cuda_fused
from mxfp8_ops.cuda import skinny as cuda_skinny
from mxfp8_ops.cuda.launches import Launch


def instances(capability: tuple[int, int] = (9, 0)) -> list[Launch]:
    """Returns every kernel that a device can run, once, without arguments. One of 9.0 can run all there are."""
    values, elements, flags = ("F32", "F16", "BF16"), ("E4M3", "E5M2"), ("false", "true")
    names = [("fold", "fold"), ("swizzle_scales", "swizzle_scales")]
    names += [("finish", f"finish<{ragged}>") for ragged in flags]
    names += [("bfloat16_parts", f"bfloat16_parts<{v}, {ragged}>") for v in ("F32", "F16") for ragged in flags]
    names += [("tile", f"tile<{x}>") for x in ("BF16", *elements)]
    for f in elements:
        for v in values:
            for ragged in flags:
                for other in flags:
                    names.append(("quantize_rows", f"quantize_rows<{v}, {f}, {other}, {ragged}>"))
                    names.append(("dequantize", f"dequantize<{v}, {f}, {other}, {ragged}>"))
                for rows in flags:
                    for layout in ("PLAIN", "SWIZZLED", "TRANSPOSED"):
                        names.append(("quantize_columns", f"quantize_columns<{v}, {f}, {rows}, {layout}, {ragged}>"))
        for x in (*values, *elements):
            names.append(("gemm_float32", f"gemm_float32<{x}, {f}>"))
        if capability == (9, 0):
            names += [("gemm_fused", cuda_fused.Cut(blocks, 1).kernel(f)) for blocks in cuda_fused.BLOCKS]
        for x in (*values, *elements):
            for tiles, choices in cuda_skinny.WARPS.items():
                names += [("gemm_skinny", cuda_skinny.Cut(tiles, warps, 1).kernel(x, f)) for warps in choices]
    return [Launch(source, kernel, 1, ()) for source, kernel in names]
