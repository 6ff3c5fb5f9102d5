// The number formats and nodes of formats.py and contract.py, as C++ tables.
#pragma once
#include <cstdint>

#include "formats.h"
#include "mxfp8_ops.h"

namespace mxfp8 {

struct Dtype {
  int code;
  const char* name;  // in ONNX
  const char* cuda;  // in codec.cuh
  int bytes;
  int cuda_type;           // cudaDataType
  uint32_t increments[4];  // for elements, formats.scale_increment of each rounding
};

struct Port {
  const char* name;
  int dtypes[8];  // the allowed ones; the rest is 0
  bool optional;
  int like = -1;  // index of the input that has the same dtype; -1 if there is none
};

struct Node {
  const char* name;
  Port inputs[8], outputs[5];                           // ports without a name are unused
  int output_dtype;                                     // default of the attribute; 0 if it has none
  int a, a_scales, b, b_scales, bias, experts, factor;  // index of this input of a gemm; -1 if there is none
};

// custom_ops/generate.py writes the lines below, up to the last one. Op is the index in kNodes; the attributes of any
// node are ROW(type, name, default).
// clang-format off
#define MXFP8_ATTRIBUTES(ROW) \
  ROW(int64_t, axis, -1) \
  ROW(int64_t, block_size, 32) \
  ROW(int64_t, output_dtype, 0) \
  ROW(std::string, scale_rounding, "ceil") \
  ROW(int64_t, activation_dtype, 1) \
  ROW(std::string, epilogue, "none") \
  ROW(int64_t, q_num_heads, 1) \
  ROW(int64_t, kv_num_heads, 1) \
  ROW(int64_t, is_causal, 0) \
  ROW(float, scale, 0.0f) \
  ROW(int64_t, nan_guard, 0) \
  ROW(std::vector<int64_t>, strides, {1}) \
  ROW(std::vector<int64_t>, pads, {0}) \
  ROW(std::vector<int64_t>, dilations, {1}) \
  ROW(int64_t, group, 1) \
  ROW(int64_t, x_dtype, 3) \
  ROW(float, alpha, 0.0f) \
  ROW(float, beta, 0.0f) \
  ROW(std::string, residual_at, "before")

static_assert(MXFP8_FLOAT32 == 1, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_FLOAT16 == 10, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_BFLOAT16 == 16, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_E4M3 == 17, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_E5M2 == 19, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_INT8 == 3, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_CEIL == 0, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_FLOOR == 1, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_EVEN == 2, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_NONE == 0, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_RELU == 1, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_GELU == 2, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_GELU_TANH == 3, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_SILU == 4, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_INT32 == 6, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_INT64 == 7, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_BOOL == 9, "mxfp8_ops.h says otherwise");
static_assert(MXFP8_CONTRACT_VERSION == 1, "mxfp8_ops.h says otherwise");

inline constexpr const char* kDomain = "mxfp8";
enum class Op {kQuantize, kDequantize, kGemm, kWeightGemm, kEmbedding, kGroupedGemm, kGroupedWeightGemm, kFusedGemm, kFusedWeightGemm, kGatedGemm, kGatedWeightGemm, kAttention, kConv};
inline constexpr const char* kScaleRoundings[] = {
    "ceil",
    "floor",
    "even",
};
inline constexpr const char* kEpilogues[] = {
    "none",
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
};
inline constexpr Dtype kValueDtypes[] = {
    {MXFP8_FLOAT32, "float", "F32", 4, 0, {}},
    {MXFP8_FLOAT16, "float16", "F16", 2, 2, {}},
    {MXFP8_BFLOAT16, "bfloat16", "BF16", 2, 14, {}},
};
inline constexpr Dtype kElementFormats[] = {
    {MXFP8_E4M3, "float8e4m3fn", "E4M3", 1, 28, {0x1fffff, 0x0, 0x80000}},
    {MXFP8_E5M2, "float8e5m2", "E5M2", 1, 29, {0x1fffff, 0x0, 0x100000}},
    {MXFP8_INT8, "int8", "INT8", 1, 3, {0x1ffff, 0x0, 0x10000}},
};
inline constexpr Dtype kActivationDtypes[] = {
    {MXFP8_FLOAT32, "float", "F32", 4, 0, {}},
    {MXFP8_BFLOAT16, "bfloat16", "BF16", 2, 14, {}},
};
inline constexpr Node kNodes[] = {
    {"MXFP8Quantize", {{"X", {1, 10, 16}, false}},
     {{"elements", {17, 19, 3}, false}, {"scales", {2}, false}}, 17, -1, -1, -1, -1, -1, -1, -1},
    {"MXFP8Dequantize", {{"elements", {17, 19, 3}, false}, {"scales", {2}, false}},
     {{"Y", {1, 10, 16}, false}}, 1, -1, -1, -1, -1, -1, -1, -1},
    {"MXFP8Gemm", {{"A", {17, 19, 3}, false}, {"A_scales", {2}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, 1, 2, 3, 4, -1, -1},
    {"MXFP8WeightGemm", {{"X", {1, 10, 16}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, -1, 1, 2, 3, -1, -1},
    {"MXFP8Embedding", {{"indices", {6, 7}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}},
     {{"Y", {1, 10, 16}, false}}, 1, -1, -1, -1, -1, -1, -1, -1},
    {"MXFP8GroupedGemm", {{"A", {17, 19, 3}, false}, {"A_scales", {2}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"experts", {7}, false}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, 1, 2, 3, -1, 4, -1},
    {"MXFP8GroupedWeightGemm", {{"X", {1, 10, 16}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"experts", {7}, false}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, -1, 1, 2, -1, 3, -1},
    {"MXFP8FusedGemm", {{"A", {17, 19, 3}, false}, {"A_scales", {2}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, 1, 2, 3, 4, -1, -1},
    {"MXFP8FusedWeightGemm", {{"X", {1, 10, 16}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, -1, 1, 2, 3, -1, -1},
    {"MXFP8GatedGemm", {{"A", {17, 19, 3}, false}, {"A_scales", {2}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"factor", {1, 10, 16}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, 1, 2, 3, 5, -1, 4},
    {"MXFP8GatedWeightGemm", {{"X", {1, 10, 16}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"factor", {1, 10, 16}, false}, {"bias", {1}, true}},
     {{"Y", {1, 10, 16}, false}}, 1, 0, -1, 1, 2, 4, -1, 3},
    {"MXFP8Attention", {{"Q", {1, 10, 16}, false}, {"K", {1, 10, 16}, false, 0}, {"V", {1, 10, 16}, false, 0}, {"attn_mask", {1, 10, 16, 9}, false}, {"past_key", {1, 10, 16}, false, 0}, {"past_value", {1, 10, 16}, false, 0}},
     {{"Y", {1, 10, 16}, false, 0}, {"present_key", {1, 10, 16}, true, 0}, {"present_value", {1, 10, 16}, true, 0}}, 0, -1, -1, -1, -1, -1, -1, -1},
    {"MXFP8Conv", {{"X", {1, 10, 16}, false}, {"B", {17, 19, 3}, false}, {"B_scales", {2}, false}, {"bias", {1}, true}, {"residual", {1, 10, 16}, true, 0}},
     {{"Y", {1, 10, 16}, false}}, 1, -1, -1, -1, -1, -1, -1, -1},
};

}  // namespace mxfp8
