// The tiles of gemm_int8.cpp on x86: dot products of bytes (VPDPBUSD), or of 16-bit integers in the set avx2.
//
//   floor      a block of kLanes columns and a row: 8 dot products, and a fold of 3 or 4 operations. With 16 bits, 16
//              products and 16 additions
//
// VPDPBUSD multiplies unsigned bytes by signed ones. A panel has B's elements plus 128, so a sum is too large by 128
// times the sum of A's block. Sums begin with a number that corrects this, which costs no operation.
//
// There are two folds. On AMD, additions of integers run beside dot products, and multiplications do not. There a sum
// begins with the bits of 1.5 * 2^23 times both scales. The sum is below 2^22, so it stays in the mantissa of that
// number. The number less its start is the sum times the scales. On other processors the fold is a conversion, and a
// multiply-add with both scales, whose exponents are added as integers. Both folds give the same bits.
//
// 16-bit factors are unpacked from a panel, of each half of a block the even elements, then the odd ones. The second
// halves are left out where they are zeros: convolutions of up to 16 channels have such blocks.
#pragma once
#include "int8.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

#if defined(__AVX512BF16__)
constexpr bool kFoldsByAdding = true;  // only AMD's processors use this set: see isa.cpp
#else
constexpr bool kFoldsByAdding = false;
#endif
constexpr int64_t kDepth = 512;                                // depth of a chunk
constexpr int64_t kTapsDepth = 576;                            // the same for a convolution: 3 x 3 taps of 64 channels
constexpr int kWords = int(kBlock) * int(sizeof(Factor)) / 4;  // lanes that the factors of a block take
// With 32 registers the totals of a tile stay in them, with 16 registers they are added up in L1.
constexpr bool kTotalsInRegisters = kLanes > 8;
constexpr int kRows = 6;
#if defined(MXFP8_DOTS_OF_BYTES)
constexpr uint8_t kFlipped = 0x80;  // plus 128
constexpr int kUnrolled = 8;
#else
constexpr uint8_t kFlipped = 0;
constexpr int kUnrolled = 2;  // with more, GCC 12 keeps operands in memory
#endif

using ByteTiles = Tiles<kRows>;

// A packed block of a row of A: its factors, the start of its sums, and the exponent of its scale, in its place in a
// float32, less the biases.
struct BlockOfA {
  Factor factors[kBlock];
  int32_t start, exponent;
};
// The product of the scales of two blocks is times 2^-12, because both elements are multiples of 2^-6.
constexpr int kProductBias = 2 * 127 - 127 + 2 * kElementBits;

// Packed A: blocks [chunk, tile, block, row]; or pixels of a convolution, which `taps` gathers to rows.
struct PackedA {
  BlockOfA* base;
  int64_t rows;
  const TapRows* taps;
  ByteTiles tiles{rows};

  MXFP8_INLINE_MEMBER PackedA(const GemmArgs& args, const void* packed, int64_t rows)
      : base(static_cast<BlockOfA*>(const_cast<void*>(packed))), rows(rows), taps(args.taps) {}
  MXFP8_INLINE_MEMBER BlockOfA* blocks(Chunk chunk, int64_t tile) const {
    return base + tiles.offset(chunk, tile) / kBlock;
  }
};

MXFP8_INLINE Ints word_at(const void* from) {  // in each lane
  int word;
  std::memcpy(&word, from, sizeof word);
  return Ints{} + word;
}

// The rows of a tile at one block, and from advance() on at the next. word(i, byte): a word of the block of row i.
template <int R>
struct RowBlocks {
  static constexpr int kCount = R;
  const char* first;
  MXFP8_INLINE_MEMBER RowBlocks(const PackedA& a, Chunk chunk, int64_t tile)
      : first(reinterpret_cast<const char*>(a.blocks(chunk, tile))) {}
  MXFP8_INLINE_MEMBER Ints word(int i, size_t byte) const { return word_at(first + i * sizeof(BlockOfA) + byte); }
  MXFP8_INLINE_MEMBER void advance() { first += R * sizeof(BlockOfA); }
};

