// The gemm for one or two rows on the bf16 dot product: B is decoded in registers, as it lies. gemm_bf16.cpp says when
// that is exact.
//
// y [M, N] = A [M, K] . B [N, K]^T. Work is split over N. Bytes moved: 1.03 N K + A + the result. The scales of B are
// applied to the sum of each block, as float32: every scale is allowed, and NaN and Inf codes too.
#include "bf16.h"
#include "gemm_skinny.h"

namespace mxfp8::MXFP8_ISA {
namespace {

MXFP8_INLINE __m512bh as_bf16(__m512i values) { return reinterpret_cast<__m512bh>(values); }

template <class F, int R>
MXFP8_INLINE void dot(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, float* out) {
  __m512 sums[R];
  for (__m512& sum : sums) sum = zero();
  __m512i unused = _mm512_setzero_si512();
  for (int64_t k = 0; k < pass.count; k += kScaleValues) {
    const int64_t left = min_of(kScaleValues, pass.count - k);
    __builtin_prefetch(pass.scales + k / kBlock + pass.ahead_scales, 0, 0);
    const __m512 scales = scale_values(load_scales(pass.scales + k / kBlock, blocks_of(left)));
    __m512i lanes = lanes_of_step(0);
    for (int64_t i = 0; i < left; i += kStepBf16) {
      const uint8_t* elements = pass.elements + k + i;
      __builtin_prefetch(elements + pass.ahead, 0, 0);  // once: not to stay in L2
      const Values b = decoder.values(load_codes(elements, left - i), &unused);
      const __m512 scale = _mm512_permutexvar_ps(lanes, scales);
      for (int r = 0; r < R; ++r) {
        const uint16_t* row = a + (k + i) * R + r * kStepBf16;
        const __m512 sum = _mm512_dpbf16_ps(zero(), as_bf16(b.even), as_bf16(_mm512_load_si512(row)));
        const __m512 both = _mm512_dpbf16_ps(sum, as_bf16(b.odd), as_bf16(_mm512_load_si512(row + kBlock)));
        sums[r] = _mm512_fmadd_ps(both, scale, sums[r]);
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(2));
    }
  }
  add_lanes<R>(sums, out);
}

template <class F, int R>
MXFP8_NOINLINE void multiply_group(const Work<uint16_t>& work) {
  const Decoder<F> decoder;
  for_each_column<F, R, 1>(work, [&](auto, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    dot<F, R>(decoder, work.a, pass, sums);
    return true;
  });
}

}  // namespace

int gemm_skinny_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  Extent extent;
  bool fits = true;
  with_a_format(args, [&](auto format) {
    for (int64_t i = 0; i < rows && fits; ++i) {
      uint16_t* out = static_cast<uint16_t*>(packed) + i * kStepBf16;
      fits = pack_row(format, args, row + i, 0, args.k, rows * kStepBf16, out, &extent);
    }
  });
  return fits && multiplies_codes(args, extent) ? extent.lowest : kNotExact;
}

void gemm_skinny_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                               int64_t column_end, const void* packed, int) {
  with_format(args.b_format, [&](auto format) {
    for_each_group<uint16_t, kStepBf16, 1, kRowsAsTheyLie>(
        args, row, rows, column_begin, column_end, static_cast<const uint16_t*>(packed),
        [&](auto r, const Work<uint16_t>& work) { multiply_group<decltype(format), decltype(r)::value>(work); });
  });
}

MXFP8_GEMM_KERNEL(gemm_skinny_bf16, int(kRowsAsTheyLie), sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
