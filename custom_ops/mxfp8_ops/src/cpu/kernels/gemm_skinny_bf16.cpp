// The gemms for very few rows on the bf16 dot product: B is decoded in registers. When that is exact is told in
// gemm_bf16.cpp.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 6. Work is split over N. Bytes moved: 1.03 N K + A + the result.
//
// The scales of B multiply the sum of each block, as float32: so any scale will do, and NaN and Inf codes too.
#include "bf16.h"
#include "gemm_skinny.h"

#if defined(__AVX512BF16__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;

MXFP8_INLINE __m512 dot_product(__m512 sum, const uint16_t* a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(b), reinterpret_cast<__m512bh>(_mm512_load_si512(a)));
}

// 2^(s - 127) of 16 scale codes.
MXFP8_INLINE __m512 scale_values(__m128i scales) {
  const __m512i codes = _mm512_cvtepu8_epi32(scales);
  __m512i bits = _mm512_slli_epi32(codes, 23);
  bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes), _mm512_set1_epi32(0x00400000));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(kScaleNan)),
                               _mm512_set1_epi32(kQuietNan));
  return _mm512_castsi512_ps(bits);
}

template <class F, int R, int C>
MXFP8_INLINE void dot(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, float* out) {
  __m512 sums[C][R];
  for (auto& column : sums) {
    for (__m512& sum : column) sum = zero();
  }
  __m512i unused = _mm512_setzero_si512();
  for (int64_t k = 0; k < pass.count; k += kPassValues) {
    const int64_t left = min_of(kPassValues, pass.count - k);
    __m512 scales[C];
    for (int c = 0; c < C; ++c) {
      scales[c] = scale_values(load_scales(pass.scales + c * pass.next_scales + k / kBlock, blocks_of(left)));
    }
    __m512i lanes = lanes_of_step(0);
    for (int64_t i = 0; i < left; i += kStep) {
      for (int c = 0; c < C; ++c) {
        const uint8_t* elements = pass.elements + c * pass.next_elements + k + i;
        __builtin_prefetch(elements + pass.ahead);
        const Values b = decoder.values(load_codes(elements, left - i), &unused);
        const __m512 scale = _mm512_permutexvar_ps(lanes, scales[c]);
        for (int r = 0; r < R; ++r) {
          const uint16_t* row = a + (k + i) * R + r * kStep;
          sums[c][r] =
              _mm512_fmadd_ps(dot_product(dot_product(zero(), row, b.even), row + kBlock, b.odd), scale, sums[c][r]);
        }
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(2));
    }
  }
  for (int c = 0; c < C; ++c) add_lanes<R>(sums[c], out + c * kSumRows);
}

template <class F, int R>
MXFP8_NOINLINE void multiply(const Work<uint16_t>& work) {
  const Decoder<F> decoder;
  for_each_column<F, R, 2>(work, [&](auto columns, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    dot<F, R, decltype(columns)::value>(decoder, work.a, pass, sums);
    return true;
  });
}

}  // namespace

int gemm_skinny_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  Extent extent;
  bool fits = true;
  with_format(args.a_format, [&](auto format) {
    for (int64_t i = 0; i < rows && fits; ++i) {
      uint16_t* out = static_cast<uint16_t*>(packed) + i * kStep;
      fits = pack_row<decltype(format)>(args, row + i, 0, args.k, rows * kStep, out, &extent);
    }
  });
  // No product with an unscaled weight, and no sum of four, may leave the range of normal floats.
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    fits = fits && extent.lowest + kElementExponent<F> >= kLowestNormal && extent.highest + F::emax + 4 <= 127;
  });
  return fits ? 0 : kNotExact;
}

void gemm_skinny_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                               int64_t column_end, const void* packed, int) {
  with_format(args.b_format, [&](auto format) {
    for_each_group<uint16_t, kStep, 1, kSkinnyRowsBf16>(
        args, row, rows, column_begin, column_end, static_cast<const uint16_t*>(packed),
        [&](auto r, const Work<uint16_t>& work) { multiply<decltype(format), decltype(r)::value>(work); });
  });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
