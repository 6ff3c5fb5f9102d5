// The gemm of INT8 elements on dot products of integers: of 8 bits (VPDPBUSD), or of 16 in the set avx2 (int8.h).
//
// y [M, N] = A [M, K] . B [N, K]^T. The 32 products of a block add up in 32 bits: not rounded at all. The sum, as
// float32, times both scales of the block is added to the result.
//
//   floor      a block of kLanes columns and a row: 8 dot products, 1 conversion, 2 multiply-adds; 8 of 11 operations
//              are dot products, which is the bound on the share of the processor's rate. With 16 bits, 16 products
//              and 16 additions: 32 of 35
//   bytes      B once, 33 for 32 weights; packed A from L2 for each panel of B
//
// VPDPBUSD multiplies unsigned bytes by signed ones. A panel has B's elements plus 128, so a sum is too large by
// 128 times the sum of A's block: sums begin with what corrects that, which costs no operation.
//
// Layout: lanes of a sum are columns of the result; a lane holds four values of K, or the even or the odd two of them:
// of a block, all even pairs come first. A block of B with a scale that a float32 product cannot hold counts as zero
// here, and exact_dot adds it; such a block of A is for another kernel.
#include "columns.h"
#include "int8.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kDepth = 512;                                // depth of a chunk
constexpr int64_t kPadding = 64;                               // packed rows are padded to a multiple of it
constexpr int kVectors = 2;                                    // vectors of columns in a register tile
constexpr int64_t kPanel = kVectors * kLanes;                  // rows of B turned at a time
constexpr int kWords = int(kBlock) * int(sizeof(Factor)) / 4;  // lanes that the factors of a block take

using ByteTiles = Tiles<kFloatRows>;

// Where packed A lies: factors [chunk, tile, block, row, 32]; and for each block and row of the strip, its scale and
// what a sum with it begins with.
struct PackedA {
  int64_t rows, k;
  char* base;
  int64_t padded = (k + kPadding - 1) / kPadding * kPadding;
  ByteTiles tiles{rows};

  MXFP8_INLINE_MEMBER PackedA(const void* packed, int64_t rows, int64_t k)
      : rows(rows), k(k), base(static_cast<char*>(const_cast<void*>(packed))) {}
  MXFP8_INLINE_MEMBER Factor* factors(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<Factor*>(base) + tiles.offset(chunk, tile);
  }
  MXFP8_INLINE_MEMBER float* scales(int64_t at_k) const {
    return reinterpret_cast<float*>(base + rows * padded * int64_t(sizeof(Factor))) + at_k / kBlock * rows;
  }
  MXFP8_INLINE_MEMBER int32_t* corrections(int64_t at_k) const {
    return reinterpret_cast<int32_t*>(scales(padded)) + at_k / kBlock * rows;
  }
};
// A panel of B: its factors [vector, block, word, column], its scales [vector, block, column].
struct Panel {
  alignas(64) Factor factors[kPanel * kDepth];
  alignas(64) float scales[kPanel * kDepth / kBlock];
  uint32_t strange[kVectors][kDepth / kBlock];  // a bit for each column whose scale does not fit: that is 0
  bool any_strange;
};

MXFP8_INLINE uint32_t lanes_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#else
  return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(reinterpret_cast<__m256i>(mask))));
#endif
}

// Stores word `word` of a square, four elements of each column, as factors of the panel.
MXFP8_INLINE void store_word(Bytes elements, int word, Factor* to) {
#if defined(MXFP8_DOTS_OF_BYTES)
  const Bytes moved = elements ^ uint8_t(0x80);
  std::memcpy(to + word * kDecoded, &moved, sizeof moved);
#else
  static_assert(kDecoded == kBlock, "a square is one block deep");
  const auto words = reinterpret_cast<__m256i>(elements);
  auto* even = reinterpret_cast<__m256i*>(to) + word;
  _mm256_store_si256(even, _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8));
  _mm256_store_si256(even + kLanes, _mm256_srai_epi16(words, 8));
