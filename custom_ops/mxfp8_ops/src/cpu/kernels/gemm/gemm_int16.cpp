// The gemm of E4M3 elements on dot products of 16-bit integers. The dot products are exact, and run at twice the rate
// of float32 on processors that have the instruction.
//
// y [M, N] = A [M, K] . B [N, K]^T. An element times a power of two is a 16-bit integer, unless the element is small.
// So the 32 products of a block add up in 32 bits, without rounding. The sum, as float32, times both scales of the
// block is added to the result: this takes 16 + 3 operations, float32 takes 32.
//
// B's elements are multiplied by 2^5 or 2^6, a block of A by 2^2 to 2^6: by as much as its sum allows, see bits_fewer.
// Small elements are not integers then. In B, these are the elements below 2^-2, or 2^-3. (Next to a block's largest
// element of 224 to 448, they are one of 700, or 1400, if elements are normally distributed.) Small elements are zeros
// in the dot products, and their products are added one by one:
//   A . B = (A's integers) . (B's integers)          the dot products
//         + (A's small elements) . (B's integers)    add_small_of_a: each with a row of a panel
//         + A . (B's small elements)                 add_small_of_b: each with a column of A, summed up in `Rest`
// Where a column of B has many small elements, these become integers in a second panel. Another kernel takes over where
// a tile of A has many, or a scale whose products float32 cannot hold. exact_dot adds the blocks of B with such scales.
//
// Layout: lanes of a sum are columns of the result, as in gemm_f32.cpp. A lane holds values k and k + 2, because a word
// of four elements splits into its even and its odd elements.
#include "columns.h"
#include "packed_integers.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kVectors = 2;                    // vectors of columns in a register tile
constexpr int64_t kPanel = kVectors * kLanes;  // rows of B decoded at a time
constexpr int kPairs = int(kBlock) / 2;        // pairs of integers of a block
constexpr int kWordPairs = kPairs / 2;         // pairs of even elements; pairs of odd ones follow
constexpr int64_t kPairLanes = 2 * kLanes;     // integers of a register
static_assert(kDepth % kStretch == 0, "chunks are whole stretches");

// A panel of B: its integers [vector, block, pair, column]; its scales, divided by the factor of the integers [vector,
// block, column]; the positions of elements that are not integers (`others`); the blocks whose scales do not fit
// (`outside`).
struct Panel {
  alignas(64) int16_t integers[kPanel * kDepth];
  alignas(64) float scales[kPanel * kDepth / kBlock];
  uint64_t others[kVectors][kDepth / kWord];    // a bit for each element of a word of each column
  uint32_t outside[kVectors][kDepth / kBlock];  // a bit for each column whose scale does not fit: `scales` has 0
};

// Calls visit(vector, k, words) for all squares of a panel of B, one chunk deep. `words` are turned: kLanes columns,
// words from value k on. Fetches the codes `ahead` bytes further.
template <class Visit>
MXFP8_INLINE void for_each_square(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                                  const Visit& visit) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Stretch from{args.b + (column + c) * args.k + chunk.k, nullptr, args.k, 0, columns - c, chunk.count};
    for (int64_t k = 0; k < chunk.padded; k += kDecoded) {
      Bytes words[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) __builtin_prefetch(from.elements + i * args.k + k + ahead, 0, 2);
      if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
        turn_rows(from.elements + k, args.k, words);
      } else {
        turn_fringe(from, k, words);
      }
      visit(c / kLanes, k, words);
    }
  }
}

// Where the pairs of even elements of word `word` of a square go; pairs of odd elements go kWordPairs pairs further.
MXFP8_INLINE int16_t* pairs_at(Panel* panel, int64_t vector, int64_t k, int word) {
  return panel->integers + (vector * kDepth + k + word / kWordPairs * kBlock) * kLanes + word % kWordPairs * kPairLanes;
}
MXFP8_INLINE void store_pairs(const Pairs& pairs, int16_t* to) {
  std::memcpy(to, &pairs.even, sizeof pairs.even);
  std::memcpy(to + kWordPairs * kPairLanes, &pairs.odd, sizeof pairs.odd);
}

// Decodes a panel of B, one chunk deep.
template <int Bits>
MXFP8_NOINLINE void decode_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                                 Panel* panel) {
  const IntegerDecoder<Bits> decoder;
  for_each_square(args, column, columns, chunk, ahead,
                  [&](int64_t vector, int64_t k, const Bytes* words) MXFP8_INLINE_LAMBDA {
#pragma GCC unroll 16
                    for (int word = 0; word < kLanes; ++word) {
                      const Pairs pairs = decoder(words[word], panel->others[vector] + k / kWord + word);
                      store_pairs(pairs, pairs_at(panel, vector, k, word));
                    }
                  });
  const int64_t blocks = blocks_of(args.k);
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t k = 0; k < chunk.padded; k += kStretch) {
      const uint8_t* from = args.b_scales + (column + c) * blocks + (chunk.k + k) / kBlock;
      const Ints scales = load_scales({nullptr, from, 0, blocks, columns - c, chunk.count - k});
      for (int64_t block = 0; block < min_of(kWord, (chunk.padded - k) / kBlock); ++block) {
        const Ints codes = (scales >> int(block * 8)) & 0xff;
        const Ints fits = (codes >= kLowestScale) & (codes <= kHighestScale);
        const Ints values = ((codes - Bits) << 23) & fits;
        std::memcpy(panel->scales + ((c * kDepth + k * kLanes) / kBlock + block * kLanes), &values, sizeof values);
        panel->outside[c / kLanes][k / kBlock + block] = lanes_of(~fits);
      }
    }
  }
}

