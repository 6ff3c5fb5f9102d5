// The gemm of E4M3 elements on dot products of 16-bit integers, which run at twice the rate of float32 where a
// processor has them (VPDPWSSD), and are exact.
//
// y [M, N] = A [M, K] . B [N, K]^T. An element times a power of two is a 16-bit integer, unless it is small, so that
// the 32 products of a block add up in 32 bits: not rounded at all. The sum, as float32, times both scales of the block
// is added to the result: 16 + 3 operations for what takes float32 32.
//
// B's elements are multiplied by 2^kBitsB, a block of A by 2^2 to 2^6: by as much as its norm allows, see shifts_of.
// Smaller elements than 2^-2 (B's, next to a block's largest of 224 to 448: one of 800 if they are normally
// distributed) are no integers then. Those are zeros in the dot products, and their products are added one by one:
//   A . B = (A's integers) . (B's integers)          the dot products
//         + (A's small elements) . (B's integers)    add_small_of_a: each with a row of a panel
//         + A . (B's small elements)                 add_small_of_b: each with a column of A, summed up in `Rest`
// What has NaN, or a scale beyond what float32 holds in a product, is for another kernel (A) or exact_dot (B).
//
// Layout: lanes of a sum are columns of the result, as in gemm_f32.cpp; a lane holds values k and k + 2, as a word of
// four elements falls apart into even and odd ones.
#include "columns.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(__AVX512BF16__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kVectors = 2;                    // of columns, in a register tile
constexpr int64_t kPanel = kVectors * kLanes;  // rows of B decoded at a time
constexpr int64_t kDepth = 256;                // of a chunk
constexpr int64_t kPadding = 64;               // packed rows are padded to a multiple of it
constexpr int kPairs = int(kBlock) / 2;        // pairs of integers of a block
constexpr int kWordPairs = kPairs / 2;         // half of them are of even elements, then come the odd ones'
constexpr int kBitsB = 6;
static_assert(kDepth % kStretch == 0, "chunks are whole stretches");

// Scales whose products are normal float32 numbers, and finite with any sum of integers.
constexpr int kLowestScale = 127 - 57, kHighestScale = 127 + 46;

using IntTiles = Tiles<kFloatRows>;

// Bytes of the integers of magnitudes 0..127, times 2^Bits: the lower ones, then the upper. Those that are no integers
// have `kOdd` instead.
constexpr uint8_t kOdd = 0x80;
template <int Bits>
struct Integers {
  alignas(64) uint8_t bytes[2][128];
  constexpr Integers() : bytes{} {
    for (int code = 1; code < 128; ++code) {
      const int exponent = code >> E4M3::mantissa_bits, shift = 10 - Bits;  // 2^(exponent - 10), times 8 to 15
      const int value =
          exponent < shift || code > int(E4M3::max_code) ? kOdd << 8 : (8 | (code & 7)) << exponent >> shift;
      bytes[0][code] = uint8_t(value);
      bytes[1][code] = uint8_t(value >> 8);
    }
  }
};
template <int Bits>
constexpr Integers<Bits> integers{};

// The integers of 64 elements: of those at even places, and at odd ones.
struct Pairs {
  __m512i even, odd;
};

template <int Bits>
struct IntDecoder {
  __m512i tables[2][2];
  MXFP8_INLINE_MEMBER IntDecoder() {
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) tables[i][j] = _mm512_load_si512(integers<Bits>.bytes[i] + 64 * j);
    }
  }
  // `odd` gets a bit for each element that is no integer, and counts as zero.
  MXFP8_INLINE_MEMBER Pairs operator()(__m512i codes, __mmask64* odd) const {
    const __m512i low = _mm512_permutex2var_epi8(tables[0][0], codes, tables[0][1]);
    __m512i high = _mm512_permutex2var_epi8(tables[1][0], codes, tables[1][1]);
    const __mmask64 whole = _mm512_testn_epi8_mask(high, _mm512_set1_epi8(char(kOdd)));
    high = _mm512_maskz_mov_epi8(whole, high);
    *odd = ~whole;
    const __m512i lower = _mm512_set1_epi16(0xff), none = _mm512_setzero_si512();
    const __m512i even = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), 0xca);  // lower ? low : high
    const __m512i odds = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, 0xca);
    return {_mm512_mask_sub_epi16(even, _mm512_movepi16_mask(_mm512_slli_epi16(codes, 8)), none, even),
            _mm512_mask_sub_epi16(odds, _mm512_movepi16_mask(codes), none, odds)};
  }
};