// The same for pixels, whose blocks lie one behind the other in a tap.
template <int R>
struct TapBlocks {
  static constexpr int kCount = R;
  const char* rows[R];
  const BlockOfA* base;
  const TapRows& taps;
  int64_t next_row;        // from the pixels of a tap to those of the next
  const uint32_t* pixels;  // of the tap
  int64_t left;            // blocks of the tap

  MXFP8_INLINE_MEMBER TapBlocks(const PackedA& a, Chunk chunk, int64_t tile)
      : base(a.base + a.taps->first), taps(*a.taps), next_row(a.rows) {
    const int64_t block = chunk.k / kBlock;
    pixels = taps.pixels + block / taps.blocks * next_row + a.tiles.first_row(tile);
    find(block % taps.blocks);
  }
  MXFP8_INLINE_MEMBER void find(int64_t block) {
    left = taps.blocks - block;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      rows[i] = reinterpret_cast<const char*>(base + int64_t(pixels[i]) * taps.stride + block);
    }
  }
  MXFP8_INLINE_MEMBER Ints word(int i, size_t byte) const { return word_at(rows[i] + byte); }
  MXFP8_INLINE_MEMBER void advance() {
    if (--left == 0) {
      pixels += next_row;
      return find(0);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) rows[i] += sizeof(BlockOfA);
  }
};

// The operands that a tile reads of a panel.
struct OperandB {
  const Factor* factors;
  const uint8_t* codes;
};

// Adds the products of `blocks` blocks to the totals of the rows of a tile and V registers of columns: of each block,
// the first `Words` lanes.
template <int V, int Words, class From>
MXFP8_NOINLINE void multiply_tile(From from, int64_t blocks, const Factor* b, const uint8_t* codes, float* strip) {
  constexpr int R = From::kCount;
  constexpr int64_t next = kPanelVectors * kDecoded / int64_t(sizeof(Factor));  // from a word of B to the next
  constexpr int64_t skipped = (kWords - Words) * next;
  Vec totals[R][V];
  if (kTotalsInRegisters) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) totals[i][j] = load(strip + i * kGemmColumns + j * kLanes);
    }
  }
  for (; blocks > 0; --blocks, codes += kPanel, b += skipped) {
    Ints exponents[V], sums[R][V];
    for (int j = 0; j < V; ++j) exponents[j] = widen_codes(codes + j * kLanes) << 23;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        const Ints start = from.word(i, offsetof(BlockOfA, start));
        sums[i][j] = kFoldsByAdding ? exponents[j] + start : start;
      }
    }
#pragma GCC unroll kUnrolled
    for (int word = 0; word < Words; ++word, b += next) {
      Ints columns[V];
      for (int j = 0; j < V; ++j) {
        const Factor* from = b + j * kDecoded / int(sizeof(Factor));
        if (sizeof(Factor) == 1) __builtin_prefetch(from + kPanelAhead);
        columns[j] = load_ints(from);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const Ints factors = from.word(i, size_t(word) * sizeof(int));
        for (int j = 0; j < V; ++j) add_dots(columns[j], factors, &sums[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) {
        const Vec scale = reinterpret_cast<Vec>(exponents[j] + from.word(i, offsetof(BlockOfA, exponent)));
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
    if (blocks > 1) from.advance();
    if (!kTotalsInRegisters) __asm__ volatile("" ::: "memory");  // otherwise GCC keeps the strip, and its addresses
  }
  if (kTotalsInRegisters) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < V; ++j) store(strip + i * kGemmColumns + j * kLanes, totals[i][j]);
    }
  }
}

#if defined(MXFP8_DOTS_OF_BYTES)
// Stores the elements of a block of A as factors; returns the correction of sums with them.
MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), elements);
  // As unsigned bytes, each too large by 128, they add up in 64-bit lanes.
  const __m256i moved = _mm256_xor_si256(elements, _mm256_set1_epi8(char(0x80)));
  const __m256i quarters = _mm256_sad_epu8(moved, _mm256_setzero_si256());
  const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
  return -128 * (_mm_cvtsi128_si32(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves))) - 128 * int(kBlock));
}
MXFP8_INLINE void unpack_block(const BlockOfA& block, uint8_t* elements) {
  std::memcpy(elements, block.factors, kBlock);
}

