// MXFP8Dequantize: numerics.dequantize, bit for bit. Rows (blocks contiguous) and columns (blocks `inner` apart), as in
// quantize.cpp; a row of the columns layout is one (outer, k) pair. Bytes moved per value: 1.03 read, 4 or 2 written.
#include "codec.h"
#include "kernels.h"

namespace mxfp8::MXFP8_ISA {
namespace {

template <class F, class D>
void rows(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t start = block * kBlock;
      const uint8_t* elements = args.elements + row * args.k + start;
      auto* y = static_cast<typename D::Storage*>(args.y) + row * args.k + start;
      const float scale = scale_value(args.scales[row * blocks + block]);
      if (args.k - start >= kBlock) {
        for (int i = 0; i < kBlock; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
      } else {
        for (int64_t i = 0; i < args.k - start; ++i) y[i] = D::store(decode<F>(elements[i]) * scale);
      }
    }
  }
}

template <class F, class D>
void columns(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t outer = row / args.k;
    const uint8_t* scales = args.scales + (outer * blocks + row % args.k / kBlock) * args.inner;
    const uint8_t* elements = args.elements + row * args.inner;
    auto* y = static_cast<typename D::Storage*>(args.y) + row * args.inner;
    for (int64_t i = 0; i < args.inner; ++i) y[i] = D::store(decode<F>(elements[i]) * scale_value(scales[i]));
  }
}

}  // namespace

void dequantize_rows(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  with_format(args.format, [&](auto format) {
    with_dtype(args.dtype, [&](auto dtype) { rows<decltype(format), decltype(dtype)>(args, row_begin, row_end); });
  });
}

void dequantize_columns(const DequantizeArgs& args, int64_t row_begin, int64_t row_end) {
  with_format(args.format, [&](auto format) {
    with_dtype(args.dtype, [&](auto dtype) { columns<decltype(format), decltype(dtype)>(args, row_begin, row_end); });
  });
}

}  // namespace mxfp8::MXFP8_ISA