// An element of A that is none of the integers: its row in the tile, its place in the chunk, its value.
struct Small {
  uint16_t row, k;
  float value;
};

// Where packed A lies. Integers: [chunk, tile, block, row, pair]; codes: [k, row]; scales:
// [block, row], without and with what the integers are multiplied by; and of each tile and chunk its small elements.
struct PackedA {
  int64_t lanes;   // rows of codes and scales, padded
  int64_t padded;  // of K
  int64_t rows;
  char* base;
  MXFP8_INLINE_MEMBER PackedA(const void* packed, int64_t rows, int64_t k)
      : lanes((rows + kLanes - 1) / kLanes * kLanes),
        padded((k + kPadding - 1) / kPadding * kPadding),
        rows(rows),
        base(static_cast<char*>(const_cast<void*>(packed))) {}
  MXFP8_INLINE_MEMBER int16_t* integers() const { return reinterpret_cast<int16_t*>(base); }
  MXFP8_INLINE_MEMBER uint8_t* codes() const { return reinterpret_cast<uint8_t*>(base + 2 * rows * padded); }
  MXFP8_INLINE_MEMBER float* scales() const { return reinterpret_cast<float*>(codes() + lanes * padded); }
  MXFP8_INLINE_MEMBER float* int_scales() const { return scales() + lanes * padded / kBlock; }
  // The first of a list is no element: its `k` is how many follow.
  MXFP8_INLINE_MEMBER Small* smalls(Chunk chunk, const IntTiles& tiles, int64_t tile) const {
    return reinterpret_cast<Small*>(int_scales() + lanes * padded / kBlock) + tiles.offset(chunk, tile) / kSmallEvery;
  }
  static constexpr int kSmallEvery = 16;
};
// How many bits fewer than kMostBitsA a block of A must have after the point, so that no sum with a block of B leaves
// 32 bits: by Cauchy and Schwarz it is at most the product of the norms, and that of B's integers at most 162,196.
// `squares` is the sum of squares of A's integers of 4 bits after the point, each rounded down: the norm may be 6
// larger.
constexpr int kMostBitsA = 6, kMostShift = 4;
MXFP8_INLINE __m512i shifts_of(__m512i squares) {
  constexpr int norm = 13240;  // 2^31 / 162,196
  __m512i shifts = _mm512_setzero_si512();
  for (int shift = 0; shift < kMostShift; ++shift) {
    const int most = (norm << shift >> (kMostBitsA - 4)) - 6;
    if (most >= 40550) continue;  // the largest norm there is
    const __mmask16 more = _mm512_cmpgt_epi32_mask(squares, _mm512_set1_epi32(most * most));
    shifts = _mm512_mask_add_epi32(shifts, more, shifts, _mm512_set1_epi32(1));
  }
  return shifts;
}

MXFP8_INLINE __m512i load_codes(const uint8_t* elements, int64_t count) {
  if (count >= kDecoded) return _mm512_loadu_si512(elements);
  return _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, elements);
}

// Where two blocks of a row of A go.
struct PackedBlocks {
  int16_t* integers;
  int64_t next_integers;
  float *scales, *int_scales;
  int64_t next_scales;
  Small* smalls;
  int64_t most_smalls;
};

