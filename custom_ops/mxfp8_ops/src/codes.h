// The codes of the C ABI. Gemms and attention include this and formats.h, not the functions or the nodes: another of
// those compiles none of them again.
#pragma once

// Dtypes of values, then element formats. These and the dtypes of indices and masks have the numbers of
// onnx.TensorProto.DataType. An INT8 element is its code times 2^-6.
enum { MXFP8_FLOAT32 = 1, MXFP8_FLOAT16 = 10, MXFP8_BFLOAT16 = 16, MXFP8_E4M3 = 17, MXFP8_E5M2 = 19, MXFP8_INT8 = 3 };
enum { MXFP8_INT32 = 6, MXFP8_INT64 = 7, MXFP8_BOOL = 9 };
// How a scale is rounded to a power of two, in the order of formats.SCALE_ROUNDINGS.
enum { MXFP8_CEIL = 0, MXFP8_FLOOR = 1, MXFP8_EVEN = 2 };
// The epilogue of a fused gemm, in the order of contract.EPILOGUES; the last three are of convolutions alone, in the
// order of conv.EPILOGUES.
enum { MXFP8_NONE = 0, MXFP8_RELU = 1, MXFP8_GELU = 2, MXFP8_GELU_TANH = 3, MXFP8_SILU = 4 };
enum { MXFP8_CLIP = 5, MXFP8_LEAKY_RELU = 6, MXFP8_HARD_SWISH = 7 };
// The result of a call. MXFP8_FAILED: an error that has no code of its own.
enum { MXFP8_OK = 0, MXFP8_BAD_ARGUMENT = -1, MXFP8_NO_MEMORY = -2, MXFP8_NO_SUCH_ISA = -3, MXFP8_FAILED = -5 };
