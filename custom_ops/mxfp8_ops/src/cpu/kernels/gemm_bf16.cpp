// The gemms on the bf16 dot product (VDPBF16PS), which multiplies MXFP8 exactly: an element times its scale has four
// significant bits, so it is a bfloat16, and the products of two of those are exact in the float32 accumulator.
//
// The one thing in the way: VDPBF16PS reads subnormal inputs as zero and flushes subnormal results, whatever the
// processor's mode. Let ea and eb be the exponents of the lowest bit set anywhere in A and in a chunk of a row of B.
// Every product, and every sum of products before rounding, is a multiple of 2^(ea + eb). With ea, eb >= -126 no input
// is subnormal, and with ea + eb >= -126 no result is. A chunk of B that fails the test, or has NaN or Inf codes, goes
// to exact_dot; if A itself does not fit, pack says so and gemm_f32.cpp takes over. All-zero blocks say nothing about
// exponents, whatever their scale.
//
// Layouts and work split as in gemm_f32.cpp, in panels of four rows of B and deeper chunks.
#include "bf16.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;
constexpr int64_t kMostDepth = 2048;  // depth of a chunk: a tile of A and a panel of B, decoded, fill L1

// Deep chunks leave fewer sums to add up, but the chunk of A must stay in half of L2, which is 1 MiB.
MXFP8_INLINE int64_t depth_for(int64_t rows) { return rows <= kGemmRows / 2 ? kMostDepth : kMostDepth / 2; }

// Decodes a chunk of a row of B, scaled, into steps kTileColumns rows apart, and fetches what lies `ahead` bytes
// further. False if that is not exact.
template <class F>
MXFP8_INLINE bool decode_row(const Decoder<F>& decoder, const uint8_t* elements, const uint8_t* scales, int64_t count,
                             int64_t ahead, int lowest, uint16_t* out) {
  __m512i highest = _mm512_setzero_si512();
  bool fits = true;
  for (int64_t k = 0; k < count; k += kScaleValues) {
    const int64_t left = min_of(kScaleValues, count - k);
    const uint8_t* codes = elements + k;
    const uint8_t* block_scales = scales + k / kBlock;
    const __m128i some = load_scales(block_scales, blocks_of(left));
    const uint32_t wrong = outside(some, lowest, kMaxScale<F>) & ((1u << blocks_of(left)) - 1);
    if (__builtin_expect(wrong != 0, 0)) fits = fits && are_zero(codes, left, block_scales, wrong);
    const __m512i exponents = exponents_of(some);
    uint16_t* to = out + k * kTileColumns;
    for (int64_t i = 0; i * kStep < left; ++i, to += kStep * kTileColumns) {
      __builtin_prefetch(codes + i * kStep + ahead, 0, 2);
      const Values values = decoder.values(load_codes(codes + i * kStep, left - i * kStep), &highest);
      const __m512i exponent = _mm512_permutexvar_epi32(lanes_of_step(i), exponents);
      _mm512_store_si512(to, add_exponents(values.even, exponent));
      _mm512_store_si512(to + kBlock, add_exponents(values.odd, exponent));
    }
  }
  return fits && !Decoder<F>::has_special(highest);
}

// Decodes a panel: kTileColumns rows of B from `column` on, one chunk deep. Rows past `column_end` are zero. Returns a
// bit for every row that does not fit; values decoded there must not be used.
template <class F>
MXFP8_INLINE uint32_t decode_panel(const Decoder<F>& decoder, const GemmArgs& args, int64_t column, int64_t column_end,
                                   Chunk chunk, int lowest, uint16_t* out) {
  uint32_t misfits = 0;
  for (int64_t row = 0; row < kTileColumns; ++row) {
    uint16_t* to = out + row * kStep;
    if (column + row >= column_end) {
      for (int64_t k = 0; k < chunk.padded; k += kStep) std::memset(to + k * kTileColumns, 0, kStep * sizeof(uint16_t));
      continue;
    }
    const uint8_t* elements = args.b + (column + row) * args.k + chunk.k;
    const uint8_t* scales = args.b_scales + (column + row) * blocks_of(args.k) + chunk.k / kBlock;
    if (!decode_row(decoder, elements, scales, chunk.count, kTileColumns * args.k, lowest, to)) misfits |= 1u << row;
  }
  return misfits;
}

MXFP8_INLINE __m512bh load_bf16(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_load_si512(p)); }

template <int R>
MXFP8_INLINE void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t depth, float* strip, bool accumulate) {
  __m512 sums[R][kTileColumns];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kTileColumns; ++j) sums[i][j] = zero();
  }
  for (int64_t k = 0; k < depth; k += kStep) {
    for (int half = 0; half < kStep; half += kBlock) {
      __m512bh column[kTileColumns];
      for (int j = 0; j < kTileColumns; ++j) column[j] = load_bf16(b + j * kStep + half);
      for (int i = 0; i < R; ++i) {
        const __m512bh row = load_bf16(a + i * kStep + half);
        for (int j = 0; j < kTileColumns; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, column[j]);
      }
    }
    a += R * kStep;
    b += kTileColumns * kStep;
  }
  for (int i = 0; i < R; ++i) store_sums(sums[i], strip + i * kGemmColumns, accumulate);
}

}  // namespace

int gemm_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  auto* out = static_cast<uint16_t*>(packed);
  Extent extent;
  bool fits = true;
  const int64_t depth = depth_for(rows);
  const Tiles<> tiles{rows};
  with_a_format(args, [&](auto format) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t first = tiles.first_row(tile), tile_rows = tiles.rows_of(tile);
      for (int64_t i = 0; i < tile_rows; ++i) {
        for (int64_t c = 0; c < chunks_of(args.k, depth) && fits; ++c) {
          const Chunk chunk = chunk_at(args.k, depth, c, kStep);
          fits = pack_row(format, args, row + first + i, chunk.k, chunk.count, tile_rows * kStep,
                          out + tiles.offset(chunk, tile) + i * kStep, &extent);
        }
      }
    }
  });
  return fits && extent.lowest >= kLowestNormal ? extent.lowest : kNotExact;
}

void gemm_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  const Tiles<> tiles{rows};
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    const Decoder<F> decoder;
    const int lowest = lowest_scale<F>(exponent);
    const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
    alignas(64) uint16_t b[kTileColumns * kMostDepth];
    for_each_strip<uint16_t, kStep, kTileColumns>(
        args, row + first, count, column_begin, column_end, depth_for(rows),
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const uint32_t misfits = decode_panel(decoder, args, column, column_end, chunk, lowest, b);
          float before[kGemmRows * kTileColumns];
          if (__builtin_expect(misfits != 0, 0)) {
            for (int64_t i = 0; i < count * kTileColumns; ++i) {
              before[i] = accumulate ? strip[i / kTileColumns * kGemmColumns + i % kTileColumns] : 0;
            }
          }
          for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
            const uint16_t* from = a + tiles.offset(chunk, tile);
            float* to = strip + (tiles.first_row(tile) - first) * kGemmColumns;
            with_rows(tiles.rows_of(tile),
                      [&](auto r) { multiply_tile<decltype(r)::value>(from, b, chunk.padded, to, accumulate); });
          }
          for (int64_t j = 0; j < kTileColumns; ++j) {
            if (misfits >> j & 1) {
              correct_column<F, kTileColumns>(args, row + first, count, column + j, chunk, before + j, strip + j);
            }
          }
        });
  });
}

MXFP8_GEMM_KERNEL(gemm_bf16, kTileRows, sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
