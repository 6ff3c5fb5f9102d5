#include "requests.h"

#include "../cpu/arguments.h"
#include "../cpu/indices.h"
#include "planner.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

constexpr int64_t kVector = 16;  // bytes that fold.cu reads at once

// An array on a GPU; 0 is not a valid address there either.
Array at(const char* name, int64_t address, int64_t value_bytes) { return {name, uint64_t(address), value_bytes}; }
int64_t bytes_of(int64_t code) { return row_of(kind_of(code)).bytes; }

void check_scales(const char* name, int64_t address, int64_t outer, int64_t k, int64_t inner) {
  check_array(at(name, address, 1), {outer, k / kBlock + (k % kBlock != 0), inner});
}

// Scales of a matrix [rows, k], which may be in cuBLASLt's layout: that is cleared word by word.
void check_matrix_scales(const char* name, int64_t address, int64_t rows, int64_t k, bool swizzled) {
  if (!swizzled) return check_scales(name, address, rows, k, 1);
  check_array(at(name, address, 4), {swizzled_bytes(rows, k) / 4});
}

template <class T>
const T& not_null(const char* name, const T* request) {
  if (request != nullptr) return *request;
  throw Error(MXFP8_BAD_ARGUMENT, std::string(name) + " is NULL", "the address of a struct", "pass one");
}

}  // namespace

const mxfp8_cuda_place& checked(const mxfp8_cuda_place* request) {
  const mxfp8_cuda_place& place = not_null("place", request);
  constexpr int64_t most = int64_t(1) << 20;  // more than any GPU or measurement has
  check_range({"capability", place.capability}, 0, most);
  check_range({"processors", place.processors}, 1, most);
  check_range({"libraries", place.libraries}, 0,
              MXFP8_CUBLAS | MXFP8_CUBLASLT | MXFP8_SCALED_MM | MXFP8_SCALED_MM_ROWS);
  check_range({"allowed", place.allowed}, 0, (1 << kRows) - 1);
  check_range({"forced", place.forced}, 0, kRows);
  check_range({"splits", place.splits}, 0, 1024);
  check_range({"warps", place.warps}, 0, kThreads / 32);
  check_range({"blocks", place.blocks}, 0, 2);
  check_range({"parts_bytes", place.parts_bytes}, 0, kMostBytes);
  return place;
}

mxfp8_cuda_gemm checked(const mxfp8_cuda_gemm* request) {
  mxfp8_cuda_gemm g = not_null("gemm", request);
  const bool quantized = is_element(kind_of(g.x_kind));
  check_element_format("b_kind", g.b_kind);
  check_value_dtype("y_dtype", g.y_dtype);
  if (g.activation_dtype != 0) check_activation_dtype("activation_dtype", g.activation_dtype);
  check_sizes({{"m", g.m}, {"n", g.n}, {"k", g.k}});
  if (g.m == 0 || g.n == 0) {
    g.m = g.n = g.k = 0;
    return g;
  }
  check_array(at("x", g.x, bytes_of(g.x_kind)), {g.m, g.k});
  if (quantized) check_scales("x_scales", g.x_scales, g.m, g.k, 1);
  check_array(at("b", g.b, 1), {g.n, g.k});
  check_scales("b_scales", g.b_scales, g.n, g.k, 1);
  if (g.bias != 0) check_array(at("bias", g.bias, 4), {g.n});
  check_array(at("y", g.y, bytes_of(g.y_dtype)), {g.m, g.n});
  if (g.wide != 0) check_array(at("wide", g.wide, 2), {g.n, g.k});
  if (g.wide_inexact != 0) check_array(at("wide_inexact", g.wide_inexact, 4), {1});
  if (g.folded != 0) {
    check_array(at("folded", g.folded, 1), {g.n, g.k});
    check_array(at("folded_scales", g.folded_scales, 4), {g.n});
  }
  return g;
}

