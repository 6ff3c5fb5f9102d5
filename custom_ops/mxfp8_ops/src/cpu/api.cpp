// The C ABI: checks arguments, turns exceptions into statuses. arguments.h has the checks and their messages.
#include "../mxfp8_ops.h"
#include "arguments.h"
#include "indices.h"
#include "isa.h"
#include "ops.h"
#include "parallel.h"
#include "profile.h"

namespace {

using namespace mxfp8;

const Kernels& kernels_in_use() {
  const Kernels* table = kernels();
  if (table == nullptr) {
    throw Error(MXFP8_NO_SUCH_ISA, "MXFP8_ISA names an instruction set that this machine lacks",
                "one of " + std::string(available_isas()), "correct the environment variable");
  }
  runs_on(*table);
  return *table;
}

// The answer to a call that computes something.
template <class Body>
int computed(const Body& body) {
  const ProfiledCall call(nullptr);
  return answer(body);
}

Parallel checked_threads(int threads) {
  check_range({"threads", threads}, 0, INT64_MAX);
  return own_threads(threads);
}

int64_t scale_count(int64_t k) { return k / kBlock + (k % kBlock != 0); }
int64_t bytes_of(int dtype) { return int64_t(value_bytes(dtype)); }

// Elements and scales [outer, k, inner], blocked along k.
void check_blocks(const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k, int64_t inner) {
  check_array(array("elements", elements, 1), {outer, k, inner});
  check_array(array("scales", scales, 1), {outer, scale_count(k), inner});
}

// The stride of a single row is never used, so it may have any value.
int64_t stride_of(int64_t rows, int64_t columns, int64_t stride) { return rows > 1 && columns > 0 ? stride : columns; }

void check_indices(const EmbeddingArgs& e) {
  const int64_t at = first_outside(e);
  if (at >= 0) throw outside(e, at, std::to_string(at));
}

// Checks b, bias, factor and y of a gemm. Returns whether there is something to compute: where y is empty, no operand
// is read.
bool check_product(const GemmArgs& g) {
  check_element_format("b_format", g.b_format);
  check_value_dtype("y_dtype", g.y_dtype);
  check_epilogue("epilogue", g.epilogue);
  check_value_dtype("factor_dtype", g.factor_dtype);
  check_sizes({{"m", g.m}, {"n", g.n}, {"k", g.k}});
  check_range({"y_stride", g.y_stride}, g.n, INT64_MAX);
  if (g.m == 0 || g.n == 0) return false;
  check_array(array("b", g.b, 1), {g.n, g.k});
  check_array(array("b_scales", g.b_scales, 1), {g.n, scale_count(g.k)});
  if (g.bias != nullptr) check_array(array("bias", g.bias, sizeof(float)), {g.n});
  if (g.factor != nullptr) check_array(array("factor", g.factor, bytes_of(g.factor_dtype)), {g.m, g.n});
  if (g.y_format != 0) check_blocks(g.y_elements, g.y_scales, g.m, g.n, 1);
  if (g.y_format == 0 || g.y != nullptr) check_rows(array("y", g.y, bytes_of(g.y_dtype)), g.m, g.n, g.y_stride);
  return true;
}

void multiply(GemmArgs g, const Parallel& parallel) {
  g.a_stride = stride_of(g.m, g.k, g.a_stride), g.y_stride = stride_of(g.m, g.n, g.y_stride);
  gemm(kernels_in_use(), parallel, g);
}

// The gemms with A quantized, and with values for A.
int quantized_product(GemmArgs g, int threads) {
  return computed([&] {
    check_element_format("a_format", g.a_format);
    const uint8_t no_scales = 0;  // stands for those of K = 0: without an address, a would be taken for values
    const bool writes = check_product(g);
    const Parallel parallel = checked_threads(threads);
    if (!writes) return;
    check_array(array("a", g.a, 1), {g.m, g.k});
    check_array(array("a_scales", g.a_scales, 1), {g.m, scale_count(g.k)});
    if (g.k == 0) g.a_scales = &no_scales;
    multiply(g, parallel);
  });
}

int weight_product(GemmArgs g, int activation_dtype, int threads) {
  return computed([&] {
    check_value_dtype("x_dtype", g.a_format);
    check_activation_dtype("activation_dtype", activation_dtype);
    g.rounds_a = activation_dtype == MXFP8_BFLOAT16;
    const bool writes = check_product(g);
    check_range({"x_stride", g.a_stride}, g.k, INT64_MAX);
    const Parallel parallel = checked_threads(threads);
    if (!writes) return;
    check_rows(array("x", g.a, bytes_of(g.a_format)), g.m, g.k, g.a_stride);
    multiply(g, parallel);
  });
}

// Checks the arguments of both grouped gemms, all but a. Returns whether there is something to compute.
bool check_grouped(const GroupedArgs& args) {
  const GemmArgs& g = args.gemm;
  check_element_format("b_format", g.b_format);
  check_value_dtype("y_dtype", g.y_dtype);
  check_sizes({{"count", args.experts}, {"m", g.m}, {"n", g.n}, {"k", g.k}});
  if (g.m == 0 || g.n == 0) return false;
  check_array(array("b", g.b, 1), {args.experts, g.n, g.k});
  check_array(array("b_scales", g.b_scales, 1), {args.experts, g.n, scale_count(g.k)});
  check_array(array("experts", args.expert, sizeof(int64_t)), {g.m});
  check_array(array("y", g.y, bytes_of(g.y_dtype)), {g.m, g.n});
  return true;
}

void multiply(const GroupedArgs& args, const Parallel& parallel) {
  for (int64_t i = 0; i < args.gemm.m; ++i) {
    check_range({"an entry of experts", args.expert[i]}, -args.experts, args.experts);
  }
  grouped_gemm(kernels_in_use(), parallel, args);
}

// A mask has each size of the scores, or 1.
void check_mask(const mxfp8_attention_arguments& g) {
  if (g.mask_dtype != MXFP8_BOOL) check_value_dtype("mask_dtype", g.mask_dtype);
  const int64_t full[] = {g.batch, g.q_heads, g.rows, g.past + g.keys};
  for (int i = 0; i < 4; ++i) {
    if (g.mask_sizes[i] != 1) check_range({"an entry of mask_sizes", g.mask_sizes[i]}, full[i], full[i]);
  }
  const int64_t bytes = g.mask_dtype == MXFP8_BOOL ? 1 : bytes_of(g.mask_dtype);
  check_array(array("mask", g.mask, bytes), {g.mask_sizes[0], g.mask_sizes[1], g.mask_sizes[2], g.mask_sizes[3]});
}

void check_attention(const mxfp8_attention_arguments& g) {
  check_value_dtype("dtype", g.dtype);
  check_activation_dtype("activation_dtype", g.activation_dtype);
  check_sizes({{"batch", g.batch}, {"rows", g.rows}, {"d", g.d}, {"dv", g.dv}});
  check_range({"kv_heads", g.kv_heads}, 1, INT32_MAX);
  check_range({"q_heads", g.q_heads}, g.kv_heads, INT32_MAX);
  check_range({"q_heads modulo kv_heads", g.q_heads % g.kv_heads}, 0, 0);
  check_range({"keys", g.keys}, 0, kMostBytes);
  check_range({"past", g.past}, 0, kMostBytes);
  const int64_t bytes = bytes_of(g.dtype), total = g.past + g.keys;
  check_array(array("q", g.q, bytes), {g.batch, g.rows, g.q_heads, g.d});
  check_array(array("k", g.k, bytes), {g.batch, g.keys, g.kv_heads, g.d});
  check_array(array("v", g.v, bytes), {g.batch, g.keys, g.kv_heads, g.dv});
  check_array(array("past_key", g.past_key, bytes), {g.batch, g.kv_heads, g.past, g.d});
  check_array(array("past_value", g.past_value, bytes), {g.batch, g.kv_heads, g.past, g.dv});
  check_array(array("y", g.y, bytes), {g.batch, g.rows, g.q_heads, g.dv});
  if (g.present_key != nullptr) {
    check_array(array("present_key", g.present_key, bytes), {g.batch, g.kv_heads, total, g.d});
  }
  if (g.present_value != nullptr) {
    check_array(array("present_value", g.present_value, bytes), {g.batch, g.kv_heads, total, g.dv});
  }
  if (g.mask != nullptr) check_mask(g);
}

}  // namespace

