// The tiles of gemm_int8.cpp on Arm: SMMLA, which multiplies two rows of A with two of B, or else SDOT, which
// multiplies a row of A with four of B.
//
//   floor      SMMLA: a block of two rows and two columns takes 4 products and a fold of 2 operations. SDOT: a block of
//              a row and four columns takes 8 products and a fold of 2 operations
//
// The fold has no conversion, and no product with A's scale: a sum begins with the bits of 1.5 * 2^23 times that scale.
// The sum is below 2^22, so it stays in the mantissa of that number. The number less its start is the sum times the
// scale, exactly. A multiply-add with B's scale adds it to the total. The bits are the same as on x86.
//
// Packed A, always in tiles of kRows rows: factors [block, step of 8, pair of rows, 2, 8] for SMMLA, [block, row, 32]
// for SDOT. Behind all factors are the starts of sums: for each row, one for each result that a register has of it.
#pragma once
#include "int8.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kDepth = 512, kTapsDepth = kDepth;  // depth of a chunk
constexpr uint8_t kFlipped = 0;
constexpr int kRows = 4;  // 8 sums, 8 totals, 6 operands: with larger tiles compilers keep them in memory
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kRowsTogether = 2;
#else
constexpr int kRowsTogether = 1;
#endif
constexpr int kColumnsTogether = kLanes / kRowsTogether;  // a register has sums of these rows and columns
constexpr int kVectors = int(kPanel) / kColumnsTogether;

using ByteTiles = Tiles<kRows>;

struct PackedA {
  int64_t rows, k;
  char* base;
  ByteTiles tiles{rows};

  MXFP8_INLINE_MEMBER PackedA(const GemmArgs& args, const void* packed, int64_t rows)
      : rows(rows), k(args.k), base(static_cast<char*>(const_cast<void*>(packed))) {}
  MXFP8_INLINE_MEMBER int64_t offset(Chunk chunk, int64_t tile) const {
    return (chunk.k * tiles.count + chunk.padded * tile) * kRows;
  }
  MXFP8_INLINE_MEMBER int8_t* factors(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<int8_t*>(base) + offset(chunk, tile);
  }
  MXFP8_INLINE_MEMBER uint32_t* starts(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<uint32_t*>(base + tiles.count * kRows * panel_depth(k)) +
           offset(chunk, tile) / kBlock * kColumnsTogether;
  }
};

MXFP8_INLINE void pack_block(const PackedA& to, Chunk chunk, int64_t tile, int64_t row, int64_t block,
                             const uint8_t* elements, uint32_t code) {
  const int64_t together = (to.tiles.rows_of(tile) + kRowsTogether - 1) / kRowsTogether;
  const int64_t unit = row / kRowsTogether, part = row % kRowsTogether;
  int8_t* factors = to.factors(chunk, tile) + block * together * kRowsTogether * kBlock;
  constexpr int64_t run = kRowsTogether == 1 ? kBlock : kIntWord;  // elements of a row that lie together
  for (int64_t i = 0; i < kBlock; i += run) {
    std::memcpy(factors + ((i / run * together + unit) * kRowsTogether + part) * run, elements + i, run);
  }
  uint32_t* starts = to.starts(chunk, tile) + (block * together + unit) * kLanes + part * kColumnsTogether;
  for (int i = 0; i < kColumnsTogether; ++i) starts[i] = ((code + kSumBits) << 23) | kHalf;
}

// The operands that a tile reads of a panel.
struct OperandB {
  const int8_t* factors;
  const float* scales;  // [block, vector of columns, lane of a sum]
};
struct RoomOfB {
  alignas(64) float scales[kDepth / kBlock * kPanel * kRowsTogether];
};
MXFP8_INLINE OperandB operand_of(PanelView panel, int64_t depth, RoomOfB* room) {
  float* to = room->scales;
  for (int64_t i = 0; i < depth / kBlock * kPanel; i += kColumnsTogether, to += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {  // times 2^-12: both elements are multiples of 2^-6
      to[lane] = float_of(uint32_t(panel.codes[i + lane % kColumnsTogether] - 2 * kElementBits) << 23);
    }
  }
  return {reinterpret_cast<const int8_t*>(panel.elements), room->scales};
}

// Adds 16 bytes of products to sums. `Word` is the number of the word of A's register, of four.
template <int Word>
MXFP8_INLINE int32x4_t add_products(int32x4_t sums, int8x16_t rows, int8x16_t columns) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vmmlaq_s32(sums, rows, columns);
#else
  return vdotq_laneq_s32(sums, columns, rows, Word);
