// The gemm of INT8 elements on dot products of integers: of 8 bits (VPDPBUSD), or of 16 in the set avx2 (int8.h).
//
// y [M, N] = A [M, K] . B [N, K]^T. The 32 products of a block add up in 32 bits: not rounded at all. The sum times
// both scales of the block, an exact float32, is added to the result.
//
//   floor      a block of kLanes columns and a row: 8 dot products, and a fold of 3 or 4 operations. With 16 bits, 16
//              products and 16 additions
//   bytes      B once, 33 for 32 weights; packed A from L2 for each panel of B
//
// VPDPBUSD multiplies unsigned bytes by signed ones. A panel has B's elements plus 128, so a sum is too large by 128
// times the sum of A's block: sums begin with what corrects that, which costs no operation.
//
// The fold, where additions of integers run beside dot products and multiplications do not (AMD): a sum begins with the
// bits of 1.5 * 2^23 times both scales. It is below 2^22, so it stays in the mantissa of that number; the number less
// what it began with is the sum times the scales. Elsewhere: a conversion, and a multiply-add with both scales, whose
// exponents are added as integers. Both give the same bits.
//
// Layout: panel.h; 16-bit factors are unpacked from it, of each block the even elements, then the odd ones. A block of
// B with a scale that a float32 product cannot hold counts as zero here, and exact_dot adds it; a strip of A with such
// a block, or a NaN scale, is for another kernel.
#include "int8.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kFoldsByAdding = true;  // of the processors that have this set only AMD's use it: see isa.cpp
#else
constexpr bool kFoldsByAdding = false;
#endif
constexpr int64_t kDepth = 512;                                // depth of a chunk
constexpr int kWords = int(kBlock) * int(sizeof(Factor)) / 4;  // lanes that the factors of a block take
// With 32 registers the totals of a tile stay there, with 16 they are added up in L1.
constexpr bool kTotalsInRegisters = kLanes > 8;
constexpr int kRows = 6;
#if defined(MXFP8_DOTS_OF_BYTES)
constexpr uint8_t kFlipped = 0x80;  // plus 128
constexpr int kUnrolled = 8;
#else
constexpr uint8_t kFlipped = 0;
constexpr int kUnrolled = 2;  // GCC 12 keeps operands of more in memory
#endif

using ByteTiles = Tiles<kRows>;

// What the sums of a block and a row begin with, and the exponent of its scale, in place, less the biases.
struct BlockOfA {
  int32_t start, exponent;
};
// Of the product of the scales of two blocks: times 2^-12, both elements being multiples of 2^-6.
constexpr int kProductBias = 2 * 127 - 127 + 2 * kElementBits;
constexpr int kSumBits = 23;  // an integer in the mantissa of a number 2^23 times as large is the sum
constexpr uint32_t kHalf = 0x400000;

// Where packed A lies: factors [chunk, tile, block, row, 32]; and for each tile, block and row a BlockOfA.
struct PackedA {
  int64_t rows, k;
  char* base;
  int64_t padded = panel_depth(k);
  ByteTiles tiles{rows};

  MXFP8_INLINE_MEMBER PackedA(const void* packed, int64_t rows, int64_t k)
      : rows(rows), k(k), base(static_cast<char*>(const_cast<void*>(packed))) {}
  MXFP8_INLINE_MEMBER Factor* factors(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<Factor*>(base) + tiles.offset(chunk, tile);
  }
  MXFP8_INLINE_MEMBER BlockOfA* blocks(Chunk chunk, int64_t tile) const {
    return reinterpret_cast<BlockOfA*>(base + rows * padded * int64_t(sizeof(Factor))) +
           tiles.offset(chunk, tile) / kBlock;
  }
};

// A chunk of a panel, and which of its blocks count as zero.
struct Panel {
  alignas(64) uint8_t elements[kPanel * kDepth];
  alignas(64) uint8_t codes[kPanel * kDepth / kBlock];
  uint32_t strange[kDepth / kBlock];  // a bit for each column
  bool any_strange;
};

MXFP8_NOINLINE void turn_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, Panel* panel) {
  panel->any_strange = false;
  turn_elements(args, column, columns, chunk, kFlipped, kPanel * args.k, panel->elements);
  turn_codes<INT8>(args, column, columns, chunk, kLowestScale, kHighestScale, panel->codes,
                   [&](int64_t block, int64_t c) {
                     if (!panel->any_strange) std::memset(panel->strange, 0, sizeof panel->strange);
                     panel->any_strange = true;
                     panel->strange[block] |= uint32_t(1) << c;
                     panel->codes[block * kPanel + c] = kNeutralScale;
                     uint8_t* elements = panel->elements + (block * kBlock * kPanel) + c * kWord;
                     for (int64_t word = 0; word < kBlock / kWord; ++word) {
                       std::memset(elements + word * kPanel * kWord, kFlipped, kWord);
                     }
                   });
}

