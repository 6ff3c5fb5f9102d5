// The gemm on the bf16 dot product for strips of many rows, exact for the reasons in gemm_bf16.cpp.
//
// y [M, N] = A [M, K] . B [N, K]^T, rows of A 256 at a time. Work is split over M and N. Bytes moved: 1.03 N K once per
// 256 rows of A + 2 M K + the result.
//
// Layout: the lanes of a sum are columns of the result, so that sums are not added up across lanes: with a K of a few
// hundred that would take a fifth of the time. B is decoded in panels of 16 columns, turned so that a register holds
// four values along K of eight columns; a broadcast of four values of A multiplies it, and the two halves of a sum
// are added at the end. Packed A is rows as they are, chunk by chunk.
#include "bf16.h"
#include "turn.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;
constexpr int kPanel = 16;       // rows of B decoded at a time: a register of columns
constexpr int64_t kDepth = 512;  // depth of a chunk: the panel, decoded, stays in L1 with a tile of A
constexpr int kGroup = 4;        // values along K that are broadcast together
constexpr int kGroups = kStep / kGroup;

// Where pack_row puts a group of a step: `even` values first, see Values.
constexpr int position_of(int group) { return group / 4 * 2 + group % 2 + group / 2 % 2 * 8; }

// Decodes a panel: kPanel rows of B from `column` on, one chunk deep. Rows past `column_end` are zero. Returns a bit
// for every row that does not fit; values decoded there must not be used.
template <class F>
MXFP8_INLINE uint32_t decode_panel(const GemmArgs& args, int64_t column, int64_t column_end, Chunk chunk, int lowest,
                                   uint16_t* out) {
  const int64_t blocks = blocks_of(args.k), columns = min_of(kPanel, column_end - column);
  const uint8_t* elements = args.b + column * args.k + chunk.k;
  const uint8_t* scales = args.b_scales + column * blocks + chunk.k / kBlock;
  alignas(16) uint8_t turned[kDepth / kBlock][kPanel];
  const int64_t chunk_blocks = blocks_of(chunk.count);
  if (columns < kPanel || chunk_blocks % 2 != 0) std::memset(turned, 127, sizeof turned);
  for (int64_t c = 0; c < columns; ++c) {
    __builtin_prefetch(scales + (c + kPanel) * blocks, 0, 2);
    for (int64_t i = 0; i < chunk_blocks; ++i) turned[i][c] = scales[c * blocks + i];
  }
  const Decoder<F> decoder;
  __m512i highest = _mm512_setzero_si512();
  uint32_t misfits = 0;
  for (int64_t k = 0; k < chunk.count; k += kStep, out += kPanel * kStep) {
    const int64_t left = chunk.count - k;
    __m512i codes[kPanel];
    if (__builtin_expect(columns == kPanel && left >= kStep, 1)) {
      for (int c = 0; c < kPanel; ++c) {
        const uint8_t* row = elements + c * args.k + k;
        __builtin_prefetch(row + kPanel * args.k, 0, 2);
        __builtin_prefetch(row + kStep);
        codes[c] = _mm512_loadu_si512(row);
      }
    } else {
      for (int c = 0; c < kPanel; ++c) {
        codes[c] = c < columns ? load_codes(elements + c * args.k + k, left) : _mm512_setzero_si512();
      }
    }
    turn(codes);
    for (int half = 0; half < 2; ++half) {
      const int64_t block_k = k + half * kBlock, block_left = chunk.count - block_k;
      const uint8_t* some = turned[block_k / kBlock];
      const __m128i block_scales = _mm_load_si128(reinterpret_cast<const __m128i*>(some));
      if (block_left > 0) {
        uint32_t wrong = outside(block_scales, lowest, kMaxScale<F>) & ((1u << columns) - 1);
        for (; __builtin_expect(wrong != 0, 0); wrong &= wrong - 1) {
          const int c = __builtin_ctz(wrong);
          if (!is_zero(elements + c * args.k + block_k, block_left, some[c])) misfits |= 1u << c;
        }
      }
      const __m512i exponents = exponents_of(block_scales);
      const __m512i even = _mm512_unpacklo_epi32(exponents, exponents);
      const __m512i odd = _mm512_unpackhi_epi32(exponents, exponents);
      for (int i = 0; i < kGroups / 2; ++i) {
        const int group = half * kGroups / 2 + i;
        const Values values = decoder.values(codes[group], &highest);
        uint16_t* to = out + position_of(group) * 2 * kBlock;
        _mm512_store_si512(to, add_exponents(values.even, even));
        _mm512_store_si512(to + kBlock, add_exponents(values.odd, odd));
      }
    }
  }
  const uint64_t special = _mm512_cmpeq_epi8_mask(highest, _mm512_set1_epi8(0x7f));
  for (int c = 0; special != 0 && c < kPanel; ++c) misfits |= uint32_t((special >> (kGroup * c) & 0xf) != 0) << c;
  return misfits;
}

