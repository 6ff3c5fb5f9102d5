// The gemms on the bf16 dot product (VDPBF16PS), which multiplies MXFP8 exactly: an element times its scale has four
// significant bits, so it is a bfloat16, and the products of two of those are exact in the float32 accumulator.
//
// The one thing in the way: VDPBF16PS reads subnormal inputs as zero and flushes subnormal results, whatever the
// processor's mode. Let ea and eb be the exponents of the lowest bit set anywhere in A and in a panel of B. Every
// product, and every sum of products before rounding, is a multiple of 2^(ea + eb). With ea, eb >= -126 no input is
// subnormal, and with ea + eb >= -126 no result is. A panel that fails the test is decoded to float32 and
// multiplied by float32 arithmetic instead; if A itself does not fit bfloat16, pack says so and gemm_f32.cpp takes
// over. All-zero blocks (scale code 0) say nothing about exponents and are skipped in the test.
//
// Layouts and work split as in gemm_f32.cpp, at half the bytes per value and twice the depth.
#include "gemm.h"

#if defined(__AVX512BF16__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kLowestNormal = -126;
constexpr int kLowestBf16 = -133;  // exponent of the smallest subnormal bfloat16

// Exponent of the lowest bit an element can have, relative to its scale.
template <class F>
constexpr int kElementExponent = 1 - F::bias - F::mantissa_bits;

MXFP8_INLINE bool all_zero(const uint8_t* elements, int64_t count) {
  uint32_t any = 0;
  for (int64_t i = 0; i < min_of(count, kBlock); ++i) any |= elements[i] & 0x7f;
  return any == 0;
}

// Lowest exponent over `blocks` blocks of one row, all-zero blocks aside. NaN blocks count as large.
template <class F>
MXFP8_INLINE int lowest_exponent(const uint8_t* elements, int64_t k, const uint8_t* scales, int64_t blocks) {
  uint8_t lowest = 255;
  for (int64_t i = 0; i < blocks; ++i) lowest = scales[i] < lowest ? scales[i] : lowest;
  if (lowest == 0) {  // a true zero code, or a block of zeros: look
    lowest = 255;
    for (int64_t i = 0; i < blocks; ++i) {
      if (scales[i] < lowest && !all_zero(elements + i * kBlock, k - i * kBlock)) lowest = scales[i];
    }
  }
  return lowest - 127 + kElementExponent<F>;
}

// Decodes two blocks at a time, scaled, to bfloat16: both bytes of the value come from tables indexed by the element
// code (VPERMI2B), then the scale is added to the exponent of everything but zeros.
template <class F>
struct Decoder {
  // Largest code for which every finite element stays finite; smallest for which every nonzero one is normal.
  static constexpr int max_scale = 254 - F::emax;
  static constexpr int min_scale = 1 - kElementExponent<F>;
  __m512i low[2], high[2];  // bytes of the 128 magnitudes

  Decoder() {
    alignas(64) uint8_t low_bytes[128], high_bytes[128];
    for (uint32_t code = 0; code < 128; ++code) {
      low_bytes[code] = uint8_t(decode_bits<F>(code) >> 16);
      high_bytes[code] = uint8_t(decode_bits<F>(code) >> 24);
    }
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(low_bytes + 64 * i);
      high[i] = _mm512_load_si512(high_bytes + 64 * i);
    }
  }

  MXFP8_INLINE_MEMBER void two_blocks(const uint8_t* elements, const uint8_t* scales, uint16_t* first,
                                      uint16_t* second) const {
    // Interleaving works within 128-bit lanes: this order makes its two results the two blocks.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(elements));
    const __m512i low_bytes = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    // magnitude | (codes & 0x80)
    const __m512i high_bytes = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
    const __mmask64 special =
        _mm512_cmpgt_epu8_mask(_mm512_and_si512(codes, _mm512_set1_epi8(0x7f)), _mm512_set1_epi8(F::max_code));
    if (__builtin_expect(special != 0, 0)) {
      any_block(elements, scales[0], first);
      any_block(elements + kBlock, scales[1], second);
      return;
    }
    store_scaled(_mm512_unpacklo_epi8(low_bytes, high_bytes), elements, scales[0], first);
    store_scaled(_mm512_unpackhi_epi8(low_bytes, high_bytes), elements + kBlock, scales[1], second);
  }

  MXFP8_INLINE_MEMBER static void store_scaled(__m512i bits, const uint8_t* elements, uint8_t scale, uint16_t* out) {
    if (__builtin_expect(scale < min_scale || scale > max_scale, 0)) return any_block(elements, scale, out);
    const __mmask32 nonzero = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x7fff));
    const __m512i exponent = _mm512_set1_epi16(short((scale - 127) * 128));
    _mm512_storeu_si512(out, _mm512_mask_add_epi16(bits, nonzero, bits, exponent));
  }

  // One block of any scale and any elements. Truncation is exact: the caller has tested the exponent.
  __attribute__((noinline)) static void any_block(const uint8_t* elements, uint8_t scale, uint16_t* out) {
    alignas(64) float values[kBlock];
    decode_block<F>(elements, kBlock, scale, values);
    for (int i = 0; i < kBlock; ++i) out[i] = uint16_t(bits_of(values[i]) >> 16);
  }

  // `blocks` blocks of a row that has `count` elements left, `step` values apart in `out`.
  MXFP8_INLINE_MEMBER void row(const uint8_t* elements, int64_t count, const uint8_t* scales, int64_t blocks,
                               int64_t step, uint16_t* out) const {
    int64_t i = 0;
    for (; i + 1 < blocks && count - i * kBlock >= 2 * kBlock; i += 2) {
      two_blocks(elements + i * kBlock, scales + i, out + i * step, out + (i + 1) * step);
    }
    for (; i < blocks; ++i) {
      alignas(64) uint8_t padded[2 * kBlock] = {};
      alignas(64) uint16_t unused[kBlock];
      const uint8_t both[2] = {scales[i], 127};
      std::memcpy(padded, elements + i * kBlock, size_t(min_of(kBlock, count - i * kBlock)));
      two_blocks(padded, both, out + i * step, unused);
    }
  }
};

