// The gemm of E4M3 elements on dot products of 16-bit integers, which are exact, and run at twice the rate of float32
// where a processor has them.
//
// y [M, N] = A [M, K] . B [N, K]^T. An element times a power of two is a 16-bit integer, unless it is small, so that
// the 32 products of a block add up in 32 bits: not rounded at all. The sum, as float32, times both scales of the block
// is added to the result: 16 + 3 operations for what takes float32 32.
//
// B's elements are multiplied by 2^5 or 2^6, a block of A by 2^2 to 2^6: by as much as its sum allows, see bits_fewer.
// Smaller elements than 2^-2, or 2^-3 (B's, next to a block's largest of 224 to 448: one of 700, or 1400, if they are
// normally distributed), are no integers then. Those are zeros in the dot products, and their products are added one by
// one:
//   A . B = (A's integers) . (B's integers)          the dot products
//         + (A's small elements) . (B's integers)    add_small_of_a: each with a row of a panel
//         + A . (B's small elements)                 add_small_of_b: each with a column of A, summed up in `Rest`
// Where a column of B has many, those are integers too, of a panel of their own; where a tile of A has many, or a scale
// beyond what float32 holds in a product, another kernel takes over. Blocks of B with such scales are for exact_dot.
//
// Layout: lanes of a sum are columns of the result, as in gemm_f32.cpp; a lane holds values k and k + 2, as a word of
// four elements falls apart into even and odd ones.
#include "columns.h"
#include "packed_integers.h"

#if defined(MXFP8_DOTS_OF_INTEGERS)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kVectors = 2;                    // of columns, in a register tile
constexpr int64_t kPanel = kVectors * kLanes;  // rows of B decoded at a time
constexpr int kPairs = int(kBlock) / 2;        // pairs of integers of a block
constexpr int kWordPairs = kPairs / 2;         // half of them are of even elements, then come the odd ones'
constexpr int64_t kPairLanes = 2 * kLanes;     // integers of a register
static_assert(kDepth % kStretch == 0, "chunks are whole stretches");

// A panel of B: its integers [vector, block, pair, column], scales with what they are multiplied by [vector, block,
// column], and the places of what is no integer.
struct Panel {
  alignas(64) int16_t integers[kPanel * kDepth];
  alignas(64) float scales[kPanel * kDepth / kBlock];
  uint64_t others[kVectors][kDepth / kWord];    // a bit for each element of a word of each column
  uint32_t strange[kVectors][kDepth / kBlock];  // a bit for each column whose scale does not fit: that is 0
};

// Decodes a stretch of kLanes rows of B to a vector of a panel, from value `at` on.
template <int Bits>
MXFP8_INLINE void decode_stretch(const IntegerDecoder<Bits>& decoder, const Stretch& from, int64_t ahead,
                                 int64_t vector, int64_t at, Panel* panel) {
  const Ints all_scales = load_scales(from);
  for (int64_t k = 0; k < min_of(kStretch, (from.left + kPadding - 1) / kPadding * kPadding); k += kDecoded) {
    Bytes words[kLanes];
    for (int64_t c = 0; c < kLanes; ++c) __builtin_prefetch(from.elements + c * from.next_elements + k + ahead, 0, 2);
    if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
      turn_rows(from.elements + k, from.next_elements, words);
    } else {
      turn_fringe(from, k, words);
    }
    int16_t* integers = panel->integers + (vector * kDepth + at + k) * kLanes;
#pragma GCC unroll 16
    for (int word = 0; word < kLanes; ++word) {
      const Pairs pairs = decoder(words[word], panel->others[vector] + (at + k) / kWord + word);
      int16_t* to = integers + word / kWordPairs * kBlock * kLanes + word % kWordPairs * kPairLanes;
      std::memcpy(to, &pairs.even, sizeof pairs.even);
      std::memcpy(to + kWordPairs * kPairLanes, &pairs.odd, sizeof pairs.odd);
    }
    for (int64_t block = k / kBlock; block < (k + kDecoded) / kBlock; ++block) {
      const Ints codes = (all_scales >> int(block * 8)) & 0xff;
      const Ints fits = (codes >= kLowestScale) & (codes <= kHighestScale);
      const Ints scales = ((codes - Bits) << 23) & fits;
      std::memcpy(panel->scales + ((vector * kDepth + at) / kBlock + block) * kLanes, &scales, sizeof scales);
      panel->strange[vector][at / kBlock + block] = lanes_of(~fits);
    }
  }
}