// Packs two blocks, values k on of a chunk, of a row of a tile. False if they do not fit.
MXFP8_INLINE bool pack_blocks(const IntDecoder<kMostBitsA>& decoder, __m512i codes, const uint8_t* scales, int64_t row,
                              int64_t k, const PackedBlocks& to) {
  const __m512i magnitudes = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
  const uint64_t nans = _mm512_cmpeq_epi8_mask(magnitudes, _mm512_set1_epi8(0x7f));
  const uint64_t present = _mm512_test_epi8_mask(magnitudes, magnitudes);
  __mmask64 odd;
  const Pairs pairs = decoder(codes, &odd);
  const __m512i even = _mm512_srai_epi16(pairs.even, kMostBitsA - 4),
                odds = _mm512_srai_epi16(pairs.odd, kMostBitsA - 4);
  __m512i squares = _mm512_dpwssd_epi32(_mm512_madd_epi16(even, even), odds, odds);
  squares = _mm512_add_epi32(squares, _mm512_permutex_epi64(squares, 0x4e));
  squares = _mm512_add_epi32(squares, _mm512_shuffle_epi32(squares, _MM_PERM_BADC));
  squares = _mm512_add_epi32(squares, _mm512_shuffle_epi32(squares, _MM_PERM_CDAB));
  const __m512i shifts = shifts_of(squares);
  const int shift[2] = {_mm512_cvtsi512_si32(shifts), _mm256_extract_epi32(_mm512_extracti64x4_epi64(shifts, 1), 0)};
  for (int half = 0; half < 2; ++half) {
    const uint32_t scale = scales[half];
    const bool is_nan = scale == kScaleNan || uint32_t(nans >> (half * kBlock)) != 0;
    const bool fits = scale >= kLowestScale && scale <= kHighestScale;
    if (!fits && !is_nan && uint32_t(present >> (half * kBlock)) != 0) return false;
    const float value = fits ? float_of(scale << 23) : 0.0f;
    const float of_integers = fits ? float_of((scale - kMostBitsA + uint32_t(shift[half])) << 23) : 0.0f;
    to.scales[half * to.next_scales] = value;
    to.int_scales[half * to.next_scales] = is_nan ? float_of(kQuietNan) : of_integers;
  }
  // With fewer bits, less is an integer.
  const __m512i in_words = _mm512_or_si512(shifts, _mm512_slli_epi32(shifts, 16));
  const __m512i least = _mm512_sllv_epi16(_mm512_set1_epi16(1 << E4M3::mantissa_bits), in_words);
  const auto whole = [&](__m512i integers) MXFP8_INLINE_LAMBDA {
    const __mmask32 kept = _mm512_cmpge_epi16_mask(_mm512_abs_epi16(integers), least);
    return _mm512_maskz_srav_epi16(kept, integers, in_words);
  };
  const __m512i first = whole(pairs.even), second = whole(pairs.odd);
  for (int half = 0; half < 2; ++half) {
    auto* at = reinterpret_cast<__m256i*>(to.integers + half * to.next_integers);
    _mm256_store_si256(at, half == 0 ? _mm512_castsi512_si256(first) : _mm512_extracti64x4_epi64(first, 1));
    _mm256_store_si256(at + 1, half == 0 ? _mm512_castsi512_si256(second) : _mm512_extracti64x4_epi64(second, 1));
  }
  const __m512i in_bytes = _mm512_or_si512(in_words, _mm512_slli_epi16(in_words, 8));
  const __m512i limits = _mm512_add_epi8(_mm512_slli_epi16(in_bytes, E4M3::mantissa_bits),
                                         _mm512_set1_epi8((10 - kMostBitsA) << E4M3::mantissa_bits));
  uint64_t small = present & _mm512_cmplt_epu8_mask(magnitudes, limits);
  if (__builtin_expect(small == 0, 1)) return true;
  alignas(64) uint8_t all[kDecoded];
  _mm512_store_si512(all, codes);
  for (; small != 0; small &= small - 1) {
    const int i = __builtin_ctzll(small);
    if (to.smalls->k == to.most_smalls) return false;
    const float value = decode<E4M3>(all[i]) * to.scales[i / kBlock * to.next_scales];
    to.smalls[++to.smalls->k] = {uint16_t(row), uint16_t(k + i), value};
  }
  return true;
}

