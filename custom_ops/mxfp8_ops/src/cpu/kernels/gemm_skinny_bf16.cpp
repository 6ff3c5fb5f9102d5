// The gemms for few rows on the bf16 dot product: B is decoded in registers. gemm_bf16.cpp says when
// that is exact.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 16. Work is split over N. Bytes moved: 1.03 N K + A + the result.
//
// Two ways to apply the scales of B:
//   up to kScaleAfterRows rows, to the sum of each block, as float32: any scale will do, and NaN and Inf codes too.
//   more rows: to the weights' exponents, which costs a fixed number of instructions. A row of B that does not allow it
//   goes to exact_dot.
#include "bf16.h"
#include "gemm_skinny.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;
constexpr int kScaleAfterRows = 2;
// The part of A that a pass over many rows reads. It leaves room in L1, for rows of B tend to lie a multiple of 4 KiB
// apart: lines fetched ahead fall into a few of its sets.
constexpr int64_t kManyRowsBytes = 16 << 10;
// The most rows for which the sums of two columns fit the registers. Of more rows, the first so many are multiplied
// while two rows of B are decoded; the others with what was decoded, which waits in L1. One column for all of them at
// once would load A twice as often, and loads, not products, would be what the time goes to.
constexpr int kTwoColumnRows = 8;

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