// Decodes a panel of B as decode_panel does, to bfloat16, and returns its lowest exponent.
template <class F>
MXFP8_INLINE int decode_panel_bf16(const Decoder<F>& decoder, const GemmArgs& args, int64_t column, int64_t column_end,
                                   Chunk chunk, uint16_t* out) {
  const int64_t blocks = blocks_of(args.k);
  const int64_t start = chunk.block * kBlock;
  int lowest = kAllZero;
  for (int64_t row = 0; row < kGemmPanel; ++row) {
    if (column + row >= column_end) {
      for (int64_t i = 0; i < chunk.blocks; ++i) {
        std::memset(out + (i * kGemmPanel + row) * kBlock, 0, kBlock * sizeof(uint16_t));
      }
      continue;
    }
    const uint8_t* elements = args.b + (column + row) * args.k + start;
    const uint8_t* scales = args.b_scales + (column + row) * blocks + chunk.block;
    const int exponent = lowest_exponent<F>(elements, args.k - start, scales, chunk.blocks);
    lowest = exponent < lowest ? exponent : lowest;
    prefetch_next_panel(args, column + row, chunk);
    decoder.row(elements, args.k - start, scales, chunk.blocks, kGemmPanel * kBlock, out + row * kBlock);
  }
  return lowest;
}

MXFP8_INLINE __m512bh load_bf16(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

template <int R>
MXFP8_INLINE void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t blocks, float* strip, bool accumulate) {
  __m512 sums[R][kGemmPanel];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kGemmPanel; ++j) sums[i][j] = zero();
  }
  for (int64_t block = 0; block < blocks; ++block) {
    __m512bh column[kGemmPanel];
    for (int j = 0; j < kGemmPanel; ++j) column[j] = load_bf16(b + j * kBlock);
    for (int i = 0; i < R; ++i) {
      const __m512bh row = load_bf16(a + i * kBlock);
      for (int j = 0; j < kGemmPanel; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, column[j]);
    }
    a += R * kBlock;
    b += kGemmPanel * kBlock;
  }
  for (int i = 0; i < R; ++i) store_sums(sums[i], strip + i * kGemmColumns, accumulate);
}

// One row of packed A times a panel that is decoded to float32: for panels the dot product would flush.
void multiply_row_f32(const uint16_t* a, int64_t a_step, const float* b, int64_t blocks, float* strip,
                      bool accumulate) {
  __m512 sums[kGemmPanel] = {zero(), zero(), zero(), zero()};
  for (int64_t block = 0; block < blocks; ++block) {
    for (int lane = 0; lane < kBlock; lane += kLanes) {
      const auto* from = reinterpret_cast<const __m256i*>(a + block * a_step + lane);
      const __m512 row = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
      for (int j = 0; j < kGemmPanel; ++j) {
        sums[j] = multiply_add(row, load(b + (block * kGemmPanel + j) * kBlock + lane), sums[j]);
      }
    }
  }
  store_sums(sums, strip, accumulate);
}