// Multiplies R rows of A, `depth` values apart, with a panel.
template <int R>
MXFP8_INLINE void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t depth, float* strip, bool accumulate) {
  __m512 sums[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = zero();
  for (int64_t k = 0; k < depth; k += kGroup, b += kPanel * kGroup) {
    const __m512bh even = reinterpret_cast<__m512bh>(_mm512_load_si512(b));
    const __m512bh odd = reinterpret_cast<__m512bh>(_mm512_load_si512(b + kBlock));
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      long long four;
      std::memcpy(&four, a + i * depth + k, sizeof four);
      const __m512bh row = reinterpret_cast<__m512bh>(_mm512_set1_epi64(four));
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], row, even);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], row, odd);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    const __m512 sum =
        _mm512_add_ps(_mm512_shuffle_ps(sums[i][0], sums[i][1], 0x88), _mm512_shuffle_ps(sums[i][0], sums[i][1], 0xdd));
    float* to = strip + i * kGemmColumns;
    _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sum) : sum);
  }
}

}  // namespace

int gemm_many_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        void* packed) {
  auto* out = static_cast<uint16_t*>(packed);
  Extent extent;
  bool fits = true;
  with_a_format(args, [&](auto format) {
    for (int64_t i = tile_begin * kBf16Rows; i < min_of(tile_end * kBf16Rows, rows) && fits; ++i) {
      for (int64_t c = 0; c < chunks_of(args.k, kDepth) && fits; ++c) {
        const Chunk chunk = chunk_at(args.k, kDepth, c, kStep);
        fits = pack_row(format, args, row + i, chunk.k, chunk.count, kStep, out + chunk.k * rows + i * chunk.padded,
                        &extent);
      }
    }
  });
  return fits && extent.lowest >= kLowestNormal ? extent.lowest : kNotExact;
}

void gemm_many_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                             int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    const int lowest = lowest_scale<F>(exponent);
    const int64_t first = tile_begin * kBf16Rows, count = min_of(tile_end * kBf16Rows, rows) - first;
    alignas(64) uint16_t b[kPanel * kDepth];
    for_each_strip<uint16_t, kStep, kPanel>(
        args, row + first, count, column_begin, column_end, kDepth,
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const uint32_t misfits = decode_panel<F>(args, column, column_end, chunk, lowest, b);
          float before[kGemmRows * kPanel];
          if (__builtin_expect(misfits != 0, 0)) {
            for (int64_t i = 0; i < count * kPanel; ++i) {
              before[i] = accumulate ? strip[i / kPanel * kGemmColumns + i % kPanel] : 0;
            }
          }
          for (int64_t i = 0; i < count; i += kBf16Rows) {
            const uint16_t* from = a + chunk.k * rows + (first + i) * chunk.padded;
            with_rows<kBf16Rows>(count - i, [&](auto r) {
              multiply_tile<decltype(r)::value>(from, b, chunk.padded, strip + i * kGemmColumns, accumulate);
            });
          }
          for (int64_t j = 0; j < kPanel; ++j) {
            if (misfits >> j & 1) {
              correct_column<F, kPanel>(args, row + first, count, column + j, chunk, before + j, strip + j);
            }
          }
        });
  });
}

MXFP8_GEMM_KERNEL(gemm_many_bf16, kBf16Rows, sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