// Packs a chunk of a tile: rows `row` on of A, `lane` on of the strip.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, const PackedA& to, int64_t row, int64_t lane, int64_t rows,
                             Chunk chunk, int16_t* integers, Small* smalls) {
  const IntDecoder<kMostBitsA> decoder;
  const int64_t blocks = blocks_of(args.k), most_smalls = rows * chunk.padded / PackedA::kSmallEvery - 1;
  *smalls = {};
  for (int64_t k = 0; k < chunk.padded; k += kDecoded) {
    const int64_t left = chunk.count - k, block = (chunk.k + k) / kBlock;
    for (int64_t i = 0; i < rows; ++i) {
      const auto* from = static_cast<const uint8_t*>(args.a) + (row + i) * args.a_stride + chunk.k + k;
      const uint8_t* scales = args.a_scales + (row + i) * blocks + block;
      const uint8_t both[2] = {scales[0], left > kBlock ? scales[1] : uint8_t(0)};
      const int64_t at = block * to.lanes + lane + i;
      const PackedBlocks packed{integers + k * rows + i * kBlock,
                                rows * kBlock,
                                to.scales() + at,
                                to.int_scales() + at,
                                to.lanes,
                                smalls,
                                most_smalls};
      if (!pack_blocks(decoder, load_codes(from, left), both, i, k, packed)) return false;
    }
  }
  return true;
}

// Turns the codes of rows `begin` to `end` of the strip: kTurnRows at a time, those that begin there.
MXFP8_INLINE void pack_codes(const GemmArgs& args, const PackedA& to, int64_t row, int64_t begin, int64_t end) {
  alignas(64) uint8_t order[kDecoded];  // byte 16 j + i is element j, of four, of row i
  for (int i = 0; i < kDecoded; ++i) order[i] = uint8_t(i % kTurnRows * kWord + i / kTurnRows);
  const __m512i to_rows = _mm512_load_si512(order);
  for (int64_t k = 0; k < args.k; k += kDecoded) {
    for (int64_t lane = (begin + kTurnRows - 1) / kTurnRows * kTurnRows; lane < end; lane += kTurnRows) {
      const auto* from = static_cast<const uint8_t*>(args.a) + (row + lane) * args.a_stride + k;
      __m512i codes[kTurnRows];
      for (int64_t i = 0; i < kTurnRows; ++i) {
        codes[i] = lane + i < to.rows ? load_codes(from + i * args.a_stride, args.k - k) : _mm512_setzero_si512();
      }
      turn(codes);
#pragma GCC unroll 16
      for (int64_t word = 0; word < kTurnRows; ++word) {
        const __m512i rows = _mm512_permutexvar_epi8(to_rows, codes[word]);
        uint8_t* at = to.codes() + (k + word * kWord) * to.lanes + lane;
        _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm512_castsi512_si128(rows));
        _mm_store_si128(reinterpret_cast<__m128i*>(at + to.lanes), _mm512_extracti32x4_epi32(rows, 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(at + 2 * to.lanes), _mm512_extracti32x4_epi32(rows, 2));
        _mm_store_si128(reinterpret_cast<__m128i*>(at + 3 * to.lanes), _mm512_extracti32x4_epi32(rows, 3));
      }
    }
  }
}

// A panel of B: its integers [vector, block, pair, column], scales with what they are multiplied by [vector, block,
// column], and the places of what is no integer.
struct Panel {
  alignas(64) int16_t integers[kPanel * kDepth];
  alignas(64) float scales[kPanel * kDepth / kBlock];
  uint64_t odd[kVectors][kDepth / kWord];       // a bit for each element of a word of each column
  uint32_t strange[kVectors][kDepth / kBlock];  // a bit for each column whose scale does not fit: that is 0
};

