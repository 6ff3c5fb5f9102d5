// The split of quantize, dequantize and pack into tasks, and their entry points.
#include "quantize.h"

#include <vector>

#include "arguments.h"
#include "tasks.h"

namespace mxfp8 {

void quantize(const Kernels& kernels, const Parallel& parallel, const QuantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_equal_ranges(parallel, args.outer, args.k, [&](int64_t, int64_t begin, int64_t end) {
      quantize_rows_kernels[kernels.column](args, begin, end, nullptr);
    });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_equal_ranges(parallel, tiles, tile_values, [&](int64_t, int64_t begin, int64_t end) {
      quantize_columns_kernels[kernels.column](args, begin, end);
    });
  }
}

void dequantize(const Kernels& kernels, const Parallel& parallel, const DequantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_equal_ranges(parallel, args.outer, args.k, [&](int64_t, int64_t begin, int64_t end) {
      dequantize_rows_kernels[kernels.column](args, begin, end);
    });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_equal_ranges(parallel, tiles, tile_values, [&](int64_t, int64_t begin, int64_t end) {
      dequantize_columns_kernels[kernels.column](args, begin, end);
    });
  }
}

void pack(const Kernels& kernels, const Parallel& parallel, const QuantizeArgs& args, bool transposed,
          mxfp8_pack_stats* result) {
  Stats total;
  if (args.outer != 0 && args.k != 0) {
    // Ranges do not depend on the number of threads, and their sums are added in order. So the result is the same for
    // any number of threads.
    int64_t count = args.outer;
    int64_t per_task = kTaskValues / args.k;
    if (transposed) {
      count = ceil_div(args.outer, kColumnTile) * ceil_div(args.k, kPackDepth * kBlock);
      per_task = kTaskValues / (kColumnTile * kPackDepth * kBlock);
    }
    per_task = std::max<int64_t>(1, per_task);
    std::vector<Stats> parts(size_t(ceil_div(count, per_task)));
    for_ranges(parallel, count, per_task, [&](int64_t task, int64_t begin, int64_t end) {
      if (transposed) {
        pack_columns_kernels[kernels.column](args, begin, end, &parts[size_t(task)]);
      } else {
        quantize_rows_kernels[kernels.column](args, begin, end, &parts[size_t(task)]);
      }
    });
    for (const Stats& part : parts) {
      total.signal += part.signal;
      total.noise += part.noise;
      if (part.first_nonfinite < 0) continue;
      if (total.first_nonfinite < 0 || part.first_nonfinite < total.first_nonfinite) {
        total.first_nonfinite = part.first_nonfinite;
      }
    }
  }
  *result = {total.signal, total.noise, total.first_nonfinite};
}

}  // namespace mxfp8

using namespace mxfp8;

extern "C" {

int mxfp8_quantize(int value_dtype, const void* x, int64_t outer, int64_t k, int64_t inner, int element_format,
                   int scale_rounding, uint8_t* elements, uint8_t* scales, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"outer", outer}, {"k", k}, {"inner", inner}});
    check_array(array("x", x, value_bytes(value_dtype)), {outer, k, inner});
    check_blocks(elements, scales, outer, k, inner);
    quantize(kernels_in_use(), checked_threads(threads),
             {value_dtype, x, outer, k, inner, k, element_format, scale_increment(element_format, scale_rounding),
              elements, scales});
  });
}

int mxfp8_dequantize(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k,
                     int64_t inner, int value_dtype, void* y, int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_sizes({{"outer", outer}, {"k", k}, {"inner", inner}});
    check_blocks(elements, scales, outer, k, inner);
    check_array(array("y", y, value_bytes(value_dtype)), {outer, k, inner});
    dequantize(kernels_in_use(), checked_threads(threads),
               {element_format, elements, scales, outer, k, inner, value_dtype, y});
  });
}

int mxfp8_pack(int value_dtype, const void* w, int64_t w_stride, int transposed, int64_t n, int64_t k,
               int element_format, int scale_rounding, uint8_t* elements, uint8_t* scales, mxfp8_pack_stats* stats,
               int threads) {
  return computed([&] {
    check_value_dtype("value_dtype", value_dtype);
    check_element_format("element_format", element_format);
    check_rounding("scale_rounding", scale_rounding);
    check_sizes({{"n", n}, {"k", k}});
    const int64_t rows = transposed != 0 ? k : n, columns = transposed != 0 ? n : k;
    check_range({"w_stride", w_stride}, columns, INT64_MAX);
    check_rows(array("w", w, value_bytes(value_dtype)), rows, columns, w_stride);
    check_blocks(elements, scales, n, k, 1);
    check_array(array("stats", stats, alignof(mxfp8_pack_stats)), {sizeof *stats / alignof(mxfp8_pack_stats)});
    pack(kernels_in_use(), checked_threads(threads),
         {value_dtype, w, n, k, 1, stride_of(rows, columns, w_stride), element_format,
          scale_increment(element_format, scale_rounding), elements, scales},
         transposed != 0, stats);
  });
}

}  // extern "C"