// Decodes a panel, one chunk deep.
template <int Bits>
MXFP8_NOINLINE void decode_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                                 Panel* panel) {
  const int64_t blocks = blocks_of(args.k);
  const IntegerDecoder<Bits> decoder;
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t k = 0; k < chunk.count; k += kStretch) {
      const uint8_t* elements = args.b + (column + c) * args.k + chunk.k + k;
      const uint8_t* scales = args.b_scales + (column + c) * blocks + (chunk.k + k) / kBlock;
      decode_stretch(decoder, {elements, scales, args.k, blocks, columns - c, chunk.count - k}, ahead, c / kLanes, k,
                     panel);
    }
  }
}

// Which of up to 64 words have an element that is no integer.
MXFP8_INLINE uint64_t words_with_others(const uint64_t* others, int64_t words) {
  static_assert(kDepth / kWord == 64 && kPadding / kWord % 8 == 0);
  uint64_t all = 0;
#if defined(__AVX512F__)
  for (int64_t i = 0; i < words; i += 8) {
    const __m512i eight = _mm512_loadu_si512(others + i);
    all |= uint64_t(_mm512_test_epi64_mask(eight, eight)) << i;
  }
#else
  for (int64_t i = 0; i < words; ++i) all |= uint64_t(others[i] != 0) << i;
#endif
  return all;
}

// More small elements than these of a column, in a chunk, are integers of a panel of their own: only what a column
// holds itself decides how it is added up.
constexpr int kMostSmall = 8;
constexpr int kSmallBits = 9;  // a small element times 2^kSmallBits is an integer below 2^7

// Moves small elements of columns that have many from `others` of a panel to the integers of `small`. Whether there are
// such columns.
MXFP8_NOINLINE bool move_small(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int bits,
                               Panel* panel, Panel* small) {
  bool any = false;
  for (int64_t j = 0; j * kLanes < columns; ++j) {
    uint64_t* others = panel->others[j];
    const uint64_t words = words_with_others(others, chunk.padded / kWord);
    uint8_t counts[kLanes] = {};
    for (uint64_t left = words; left != 0; left &= left - 1) {
      for (uint64_t bit = others[__builtin_ctzll(left)]; bit != 0; bit &= bit - 1) {
        uint8_t& count = counts[__builtin_ctzll(bit) / kWord];
        count = uint8_t(count + (count <= kMostSmall));
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (__builtin_expect(counts[lane] <= kMostSmall, 1)) continue;
      if (!any) std::memset(small->integers, 0, sizeof small->integers);
      any = true;
      const uint8_t* elements = args.b + (column + j * kLanes + lane) * args.k + chunk.k;
      for (uint64_t left = words; left != 0; left &= left - 1) {
        const int64_t word = __builtin_ctzll(left);
        for (int64_t place = 0; place < kWord; ++place) {
          const uint64_t bit = uint64_t(1) << (lane * kWord + place);
          const uint8_t code = (others[word] & bit) != 0 ? elements[word * kWord + place] : 0;
          if ((code & 0x7f) == 0 || (code & 0x7f) > E4M3::max_code) continue;
          others[word] &= ~bit;
          int16_t* pair = small->integers + j * kDepth * kLanes + word / kWordPairs * kBlock * kLanes +
                          (place % 2 * kWordPairs + word % kWordPairs) * kPairLanes + lane * 2;
          pair[place / 2] = int16_t(decode<E4M3>(code) * (1 << kSmallBits));
        }
      }
    }
  }
  if (any) {
    const Vec smaller = all_of(float_of(uint32_t(127 + bits - kSmallBits) << 23));
    for (int64_t i = 0; i < kPanel * kDepth / kBlock; i += kLanes) {
      store(small->scales + i, load(panel->scales + i) * smaller);
    }
  }
  return any;
}

// Multiplies R rows of A, `depth` integers each, with V registers of columns of a panel.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const int16_t* a, const float* a_scales, int64_t next_scales, const int16_t* b,
                                  const float* b_scales, int64_t depth, float* strip) {
  for (int64_t k = 0; k < depth; k += kBlock, a += R * kBlock, a_scales += next_scales, b_scales += kLanes) {
    Ints sums[R][V];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) sums[i][j] = Ints{};
    }