extern "C" {

int mxfp8_contract_version(void) { return MXFP8_CONTRACT_VERSION; }

const char* mxfp8_isa_available(void) { return available_isas(); }

const char* mxfp8_isa(void) {
  const Kernels* table = kernels();
  return table == nullptr ? nullptr : table->isa;
}

int mxfp8_isa_force(const char* name) {
  return answer([&] {
    if (force_isa(name)) return;
    throw Error(MXFP8_NO_SUCH_ISA,
                "instruction set " + (name == nullptr ? std::string("NULL") : "'" + std::string(name) + "'"),
                std::string("one of ") + available_isas(), "name an instruction set of this machine");
  });
}

void mxfp8_use_openmp(void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned)) { use_openmp(gomp_parallel); }

int mxfp8_quantize(int value_dtype, const void* x, int64_t outer, int64_t k, int64_t inner, int element_format,
                   int scale_rounding, uint8_t* elements, uint8_t* scales, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"outer", outer}, {"k", k}, {"inner", inner}});
    check_array(array("x", x, bytes_of(value_dtype)), {outer, k, inner});
    check_blocks(elements, scales, outer, k, inner);
    quantize(kernels_in_use(), checked_threads(threads),
             {value_dtype, x, outer, k, inner, k, element_format, scale_increment(element_format, scale_rounding),
              elements, scales});
  });
}

