// The tiles of gemm_bf16.cpp on Arm: BFMMLA, which multiplies two rows of A with two of B, four values each.
//
//   floor      a block of two rows and two columns: 8 products; the values contain the scales
//
// An operand has four values along K of two columns, which are two words of a panel that lie together; or four values
// along K of two rows of A. A is packed [step of 4, pair of rows, 2, 4], always in tiles of kRows rows.
// BFMMLA adds products in pairs, and rounds each sum to odd, with an error of up to 2^-23 of the sum. A chain of K
// products has K / 2 such sums, so its error is at most K 2^-24, which numerics.gemm_error_bound allows.
#pragma once
#include "bf16_exact.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kDepth = 256;  // depth of a chunk: the panel, decoded, stays in L1 with a tile of A
constexpr int kRows = 10;        // 5 x 4 sums, because a chain of sums waits 5 cycles, and 5 + 4 operands
constexpr int kFewRows = 0;      // weights are decoded before they are multiplied, for any number of rows
constexpr int kPairs = int(kPanel) / 2;
constexpr int64_t kOperand = 8;  // values of a register

using Bf16Tiles = Tiles<kRows>;

MXFP8_INLINE int64_t offset_of(const Bf16Tiles& tiles, Chunk chunk, int64_t tile) {
  return (chunk.k * tiles.count + chunk.padded * tile) * kRows;
}

// Packs a chunk of a row of a tile of `rows`.
template <class Format>
MXFP8_INLINE bool pack_chunk(Format, const GemmArgs& args, int64_t row, Chunk chunk, int64_t rows, int64_t i,
                             uint16_t* tile, Extent* extent) {
  uint32_t lowest = kInfinity, highest = 0;
  uint16_t* out = tile + i * kWord;
  for (int64_t k = 0; k < chunk.padded; k += kBlock) {
    alignas(64) float values[kBlock] = {};
    if (k < chunk.count) load_a_block(args, row, (chunk.k + k) / kBlock, values);
    for (int64_t j = 0; j < kBlock; ++j) {
      const uint32_t magnitude = bits_of(values[j]) & kMagnitude, exponent = magnitude & kInfinity;
      const bool counts = magnitude != 0 && magnitude < kInfinity;
      lowest = counts && exponent < lowest ? exponent : lowest;
      highest = counts && exponent > highest ? exponent : highest;
    }
    for (int64_t j = 0; j < kBlock; j += kWord, out += (rows + 1) / 2 * kOperand) {
      for (int64_t word = 0; word < kWord; ++word) out[word] = uint16_t(bits_of(values[j + word]) >> 16);
    }
  }
  // A subnormal has the lowest bit of all, which is below what BFMMLA reads.
  if (lowest != kInfinity) extent->add(int(lowest >> 23) - 127 - (lowest == 0 ? 8 : 7), int(highest >> 23) - 127);
  return true;
}

// A bit for each column of a panel that has a scale code outside of lowest..highest.
MXFP8_INLINE uint32_t columns_outside(const uint8_t* codes, int64_t depth, int lowest, int highest) {
  uint32_t columns = 0;
  for (int64_t i = 0; i < depth / kBlock * kPanel; ++i) {
    columns |= uint32_t(codes[i] < lowest || codes[i] > highest) << (i % kPanel);
  }
  return columns;
}

