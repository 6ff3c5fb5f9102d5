// The tiles of gemm_bf16.cpp on x86: VDPBF16PS, sixteen pairs of values along K.
//
// A lane of a register has two values of a column along K. Of a word, which has four elements, the two even ones are in
// one register and the two odd ones in another. A is packed in this order.
#pragma once
#include "bf16.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kDepth = 256;     // depth of a chunk: the panel, decoded, stays in L1 with a tile of A
constexpr int kRows = 10;           // rows of a tile: 10 x 2 sums, 2 + 1 operands
constexpr int kFewRows = 20;        // up to here decoding a weight for each tile takes less time than storing it
constexpr int kRegisterTotals = 6;  // vectors of totals beside two of sums for each
constexpr int kTwoVectorRows = 3;   // up to here with two vectors of columns
constexpr int kWordsOfBlock = int(kBlock) / kWord;
constexpr int64_t kWordValues = 2 * kPanelVectors * kBlock;  // bfloat16 values of a word of a panel

using Bf16Tiles = Tiles<kRows>;

// The even values of a word of A; the odd ones are kBlock behind.
MXFP8_INLINE __m512i pair_of(const uint16_t* a) {
  int pair;
  std::memcpy(&pair, a, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// The exponents that the scales of a block add to the bfloat16 values of each vector of columns.
MXFP8_INLINE __m512i panel_exponents(const uint8_t* codes) {
  return exponents_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// A bit for each column of a panel that has a scale code outside of lowest..highest.
MXFP8_INLINE uint32_t columns_outside(const uint8_t* codes, int64_t depth, int lowest, int highest) {
  uint32_t columns = 0;
  for (int64_t i = 0; i < depth / kBlock * kPanel; i += kLanes) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    columns |= uint32_t(outside(some, lowest, highest)) << (i % kPanel);
  }
  return columns;
}

// Decodes `depth` values of a panel, scaled: [word, even and odd, vector, column, 2]. Returns a bit for each column
// that has a NaN or Inf.
template <class F>
MXFP8_NOINLINE uint32_t decode_panel(PanelView panel, int64_t depth, uint16_t* out) {
  const Decoder<F> decoder;
  __m512i highest[kPanelVectors] = {};
  for (int64_t k = 0; k < depth; k += kBlock, panel.codes += kPanel) {
    __m512i exponents[kPanelVectors];
    for (int j = 0; j < kPanelVectors; ++j) exponents[j] = panel_exponents(panel.codes + j * kLanes);
    for (int word = 0; word < kWordsOfBlock; ++word, out += kWordValues) {
      for (int j = 0; j < kPanelVectors; ++j, panel.elements += kDecoded) {
        __builtin_prefetch(panel.elements + kPanelAhead, 0, 2);
        const Values values = decoder.values(_mm512_loadu_si512(panel.elements), highest + j);
        _mm512_store_si512(out + j * kBlock, add_exponents(values.even, exponents[j]));
        _mm512_store_si512(out + (kPanelVectors + j) * kBlock, add_exponents(values.odd, exponents[j]));
      }
    }
  }
  uint32_t columns = 0;
  for (int j = 0; j < kPanelVectors && !F::is_integer; ++j) {
    const __m512i special = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(highest[j], _mm512_set1_epi8(0x7f)));
    columns |= uint32_t(_mm512_test_epi32_mask(special, special)) << (j * kLanes);
  }
  return columns;
}

// Multiplies R rows of A with V vectors of columns of a decoded panel.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t depth, float* strip, bool accumulate) {
  __m512 sums[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < V; ++j) sums[i][j] = zero();
  }
  for (int64_t k = 0; k < depth; k += kStepBf16, a += R * kStepBf16) {
    for (int word = 0; word < kStepBf16 / kWord; ++word, b += kWordValues) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        __m512i columns[V];
        for (int j = 0; j < V; ++j) columns[j] = _mm512_load_si512(b + (odd * kPanelVectors + j) * kBlock);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
          const __m512i row = pair_of(a + i * kStepBf16 + odd * kBlock + 2 * word);
          for (int j = 0; j < V; ++j) sums[i][j] = dot_product(sums[i][j], row, columns[j]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < V; ++j) {
      float* to = strip + i * kGemmColumns + j * kLanes;
      store(to, accumulate ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// The same with a panel's codes: the scales are applied to the sums.
template <class F, int R, int V>
MXFP8_NOINLINE void multiply_codes(const uint16_t* a, PanelView panel, int64_t depth, float* strip, bool accumulate) {
  const Decoder<F> decoder;
  __m512i unused = _mm512_setzero_si512();
  constexpr bool in_registers = R * V <= kRegisterTotals;  // otherwise totals are added up in L1
  __m512 totals[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < V; ++j) {
      float* to = strip + i * kGemmColumns + j * kLanes;
      if (in_registers) {
        totals[i][j] = accumulate ? load(to) : zero();
      } else if (!accumulate) {
        store(to, zero());
      }
    }
  }
  for (int64_t k = 0; k < depth; k += kBlock, panel.codes += kPanel) {
    const uint16_t* block = a + k / kStepBf16 * R * kStepBf16 + k % kStepBf16 / 2;
    __m512 even[R][V], odd[R][V];  // apart, because a chain of dot products takes the time of its latencies
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) even[i][j] = odd[i][j] = zero();
    }
#pragma GCC unroll 2
    for (int word = 0; word < kWordsOfBlock; ++word, panel.elements += kPanelVectors * kDecoded) {
      Values columns[V];
      for (int j = 0; j < V; ++j) {
        const uint8_t* codes = panel.elements + j * kDecoded;
        __builtin_prefetch(codes + kPanelAhead);
        columns[j] = decoder.values(_mm512_loadu_si512(codes), &unused);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const uint16_t* pair = block + i * kStepBf16 + 2 * word;
        const __m512i first = pair_of(pair), second = pair_of(pair + kBlock);
        for (int j = 0; j < V; ++j) {
          even[i][j] = dot_product(even[i][j], first, columns[j].even);
          odd[i][j] = dot_product(odd[i][j], second, columns[j].odd);
        }
      }
    }
    for (int j = 0; j < V; ++j) {
      const __m512 scales = scale_values(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.codes + j * kLanes)));
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        float* to = strip + i * kGemmColumns + j * kLanes;
        const __m512 sum = even[i][j] + odd[i][j];
        if (in_registers) {
          totals[i][j] = _mm512_fmadd_ps(sum, scales, totals[i][j]);
        } else {
          store(to, _mm512_fmadd_ps(sum, scales, load(to)));
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; in_registers && i < R; ++i) {
    for (int j = 0; j < V; ++j) store(strip + i * kGemmColumns + j * kLanes, totals[i][j]);
  }
}

