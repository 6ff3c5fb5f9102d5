// The gemms for few rows on the bf16 dot product: B is decoded in registers. When that is exact is told in
// gemm_bf16.cpp.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 9. Work is split over N. Bytes moved: 1.03 N K + A + the result.
//
// Two ways to apply the scales of B:
//   up to kScaleAfterRows rows, to the sum of each block, as float32: any scale will do, and NaN and Inf codes too.
//   more rows: to the weights' exponents, which costs a fixed number of instructions. A row of B that does not allow it
//   goes to exact_dot.
#include "bf16.h"
#include "gemm_skinny.h"

#if defined(__AVX512BF16__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;
constexpr int kScaleAfterRows = 6;

MXFP8_INLINE __m512bh as_bf16(__m512i values) { return reinterpret_cast<__m512bh>(values); }

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
MXFP8_INLINE void dot_scaled_after(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, float* out) {
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
        __builtin_prefetch(elements + pass.ahead, 0, 2);
        const Values b = decoder.values(load_codes(elements, left - i), &unused);
        const __m512 scale = _mm512_permutexvar_ps(lanes, scales[c]);
        for (int r = 0; r < R; ++r) {
          const uint16_t* row = a + (k + i) * R + r * kStep;
          const __m512 sum = _mm512_dpbf16_ps(zero(), as_bf16(b.even), as_bf16(_mm512_load_si512(row)));
          const __m512 both = _mm512_dpbf16_ps(sum, as_bf16(b.odd), as_bf16(_mm512_load_si512(row + kBlock)));
          sums[c][r] = _mm512_fmadd_ps(both, scale, sums[c][r]);
        }
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(2));
    }
  }
  for (int c = 0; c < C; ++c) add_lanes<R>(sums[c], out + c * kSumRows);
}

template <class F, int R>
MXFP8_NOINLINE void multiply_scaled_after(const Work<uint16_t>& work) {
  const Decoder<F> decoder;
  for_each_column<F, R, 2>(work, [&](auto columns, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    dot_scaled_after<F, R, decltype(columns)::value>(decoder, work.a, pass, sums);
    return true;
  });
}

// _mm512_dpbf16_ps, with A read by the instruction itself: GCC 12 loads it apart, and runs out of registers.
MXFP8_INLINE __m512 dot_product(__m512 sum, const uint16_t* a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "m"(*reinterpret_cast<const __m512i*>(a)));
  return sum;
}

// `lowest` is the smallest scale code that makes neither a weight nor a product subnormal.
template <class F, int R>
MXFP8_INLINE bool dot_scaled_first(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, int lowest,
                                   float* out) {
  constexpr int chains = R <= 8 ? 2 : 1;  // sums per row: enough to have a dot product to start in every cycle
  __m512 sums[R * chains];
  for (__m512& sum : sums) sum = zero();
  __m512i highest = _mm512_setzero_si512();
  __m512i exponents;
  const auto step = [&](int64_t i, __m512i codes, const uint16_t* rows) MXFP8_INLINE_LAMBDA {
    const Values b = decoder.values(codes, &highest);
    const __m512i exponent = _mm512_permutexvar_epi32(lanes_of_step(i), exponents);
    const __m512i even = add_exponents(b.even, exponent), odd = add_exponents(b.odd, exponent);
    for (int r = 0; r < R; ++r) sums[r] = dot_product(sums[r], rows + r * kStep, even);
    for (int r = 0; r < R; ++r) {
      __m512& sum = sums[r + (chains - 1) * R];
      sum = dot_product(sum, rows + r * kStep + kBlock, odd);
    }
  };
  for (int64_t k = 0; k < pass.count; k += kPassValues) {
    const int64_t left = min_of(kPassValues, pass.count - k);
    const uint8_t* elements = pass.elements + k;
    const uint8_t* scales = pass.scales + k / kBlock;
    const uint16_t* rows = a + k * R;
    const __m128i codes = load_scales(scales, blocks_of(left));
    const uint32_t wrong = outside(codes, lowest, kMaxScale<F>) & ((1u << blocks_of(left)) - 1);
    if (__builtin_expect(wrong != 0, 0) && !are_zero(elements, left, scales, wrong)) return false;
    exponents = exponents_of(codes);
    int64_t i = 0;
    for (; (i + 1) * kStep <= left; ++i) {
      __builtin_prefetch(elements + i * kStep + pass.ahead);
      step(i, _mm512_loadu_si512(elements + i * kStep), rows + i * kStep * R);
    }
    if (i * kStep < left) step(i, load_codes(elements + i * kStep, left - i * kStep), rows + i * kStep * R);
  }
  if (Decoder<F>::has_special(highest)) return false;
  if (chains == 2) {
    for (int r = 0; r < R; ++r) sums[r] = _mm512_add_ps(sums[r], sums[r + (chains - 1) * R]);
  }
  add_lanes<R>(sums, out);
  return true;
}

template <class F, int R>
MXFP8_NOINLINE void multiply_scaled_first(const Work<uint16_t>& work, int lowest) {
  const Decoder<F> decoder;
  for_each_column<F, R, 1>(work, [&](auto, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    return dot_scaled_first<F, R>(decoder, work.a, pass, lowest, sums);
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
  return fits ? extent.lowest : kNotExact;
}

void gemm_skinny_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                               int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    if (rows <= kScaleAfterRows) {
      for_each_group<uint16_t, kStep, 1, kScaleAfterRows>(
          args, row, rows, column_begin, column_end, a,
          [&](auto r, const Work<uint16_t>& work) { multiply_scaled_after<F, decltype(r)::value>(work); });
    } else {
      const int lowest = lowest_scale<F>(exponent);
      for_each_group<uint16_t, kStep, kScaleAfterRows + 1, kSkinnyRowsBf16>(
          args, row, rows, column_begin, column_end, a,
          [&](auto r, const Work<uint16_t>& work) { multiply_scaled_first<F, decltype(r)::value>(work, lowest); });
    }
  });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