template <class F, int R>
MXFP8_INLINE void dot_scaled_after(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, float* out) {
  __m512 sums[R];
  for (__m512& sum : sums) sum = zero();
  __m512i unused = _mm512_setzero_si512();
  for (int64_t k = 0; k < pass.count; k += kScaleValues) {
    const int64_t left = min_of(kScaleValues, pass.count - k);
    __builtin_prefetch(pass.scales + k / kBlock + pass.ahead_scales, 0, 0);
    const __m512 scales = scale_values(load_scales(pass.scales + k / kBlock, blocks_of(left)));
    __m512i lanes = lanes_of_step(0);
    for (int64_t i = 0; i < left; i += kStep) {
      const uint8_t* elements = pass.elements + k + i;
      __builtin_prefetch(elements + pass.ahead, 0, 0);  // once: not to stay in L2
      const Values b = decoder.values(load_codes(elements, left - i), &unused);
      const __m512 scale = _mm512_permutexvar_ps(lanes, scales);
      for (int r = 0; r < R; ++r) {
        const uint16_t* row = a + (k + i) * R + r * kStep;
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
MXFP8_NOINLINE void multiply_scaled_after(const Work<uint16_t>& work) {
  const Decoder<F> decoder;
  for_each_column<F, R, 1>(work, [&](auto, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    dot_scaled_after<F, R>(decoder, work.a, pass, sums);
    return true;
  });
}

// _mm512_dpbf16_ps, without the copies of sums that GCC 12 adds to it.
MXFP8_INLINE __m512 dot_product(__m512 sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
  return sum;
}
// The same with A read by the instruction itself: GCC 12 loads it apart, and runs out of registers.
MXFP8_INLINE __m512 dot_product(__m512 sum, const uint16_t* a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "m"(*reinterpret_cast<const __m512i*>(a)));
  return sum;
}

// Adds the products of R rows of A, a step of each, with C rows of B.
template <int R, int C>
MXFP8_INLINE void add_products(const uint16_t* a, const __m512i* b, __m512 (*sums)[R]) {
  if constexpr (C == 1) {
    for (int r = 0; r < R; ++r) sums[0][r] = dot_product(sums[0][r], a + r * kStep, b[0]);
  } else {
    for (int r = 0; r < R; ++r) {
      const __m512i row = _mm512_load_si512(a + r * kStep);
      for (int c = 0; c < C; ++c) sums[c][r] = dot_product(sums[c][r], row, b[c]);
    }
  }
}

// Adds the lanes of the sums of C columns to `out`.
template <int R, int C>
MXFP8_INLINE void add_columns(const __m512 (*sums)[R], float* out) {
  for (int c = 0; c < C; ++c) add_lanes<R>(sums[c], out + c * kSumRows);
}

// The products of all but the first `First` of R rows of A with what dot_scaled_first decoded.
template <int R, int C, int First>
MXFP8_INLINE void dot_decoded(const uint16_t* a, const uint16_t* decoded, int64_t count, float* out) {
  __m512 sums[C][R - First] = {};
  for (int64_t k = 0; k < count; k += kStep, decoded += C * kStep) {
    const uint16_t* rows = a + k * R + First * kStep;
    for (int half = 0; half < kStep; half += kBlock) {
      __m512i b[C];
      for (int c = 0; c < C; ++c) b[c] = _mm512_load_si512(decoded + c * kStep + half);
      add_products<R - First, C>(rows + half, b, sums);
    }
  }
  add_columns<R - First, C>(sums, out + First);
}

// `lowest` is the smallest scale code that makes neither a weight nor a product subnormal.
template <class F, int R, int C>
MXFP8_INLINE bool dot_scaled_first(const Decoder<F>& decoder, const uint16_t* a, const Pass& pass, int lowest,
                                   float* out) {
  constexpr int First = C == 1 || R <= kTwoColumnRows ? R : kTwoColumnRows;
  constexpr int64_t most = First == R ? 1 : C * kManyRowsBytes / int64_t(sizeof(uint16_t)) / R + C * kStep;
  alignas(64) uint16_t decoded[most];
  uint16_t* to = decoded;
  __m512 sums[C][First] = {};
  __m512i highest = _mm512_setzero_si512();
  for (int64_t k = 0; k < pass.count; k += kScaleValues) {
    const int64_t left = min_of(kScaleValues, pass.count - k);
    __m512i exponents[C];
    for (int c = 0; c < C; ++c) {
      const uint8_t* scales = pass.scales + c * pass.next_scales + k / kBlock;
      __builtin_prefetch(scales + pass.ahead_scales);
      const __m128i codes = load_scales(scales, blocks_of(left));
      const uint32_t wrong = outside(codes, lowest, kMaxScale<F>) & ((1u << blocks_of(left)) - 1);
      if (__builtin_expect(wrong != 0, 0)) {
        if (!are_zero(pass.elements + c * pass.next_elements + k, left, scales, wrong)) return false;
      }
      exponents[c] = exponents_of(codes);
    }
    __m512i lanes = lanes_of_step(0);
    const auto step = [&](int64_t i, const auto& codes_of) MXFP8_INLINE_LAMBDA {
      __m512i even[C], odd[C];
      for (int c = 0; c < C; ++c) {
        const uint8_t* elements = pass.elements + c * pass.next_elements + k + i;
        __builtin_prefetch(elements + pass.ahead);
        const Values b = decoder.values(codes_of(elements), &highest);
        const __m512i exponent = _mm512_permutexvar_epi32(lanes, exponents[c]);
        even[c] = add_exponents(b.even, exponent);
        odd[c] = add_exponents(b.odd, exponent);
        if constexpr (First < R) {
          _mm512_store_si512(to, even[c]);
          _mm512_store_si512(to + kBlock, odd[c]);
          to += kStep;
        }
      }
      lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(2));
      const uint16_t* rows = a + (k + i) * R;
      add_products<First, C>(rows, even, sums);
      add_products<First, C>(rows + kBlock, odd, sums);
    };
    int64_t i = 0;
    for (; i + kStep <= left; i += kStep) {
      step(i, [](const uint8_t* elements) MXFP8_INLINE_LAMBDA { return _mm512_loadu_si512(elements); });
    }
    if (i < left) {
      step(i, [=](const uint8_t* elements) MXFP8_INLINE_LAMBDA { return load_codes(elements, left - i); });
    }
  }
  if (Decoder<F>::has_special(highest)) return false;
  add_columns<First, C>(sums, out);
  if constexpr (First < R) dot_decoded<R, C, First>(a, decoded, pass.count, out);
  return true;
}

template <class F, int R>
MXFP8_NOINLINE void multiply_scaled_first(const Work<uint16_t>& work, int lowest) {
  const Decoder<F> decoder;
  for_each_column<F, R, 2>(work, [&](auto columns, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
    return dot_scaled_first<F, R, decltype(columns)::value>(decoder, work.a, pass, lowest, sums);
  });
}

}  // namespace

int gemm_skinny_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  Extent extent;
  bool fits = true;
  with_a_format(args, [&](auto format) {
    for (int64_t i = 0; i < rows && fits; ++i) {
      uint16_t* out = static_cast<uint16_t*>(packed) + i * kStep;
      fits = pack_row(format, args, row + i, 0, args.k, rows * kStep, out, &extent);
    }
  });
  // No product with an unscaled weight, and no sum of four, may leave the range of normal floats.
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    fits =
        fits && extent.lowest + kElementExponent<F> >= kLowestNormal && extent.highest + kHighestExponent<F> + 4 <= 127;
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
      const auto multiply = [&](auto r, const Work<uint16_t>& work) {
        multiply_scaled_first<F, decltype(r)::value>(work, lowest);
      };
      if (rows <= kTwoColumnRows) {
        for_each_group<uint16_t, kStep, kScaleAfterRows + 1, kTwoColumnRows>(args, row, rows, column_begin, column_end,
                                                                             a, multiply);
      } else {
        for_each_group<uint16_t, kStep, kTwoColumnRows + 1, int(kSkinnyRows), kManyRowsBytes>(
            args, row, rows, column_begin, column_end, a, multiply);
      }
    }
  });
}

MXFP8_GEMM_KERNEL(gemm_skinny_bf16, int(kSkinnyRows), sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
