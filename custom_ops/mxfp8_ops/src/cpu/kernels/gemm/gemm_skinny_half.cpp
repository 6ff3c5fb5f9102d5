// The gemm of E4M3 elements for few rows on FMLAL (FEAT_FHM), which multiplies float16 numbers exactly and adds in
// float32: B is decoded in registers, as it lies.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 4. Work is split over N. Bytes moved: 1.03 N K + A + the result. A block of B
// takes 12 operations, and 11 more for each row of A: 8 products, a sum, the product of both scales, and a
// multiply-add.
//
// An element times 2^-8 is a float16 number, also where it is subnormal: its sign, and its magnitude 7 bits up. A row
// of B with a NaN, or with a scale whose product float32 cannot hold, goes to exact_dot; a strip of A with such a row
// goes to another kernel.
#include <arm_neon.h>

#include "gemm_skinny.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = int(kBlock);
constexpr int64_t kRowsOfGroup = 4;
constexpr int64_t kFarBytes = 16384;  // B is fetched this far ahead
constexpr int kBiasGap = 16;          // both elements are 2^-8 too small
// Both scales, with B's times 2^16, are within 2^-46 .. 2^46; the nonzero sums of a block are within 2^-34 .. 2^7.
constexpr int kMostExponent = 46;
constexpr uint32_t kLowestOfA = 127 - kMostExponent, kHighestOfA = 127 + kMostExponent;
constexpr uint32_t kLowestOfB = kLowestOfA - kBiasGap, kHighestOfB = kHighestOfA - kBiasGap;

MXFP8_INLINE float16x8_t half_of(int8x8_t codes) {
  return vreinterpretq_f16_u16(vreinterpretq_u16_s16(vshll_n_s8(codes, 7)) & vdupq_n_u16(0xbfff));
}
MXFP8_INLINE uint8x16_t magnitudes(const uint8_t* codes) { return vld1q_u8(codes) & vdupq_n_u8(0x7f); }

template <int R>
MXFP8_INLINE bool dot(const float16_t* a, const float* a_scales, int64_t a_stride, const Pass& pass, float* out) {
  Vec sums[R] = {};
  uint8x16_t largest = {};
  bool fits = true;
  const auto step = [&](const uint8_t* elements, int64_t k) MXFP8_INLINE_LAMBDA {
    const uint32_t code = pass.scales[k / kBlock];
    bool inside = code >= kLowestOfB && code <= kHighestOfB;
    const float scale = float_of((code + kBiasGap) << 23);
    float32x4_t low[R] = {}, high[R] = {};
    if (__builtin_expect(!inside, 0)) {  // a block of zeros fits
      const uint8x16_t most = vmaxq_u8(magnitudes(elements), magnitudes(elements + 16));
      inside = code != uint32_t(kScaleNan) && vmaxvq_u8(most) == 0;
    }
    fits &= inside;
#pragma GCC unroll 2
    for (int i = 0; i < kStep; i += 16) {
      const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(elements + i));
      largest = vmaxq_u8(largest, magnitudes(elements + i));
      const float16x8_t first = half_of(vget_low_s8(codes)), second = half_of(vget_high_s8(codes));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float16_t* row = a + k * R + r * kStep + i;
        const float16x8_t x = vld1q_f16(row), next = vld1q_f16(row + 8);
        low[r] = vfmlalq_low_f16(vfmlalq_low_f16(low[r], x, first), next, second);
        high[r] = vfmlalq_high_f16(vfmlalq_high_f16(high[r], x, first), next, second);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sums[r] = vfmaq_n_f32(sums[r], low[r] + high[r], a_scales[r * a_stride + k / kBlock] * scale);
    }
  };
  int64_t k = 0;
  for (; k + kStep <= pass.count; k += kStep) {
    if (k % 64 == 0) __builtin_prefetch(pass.elements + k + pass.ahead, 0, 0);
    step(pass.elements + k, k);
  }
  if (k < pass.count) {
    alignas(16) uint8_t padded[kStep] = {};
    std::memcpy(padded, pass.elements + k, size_t(pass.count - k));
    step(padded, k);
  }
  if (!fits || vmaxvq_u8(largest) > E4M3::max_code) return false;
  add_lanes<R>(sums, out);
  return true;
}

// Where packed A lies: float16 numbers [group, step, row, kStep], then scales [row, block].
MXFP8_INLINE float* scales_of(void* packed, int64_t rows, int64_t blocks) {
  return reinterpret_cast<float*>(static_cast<float16_t*>(packed) + rows * blocks * kBlock);
}

}  // namespace

int gemm_skinny_half_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  const int64_t blocks = blocks_of(args.k);
  float* scales = scales_of(packed, rows, blocks);
  uint8x16_t largest = {};
  for (int64_t r = 0; r < rows; ++r) {
    const RowOfA<uint8_t> a = row_of_a(args, row + r);
    for (int64_t block = 0; block < blocks; ++block) {
      alignas(16) uint8_t codes[kBlock] = {};
      std::memcpy(codes, a.values + block * kBlock, size_t(min_of(kBlock, args.k - block * kBlock)));
      const uint32_t code = a.scales[block];
      const uint8x16_t most = vmaxq_u8(magnitudes(codes), magnitudes(codes + 16));
      const bool fits = code >= kLowestOfA && code <= kHighestOfA;
      if (!fits && (code == uint32_t(kScaleNan) || vmaxvq_u8(most) != 0)) return kNotExact;
      largest = vmaxq_u8(largest, most);
      scales[r * blocks + block] = fits ? float_of(code << 23) : 0.0f;
      auto* to = static_cast<float16_t*>(packed) + block * kBlock * rows + r * kStep;
      for (int i = 0; i < kStep; i += 8) {
        const float16x8_t halves = half_of(vreinterpret_s8_u8(vld1_u8(codes + i)));
        std::memcpy(to + i, &halves, sizeof halves);
      }
    }
  }
  return vmaxvq_u8(largest) > E4M3::max_code ? kNotExact : 0;
}

void gemm_skinny_half_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                               int64_t column_end, const void* packed, int) {
  const int64_t blocks = blocks_of(args.k);
  const float* scales = scales_of(const_cast<void*>(packed), rows, blocks);
  for_each_group<float16_t, kStep, 1, kRowsOfGroup, kGroupBytes, kFarBytes>(
      args, row, rows, column_begin, column_end, static_cast<const float16_t*>(packed),
      [&](auto r, const Work<float16_t>& work) {
        constexpr int R = decltype(r)::value;
        const float* of_group = scales + (work.row - row) * blocks + work.k / kBlock;
        for_each_column<E4M3, R, 1>(work, [&](auto, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
          return dot<R>(work.a, of_group, blocks, pass, sums);
        });
      });
}

MXFP8_GEMM_KERNEL(gemm_skinny_half, int(kRowsOfGroup), sizeof(float16_t) + 1);

}  // namespace mxfp8::MXFP8_ISA