// Adds to the totals of R rows of A and V registers of columns what `depth` values give.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const Factor* a, const BlockOfA* blocks_of_a, const Factor* b, const uint8_t* codes,
                                  int64_t depth, float* strip) {
  Vec totals[R][V];
  if (kTotalsInRegisters) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) totals[i][j] = load(strip + i * kGemmColumns + j * kLanes);
    }
  }
  for (int64_t k = 0; k < depth; k += kBlock, codes += kPanel, blocks_of_a += R, a += R * kBlock) {
    Ints exponents[V], sums[R][V];
    for (int j = 0; j < V; ++j) exponents[j] = widen_codes(codes + j * kLanes) << 23;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        sums[i][j] = kFoldsByAdding ? exponents[j] + blocks_of_a[i].start : Ints{} + blocks_of_a[i].start;
      }
    }
#pragma GCC unroll kUnrolled
    for (int word = 0; word < kWords; ++word, b += kPanelVectors * kDecoded / int(sizeof(Factor))) {
      Ints columns[V];
      for (int j = 0; j < V; ++j) {
        const Factor* from = b + j * kDecoded / int(sizeof(Factor));
        if (sizeof(Factor) == 1) __builtin_prefetch(from + kPanelAhead);
        std::memcpy(columns + j, from, sizeof columns[j]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int factors;
        std::memcpy(&factors, reinterpret_cast<const int*>(a + i * kBlock) + word, sizeof factors);
        const Ints row = Ints{} + factors;
        for (int j = 0; j < V; ++j) add_dots(columns[j], row, &sums[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        const Vec scale = reinterpret_cast<Vec>(exponents[j] + blocks_of_a[i].exponent);
        float* to = strip + i * kGemmColumns + j * kLanes;
        const Vec total = kTotalsInRegisters ? totals[i][j] : load(to);
        const Vec sum = kFoldsByAdding ? total + (reinterpret_cast<Vec>(sums[i][j]) - scale)
                                       : multiply_add(__builtin_convertvector(sums[i][j], Vec), scale, total);
        if (kTotalsInRegisters) {
          totals[i][j] = sum;
        } else {
          store(to, sum);
        }
      }
    }
    if (!kTotalsInRegisters) __asm__ volatile("" ::: "memory");  // or GCC keeps the strip, and its addresses
  }
  if (kTotalsInRegisters) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) store(strip + i * kGemmColumns + j * kLanes, totals[i][j]);
    }
  }
}

#if defined(MXFP8_DOTS_OF_BYTES)
// Stores the elements of a block of A as factors; returns what corrects sums with them.
MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), elements);
  // As unsigned bytes, each 128 too large, they add up in 64-bit lanes.
  const __m256i moved = _mm256_xor_si256(elements, _mm256_set1_epi8(char(0x80)));
  const __m256i quarters = _mm256_sad_epu8(moved, _mm256_setzero_si256());
  const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
  return -128 * (_mm_cvtsi128_si32(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves))) - 128 * int(kBlock));
}

MXFP8_INLINE const Factor* factors_of(const uint8_t* elements, int64_t, Factor*) {
  return reinterpret_cast<const Factor*>(elements);
}
#else
// Even elements, then odd ones.
MXFP8_INLINE void store_halves(__m256i elements, int64_t half, Factor* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_srai_epi16(_mm256_slli_epi16(elements, 8), 8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + half), _mm256_srai_epi16(elements, 8));
}
MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  store_halves(elements, kBlock / 2, to);
  return 0;
}

// The factors of `depth` values of a panel.
MXFP8_INLINE const Factor* factors_of(const uint8_t* elements, int64_t depth, Factor* to) {
  constexpr int64_t each = kPanel * kBlock;  // elements of a block
  for (int64_t i = 0; i < depth * kPanel; i += kDecoded) {
    __builtin_prefetch(elements + i + kPanelAhead);
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements + i));
    store_halves(words, each / 2, to + i / each * each + i % each / 2);
  }
  return to;
}
#endif