// Which of up to 64 words have an element in `others`: small or NaN.
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

// The most small elements of a column, in a chunk, that are added one by one. With more, they are integers of a second
// panel. Only the column's own elements decide how they are added up.
constexpr int kMostSmall = 12;

// The columns of a vector of a panel that have more small elements than kMostSmall.
MXFP8_INLINE uint32_t columns_with_many(const uint64_t* others, int64_t words) {
  uint8_t counts[kLanes] = {};
  for (uint64_t left = words_with_others(others, words); left != 0; left &= left - 1) {
    for (uint64_t bits = others[__builtin_ctzll(left)]; bits != 0; bits &= bits - 1) {
      uint8_t& count = counts[__builtin_ctzll(bits) / kWord];
      count = uint8_t(count + (count <= kMostSmall));
    }
  }
  uint32_t many = 0;
  for (int lane = 0; lane < kLanes; ++lane) many |= uint32_t(counts[lane] > kMostSmall) << lane;
  return many;
}

// Moves the small elements of columns that have many (`many`) from `others` of the panel to the integers of `small`.
template <int Bits>
MXFP8_NOINLINE void decode_small(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk,
                                 const uint32_t* many, Panel* panel, Panel* small) {
  Ints moved[kVectors];
  uint64_t moved_bits[kVectors] = {};
  for (int j = 0; j < kVectors; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool moves = (many[j] >> lane & 1) != 0;
      moved[j][lane] = -int(moves);
      if (moves) moved_bits[j] |= uint64_t(0xf) << (lane * kWord);
    }
  }
  for_each_square(
      args, column, columns, chunk, 0, [&](int64_t vector, int64_t k, const Bytes* words) MXFP8_INLINE_LAMBDA {
        for (int word = 0; word < kLanes; ++word) {
          const Pairs pairs = small_integers<Bits>(words[word]);
          store_pairs({pairs.even & moved[vector], pairs.odd & moved[vector]}, pairs_at(small, vector, k, word));
          panel->others[vector][k / kWord + word] &= ~moved_bits[vector] | nan_bits(words[word]);
        }
      });
  const Vec smaller = all_of(float_of(uint32_t(127 + Bits - kSmallBits) << 23));
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t k = 0; k < chunk.padded; k += kBlock) {
      const int64_t at = (c * kDepth + k * kLanes) / kBlock;
      store(small->scales + at, load(panel->scales + at) * smaller);
    }
  }
}

// Decodes a panel into panels[0], and many small elements into panels[1]; returns how many panels have integers.
template <int Bits>
MXFP8_INLINE int decode_panels(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                               Panel* panels) {
  decode_panel<Bits>(args, column, columns, chunk, ahead, panels);
  uint32_t many[kVectors] = {}, any = 0;
  for (int64_t j = 0; j * kLanes < columns; ++j) {
    many[j] = columns_with_many(panels->others[j], chunk.padded / kWord);
    any |= many[j];
  }
  if (__builtin_expect(any == 0, 1)) return 1;
  decode_small<Bits>(args, column, columns, chunk, many, panels, panels + 1);
  return 2;
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
      for (int j = 0; j < V; ++j) columns[j] = load_ints(b + j * kDepth * kLanes);
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
    __asm__ volatile("" ::: "memory");  // otherwise GCC keeps the strip, and its addresses, across blocks
  }
}

// Adds the products of the small elements of a tile of A with a panel's integers.
template <int V>
MXFP8_NOINLINE void add_small_of_a(const Small* smalls, const Panel& panel, float* strip) {
  const Small* last = smalls + smalls->k;
  while (smalls != last) {
    const Small& small = *++smalls;
    const int64_t block = small.k / kBlock, word = small.k % kBlock / kWord, place = small.k % kWord;
    const int16_t* pairs = panel.integers + block * kBlock * kLanes + (place % 2 * kWordPairs + word) * kPairLanes;
    const int to_top = place < 2 ? 16 : 0;
    for (int j = 0; j < V; ++j) {
      const Ints two = load_ints(pairs + j * kDepth * kLanes);
      const Vec weights = __builtin_convertvector((two << to_top) >> 16, Vec) *
                          load(panel.scales + (j * (kDepth / kBlock) + block) * kLanes);
      float* to = strip + small.row * kGemmColumns + j * kLanes;
      store(to, multiply_add(all_of(small.value), weights, load(to)));
    }
  }
}

// The sums besides the dot products that are added to columns of a strip, [kGemmColumns, row].
struct Rest {
  alignas(64) float sums[kGemmColumns][kGemmRows + kLanes];
  uint64_t columns = 0;  // a bit for each column that has a sum

