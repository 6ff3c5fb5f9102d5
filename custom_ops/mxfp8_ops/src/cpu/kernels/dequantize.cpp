// MXFP8Dequantize: numerics.dequantize, bit for bit. Rows (blocks contiguous) and columns (blocks `inner` apart), as in
// quantize.cpp: a tile of the columns layout is one block deep and 64 columns wide, and up to 64 tiles side by side are
// done together: whole pages are read and written in turn. Bytes moved per value: 1.03 read, 4 or 2 written.
#include "codec.h"
#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace mxfp8::MXFP8_ISA {
namespace {

// Scales whose products with elements are normal float32 numbers, and so exact in bfloat16 too: the smallest element is
// 2^-16.
constexpr int kLowestPlainScale = 17;
constexpr int kHighestPlainScale = 246;  // above, the product with 2^8 that undoes halves_to_floats overflows

constexpr int64_t kRun = 64;  // tiles side by side

template <class F>
MXFP8_INLINE void decode_block(const uint8_t* elements, float scale, float* values) {
#if defined(__AVX2__)
  if (F::has_infinity || !any_nan_code(elements)) {
    return halves_to_floats<F>(elements, F::has_infinity ? scale : scale * 256.0f, values);
  }
#endif
  for (int i = 0; i < kBlock; ++i) values[i] = decode<F>(elements[i]) * scale;
}

template <class F, class D>
void rows(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  alignas(64) float values[kBlock];
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t start = block * kBlock;
      const uint8_t* elements = args.elements + row * args.k + start;
      auto* y = static_cast<typename D::Storage*>(args.y) + row * args.k + start;
      const int code = args.scales[row * blocks + block];
      const float scale = scale_value(uint32_t(code));
      if (args.k - start < kBlock) {
        for (int64_t i = 0; i < args.k - start; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
      } else if (code >= kLowestPlainScale && code <= kHighestPlainScale) {
        decode_block<F>(elements, scale, values);
        D::store_short_block(values, y);
      } else {
        for (int i = 0; i < kBlock; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
      }
    }
  }
}

template <class F, class D>
void columns(const DequantizeArgs& args, int64_t tile_begin, int64_t tile_end) {
  alignas(64) float scale[kRun * kColumnTile];
  alignas(64) float values[kBlock];
  for_each_run(args, tile_begin, tile_end, kRun, [&](const TileRun& run) {
    const uint8_t* scales = args.scales + run.scale;
    int outside = 0;
    for (int64_t i = 0; i < run.width; ++i) {
      scale[i] = scale_value(scales[i]);
      outside += scales[i] < kLowestPlainScale || scales[i] > kHighestPlainScale;
    }
    const int64_t plain = outside == 0 ? run.width / kBlock * kBlock : 0;
    for (int64_t row = 0; row < run.depth; ++row) {
      const uint8_t* elements = args.elements + run.start + row * args.inner;
      auto* y = static_cast<typename D::Storage*>(args.y) + run.start + row * args.inner;
      for (int64_t i = 0; i < plain; i += kBlock) {
        decode_block<F>(elements + i, 1.0f, values);
        for (int64_t j = 0; j < kBlock; ++j) values[j] *= scale[i + j];
        D::store_short_block(values, y + i);
      }
      for (int64_t i = plain; i < run.width; ++i) y[i] = D::store(decode<F>(elements[i]) * scale[i]);
    }
  });
}

}  // namespace

void dequantize_rows(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  with_format(args.format, [&](auto format) {
    with_dtype(args.dtype, [&](auto dtype) { rows<decltype(format), decltype(dtype)>(args, row_begin, row_end); });
  });
}

void dequantize_columns(const DequantizeArgs& args, int64_t tile_begin, int64_t tile_end) {
  with_format(args.format, [&](auto format) {
    with_dtype(args.dtype, [&](auto dtype) { columns<decltype(format), decltype(dtype)>(args, tile_begin, tile_end); });
  });
}

}  // namespace mxfp8::MXFP8_ISA
