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
// Layouts and work split as in gemm_f32.cpp at half the bytes: a panel of B is 8 KiB.
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

// Decodes 32 elements, scaled, to bfloat16.
template <class F>
struct Decoder {
  // Largest code for which every finite element stays finite; smallest for which every nonzero one is normal.
  static constexpr int max_scale = 254 - F::emax;
  static constexpr int min_scale = 1 - kElementExponent<F>;
  __m512i subnormals;  // bfloat16 of the elements below the first normal one, by code; zero in the other lanes
  Decoder() {
    alignas(64) uint16_t table[kBlock] = {};
    for (uint32_t i = 1; i < (1u << F::mantissa_bits); ++i) table[i] = uint16_t(decode_bits<F>(i) >> 16);
    subnormals = _mm512_load_si512(table);
  }

  __m512i operator()(const uint8_t* elements, uint8_t scale) const {
    if (scale < min_scale || scale > max_scale) return any_scale(elements, scale);
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements)));
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i exponent = _mm512_set1_epi16(short((scale - 127) * 128));
    const __m512i bias = _mm512_add_epi16(exponent, _mm512_set1_epi16((127 - F::bias) * 128));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 7 - F::mantissa_bits), bias);
    const __m512i table = _mm512_mask_add_epi16(subnormals, (1u << (1 << F::mantissa_bits)) - 2, subnormals, exponent);
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(1 << F::mantissa_bits));
    bits = _mm512_mask_permutexvar_epi16(bits, small, magnitude, table);
    const __mmask32 special = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(F::max_code));
    if (__builtin_expect(special != 0, 0)) {
      bits = _mm512_mask_mov_epi16(bits, special, _mm512_set1_epi16(kQuietNan >> 16));
      if (F::has_infinity) {
        const __mmask32 infinite = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(F::max_code + 1));
        bits = _mm512_mask_mov_epi16(bits, infinite, _mm512_set1_epi16(kInfinity >> 16));
      }
    }
    // bits | (codes << 8 & 0x8000)
    return _mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(short(0x8000)), 0xf8);
  }

  // The same for codes at the ends of the range. Truncation is exact: the caller has tested the exponent.
  __attribute__((noinline)) static __m512i any_scale(const uint8_t* elements, uint8_t scale) {
    alignas(64) float values[kBlock];
    alignas(64) uint16_t out[kBlock];
    decode_block<F>(elements, kBlock, scale, values);
    for (int i = 0; i < kBlock; ++i) out[i] = uint16_t(bits_of(values[i]) >> 16);
    return _mm512_load_si512(out);
  }

  void block(const uint8_t* elements, int64_t count, uint8_t scale, uint16_t* out) const {
    if (count >= kBlock) {
      _mm512_storeu_si512(out, (*this)(elements, scale));
    } else {
      alignas(64) uint8_t padded[kBlock] = {};
      std::memcpy(padded, elements, size_t(count));
      _mm512_storeu_si512(out, (*this)(padded, scale));
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
    for (int64_t i = 0; i < chunk.blocks; ++i) {
      decoder.block(elements + i * kBlock, args.k - start - i * kBlock, scales[i],
                    out + (i * kGemmPanel + row) * kBlock);
    }
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
    for (int64_t c = 0; c < chunks_of(args.k); ++c) {
      const Chunk chunk = chunk_at(args.k, c);
      uint16_t* to = out + tile_offset(rows, chunk, tile) + i % kTileRows * kBlock;
      for (int64_t j = 0; j < chunk.blocks; ++j) {
        const int64_t block = chunk.block + j;
        decoder.block(a + block * kBlock, args.k - block * kBlock, scales[block], to + j * tile_rows * kBlock);
      }
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
    for (int64_t c = 0; c < chunks_of(args.k); ++c) {
      const Chunk chunk = chunk_at(args.k, c);
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
    alignas(64) uint16_t b[kGemmPanel * kGemmDepth];
    alignas(64) float b_f32[kGemmPanel * kGemmDepth];
    for_each_strip(
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
