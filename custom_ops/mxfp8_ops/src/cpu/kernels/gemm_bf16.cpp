// The gemms on the bf16 dot product (VDPBF16PS), which multiplies MXFP8 exactly: an element times its scale has four
// significant bits, so it is a bfloat16, and the products of two of those are exact in the float32 accumulator.
//
// y [M, N] = A [M, K] . B [N, K]^T. Work is split over M and N. Bytes moved: 1.03 N K once per 256 rows of A + 2 M K +
// the result.
//
// The one thing in the way: VDPBF16PS reads subnormal inputs as zero and flushes subnormal results, whatever the
// processor's mode. Let ea and eb be the exponents of the lowest bit set anywhere in A and in a chunk of a panel of B.
// Every product, and every sum of products before rounding, is a multiple of 2^(ea + eb). With ea, eb >= -126 no input
// is subnormal, and with ea + eb >= -126 no result is. So there are two ways to apply the scales of B:
//   to the weights' exponents, once for all rows, if a column of the panel passes that test and has no NaN;
//   for few rows to the sum of each block, as float32: weights go from their codes to the dot product in registers, and
//   any scale will do with which they are finite. eb is then that of the elements.
// Other columns go to exact_dot, and an A that does not fit to gemm_f32.cpp. All-zero blocks say nothing about
// exponents, whatever their scale.
//
// Layout: panel.h. A lane of a register has two values along K of a column; of four elements, a word, the even two make
// one register and the odd two another. A is packed in that order.
#include "bf16.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {
namespace {

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

// The same with a panel's codes, and scales applied to sums.
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

// All vectors of columns of a panel, as many at a time as registers allow.
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

// A chunk of a panel, turned at this call, and decoded.
struct Room {
  alignas(64) uint8_t elements[kPanel * kDepth];
  alignas(64) uint8_t codes[kPanel * kDepth / kBlock];
  alignas(64) uint16_t values[kPanel * kDepth];
};

// Where decoded panels are: those of the whole K one behind the other.
MXFP8_INLINE const uint16_t* decoded_at(const GemmArgs& args, const void* data, int64_t column, int64_t k) {
  return static_cast<const uint16_t*>(data) + column * panel_depth(args.k) + k * kPanel;
}

// A chunk of a panel of B: decoded, or, where `values` is null, its codes; and a bit for each column that these are not
// exact for.
struct ChunkOfB {
  const uint16_t* values;
  PanelView codes;
  uint32_t misfits;
};
template <class F>
MXFP8_INLINE ChunkOfB chunk_of_b(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t rows,
                                 int lowest, Room* room) {
  const Panels* panels = args.panels;
  if (panels != nullptr && panels->decoded && panels->lowest >= lowest) {
    return {decoded_at(args, panels->data, column, chunk.k), {}, 0};
  }
  PanelView codes = {room->elements, room->codes};
  if (panels != nullptr && !panels->decoded) {
    codes = panel_at(args, panels->data, column, chunk.k);
  } else {
    turn_elements(args, column, columns, chunk, 0, kPanel * args.k, room->elements);
    turn_codes<F>(args, column, columns, chunk, lowest, kMaxScale<F>, room->codes, [](int64_t, int64_t) {});
  }
  if (rows <= kFewRows) return {nullptr, codes, columns_outside(codes.codes, chunk.padded, 0, kMaxScale<F>)};
  const uint32_t outside = columns_outside(codes.codes, chunk.padded, lowest, kMaxScale<F>);
  return {room->values, codes, outside | decode_panel<F>(codes, chunk.padded, room->values)};
}

}  // namespace