// Packs a chunk of a tile of the strip that begins with `row`. False if a scale does not fit.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, int64_t row, int64_t tile, Chunk chunk, const PackedA& to) {
  constexpr int bias = kFoldsByAdding ? kProductBias - kSumBits : kProductBias;
  const int64_t first = to.tiles.first_row(tile), rows = to.tiles.rows_of(tile);
  for (int64_t i = 0; i < rows; ++i) {
    const auto* elements = static_cast<const uint8_t*>(args.a) + (row + first + i) * args.a_stride;
    const uint8_t* codes = args.a_scales + (row + first + i) * blocks_of(args.k);
    for (int64_t k = chunk.k; k < chunk.k + chunk.padded; k += kBlock) {
      alignas(32) uint8_t block[kBlock] = {};
      const int64_t left = args.k - k;
      if (left < kBlock) std::memcpy(block, elements + k, size_t(left < 0 ? 0 : left));
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left < kBlock ? block : elements + k));
      uint32_t code = left > 0 ? codes[k / kBlock] : kNeutralScale;
      if (__builtin_expect(code < kLowestScale || code > kHighestScale, 0)) {
        if (has_values<INT8>(elements + k, left, uint8_t(code))) return false;
        code = kNeutralScale;
      }
      const int64_t at = (k - chunk.k) / kBlock * rows + i;
      const int32_t exponent = (int32_t(code) - bias) * (1 << 23) + int32_t(kFoldsByAdding ? kHalf : 0);
      const int32_t correction = store_block(values, to.factors(chunk, tile) + at * kBlock);
      to.blocks(chunk, tile)[at] = {correction + (kFoldsByAdding ? exponent : 0), exponent};
    }
  }
  return true;
}

// Adds the blocks of a panel that count as zero to rows of a strip that begin with `row` of A.
MXFP8_NOINLINE void add_strange(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, Chunk chunk,
                                const Panel& panel, float* strip) {
  for (int64_t block = 0; block < blocks_of(chunk.count); ++block) {
    for (uint32_t strange = panel.strange[block]; strange != 0; strange &= strange - 1) {
      const int64_t c = __builtin_ctz(strange), k = chunk.k + block * kBlock;
      for (int64_t i = 0; i < rows; ++i) {
        strip[i * kGemmColumns + c] += exact_dot<INT8>(args, row + i, column + c, k, min_of(kBlock, args.k - k));
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
      if (!pack_chunk(args, row, tile, chunk_at(args.k, kDepth, c, kPanelPadding), to)) return kNotExact;
    }
  }
  return 0;
}

void gemm_int8_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int) {
  const PackedA a(packed, rows, args.k);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panel;
  alignas(64) Factor room[sizeof(Factor) == 1 ? 1 : kPanel * kDepth];
  const auto multiply_panel = [&](auto vectors, PanelView view, Chunk chunk, float* strip) {
    const Factor* b = factors_of(view.elements, chunk.padded, room);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      float* to = strip + (a.tiles.first_row(tile) - first) * kGemmColumns;
      with_rows<kRows>(a.tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, decltype(vectors)::value>(a.factors(chunk, tile), a.blocks(chunk, tile), b,
                                                                    view.codes, chunk.padded, to);
      });
    }
  };
  for_each_strip<Factor, int(kPanelPadding), kPanel>(
      args, row + first, count, column_begin, column_end, kDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column);
        PanelView view{panel.elements, panel.codes};
        if (args.panels != nullptr) {
          view = panel_at(args, args.panels->data, column, chunk.k);
        } else {
          turn_panel(args, column, columns, chunk, &panel);
        }
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        if (columns > kLanes) {
          multiply_panel(Rows<kPanelVectors>{}, view, chunk, strip);
        } else {
          multiply_panel(Rows<1>{}, view, chunk, strip);
        }
        if (args.panels == nullptr && __builtin_expect(panel.any_strange, 0)) {
          add_strange(args, row + first, count, column, chunk, panel, strip);
        }
      });
}

int64_t gemm_int8_panel_bytes(const GemmArgs& args, bool) { return bytes_of_panels(args); }

int gemm_int8_make_panels(const GemmArgs& args, bool, int64_t column_begin, int64_t column_end, void* data) {
  bool fits = true;
  for (int64_t column = column_begin; column < column_end; column += kPanel) {
    make_panel<INT8>(args, column, kFlipped, kLowestScale, kHighestScale, data,
                     [&](int64_t, int64_t) { fits = false; });
  }
  return fits ? 0 : kNotExact;
}

MXFP8_PANEL_KERNEL(gemm_int8, kRows, kPackedBytes);

}  // namespace mxfp8::MXFP8_ISA