template <class F>
int pack_elements(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                  uint16_t* out) {
  const Decoder<F> decoder;
  const int64_t blocks = blocks_of(args.k);
  int lowest = kAllZero;
  for (int64_t i = tile_begin * kTileRows; i < min_of(tile_end * kTileRows, rows); ++i) {
    const int64_t tile = i / kTileRows;
    const int64_t tile_rows = min_of(kTileRows, rows - tile * kTileRows);
    const auto* a = static_cast<const uint8_t*>(args.a) + (row + i) * args.a_stride;
    const uint8_t* scales = args.a_scales + (row + i) * blocks;
    const int exponent = lowest_exponent<F>(a, args.k, scales, blocks);
    lowest = exponent < lowest ? exponent : lowest;
    for (int64_t c = 0; c < chunks_of<uint16_t>(args.k); ++c) {
      const Chunk chunk = chunk_at<uint16_t>(args.k, c);
      uint16_t* to = out + tile_offset(rows, chunk, tile) + i % kTileRows * kBlock;
      const int64_t k = chunk.block * kBlock;
      decoder.row(a + k, args.k - k, scales + chunk.block, chunk.blocks, tile_rows * kBlock, to);
    }
  }
  return lowest < kLowestBf16 ? kNotExact : lowest;
}

int pack_values(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, uint16_t* out) {
  uint16_t lowest = 255;  // exponent field
  for (int64_t i = tile_begin * kTileRows; i < min_of(tile_end * kTileRows, rows); ++i) {
    const int64_t tile = i / kTileRows;
    const int64_t tile_rows = min_of(kTileRows, rows - tile * kTileRows);
    const auto* a = static_cast<const uint16_t*>(args.a) + (row + i) * args.a_stride;
    for (int64_t k = 0; k < args.k; ++k) {
      const uint16_t exponent = (a[k] & 0x7fff) == 0 ? 255 : (a[k] >> 7) & 0xff;
      lowest = exponent < lowest ? exponent : lowest;
    }
    for (int64_t c = 0; c < chunks_of<uint16_t>(args.k); ++c) {
      const Chunk chunk = chunk_at<uint16_t>(args.k, c);
      uint16_t* to = out + tile_offset(rows, chunk, tile) + i % kTileRows * kBlock;
      for (int64_t j = 0; j < chunk.blocks; ++j) {
        const int64_t k = (chunk.block + j) * kBlock;
        const int64_t count = min_of(kBlock, args.k - k);
        uint16_t* block = to + j * tile_rows * kBlock;
        if (count < kBlock) std::memset(block, 0, kBlock * sizeof(uint16_t));
        std::memcpy(block, a + k, size_t(count) * sizeof(uint16_t));
      }
    }
  }
  return (lowest == 0 ? 1 : lowest) - 127 - 7;
}

}  // namespace

int gemm_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  auto* out = static_cast<uint16_t*>(packed);
  if (args.a_scales == nullptr) {
    if (args.a_format != MXFP8_BFLOAT16) return kNotExact;
    return pack_values(args, row, rows, tile_begin, tile_end, out);
  }
  int lowest = kAllZero;
  with_format(args.a_format, [&](auto format) {
    lowest = pack_elements<decltype(format)>(args, row, rows, tile_begin, tile_end, out);
  });
  return lowest;
}

void gemm_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    const Decoder<F> decoder;
    alignas(64) uint16_t b[kGemmPanel * kDepth<uint16_t>];
    alignas(64) float b_f32[kGemmPanel * kDepth<uint16_t>];
    for_each_strip<uint16_t>(
        args, row, rows, tile_begin, tile_end, column_begin, column_end,
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const int lowest = decode_panel_bf16(decoder, args, column, column_end, chunk, b);
          const bool exact = exponent >= kLowestNormal && lowest >= kLowestNormal && exponent + lowest >= kLowestNormal;
          if (!exact) decode_panel<F>(args, column, column_end, chunk, b_f32);
          for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
            const uint16_t* from = a + tile_offset(rows, chunk, tile);
            float* to = strip + (tile - tile_begin) * kTileRows * kGemmColumns;
            const int64_t tile_rows = min_of(kTileRows, rows - tile * kTileRows);
            if (exact) {
              with_rows(tile_rows,
                        [&](auto r) { multiply_tile<decltype(r)::value>(from, b, chunk.blocks, to, accumulate); });
            } else {
              for (int64_t i = 0; i < tile_rows; ++i) {
                multiply_row_f32(from + i * kBlock, tile_rows * kBlock, b_f32, chunk.blocks, to + i * kGemmColumns,
                                 accumulate);
              }
            }
          }
        });
  });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
