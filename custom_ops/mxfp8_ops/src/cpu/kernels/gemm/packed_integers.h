// A, packed for gemm_int16.cpp: blocks as 16-bit integers, and lists of the elements that are not integers.
#pragma once
#include "../common/turn.h"
#include "gemm.h"
#include "integers.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kDepth = 256;   // depth of a chunk
constexpr int64_t kPadding = 64;  // packed rows are padded to a multiple of it
// At most one element in kSmallEvery of a tile, in a chunk, may be small. Products of small elements are added one by
// one: at 4% of them a tile takes as long as in gemm_f32.cpp, as measured.
constexpr int64_t kSmallEvery = 24;

// Scales whose products with the factors of the integers are normal float32 numbers, and stay finite with any sum of
// integers.
constexpr int kLowestScale = 127 - 57, kHighestScale = 127 + 46;

using IntegerTiles = Tiles<kFloatRows>;

// A small element: its row in the tile, its place in the chunk, its value.
struct Small {
  uint16_t row, k;
  float value;
};

// Where packed A lies. Integers: [chunk, tile, block, row, pair], even elements before odd ones; codes: [k, row];
// scales: [block, row], once as they are and once divided by the factor of the integers; and the small elements of each
// tile and chunk.
struct PackedA {
  int64_t rows;
  int64_t lanes = (rows + kTurnRows - 1) / kTurnRows * kTurnRows;  // rows of codes and scales
  int64_t k;
  char* base;
  int64_t padded = (k + kPadding - 1) / kPadding * kPadding;
  IntegerTiles tiles{rows};

  MXFP8_INLINE_MEMBER PackedA(const void* packed, int64_t rows, int64_t k)
      : rows(rows), k(k), base(static_cast<char*>(const_cast<void*>(packed))) {}
  MXFP8_INLINE_MEMBER int16_t* integers(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<int16_t*>(base) + tiles.offset(chunk, tile);
  }
  MXFP8_INLINE_MEMBER uint8_t* codes(int64_t at_k) const {
    return reinterpret_cast<uint8_t*>(base + 2 * rows * padded) + at_k * lanes;
  }
  MXFP8_INLINE_MEMBER float* scales(int64_t at_k) const {
    return reinterpret_cast<float*>(codes(padded)) + at_k / kBlock * lanes;
  }
  MXFP8_INLINE_MEMBER float* integer_scales(int64_t at_k) const { return scales(padded) + at_k / kBlock * lanes; }
  // The first entry of a list is not an element: its `k` is the number of entries after it.
  MXFP8_INLINE_MEMBER Small* smalls(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<Small*>(integer_scales(padded)) + tiles.offset(chunk, tile) / kSmallEvery;
  }
};

// The bits after the point of B's integers. With more bits, fewer of B's elements are small, and more of A's are, which
// costs more where there are many rows to add to.
MXFP8_INLINE int bits_of_b(int64_t rows) { return rows < 64 ? 6 : 5; }

// Bytes of packed A for each value of it. A few rows, which are padded, need more: enough_bytes tells whether this
// number is enough from `least` rows on.
constexpr int64_t kPackedBytes = 5;
constexpr bool enough_bytes(int64_t least) {
  for (int64_t rows = least; rows <= kGemmRows; ++rows) {
    const int64_t k = kPadding, lanes = (rows + kTurnRows - 1) / kTurnRows * kTurnRows;
    const int64_t scales = 2 * lanes * (k / kBlock) * int64_t(sizeof(float));
    const int64_t smalls = rows * k / kSmallEvery * int64_t(sizeof(Small));
    const int64_t room = (rows + kFloatRows - 1) / kFloatRows * kFloatRows * k * kPackedBytes;
    if (rows * k * int64_t(sizeof(int16_t)) + lanes * k + scales + smalls > room) return false;
  }
  return true;
}

// How many bits fewer than kMostBits a block of A must have, so that every sum with a block of B fits in 32 bits. Such
// a sum is at most B's largest magnitude times the sum of A's magnitudes (`magnitudes`, with kMostBits).
MXFP8_INLINE int bits_fewer(int magnitudes, int64_t rows) {
  const int most = 0x7fffffff / (448 << bits_of_b(rows));
  return (magnitudes > most) + (magnitudes > 2 * most) + (magnitudes > 4 * most) + (magnitudes > 8 * most);
}

// Where the parts of a packed block of a row of A go.
struct PackedBlock {
  int64_t rows;  // rows of the strip
  int16_t* integers;
  float *scale, *integer_scale;
  Small* smalls;
  int64_t most_smalls;
};