// Decodes a stretch of kLanes rows of B.
MXFP8_INLINE void decode_stretch(const IntDecoder<kBitsB>& decoder, const Stretch& from, int64_t ahead,
                                 int16_t* integers, float* scales, uint64_t* odd, uint32_t* strange) {
  const Ints all_scales = load_scales(from);
  for (int64_t k = 0; k < min_of(kStretch, (from.left + kPadding - 1) / kPadding * kPadding); k += kDecoded) {
    Bytes words[kLanes];
    for (int64_t c = 0; c < kLanes; ++c) __builtin_prefetch(from.elements + c * from.next_elements + k + ahead, 0, 2);
    if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
      turn_rows(from.elements + k, from.next_elements, words);
    } else {
      turn_fringe(from, k, words);
    }
#pragma GCC unroll 16
    for (int word = 0; word < kLanes; ++word) {
      __mmask64 found;
      const Pairs pairs = decoder(reinterpret_cast<__m512i>(words[word]), &found);
      int16_t* to = integers + (k + word / kWordPairs * kBlock) * kLanes + word % kWordPairs * 2 * kLanes;
      _mm512_store_si512(to, pairs.even);
      _mm512_store_si512(to + kBlock / 2 * kLanes, pairs.odd);
      odd[k / kWord + word] = found;
    }
    for (int half = 0; half < 2; ++half) {
      const int64_t block = k / kBlock + half;
      const __m512i codes = _mm512_and_si512(
          _mm512_srli_epi32(reinterpret_cast<__m512i>(all_scales), unsigned(block) * 8), _mm512_set1_epi32(0xff));
      const __mmask16 fits = _mm512_cmple_epu32_mask(_mm512_sub_epi32(codes, _mm512_set1_epi32(kLowestScale)),
                                                     _mm512_set1_epi32(kHighestScale - kLowestScale));
      const __m512i exponents = _mm512_slli_epi32(_mm512_sub_epi32(codes, _mm512_set1_epi32(kBitsB)), 23);
      _mm512_store_si512(scales + block * kLanes, _mm512_maskz_mov_epi32(fits, exponents));
      strange[block] = uint16_t(~fits);
    }
  }
}

// Multiplies R rows of A, `depth` integers each, with V registers of columns of a panel.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const int16_t* a, const float* a_scales, int64_t next_scales, const int16_t* b,
                                  const float* b_scales, int64_t depth, float* strip) {
  for (int64_t k = 0; k < depth; k += kBlock, a += R * kBlock, a_scales += next_scales, b_scales += kLanes) {
    __m512i sums[R][V];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) sums[i][j] = _mm512_setzero_si512();
    }
#pragma GCC unroll 2
    for (int pair = 0; pair < kPairs; ++pair, b += 2 * kLanes) {
      __m512i columns[V];
      for (int j = 0; j < V; ++j) columns[j] = _mm512_load_si512(b + j * kDepth * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int two;
        std::memcpy(&two, a + i * kBlock + 2 * pair, sizeof two);
        const __m512i row = _mm512_set1_epi32(two);
        for (int j = 0; j < V; ++j) {
          // The instruction itself: with its intrinsic, GCC 12 keeps sums in memory, which takes twice the time.
          __asm__("vpdpwssd %2, %1, %0" : "+v"(sums[i][j]) : "v"(row), "v"(columns[j]));
        }
      }
    }
    Vec scales[V];
    for (int j = 0; j < V; ++j) scales[j] = load(b_scales + j * (kDepth / kBlock) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        float* to = strip + i * kGemmColumns + j * kLanes;
        store(to, multiply_add(_mm512_cvtepi32_ps(sums[i][j]) * scales[j], all_of(a_scales[i]), load(to)));
      }
    }
    __asm__ volatile("" ::: "memory");  // or it keeps the strip's addresses, and the strip itself, across blocks
  }
}

// The small elements of a tile of A times a panel's integers.
template <int V>
MXFP8_NOINLINE void add_small_of_a(const Small* smalls, const Panel& panel, float* strip) {
  const Small* last = smalls + smalls->k;
  while (smalls != last) {
    const Small& small = *++smalls;
    const int64_t block = small.k / kBlock, word = small.k % kBlock / kWord, place = small.k % kWord;
    const int16_t* pairs = panel.integers + block * kBlock * kLanes + (place % 2 * kWordPairs + word) * 2 * kLanes;
    const __m128i to_top = _mm_cvtsi32_si128(place < 2 ? 16 : 0);
    for (int j = 0; j < V; ++j) {
      const __m512i two = _mm512_sll_epi32(_mm512_load_si512(pairs + j * kDepth * kLanes), to_top);
      const Vec weights = _mm512_cvtepi32_ps(_mm512_srai_epi32(two, 16)) *
                          load(panel.scales + (j * (kDepth / kBlock) + block) * kLanes);
      float* to = strip + small.row * kGemmColumns + j * kLanes;
      store(to, multiply_add(all_of(small.value), weights, load(to)));
    }
  }
}