int mxfp8_dequantize(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k,
                     int64_t inner, int value_dtype, void* y, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_sizes({{"outer", outer}, {"k", k}, {"inner", inner}});
    check_blocks(elements, scales, outer, k, inner);
    check_array(array("y", y, bytes_of(value_dtype)), {outer, k, inner});
    dequantize(kernels_in_use(), checked_threads(threads),
               {element_format, elements, scales, outer, k, inner, value_dtype, y});
  });
}

int mxfp8_embedding(int index_dtype, const void* indices, int64_t count, int b_format, const uint8_t* b,
                    const uint8_t* b_scales, int64_t v, int64_t d, int y_dtype, void* y, int threads) {
  return computed([&] {
    check_index_dtype("index_dtype", index_dtype);
    check_element_format("b_format", b_format);
    check_value_dtype("y_dtype", y_dtype);
    check_sizes({{"count", count}, {"v", v}, {"d", d}});
    const Parallel parallel = checked_threads(threads);
    check_array(array("indices", indices, index_bytes(index_dtype)), {count});
    if (count > 0 && d > 0) {
      check_array(array("b", b, 1), {v, d});
      check_array(array("b_scales", b_scales, 1), {v, scale_count(d)});
      check_array(array("y", y, bytes_of(y_dtype)), {count, d});
    }
    const EmbeddingArgs e = {index_dtype, indices, count, b_format, b, b_scales, v, d, y_dtype, y};
    check_indices(e);
    embedding(kernels_in_use(), parallel, e);
  });
}

int mxfp8_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
               const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
               int64_t y_stride, int threads) {
  return quantized_product(
      {a_format, a, a_scales, k, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride, false}, threads);
}

int mxfp8_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                      const uint8_t* b, const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k,
                      int y_dtype, void* y, int64_t y_stride, int threads) {
  return weight_product({x_dtype, x, nullptr, x_stride, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride},
                        activation_dtype, threads);
}

int mxfp8_fused_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                     const uint8_t* b_scales, const float* bias, int epilogue, int factor_dtype, const void* factor,
                     int64_t m, int64_t n, int64_t k, int y_dtype, void* y, int64_t y_stride, int threads) {
  return quantized_product({a_format, a, a_scales, k, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride, false,
                            epilogue, factor_dtype, factor},
                           threads);
}

int mxfp8_gemm_quantize(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                        const uint8_t* b_scales, const float* bias, int epilogue, int64_t m, int64_t n, int64_t k,
                        int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, float* y,
                        int threads) {
  GemmArgs g = {a_format, a, a_scales, k, b_format, b, b_scales, bias, m, n, k, MXFP8_FLOAT32, y, n, false, epilogue};
  const int refused = answer([&] {
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
  });
  if (refused != MXFP8_OK) return refused;
  g.y_format = element_format, g.y_increment = scale_increment(element_format, scale_rounding);
  g.y_elements = elements, g.y_scales = scales;
  return quantized_product(g, threads);
}

int mxfp8_fused_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int activation_dtype, int b_format,
                            const uint8_t* b, const uint8_t* b_scales, const float* bias, int epilogue,
                            int factor_dtype, const void* factor, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                            int64_t y_stride, int threads) {
  return weight_product({x_dtype, x, nullptr, x_stride, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride,
                         false, epilogue, factor_dtype, factor},
                        activation_dtype, threads);
}

int mxfp8_norm_quantize(int value_dtype, const void* x, const void* residual, const float* scale, const float* bias,
                        int64_t rows, int64_t k, int norm, float epsilon, int element_format, int scale_rounding,
                        uint8_t* elements, uint8_t* scales, void* normalized, void* sum, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_norm("norm", norm);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"rows", rows}, {"k", k}});
    const int64_t bytes = bytes_of(value_dtype);
    check_array(array("x", x, bytes), {rows, k});
    for (const Array& each :
         {array("residual", residual, bytes), array("normalized", normalized, bytes), array("sum", sum, bytes)}) {
      if (each.address != 0) check_array(each, {rows, k});
    }
    if (rows > 0) check_array(array("scale", scale, sizeof(float)), {k});
    if (rows > 0 && bias != nullptr) check_array(array("bias", bias, sizeof(float)), {k});
    check_blocks(elements, scales, rows, k, 1);
    norm_quantize(kernels_in_use(), checked_threads(threads),
                  {value_dtype, x, residual, scale, bias, rows, k, norm, epsilon, element_format,
                   scale_increment(element_format, scale_rounding), elements, scales, normalized, sum});
  });
}