// Multiplies all vectors of columns of a panel, as many at a time as the registers allow.
template <class F>
MXFP8_INLINE void multiply_few_rows(const uint16_t* a, int64_t rows, PanelView panel, int64_t columns, int64_t depth,
                                    float* strip, bool accumulate) {
  if (rows <= kTwoVectorRows && columns > kLanes) {
    return with_rows<kTwoVectorRows>(rows, [&](auto r) {
      multiply_codes<F, decltype(r)::value, kPanelVectors>(a, panel, depth, strip, accumulate);
    });
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    const PanelView vector = {panel.elements + c / kLanes * kDecoded, panel.codes + c};
    with_rows<kRows>(
        rows, [&](auto r) { multiply_codes<F, decltype(r)::value, 1>(a, vector, depth, strip + c, accumulate); });
  }
}

// Multiplies rows of a tile with all columns of a panel: decoded values, or, where `values` is null, codes.
template <class F>
MXFP8_INLINE void multiply_rows(const uint16_t* a, int64_t rows, const uint16_t* values, PanelView codes,
                                int64_t columns, int64_t depth, float* strip, bool accumulate) {
  if (values == nullptr) return multiply_few_rows<F>(a, rows, codes, columns, depth, strip, accumulate);
  with_rows<kRows>(rows, [&](auto r) {
    constexpr int R = decltype(r)::value;
    if (columns > kLanes) return multiply_tile<R, 2>(a, values, depth, strip, accumulate);
    multiply_tile<R, 1>(a, values, depth, strip, accumulate);
  });
}

MXFP8_INLINE int64_t offset_of(const Bf16Tiles& tiles, Chunk chunk, int64_t tile) { return tiles.offset(chunk, tile); }

// Packs a chunk of a row of a tile of `rows`. False if a scale does not fit bfloat16.
template <class Format>
MXFP8_INLINE bool pack_chunk(Format format, const GemmArgs& args, int64_t row, Chunk chunk, int64_t rows, int64_t i,
                             uint16_t* tile, Extent* extent) {
  return pack_row(format, args, row, chunk.k, chunk.count, rows * kStepBf16, tile + i * kStepBf16, extent);
}

}  // namespace mxfp8::MXFP8_ISA