#endif
}

// Turns a panel of B, one chunk deep, and fetches what lies `ahead` bytes further.
MXFP8_NOINLINE void turn_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                               Panel* panel) {
  const int64_t blocks = blocks_of(args.k);
  panel->any_strange = false;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Stretch from{args.b + (column + c) * args.k + chunk.k, nullptr, args.k, 0, columns - c, chunk.count};
    Factor* to = panel->factors + c * kDepth;
    for (int64_t k = 0; k < chunk.padded; k += kDecoded, to += kDecoded * kLanes) {
      Bytes words[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) __builtin_prefetch(from.elements + i * args.k + k + ahead, 0, 2);
      if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
        turn_rows(from.elements + k, args.k, words);
      } else {
        turn_fringe(from, k, words);
      }
#pragma GCC unroll 16
      for (int word = 0; word < kLanes; ++word) store_word(words[word], word, to);
    }
    for (int64_t k = 0; k < chunk.padded; k += kStretch) {
      const uint8_t* codes_of_b = args.b_scales + (column + c) * blocks + (chunk.k + k) / kBlock;
      const Ints scales = load_scales({nullptr, codes_of_b, 0, blocks, columns - c, chunk.count - k});
      for (int64_t block = 0; block < min_of(kWord, (chunk.padded - k) / kBlock); ++block) {
        const Ints codes = (scales >> int(block * 8)) & 0xff;
        const Ints fits = (codes >= int(kLowestScale)) & (codes <= int(kHighestScale));
        const Ints values = ((codes - kElementBits) << 23) & fits;
        std::memcpy(panel->scales + (c * kDepth + k * kLanes) / kBlock + block * kLanes, &values, sizeof values);
        const uint32_t strange = lanes_of(~fits);
        panel->strange[c / kLanes][k / kBlock + block] = strange;
        panel->any_strange |= strange != 0;
      }
    }
  }
}

// Multiplies R rows of A, `depth` elements each, with V registers of columns of a panel.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const Factor* a, const float* a_scales, const int32_t* corrections, int64_t next,
                                  const Factor* b, const float* b_scales, int64_t depth, float* strip) {
  for (int64_t k = 0; k < depth; k += kBlock, a_scales += next, corrections += next, b_scales += kLanes) {
    Ints sums[R][V];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) sums[i][j] = Ints{} + corrections[i];
    }
#pragma GCC unroll 2
    for (int word = 0; word < kWords; ++word, b += kDecoded / sizeof(Factor)) {
      Ints columns[V];
      for (int j = 0; j < V; ++j) std::memcpy(columns + j, b + j * kDepth * kLanes, sizeof columns[j]);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int factors;
        std::memcpy(&factors, reinterpret_cast<const int*>(a + i * kBlock) + word, sizeof factors);
        const Ints row = Ints{} + factors;
        for (int j = 0; j < V; ++j) add_dots(columns[j], row, &sums[i][j]);
      }
    }
    a += R * kBlock;
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

#if defined(MXFP8_DOTS_OF_BYTES)
// Stores the elements of a block as factors; returns what sums with them begin with.
MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), elements);
  // As unsigned bytes, each 128 too large, they add up in 64-bit lanes.
  const __m256i moved = _mm256_xor_si256(elements, _mm256_set1_epi8(char(0x80)));
  const __m256i quarters = _mm256_sad_epu8(moved, _mm256_setzero_si256());
  const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
  return -128 * (_mm_cvtsi128_si32(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves))) - 128 * int(kBlock));
}
#else
MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  auto* even = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(even, _mm256_srai_epi16(_mm256_slli_epi16(elements, 8), 8));
  _mm256_storeu_si256(even + 1, _mm256_srai_epi16(elements, 8));
  return 0;
}
#endif