#pragma GCC unroll 2
    for (int pair = 0; pair < kPairs; ++pair, b += kPairLanes) {
      Ints columns[V];
      for (int j = 0; j < V; ++j) std::memcpy(columns + j, b + j * kDepth * kLanes, sizeof columns[j]);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int two;
        std::memcpy(&two, a + i * kBlock + 2 * pair, sizeof two);
        const Ints row = Ints{} + two;
        for (int j = 0; j < V; ++j) add_dots(row, columns[j], &sums[i][j]);
      }
    }
    Vec scales[V];
    for (int j = 0; j < V; ++j) scales[j] = load(b_scales + j * (kDepth / kBlock) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        float* to = strip + i * kGemmColumns + j * kLanes;
        store(to, multiply_add(__builtin_convertvector(sums[i][j], Vec) * scales[j], all_of(a_scales[i]), load(to)));
      }
    }
    __asm__ volatile("" ::: "memory");  // or GCC keeps the strip, and its addresses, across blocks
  }
}

// The small elements of a tile of A times a panel's integers.
template <int V>
MXFP8_NOINLINE void add_small_of_a(const Small* smalls, const Panel& panel, float* strip) {
  const Small* last = smalls + smalls->k;
  while (smalls != last) {
    const Small& small = *++smalls;
    const int64_t block = small.k / kBlock, word = small.k % kBlock / kWord, place = small.k % kWord;
    const int16_t* pairs = panel.integers + block * kBlock * kLanes + (place % 2 * kWordPairs + word) * kPairLanes;
    const int to_top = place < 2 ? 16 : 0;
    for (int j = 0; j < V; ++j) {
      Ints two;
      std::memcpy(&two, pairs + j * kDepth * kLanes, sizeof two);
      const Vec weights = __builtin_convertvector((two << to_top) >> 16, Vec) *
                          load(panel.scales + (j * (kDepth / kBlock) + block) * kLanes);
      float* to = strip + small.row * kGemmColumns + j * kLanes;
      store(to, multiply_add(all_of(small.value), weights, load(to)));
    }
  }
}

// What is added to columns of a strip besides the dot products, [kGemmColumns, row].
struct Rest {
  alignas(64) float sums[kGemmColumns][kGemmRows + kLanes];
  uint64_t columns = 0;  // that have a sum

  MXFP8_INLINE_MEMBER float* of(int64_t column, int64_t lanes) {
    if ((columns >> column & 1) == 0) std::memset(sums[column], 0, size_t(lanes) * sizeof(float));
    columns |= uint64_t(1) << column;
    return sums[column];
  }
};

// A small element of B, `value`, times values `k` of all rows of A.
MXFP8_INLINE void add_small_of_b(const PackedA& a, int64_t k, float value, float* sums) {
  const uint8_t* codes = a.codes(k);
  const float* scales = a.scales(k);
  const Vec factor = all_of(value * 256.0f);  // for values_of
  for (int64_t i = 0; i < a.lanes; i += kLanes) {
    store(sums + i, multiply_add(values_of(codes + i) * load(scales + i), factor, load(sums + i)));
  }
}

// Whether a block is all zeros, its scale a number.
MXFP8_INLINE bool is_zero(const uint8_t* elements, int64_t count, uint8_t scale) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= elements[i];
  return (any & 0x7f) == 0 && scale != kScaleNan;
}

// Adds, for a panel's columns from `at` on in the strip, what its dot products leave out. A's rows begin with `row`.
MXFP8_NOINLINE void add_rest(const GemmArgs& args, const PackedA& a, int64_t row, int64_t column, int64_t columns,
                             int64_t at, Chunk chunk, const Panel& panel, Rest* rest) {
  const int64_t blocks = blocks_of(args.k);
  for (int64_t j = 0; j * kLanes < columns; ++j) {
    for (uint64_t words = words_with_others(panel.others[j], chunk.padded / kWord); words != 0; words &= words - 1) {
      const int64_t word = __builtin_ctzll(words);
      for (uint64_t others = panel.others[j][word]; others != 0; others &= others - 1) {
        const int bit = __builtin_ctzll(others);
        const int64_t c = j * kLanes + bit / kWord, k = chunk.k + word * kWord + bit % kWord;
        if (panel.strange[j][word * kWord / kBlock] >> (bit / kWord) & 1) continue;  // below
        const uint8_t code = args.b[(column + c) * args.k + k];
        const float value = decode<E4M3>(code) * scale_value(args.b_scales[(column + c) * blocks + k / kBlock]);
        add_small_of_b(a, k, value, rest->of(at + c, a.lanes));
      }
    }
    const uint32_t real = (uint32_t(1) << min_of(columns - j * kLanes, kLanes)) - 1;
    for (int64_t block = 0; block * kBlock < chunk.count; ++block) {
      for (uint32_t strange = panel.strange[j][block] & real; strange != 0; strange &= strange - 1) {
        const int64_t c = j * kLanes + __builtin_ctz(strange), k = chunk.k + block * kBlock;
        const int64_t count = min_of(kBlock, args.k - k);
        if (is_zero(args.b + (column + c) * args.k + k, count, args.b_scales[(column + c) * blocks + k / kBlock]))
          continue;
        float* sums = rest->of(at + c, a.lanes);
        for (int64_t i = 0; i < a.rows; ++i) sums[i] += exact_dot<E4M3>(args, row + i, column + c, k, count);
      }
    }
  }
}