  MXFP8_INLINE_MEMBER float* sums_of(int64_t column, int64_t lanes) {
    if ((columns >> column & 1) == 0) std::memset(sums[column], 0, size_t(lanes) * sizeof(float));
    columns |= uint64_t(1) << column;
    return sums[column];
  }
};

// Adds the products of a small element of B, `value`, with values `k` of all rows of A.
MXFP8_INLINE void add_small_of_b(const PackedA& a, int64_t k, float value, float* sums) {
  const uint8_t* codes = a.codes(k);
  const float* scales = a.scales(k);
  const Vec factor = all_of(value * 256.0f);  // values_of returns 2^-8 times each value
  for (int64_t i = 0; i < a.lanes; i += kLanes) {
    store(sums + i, multiply_add(values_of(codes + i) * load(scales + i), factor, load(sums + i)));
  }
}

// Whether a block is all zeros and its scale is a number.
MXFP8_INLINE bool is_zero(const uint8_t* elements, int64_t count, uint8_t scale) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= elements[i];
  return (any & 0x7f) == 0 && scale != kScaleNan;
}

// Adds to `rest` the products of a panel's `others`, and of the blocks whose scales do not fit. The panel's columns
// begin at column `at` of the strip, A's rows with `row`.
MXFP8_NOINLINE void add_rest(const GemmArgs& args, const PackedA& a, int64_t row, int64_t column, int64_t columns,
                             int64_t at, Chunk chunk, const Panel& panel, Rest* rest) {
  const int64_t blocks = blocks_of(args.k);
  for (int64_t j = 0; j * kLanes < columns; ++j) {
    for (uint64_t words = words_with_others(panel.others[j], chunk.padded / kWord); words != 0; words &= words - 1) {
      const int64_t word = __builtin_ctzll(words);
      for (uint64_t others = panel.others[j][word]; others != 0; others &= others - 1) {
        const int bit = __builtin_ctzll(others);
        const int64_t c = j * kLanes + bit / kWord, k = chunk.k + word * kWord + bit % kWord;
        if (panel.outside[j][word * kWord / kBlock] >> (bit / kWord) & 1) continue;  // see the next loop
        const uint8_t code = args.b[(column + c) * args.k + k];
        const float value = decode<E4M3>(code) * scale_value(args.b_scales[(column + c) * blocks + k / kBlock]);
        add_small_of_b(a, k, value, rest->sums_of(at + c, a.lanes));
      }
    }
    const uint32_t real = (uint32_t(1) << min_of(columns - j * kLanes, kLanes)) - 1;
    for (int64_t block = 0; block * kBlock < chunk.count; ++block) {
      for (uint32_t outside = panel.outside[j][block] & real; outside != 0; outside &= outside - 1) {
        const int64_t c = j * kLanes + __builtin_ctz(outside), k = chunk.k + block * kBlock;
        const int64_t count = min_of(kBlock, args.k - k);
        if (is_zero(args.b + (column + c) * args.k + k, count, args.b_scales[(column + c) * blocks + k / kBlock]))
          continue;
        float* sums = rest->sums_of(at + c, a.lanes);
        for (int64_t i = 0; i < a.rows; ++i) sums[i] += exact_dot<E4M3>(args, row + i, column + c, k, count);
      }
    }
  }
}

// Adds the `rest` of a panel's columns, from `at` on, to a strip. The strip has rows `first` to `first` + `rows` of A.
MXFP8_NOINLINE void add_to_strip(Rest* rest, int64_t at, int64_t first, int64_t rows, int64_t lanes, float* strip) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const uint64_t columns = ((uint64_t(1) << kLanes) - 1) << (at + j);
    if ((rest->columns & columns) == 0) continue;
    for (int64_t c = 0; c < kLanes; ++c) rest->sums_of(at + j + c, lanes);
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
  const int64_t end = to.tiles.first_row(tile_end);
  pack_codes(args, row, to.tiles.first_row(tile_begin), end, to);
  for (int64_t k = 0; end == rows && k < to.padded; k += kBlock) {
    std::memset(to.scales(k) + rows, 0, size_t(to.lanes - rows) * sizeof(float));
  }
  return 0;
}

void gemm_int16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                         int64_t column_begin, int64_t column_end, const void* packed, int) {
  const PackedA a(packed, rows, args.k);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panels[2];  // one of integers, one of small elements
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
        const auto decode = bits_of_b(rows) == 6 ? decode_panels<6> : decode_panels<5>;
        const int used = decode(args, column, columns, chunk, along_k ? kDepth : kPanel * args.k, panels);
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        for (int i = 0; i < used; ++i) {
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

#if defined(__AVX512F__)
static_assert(enough_bytes(kFewRowsAvx512 + 1));
#else
static_assert(enough_bytes(kFewRowsAvx2 + 1));
#endif
MXFP8_GEMM_KERNEL(gemm_int16, kFloatRows, kPackedBytes);

}  // namespace mxfp8::MXFP8_ISA