int gemm_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  auto* out = static_cast<uint16_t*>(packed);
  Extent extent;
  bool fits = true;
  const Bf16Tiles tiles{rows};
  with_a_format(args, [&](auto format) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t first = tiles.first_row(tile), tile_rows = tiles.rows_of(tile);
      for (int64_t i = 0; i < tile_rows; ++i) {
        for (int64_t c = 0; c < chunks_of(args.k, kDepth) && fits; ++c) {
          const Chunk chunk = chunk_at(args.k, kDepth, c, kStepBf16);
          fits = pack_row(format, args, row + first + i, chunk.k, chunk.count, tile_rows * kStepBf16,
                          out + tiles.offset(chunk, tile) + i * kStepBf16, &extent);
        }
      }
    }
  });
  return fits && multiplies_codes(args, extent) ? extent.lowest : kNotExact;
}

void gemm_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  const Bf16Tiles tiles{rows};
  const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
  Room room;
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    for_each_strip<uint16_t, kStepBf16, kPanel>(
        args, row + first, count, column_begin, column_end, kDepth,
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const int64_t columns = min_of(kPanel, column_end - column);
          const ChunkOfB b = chunk_of_b<F>(args, column, columns, chunk, count, lowest_scale<F>(exponent), &room);
          float before[kGemmRows * kPanel];
          for (int64_t i = 0; __builtin_expect(b.misfits != 0, 0) && i < count * kPanel; ++i) {
            before[i] = accumulate ? strip[i / kPanel * kGemmColumns + i % kPanel] : 0;
          }
          for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
            const uint16_t* from = a + tiles.offset(chunk, tile);
            float* to = strip + (tiles.first_row(tile) - first) * kGemmColumns;
            if (b.values == nullptr) {
              multiply_few_rows<F>(from, tiles.rows_of(tile), b.codes, columns, chunk.padded, to, accumulate);
              continue;
            }
            with_rows<kRows>(tiles.rows_of(tile), [&](auto r) {
              constexpr int R = decltype(r)::value;
              if (columns > kLanes) return multiply_tile<R, 2>(from, b.values, chunk.padded, to, accumulate);
              multiply_tile<R, 1>(from, b.values, chunk.padded, to, accumulate);
            });
          }
          for (uint32_t misfits = b.misfits; misfits != 0; misfits &= misfits - 1) {
            const int c = __builtin_ctz(misfits);
            if (c < columns)
              correct_column<F, kPanel>(args, row + first, count, column + c, chunk, before + c, strip + c);
          }
        });
  });
}

int64_t gemm_bf16_panel_bytes(const GemmArgs& args, bool decoded) {
  return decoded ? (args.n + kPanel - 1) / kPanel * kPanel * panel_depth(args.k) * int64_t(sizeof(uint16_t))
                 : bytes_of_panels(args);
}

int gemm_bf16_make_panels(const GemmArgs& args, bool decoded, int64_t column_begin, int64_t column_end, void* data) {
  int lowest = kAllZero;
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    Room room;
    for (int64_t column = column_begin; column < column_end; column += kPanel) {
      if (!decoded) {
        make_panel<F>(args, column, 0, kMinScale<F>, kMaxScale<F>, data, [](int64_t, int64_t) {});
        continue;
      }
      const int64_t columns = min_of(kPanel, args.n - column);
      for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
        const Chunk chunk = chunk_at(args.k, kDepth, c, kStepBf16);
        bool fits = true;
        turn_elements(args, column, columns, chunk, 0, kPanel * args.k, room.elements);
        turn_codes<F>(args, column, columns, chunk, kMinScale<F>, kMaxScale<F>, room.codes,
                      [&](int64_t, int64_t) { fits = false; });
        for (int64_t i = 0; i < chunk.padded / kBlock * kPanel; ++i)
          lowest = room.codes[i] < lowest ? room.codes[i] : lowest;
        auto* to = const_cast<uint16_t*>(decoded_at(args, data, column, chunk.k));
        if (decode_panel<F>({room.elements, room.codes}, chunk.padded, to) != 0 || !fits) lowest = kNotExact;
      }
    }
  });
  return lowest;
}

MXFP8_PANEL_KERNEL(gemm_bf16, kRows, sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