// Adds the rest of a panel's columns, from `at` on, to a strip of rows `first` to `first` + `rows` of A.
MXFP8_NOINLINE void add_to_strip(Rest* rest, int64_t at, int64_t first, int64_t rows, int64_t lanes, float* strip) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const uint64_t columns = ((uint64_t(1) << kLanes) - 1) << (at + j);
    if ((rest->columns & columns) == 0) continue;
    for (int64_t c = 0; c < kLanes; ++c) rest->of(at + j + c, lanes);
    rest->columns &= ~columns;
    for (int64_t i = 0; i < rows; i += kLanes) {
      alignas(64) float turned[kLanes][kLanes];
      transpose_tile(reinterpret_cast<const char*>(rest->sums[at + j] + first + i), sizeof rest->sums[0],
                     reinterpret_cast<char*>(turned), sizeof turned[0]);
      for (int64_t r = 0; r < min_of(rows - i, kLanes); ++r) {
        float* to = strip + (i + r) * kGemmColumns + j;
        store(to, load(to) + load(turned[r]));
      }
    }
  }
}

}  // namespace

int gemm_int16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                    void* packed) {
  const PackedA to(packed, rows, args.k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      if (!pack_chunk(args, row, tile, chunk_at(args.k, kDepth, c, kPadding), to)) return kNotExact;
    }
  }
  pack_codes(args, row, to.tiles.first_row(tile_begin), to.tiles.first_row(tile_end), to);
  return 0;
}

void gemm_int16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                         int64_t column_begin, int64_t column_end, const void* packed, int) {
  const PackedA a(packed, rows, args.k);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panels[2];  // of integers, and of small elements
  Rest rest;
  const auto multiply_panel = [&](const Panel& panel, auto vectors, Chunk chunk, float* strip) {
    constexpr int V = decltype(vectors)::value;
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t tile_row = a.tiles.first_row(tile);
      float* to = strip + (tile_row - first) * kGemmColumns;
      with_rows<kFloatRows>(a.tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, V>(a.integers(chunk, tile), a.integer_scales(chunk.k) + tile_row, a.lanes,
                                             panel.integers, panel.scales, chunk.padded, to);
      });
      add_small_of_a<V>(a.smalls(chunk, tile), panel, to);
    }
  };
  for_each_strip<int16_t, int(kPadding), kPanel>(
      args, row + first, count, column_begin, column_end, kDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column), at = (column - column_begin) % kGemmColumns;
        const bool last = chunk.k + chunk.count == args.k;
        const bool along_k = count * int64_t(sizeof(int16_t)) <= kFewRowsBytes && !last;
        const int bits = bits_of_b(rows);
        const auto decode = bits == 6 ? decode_panel<6> : decode_panel<5>;
        decode(args, column, columns, chunk, along_k ? kDepth : kPanel * args.k, panels);
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        const int64_t count_of_panels = move_small(args, column, columns, chunk, bits, panels, panels + 1) ? 2 : 1;
        for (int64_t i = 0; i < count_of_panels; ++i) {
          if (columns > kLanes) {
            multiply_panel(panels[i], Rows<kVectors>{}, chunk, strip);
          } else {
            multiply_panel(panels[i], Rows<1>{}, chunk, strip);
          }
        }
        add_rest(args, a, row, column, columns, at, chunk, panels[0], &rest);
        if (last) add_to_strip(&rest, at, first, count, a.lanes, strip);
      });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
