// MXFP8Dequantize: numerics.dequantize, bit for bit. It has the rows layout (blocks contiguous) and the columns layout
// (blocks `inner` apart) of quantize.cpp. A tile of the columns layout is one block deep and 64 columns wide. Up to 64
// tiles side by side are done together, so that whole pages are read and written in turn. Bytes moved per value: 1.03
// read, 4 or 2 written.
#include "../../quantize.h"
#include "../common/codec.h"
#include "decode_row.h"
#include "tiles.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kRun = 64;  // tiles side by side

template <class F, class D>
void rows(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  auto* y = static_cast<typename D::Storage*>(args.y);
  for (int64_t row = row_begin; row < row_end; ++row) {
    decode_row<F, D>(args.elements + row * args.k, args.scales + row * blocks, args.k, y + row * args.k);
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