// Packs a chunk of a tile of the strip that begins with `row`. False if a scale does not fit.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, int64_t row, int64_t tile, Chunk chunk, const PackedA& to) {
  const int64_t first = to.tiles.first_row(tile), rows = to.tiles.rows_of(tile);
  for (int64_t i = 0; i < rows; ++i) {
    const auto* elements = static_cast<const uint8_t*>(args.a) + (row + first + i) * args.a_stride;
    const uint8_t* scales = args.a_scales + (row + first + i) * blocks_of(args.k);
    for (int64_t k = chunk.k; k < chunk.k + chunk.padded; k += kBlock) {
      alignas(32) uint8_t block[kBlock] = {};
      const int64_t left = args.k - k;
      if (left < kBlock) std::memcpy(block, elements + k, size_t(left < 0 ? 0 : left));
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left < kBlock ? block : elements + k));
      const Int8Scale scale = left > 0 ? int8_scale(scales[k / kBlock], elements + k, left) : Int8Scale{0, true};
      if (!scale.fits) return false;
      to.scales(k)[first + i] = scale.value;
      to.corrections(k)[first + i] = store_block(values, to.factors(chunk, tile) + (k - chunk.k) * rows + i * kBlock);
    }
  }
  return true;
}

// Adds the blocks of a panel whose scales do not fit to rows of a strip that begin with `row` of A.
MXFP8_NOINLINE void add_strange(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                Chunk chunk, const Panel& panel, float* strip) {
  for (int64_t c = 0; c < columns; ++c) {
    const uint8_t* scales = args.b_scales + (column + c) * blocks_of(args.k);
    for (int64_t k = 0; k < chunk.count; k += kBlock) {
      if ((panel.strange[c / kLanes][k / kBlock] >> (c % kLanes) & 1) == 0) continue;
      const uint8_t* elements = args.b + (column + c) * args.k + chunk.k + k;
      const int64_t count = min_of(kBlock, chunk.count - k);
      uint8_t any = scales[(chunk.k + k) / kBlock] == kScaleNan;
      for (int64_t i = 0; i < count; ++i) any |= elements[i];
      if (any == 0) continue;  // zeros, as their quantization writes them
      for (int64_t i = 0; i < rows; ++i) {
        strip[i * kGemmColumns + c] += exact_dot<INT8>(args, row + i, column + c, chunk.k + k, count);
      }
    }
  }
}

}  // namespace

int gemm_int8_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  const PackedA to(packed, rows, args.k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      if (!pack_chunk(args, row, tile, chunk_at(args.k, kDepth, c, kPadding), to)) return kNotExact;
    }
  }
  return 0;
}

void gemm_int8_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int) {
  const PackedA a(packed, rows, args.k);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panel;
  const auto multiply_panel = [&](auto vectors, Chunk chunk, float* strip) {
    constexpr int V = decltype(vectors)::value;
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t tile_row = a.tiles.first_row(tile);
      with_rows<kFloatRows>(a.tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, V>(a.factors(chunk, tile), a.scales(chunk.k) + tile_row,
                                             a.corrections(chunk.k) + tile_row, rows, panel.factors, panel.scales,
                                             chunk.padded, strip + (tile_row - first) * kGemmColumns);
      });
    }
  };
  for_each_strip<Factor, int(kPadding), kPanel>(
      args, row + first, count, column_begin, column_end, kDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column);
        turn_panel(args, column, columns, chunk, kPanel * args.k, &panel);
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        if (columns > kLanes) {
          multiply_panel(Rows<kVectors>{}, chunk, strip);
        } else {
          multiply_panel(Rows<1>{}, chunk, strip);
        }
        if (__builtin_expect(panel.any_strange, 0)) {
          add_strange(args, row + first, count, column, columns, chunk, panel, strip);
        }
      });
}

MXFP8_GEMM_KERNEL(gemm_int8, kFloatRows, kPackedBytes);

}  // namespace mxfp8::MXFP8_ISA