MXFP8_INLINE const Factor* factors_of(const uint8_t* elements, int64_t, Factor*) {
  return reinterpret_cast<const Factor*>(elements);
}
#else
MXFP8_INLINE void store(Factor* to, __m256i factors) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), factors); }
MXFP8_INLINE __m256i even_factors(__m256i elements) { return _mm256_srai_epi16(_mm256_slli_epi16(elements, 8), 8); }
MXFP8_INLINE __m256i odd_factors(__m256i elements) { return _mm256_srai_epi16(elements, 8); }

MXFP8_INLINE int32_t store_block(__m256i elements, Factor* to) {
  const __m256i even = even_factors(elements), odd = odd_factors(elements);
  store(to, _mm256_permute2x128_si256(even, odd, 0x20));
  store(to + kBlock / 2, _mm256_permute2x128_si256(even, odd, 0x31));
  return 0;
}
MXFP8_INLINE void unpack_block(const BlockOfA& block, uint8_t* elements) {
  for (int i = 0; i < kBlock; ++i) elements[i] = uint8_t(block.factors[i / 16 * 16 + i % 2 * 8 + i % 16 / 2]);
}

// The factors of `depth` values of a panel.
MXFP8_INLINE const Factor* factors_of(const uint8_t* elements, int64_t depth, Factor* to) {
  constexpr int64_t each = kPanel * kBlock / 2;  // elements of half a block
  for (int64_t i = 0; i < depth * kPanel; i += kDecoded) {
    __builtin_prefetch(elements + i + kPanelAhead);
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements + i));
    Factor* at = to + i / each * each + i % each / 2;
    store(at, even_factors(words));
    store(at + each / 2, odd_factors(words));
  }
  return to;
}
#endif

struct RoomOfB {
  alignas(64) Factor factors[sizeof(Factor) == 1 ? 1 : kPanel * kTapsDepth];
};
MXFP8_INLINE OperandB operand_of(PanelView panel, int64_t depth, RoomOfB* room) {
  return {factors_of(panel.elements, depth, room->factors), panel.codes};
}

template <int R, int V>
MXFP8_INLINE void multiply_tile(const PackedA& a, Chunk chunk, int64_t tile, OperandB b, int64_t block_values,
                                float* strip) {
  const int64_t blocks = blocks_of(chunk.count);
  if (a.taps == nullptr) {
    multiply_tile<V, kWords>(RowBlocks<R>(a, chunk, tile), blocks, b.factors, b.codes, strip);
  } else if (block_values > kBlock / 2) {
    multiply_tile<V, kWords>(TapBlocks<R>(a, chunk, tile), blocks, b.factors, b.codes, strip);
  } else {
    multiply_tile<V, kWords / 2>(TapBlocks<R>(a, chunk, tile), blocks, b.factors, b.codes, strip);
  }
}

// Packs a block whose scale has this code.
MXFP8_INLINE void pack_block(const uint8_t* elements, uint32_t code, BlockOfA* to) {
  constexpr int bias = kFoldsByAdding ? kProductBias - kSumBits : kProductBias;
  const int32_t exponent = (int32_t(code) - bias) * (1 << 23) + int32_t(kFoldsByAdding ? kHalf : 0);
  const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements));
  const int32_t correction = store_block(values, to->factors);
  to->start = correction + (kFoldsByAdding ? exponent : 0), to->exponent = exponent;
}
// The same for a block of a row of a tile.
MXFP8_INLINE void pack_block(const PackedA& to, Chunk chunk, int64_t tile, int64_t row, int64_t block,
                             const uint8_t* elements, uint32_t code) {
  pack_block(elements, code, to.blocks(chunk, tile) + block * to.tiles.rows_of(tile) + row);
}

}  // namespace mxfp8::MXFP8_ISA
