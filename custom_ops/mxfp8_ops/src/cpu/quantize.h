// MXFP8Quantize and MXFP8Dequantize, and packing, which quantizes a weight and measures the error.
#pragma once
#include "../mxfp8_ops.h"
#include "kernels/kernels.h"

namespace mxfp8 {

constexpr int64_t kColumnTile = 64;  // columns that a kernel of strided blocks computes at once
constexpr int64_t kPackDepth = 8;    // blocks along K in one tile of the transposing pack

// x is [outer, K, inner] for quantize; for pack it is [N, K] or, transposed, [K, N], with `stride` values per row.
struct QuantizeArgs {
  int dtype;
  const void* x;
  int64_t outer, k, inner, stride;
  int format;
  uint32_t increment;  // formats.scale_increment
  uint8_t* elements;
  uint8_t* scales;
  // For pack_columns: x is one tile or less of it; elements are [kColumnTile, kPackDepth * 32], of which the whole
  // blocks of k are written.
  bool whole_tile = false;
};

// One task's share of mxfp8_pack_stats. Blocks that hold a NaN or Inf count in neither sum.
struct Stats {
  double signal = 0;
  double noise = 0;
  int64_t first_nonfinite = -1;
};

struct DequantizeArgs {
  int format;
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t outer, k, inner;
  int dtype;
  void* y;
};

MXFP8_KERNEL(void, quantize_rows, const QuantizeArgs&, int64_t row_begin, int64_t row_end, Stats*)
MXFP8_KERNEL(void, quantize_columns, const QuantizeArgs&, int64_t tile_begin, int64_t tile_end)
// `stats` may be null.
MXFP8_KERNEL(void, pack_columns, const QuantizeArgs&, int64_t tile_begin, int64_t tile_end, Stats*)
MXFP8_KERNEL(void, dequantize_rows, const DequantizeArgs&, int64_t row_begin, int64_t row_end)
MXFP8_KERNEL(void, dequantize_columns, const DequantizeArgs&, int64_t tile_begin, int64_t tile_end)

void quantize(const Kernels&, const Parallel&, const QuantizeArgs&);
void dequantize(const Kernels&, const Parallel&, const DequantizeArgs&);
// args.outer is N; `transposed` says that args.x is [K, N].
void pack(const Kernels&, const Parallel&, const QuantizeArgs&, bool transposed, mxfp8_pack_stats* stats);

}  // namespace mxfp8