int mxfp8_grouped_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
                       const uint8_t* b_scales, const int64_t* experts, int64_t count, int64_t m, int64_t n, int64_t k,
                       int y_dtype, void* y, int threads) {
  return computed([&] {
    check_element_format("a_format", a_format);
    const uint8_t no_scales = 0;  // as in mxfp8_gemm
    GroupedArgs args = {{a_format, a, a_scales, k, b_format, b, b_scales, nullptr, m, n, k, y_dtype, y, n},
                        count,
                        experts,
                        nullptr,
                        MXFP8_FLOAT32};
    const bool writes = check_grouped(args);
    const Parallel parallel = checked_threads(threads);
    if (!writes) return;
    check_array(array("a", a, 1), {m, k});
    check_array(array("a_scales", a_scales, 1), {m, scale_count(k)});
    if (k == 0) args.gemm.a_scales = &no_scales;
    multiply(args, parallel);
  });
}

int mxfp8_grouped_weight_gemm(int x_dtype, const void* x, int activation_dtype, int b_format, const uint8_t* b,
                              const uint8_t* b_scales, const int64_t* experts, int64_t count, int64_t m, int64_t n,
                              int64_t k, int y_dtype, void* y, int threads) {
  return computed([&] {
    check_value_dtype("x_dtype", x_dtype);
    check_activation_dtype("activation_dtype", activation_dtype);
    const GroupedArgs args = {{x_dtype, x, nullptr, k, b_format, b, b_scales, nullptr, m, n, k, y_dtype, y, n},
                              count,
                              experts,
                              nullptr,
                              activation_dtype};
    const bool writes = check_grouped(args);
    const Parallel parallel = checked_threads(threads);
    if (!writes) return;
    check_array(array("x", x, bytes_of(x_dtype)), {m, k});
    multiply(args, parallel);
  });
}

int mxfp8_attention(const mxfp8_attention_arguments* arguments, int threads) {
  return computed([&] {
    check_array(array("arguments", arguments, alignof(mxfp8_attention_arguments)),
                {sizeof *arguments / alignof(mxfp8_attention_arguments)});
    const mxfp8_attention_arguments& g = *arguments;
    check_attention(g);
    AttentionArgs a = {};
    a.dtype = g.dtype, a.mask_dtype = g.mask_dtype;
    a.q = g.q, a.k = g.k, a.v = g.v, a.past_key = g.past_key, a.past_value = g.past_value, a.mask = g.mask;
    a.y = g.y, a.present_key = g.present_key, a.present_value = g.present_value;
    a.batch = g.batch, a.rows = g.rows, a.keys = g.keys, a.past = g.past;
    a.q_heads = g.q_heads, a.kv_heads = g.kv_heads, a.d = g.d, a.dv = g.dv;
    a.scale = g.scale, a.causal = g.causal != 0, a.nan_guard = g.nan_guard != 0;
    a.rounds = g.activation_dtype == MXFP8_BFLOAT16;
    set_mask_strides(g.mask_sizes, &a);
    attention(kernels_in_use(), checked_threads(threads), a);
  });
}

int mxfp8_pack(int value_dtype, const void* w, int64_t w_stride, int transposed, int64_t n, int64_t k,
               int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, mxfp8_pack_stats* stats,
               int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"n", n}, {"k", k}});
    const int64_t rows = transposed != 0 ? k : n, columns = transposed != 0 ? n : k;
    check_range({"w_stride", w_stride}, columns, INT64_MAX);
    check_rows(array("w", w, bytes_of(value_dtype)), rows, columns, w_stride);
    check_blocks(elements, scales, n, k, 1);
    check_array(array("stats", stats, alignof(mxfp8_pack_stats)), {sizeof *stats / alignof(mxfp8_pack_stats)});
    pack(kernels_in_use(), checked_threads(threads),
         {value_dtype, w, n, k, 1, stride_of(rows, columns, w_stride), element_format,
          scale_increment(element_format, scale_rounding), elements, scales},
         transposed != 0, stats);
  });
}

}  // extern "C"