#endif
}

// Loads stay behind it. So a sum is loaded, which takes no operation, instead of copied; and few operands stay in
// registers.
MXFP8_INLINE void fence() { __asm__ volatile("" ::: "memory"); }

template <int Units, int Words>
MXFP8_INLINE void multiply_step(const int8_t* a, int64_t next_row, const int8_t* b, int32x4_t (*sums)[kVectors]) {
  int8x16_t rows[Units];
  for (int i = 0; i < Units; ++i) rows[i] = vld1q_s8(a + i * next_row);
  const auto word = [&](auto number) MXFP8_INLINE_LAMBDA {
    constexpr int at = decltype(number)::value;
    if constexpr (at < Words) {
      int8x16_t columns[kVectors];
      fence();
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) columns[j] = vld1q_s8(b + (at * kVectors + j) * kDecoded);
#pragma GCC unroll 4
      for (int i = 0; i < Units; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[i][j] = add_products<at>(sums[i][j], rows[i], columns[j]);
      }
    }
  };
  word(Rows<0>{}), word(Rows<1>{}), word(Rows<2>{}), word(Rows<3>{});
}

// Totals of a register: with SMMLA, its two halves are results of two rows.
MXFP8_INLINE float32x4_t load_totals(const float* strip, bool second) {
  if (kRowsTogether == 1) return vld1q_f32(strip);
  return vcombine_f32(vld1_f32(strip), second ? vld1_f32(strip + kGemmColumns) : vdup_n_f32(0));
}
MXFP8_INLINE void store_totals(float32x4_t totals, bool second, float* strip) {
  if (kRowsTogether == 1) return vst1q_f32(strip, totals);
  vst1_f32(strip, vget_low_f32(totals));
  if (second) vst1_f32(strip + kGemmColumns, vget_high_f32(totals));
}

// Adds the products of `depth` values to the totals of R rows of A and a panel.
template <int R>
MXFP8_NOINLINE void multiply_rows(const int8_t* a, const uint32_t* starts, OperandB b, int64_t depth, float* strip) {
  constexpr int units = (R + kRowsTogether - 1) / kRowsTogether;
  constexpr int64_t next_row = kRowsTogether == 1 ? kBlock : kDecoded;
  constexpr int words = kRowsTogether == 1 ? kDecoded / int(kIntWord) : 1;  // words of B per register of A
  constexpr int steps = int(kBlock / kIntWord) / words;
  float32x4_t totals[units][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < units; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      totals[i][j] = load_totals(strip + i * kRowsTogether * kGemmColumns + j * kColumnsTogether, 2 * i + 1 < R);
    }
  }
  for (int64_t k = 0; k < depth; k += kBlock, a += units * kRowsTogether * kBlock, starts += units * kLanes) {
    int32x4_t sums[units][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < units; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        fence();
        sums[i][j] = vreinterpretq_s32_u32(vld1q_u32(starts + i * kLanes));
      }
    }
#pragma GCC unroll 4
    for (int step = 0; step < steps; ++step, b.factors += words * kIntWord * kPanel) {
      multiply_step<units, words>(a + step * (kRowsTogether == 1 ? kDecoded : units * kDecoded), next_row, b.factors,
                                  sums);
    }
    fence();
    float32x4_t begin[units];
    for (int i = 0; i < units; ++i) begin[i] = vreinterpretq_f32_u32(vld1q_u32(starts + i * kLanes));
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j, b.scales += kLanes) {
      const float32x4_t scale = vld1q_f32(b.scales);
#pragma GCC unroll 4
      for (int i = 0; i < units; ++i) {
        totals[i][j] = vfmaq_f32(totals[i][j], vsubq_f32(vreinterpretq_f32_s32(sums[i][j]), begin[i]), scale);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < units; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      store_totals(totals[i][j], 2 * i + 1 < R, strip + i * kRowsTogether * kGemmColumns + j * kColumnsTogether);
    }
  }
}

template <int R, int V>
MXFP8_INLINE void multiply_tile(const PackedA& a, Chunk chunk, int64_t tile, OperandB b, int64_t, float* strip) {
  multiply_rows<R>(a.factors(chunk, tile), a.starts(chunk, tile), b, chunk.count, strip);
}

}  // namespace mxfp8::MXFP8_ISA