mxfp8_cuda_quantize checked(const mxfp8_cuda_quantize* request) {
  mxfp8_cuda_quantize q = not_null("quantize", request);
  check_value_dtype("x_dtype", q.x_dtype);
  check_element_format("format", q.format);
  check_range({"increment", q.increment}, 0, UINT32_MAX);
  check_range({"layout", q.layout}, MXFP8_PLAIN, MXFP8_TRANSPOSED);
  check_sizes({{"outer", q.outer}, {"k", q.k}, {"inner", q.inner}});
  if (q.outer == 0 || q.k == 0 || q.inner == 0) q.outer = q.k = q.inner = 0;
  check_array(at("x", q.x, bytes_of(q.x_dtype)), {q.outer, q.k, q.inner});
  check_array(at("elements", q.elements, 1), {q.outer, q.k, q.inner});
  if (q.k == 0) return q;
  const bool swizzled = q.layout == MXFP8_SWIZZLED, both = q.row_elements != 0;
  if (swizzled && q.inner == 1 && !both) {
    check_matrix_scales("scales", q.scales, q.outer, q.k, true);
  } else if (swizzled) {
    check_matrix_scales("scales", q.scales, q.inner, q.k, true);
  } else {
    check_scales("scales", q.scales, q.outer, q.k, q.inner);
  }
  if (both) {
    check_range({"outer", q.outer}, 1, 1);
    check_array(at("row_elements", q.row_elements, 1), {q.k, q.inner});
    check_matrix_scales("row_scales", q.row_scales, q.k, q.inner, swizzled);
  }
  return q;
}

mxfp8_cuda_dequantize checked(const mxfp8_cuda_dequantize* request) {
  mxfp8_cuda_dequantize d = not_null("dequantize", request);
  check_element_format("format", d.format);
  check_value_dtype("y_dtype", d.y_dtype);
  check_sizes({{"outer", d.outer}, {"k", d.k}, {"inner", d.inner}});
  if (d.outer == 0 || d.k == 0 || d.inner == 0) d.outer = d.k = d.inner = 0;
  check_array(at("elements", d.elements, 1), {d.outer, d.k, d.inner});
  check_scales("scales", d.scales, d.outer, d.k, d.inner);
  check_array(at("y", d.y, bytes_of(d.y_dtype)), {d.outer, d.k, d.inner});
  if (d.inexact != 0) check_array(at("inexact", d.inexact, 4), {1});
  return d;
}

mxfp8_cuda_embedding checked(const mxfp8_cuda_embedding* request) {
  mxfp8_cuda_embedding e = not_null("embedding", request);
  check_index_dtype("index_dtype", e.index_dtype);
  check_element_format("b_format", e.b_format);
  check_value_dtype("y_dtype", e.y_dtype);
  check_sizes({{"count", e.count}, {"v", e.v}, {"d", e.d}});
  if (e.count == 0 || e.d == 0) {
    e.count = e.d = 0;
    return e;
  }
  check_array(at("indices", e.indices, index_bytes(int(e.index_dtype))), {e.count});
  if (e.v > 0) {
    check_array(at("b", e.b, 1), {e.v, e.d});
    check_scales("b_scales", e.b_scales, e.v, e.d, 1);
  }
  check_array(at("y", e.y, bytes_of(e.y_dtype)), {e.count, e.d});
  return e;
}

mxfp8_cuda_fold checked(const mxfp8_cuda_fold* request) {
  mxfp8_cuda_fold f = not_null("fold", request);
  check_sizes({{"rows", f.rows}, {"k", f.k}});
  if (f.k % kBlock != 0) {
    throw Error(MXFP8_BAD_ARGUMENT, "k is " + std::to_string(f.k), "a multiple of " + std::to_string(kBlock),
                "use the weight without folding");
  }
  if (f.rows == 0 || f.k == 0) {
    f.rows = f.k = 0;
    return f;
  }
  check_array(at("elements", f.elements, 1), {f.rows, f.k});
  check_scales("scales", f.scales, f.rows, f.k, 1);
  check_array(at("folded", f.folded, 1), {f.rows, f.k});
  check_array(at("row_scales", f.row_scales, 4), {f.rows});
  for (const auto& [name, address] : {Size{"elements", f.elements}, Size{"folded", f.folded}}) {
    check_array(at(name, address, kVector), {1});
  }
  return f;
}

int64_t checked_swizzled_bytes(int64_t rows, int64_t k) {
  check_sizes({{"rows", rows}, {"k", k}});
  if (rows == 0 || k == 0) return 0;
  check_scales("the matrix of scales", 1, rows, k, 1);
  return swizzled_bytes(rows, k);
}

}  // namespace mxfp8::cuda