// Packs a block of a row of a tile: values k on of a chunk. False if the block does not fit.
MXFP8_INLINE bool pack_block(__m256i codes, uint32_t scale, int64_t row, int64_t k, const PackedBlock& to) {
  const BlockIntegers integers = integers_of_block<kMostBits>(codes);
  const auto sums = [](__m256i some)
                        MXFP8_INLINE_LAMBDA { return _mm256_madd_epi16(_mm256_abs_epi16(some), _mm256_set1_epi16(1)); };
  __m256i magnitudes = _mm256_add_epi32(sums(integers.even), sums(integers.odd));
  magnitudes = _mm256_add_epi32(magnitudes, _mm256_permute4x64_epi64(magnitudes, 0x4e));
  magnitudes = _mm256_add_epi32(magnitudes, _mm256_shuffle_epi32(magnitudes, 0x4e));
  magnitudes = _mm256_add_epi32(magnitudes, _mm256_shuffle_epi32(magnitudes, 0xb1));
  const int fewer = bits_fewer(_mm256_cvtsi256_si32(magnitudes), to.rows);
  const bool is_nan = scale == kScaleNan || nan_elements(codes) != 0;
  const bool fits = scale >= kLowestScale && scale <= kHighestScale;
  if (__builtin_expect(!fits, 0) && !is_nan && !_mm256_testz_si256(codes, _mm256_set1_epi8(0x7f))) return false;
  const float value = fits ? float_of(scale << 23) : 0.0f;
  const float of_integers = fits ? float_of((scale - kMostBits + uint32_t(fewer)) << 23) : 0.0f;
  *to.scale = value;
  *to.integer_scale = is_nan ? float_of(kQuietNan) : of_integers;
  // With fewer bits, fewer elements are integers.
  const __m256i small = _mm256_set1_epi16(short((1 << (E4M3::mantissa_bits + fewer)) - 1));
  const __m128i shift = _mm_cvtsi32_si128(fewer);
  const auto store = [&](int16_t* at, __m256i some) MXFP8_INLINE_LAMBDA {
    const __m256i whole = _mm256_and_si256(some, _mm256_cmpgt_epi16(_mm256_abs_epi16(some), small));
    _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm256_sra_epi16(whole, shift));
  };
  store(to.integers, integers.even);
  store(to.integers + kBlock / 2, integers.odd);
  uint32_t smalls = small_elements(codes, first_integer(kMostBits - fewer) - 1);
  if (__builtin_expect(smalls == 0, 1)) return true;
  alignas(32) uint8_t all[kBlock];
  _mm256_store_si256(reinterpret_cast<__m256i*>(all), codes);
  for (; smalls != 0; smalls &= smalls - 1) {
    const int i = __builtin_ctz(smalls);
    if (to.smalls->k == to.most_smalls) return false;
    to.smalls[++to.smalls->k] = {uint16_t(row), uint16_t(k + i), decode<E4M3>(all[i]) * value};
  }
  return true;
}

// Packs a chunk of a tile of the strip that begins with `row`. False if it does not fit.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, int64_t row, int64_t tile, Chunk chunk, const PackedA& to) {
  const int64_t first = to.tiles.first_row(tile), rows = to.tiles.rows_of(tile);
  int16_t* integers = to.integers(chunk, tile);
  Small* smalls = to.smalls(chunk, tile);
  *smalls = {};
  for (int64_t i = 0; i < rows; ++i) {
    const auto [elements, scales] = row_of_a(args, row + first + i);
    for (int64_t k = chunk.k; k < chunk.k + chunk.padded; k += kBlock) {
      alignas(32) uint8_t block[kBlock] = {};
      const int64_t left = args.k - k;
      if (left < kBlock) std::memcpy(block, elements + k, size_t(left < 0 ? 0 : left));
      const auto* from = reinterpret_cast<const __m256i*>(left < kBlock ? block : elements + k);
      const int64_t lane = first + i;
      const PackedBlock packed{
          to.rows, integers + (k - chunk.k) * rows + i * kBlock, to.scales(k) + lane, to.integer_scales(k) + lane,
          smalls,  rows * chunk.padded / kSmallEvery - 1};
      if (!pack_block(_mm256_loadu_si256(from), left > 0 ? scales[k / kBlock] : 0, i, k - chunk.k, packed))
        return false;
    }
  }
  return true;
}

// Turns the codes of rows `begin` to `end` of the strip, kTurnRows at a time: the groups that begin in this range.
MXFP8_INLINE void pack_codes(const GemmArgs& args, int64_t row, int64_t begin, int64_t end, const PackedA& to) {
  for (int64_t k = 0; k < args.k; k += kTurnRows) {
    for (int64_t lane = (begin + kTurnRows - 1) / kTurnRows * kTurnRows; lane < end; lane += kTurnRows) {
      const auto from = [&](int64_t i) { return row_of_a(args, row + lane + i).values + k; };
      const int64_t left = args.k - k;
      const bool whole = left >= kTurnRows && lane + kTurnRows <= to.rows;
      uint8_t some[kTurnRows][kTurnRows];
      if (!whole) {
        std::memset(some, 0, sizeof some);
        for (int64_t i = 0; i < min_of(to.rows - lane, kTurnRows); ++i) {
          std::memcpy(some[i], from(i), size_t(min_of(left, kTurnRows)));
        }
      }
      __m128i codes[kTurnRows];
      for (int64_t i = 0; i < kTurnRows; ++i) {
        codes[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(whole ? from(i) : some[i]));
      }
      turn(codes);
      for (int64_t i = 0; i < min_of(left, kTurnRows); ++i) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to.codes(k + i) + lane), codes[i]);
      }
    }
  }
}

}  // namespace mxfp8::MXFP8_ISA
