// The C ABI: checks arguments, turns exceptions into codes.
#include <new>

#include "isa.h"
#include "mxfp8_ops.h"
#include "ops.h"
#include "parallel.h"

namespace {

using namespace mxfp8;

template <class Body>
int checked(bool valid, const Body& body) {
  if (!valid) return MXFP8_BAD_ARGUMENT;
  const Kernels* found = kernels();
  if (found == nullptr) return MXFP8_NO_SUCH_ISA;
  try {
    body(*found);
    return MXFP8_OK;
  } catch (const std::bad_alloc&) {
    return MXFP8_NO_MEMORY;
  }
}

bool is_rounding(int rounding) { return rounding >= MXFP8_CEIL && rounding <= MXFP8_EVEN; }

}  // namespace

extern "C" {

int mxfp8_contract_version(void) { return MXFP8_CONTRACT_VERSION; }

const char* mxfp8_isa_available(void) { return available_isas(); }

const char* mxfp8_isa(void) {
  const Kernels* found = kernels();
  return found == nullptr ? nullptr : found->isa;
}

int mxfp8_isa_force(const char* name) { return force_isa(name) ? MXFP8_OK : MXFP8_NO_SUCH_ISA; }

int mxfp8_quantize(int value_dtype, const void* x, int64_t outer, int64_t k, int64_t inner, int element_format,
                   int scale_rounding, uint8_t* elements, uint8_t* scales, int threads) {
  const bool valid = is_value_dtype(value_dtype) && is_element_format(element_format) && is_rounding(scale_rounding) &&
                     outer >= 0 && k >= 0 && inner >= 0;
  return checked(valid, [&](const Kernels& table) {
    quantize(table, own_threads(threads),
             {value_dtype, x, outer, k, inner, k, element_format, scale_increment(element_format, scale_rounding),
              elements, scales});
  });
}

int mxfp8_dequantize(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k,
                     int64_t inner, int value_dtype, void* y, int threads) {
  const bool valid =
      is_value_dtype(value_dtype) && is_element_format(element_format) && outer >= 0 && k >= 0 && inner >= 0;
  return checked(valid, [&](const Kernels& table) {
    dequantize(table, own_threads(threads), {element_format, elements, scales, outer, k, inner, value_dtype, y});
  });
}

int mxfp8_gemm(int a_format, const uint8_t* a, const uint8_t* a_scales, int b_format, const uint8_t* b,
               const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
               int64_t y_stride, int threads) {
  const bool valid = is_element_format(a_format) && is_element_format(b_format) && is_value_dtype(y_dtype) && m >= 0 &&
                     n >= 0 && k >= 0 && y_stride >= n && (m == 0 || a_scales != nullptr);
  return checked(valid, [&](const Kernels& table) {
    gemm(table, own_threads(threads),
         {a_format, a, a_scales, k, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride});
  });
}

int mxfp8_weight_gemm(int x_dtype, const void* x, int64_t x_stride, int b_format, const uint8_t* b,
                      const uint8_t* b_scales, const float* bias, int64_t m, int64_t n, int64_t k, int y_dtype, void* y,
                      int64_t y_stride, int threads) {
  const bool valid = is_value_dtype(x_dtype) && is_element_format(b_format) && is_value_dtype(y_dtype) && m >= 0 &&
                     n >= 0 && k >= 0 && x_stride >= k && y_stride >= n;
  return checked(valid, [&](const Kernels& table) {
    gemm(table, own_threads(threads),
         {x_dtype, x, nullptr, x_stride, b_format, b, b_scales, bias, m, n, k, y_dtype, y, y_stride});
  });
}

int mxfp8_pack(int value_dtype, const void* w, int64_t w_stride, int transposed, int64_t n, int64_t k,
               int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, mxfp8_pack_stats* stats,
               int threads) {
  const bool valid = is_value_dtype(value_dtype) && is_element_format(element_format) && is_rounding(scale_rounding) &&
                     n >= 0 && k >= 0 && stats != nullptr && w_stride >= (transposed != 0 ? n : k);
  return checked(valid, [&](const Kernels& table) {
    pack(table, own_threads(threads),
         {value_dtype, w, n, k, 1, w_stride, element_format, scale_increment(element_format, scale_rounding), elements,
          scales},
         transposed != 0, stats);
  });
}

}  // extern "C"