// What is added to columns of a strip [kGemmColumns, rows] besides the dot products.
struct Rest {
  alignas(64) float sums[kGemmColumns][kGemmRows];
  uint64_t columns = 0;  // that have a sum

  MXFP8_INLINE_MEMBER float* of(int64_t column, int64_t rows) {
    if ((columns >> column & 1) == 0)
      std::memset(sums[column], 0, size_t((rows + kLanes - 1) / kLanes * kLanes) * sizeof(float));
    columns |= uint64_t(1) << column;
    return sums[column];
  }
};

// A small element of B, `value`, times values `k` of all rows of A.
MXFP8_INLINE void add_small_of_b(const PackedA& a, int64_t first, int64_t rows, int64_t k, float value, float* sums) {
  const uint8_t* codes = a.codes() + k * a.lanes + first;
  const float* scales = a.scales() + k / kBlock * a.lanes + first;
  const Vec factor = all_of(value * 256.0f);  // as float16 an element is so much smaller
  for (int64_t i = 0; i < rows; i += kLanes) {
    const __mmask16 present = __mmask16((1u << min_of(rows - i, kLanes)) - 1);
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(present, codes + i)), 8);
    const __m256i smaller = _mm256_and_si256(_mm256_srai_epi16(halves, 1), _mm256_set1_epi16(short(0xbfff)));
    const Vec values = _mm512_cvtph_ps(smaller) * _mm512_maskz_loadu_ps(present, scales + i);
    store(sums + i, multiply_add(values, factor, load(sums + i)));
  }
}

// Which of up to 64 words have an element that is no integer.
MXFP8_INLINE uint64_t words_with_odd(const uint64_t* odd, int64_t words) {
  static_assert(kDepth / kWord == 64 && kPadding / kWord % 8 == 0);
  uint64_t all = 0;
  for (int64_t i = 0; i < words; i += 8) {
    const __m512i eight = _mm512_loadu_si512(odd + i);
    all |= uint64_t(_mm512_test_epi64_mask(eight, eight)) << i;
  }
  return all;
}

// Adds, for a panel's columns from `at` on in the strip, what its dot products leave out.
MXFP8_NOINLINE void add_rest(const GemmArgs& args, const PackedA& a, int64_t row, int64_t first, int64_t rows,
                             int64_t column, int64_t columns, int64_t at, Chunk chunk, const Panel& panel, Rest* rest) {
  const int64_t blocks = blocks_of(args.k);
  for (int64_t j = 0; j * kLanes < columns; ++j) {
    const uint32_t real = (uint32_t(1) << min_of(columns - j * kLanes, kLanes)) - 1;
    for (uint64_t words = words_with_odd(panel.odd[j], chunk.padded / kWord); words != 0; words &= words - 1) {
      const int64_t word = __builtin_ctzll(words);
      for (uint64_t odd = panel.odd[j][word]; odd != 0; odd &= odd - 1) {
        const int bit = __builtin_ctzll(odd);
        const int64_t c = j * kLanes + bit / kWord, k = chunk.k + word * kWord + bit % kWord;
        if (panel.strange[j][word * kWord / kBlock] >> (bit / kWord) & 1) continue;  // below
        const uint8_t code = args.b[(column + c) * args.k + k];
        const float value = decode<E4M3>(code) * scale_value(args.b_scales[(column + c) * blocks + k / kBlock]);
        add_small_of_b(a, first, rows, k, value, rest->of(at + c, rows));
      }
    }
    for (int64_t block = 0; block * kBlock < chunk.count; ++block) {
      for (uint32_t strange = panel.strange[j][block] & real; strange != 0; strange &= strange - 1) {
        const int64_t c = j * kLanes + __builtin_ctz(strange), k = chunk.k + block * kBlock;
        const int64_t count = min_of(kBlock, args.k - k);
        float* sums = rest->of(at + c, rows);
        for (int64_t i = 0; i < rows; ++i) sums[i] += exact_dot<E4M3>(args, row + i, column + c, k, count);
      }
    }
  }
}