// Turns eight elements into values: four each of two columns, whose scales are First and First + 1.
template <class F, bool Split, int First>
MXFP8_INLINE uint16x8_t decode_operand(int8x8_t codes, float32x4_t scales) {
  float32x4_t values[2];
  if constexpr (F::is_integer) {
    const int16x8_t wide = vmovl_s8(codes);
    values[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    values[1] = vcvtq_f32_s32(vmovl_high_s16(wide));
  } else {
    // The bits of bfloat16 values times 2^-bias_gap; subnormal elements become subnormal numbers.
    constexpr int up = 7 - F::mantissa_bits;
    const uint16x8_t bits = vreinterpretq_u16_s16(vshll_n_s8(codes, up)) & vdupq_n_u16(uint16_t(0x8000 | (0x7f << up)));
    values[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
    values[1] = vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
  }
  const float gap = float_of(uint32_t(127 + Shift<F>::bias_gap) << 23);
  if (Split) values[0] = values[0] * gap, values[1] = values[1] * gap;
  values[0] = vmulq_laneq_f32(values[0], scales, First);
  values[1] = vmulq_laneq_f32(values[1], scales, First + 1);
  return vuzp2q_u16(vreinterpretq_u16_f32(values[0]), vreinterpretq_u16_f32(values[1]));
}

// Decodes `depth` values of a panel, scaled: [word, pair of columns, 2, 4]. Returns a bit for each column that has a
// NaN or Inf. The values times 2^-bias_gap take scales times 2^bias_gap, in two factors if `Split`.
template <class F, bool Split>
MXFP8_NOINLINE uint32_t decode_panel(PanelView panel, int64_t depth, uint16_t* out) {
  uint8x16_t highest[kPanelVectors] = {};
  for (int64_t k = 0; k < depth; k += kBlock, panel.codes += kPanel) {
    float scales[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      scales[c] = float_of(uint32_t(panel.codes[c] + (Split ? 0 : Shift<F>::bias_gap)) << 23);
    }
    for (int64_t word = 0; word < kBlock; word += kWord) {
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v, panel.elements += kDecoded, out += 2 * kOperand) {
        const uint8x16_t codes = vld1q_u8(panel.elements);
        const int8x16_t elements = vreinterpretq_s8_u8(codes);
        const float32x4_t scale = vld1q_f32(scales + v * kLanes);
        if (!F::is_integer) highest[v] = vmaxq_u8(highest[v], codes & vdupq_n_u8(0x7f));
        const uint16x8_t first = decode_operand<F, Split, 0>(vget_low_s8(elements), scale);
        const uint16x8_t second = decode_operand<F, Split, 2>(vget_high_s8(elements), scale);
        vst1q_u16(out, first);
        vst1q_u16(out + kOperand, second);
      }
    }
  }
  uint8_t most[kPanel * kWord];
  std::memcpy(most, highest, sizeof most);
  uint32_t columns = 0;
  for (int i = 0; i < kPanel * kWord; ++i) columns |= uint32_t(most[i] > F::max_code) << (i / kWord);
  return columns;
}
template <class F>
MXFP8_INLINE uint32_t decode_panel(PanelView panel, int64_t depth, uint16_t* out) {
  constexpr int highest = 254 - Shift<F>::bias_gap;  // with which a scale times 2^bias_gap is finite
  if (highest < 254 && __builtin_expect(columns_outside(panel.codes, depth, 0, highest) != 0, 0)) {
    return decode_panel<F, true>(panel, depth, out);
  }
  return decode_panel<F, false>(panel, depth, out);
}

// Multiplies R rows of A with a decoded panel.
template <int R>
MXFP8_NOINLINE void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t depth, float* strip, bool accumulate) {
  constexpr int pairs = (R + 1) / 2;
  float32x4_t sums[pairs][kPairs];
#pragma GCC unroll 5
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 5
    for (int j = 0; j < kPairs; ++j) sums[i][j] = vdupq_n_f32(0);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += kWord, a += pairs * kOperand, b += kPairs * kOperand) {
    bfloat16x8_t rows[pairs], columns[kPairs];
#pragma GCC unroll 5
    for (int i = 0; i < pairs; ++i) rows[i] = vreinterpretq_bf16_u16(vld1q_u16(a + i * kOperand));
#pragma GCC unroll 5
    for (int j = 0; j < kPairs; ++j) columns[j] = vreinterpretq_bf16_u16(vld1q_u16(b + j * kOperand));
#pragma GCC unroll 5
    for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 5
      for (int j = 0; j < kPairs; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], rows[i], columns[j]);
    }
  }
#pragma GCC unroll 5
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 5
    for (int j = 0; j < kPairs; ++j) {
      const auto put = [&](float32x2_t two, float* to) { vst1_f32(to, accumulate ? two + vld1_f32(to) : two); };
      put(vget_low_f32(sums[i][j]), strip + 2 * i * kGemmColumns + 2 * j);
      if (2 * i + 1 < R) put(vget_high_f32(sums[i][j]), strip + (2 * i + 1) * kGemmColumns + 2 * j);
    }
  }
}

// Multiplies rows of a tile with a decoded panel.
template <class F>
MXFP8_INLINE void multiply_rows(const uint16_t* a, int64_t rows, const uint16_t* values, PanelView, int64_t,
                                int64_t depth, float* strip, bool accumulate) {
  with_rows<kRows>(rows, [&](auto r) { multiply_tile<decltype(r)::value>(a, values, depth, strip, accumulate); });
}

}  // namespace mxfp8::MXFP8_ISA