// Adds the rest of a panel's columns, `begin` on, to a strip.
MXFP8_NOINLINE void add_to_strip(Rest* rest, int64_t begin, int64_t rows, float* strip) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const uint32_t columns = uint32_t(rest->columns >> (begin + j)) & 0xffff;
    if (columns == 0) continue;
    for (int64_t c = 0; c < kLanes; ++c) rest->of(begin + j + c, rows);
    for (int64_t i = 0; i < rows; i += kLanes) {
      alignas(64) float turned[kLanes][kLanes];
      transpose_tile(reinterpret_cast<const char*>(rest->sums[begin + j] + i), sizeof rest->sums[0],
                     reinterpret_cast<char*>(turned), sizeof turned[0]);
      for (int64_t r = 0; r < min_of(rows - i, kLanes); ++r) {
        float* to = strip + (i + r) * kGemmColumns + j;
        store(to, load(to) + load(turned[r]));
      }
    }
    rest->columns &= ~(uint64_t(0xffff) << (begin + j));
  }
}

}  // namespace

int gemm_int16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                    void* packed) {
  const IntTiles tiles{rows};
  const PackedA to(packed, rows, args.k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = tiles.first_row(tile);
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      const Chunk chunk = chunk_at(args.k, kDepth, c, kPadding);
      if (!pack_chunk(args, to, row + first, first, tiles.rows_of(tile), chunk,
                      to.integers() + tiles.offset(chunk, tile), to.smalls(chunk, tiles, tile))) {
        return kNotExact;
      }
    }
  }
  pack_codes(args, to, row, tiles.first_row(tile_begin), tiles.first_row(tile_end));
  return 0;
}

void gemm_int16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                         int64_t column_begin, int64_t column_end, const void* packed, int) {
  const IntTiles tiles{rows};
  const PackedA a(packed, rows, args.k);
  const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
  const int64_t blocks = blocks_of(args.k);
  const IntDecoder<kBitsB> decoder;
  Panel panel;
  Rest rest;
  const auto multiply_panel = [&](auto vectors, Chunk chunk, float* strip) {
    constexpr int V = decltype(vectors)::value;
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t tile_row = tiles.first_row(tile);
      float* to = strip + (tile_row - first) * kGemmColumns;
      with_rows<kFloatRows>(tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, V>(a.integers() + tiles.offset(chunk, tile),
                                             a.int_scales() + chunk.k / kBlock * a.lanes + tile_row, a.lanes,
                                             panel.integers, panel.scales, chunk.padded, to);
      });
      add_small_of_a<V>(a.smalls(chunk, tiles, tile), panel, to);
    }
  };
  for_each_strip<int16_t, int(kPadding), kPanel>(
      args, row + first, count, column_begin, column_end, kDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column), at = (column - column_begin) % kGemmColumns;
        const bool last = chunk.k + chunk.count == args.k;
        const bool along_k = count * int64_t(sizeof(int16_t)) <= kFewRowsBytes && !last;
        const int64_t ahead = along_k ? kDepth : kPanel * args.k;
        for (int64_t j = 0; j * kLanes < columns; ++j) {
          for (int64_t k = 0; k < chunk.count; k += kStretch) {
            const uint8_t* elements = args.b + (column + j * kLanes) * args.k + chunk.k + k;
            const uint8_t* scales = args.b_scales + (column + j * kLanes) * blocks + (chunk.k + k) / kBlock;
            const Stretch from{elements, scales, args.k, blocks, columns - j * kLanes, chunk.count - k};
            decode_stretch(decoder, from, ahead, panel.integers + (j * kDepth + k) * kLanes,
                           panel.scales + (j * kDepth + k) / kBlock * kLanes, panel.odd[j] + k / kWord,
                           panel.strange[j] + k / kBlock);
          }
        }
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        if (columns > kLanes) {
          multiply_panel(Rows<kVectors>{}, chunk, strip);
        } else {
          multiply_panel(Rows<1>{}, chunk, strip);
        }
        add_rest(args, a, row + first, first, count, column, columns, at, chunk, panel, &rest);
        if (last) add_to_strip(&rest, at, count, strip);
      });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
