// How each operation is split into tasks. A task is about kTaskWork units of work, so that small calls stay on the
// caller's thread; the numerics are in kernels/.
#include "ops.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

namespace mxfp8 {
namespace {

constexpr int64_t kTaskValues = 1 << 18;    // values that one quantize, dequantize or pack task handles: 30 us
constexpr int64_t kTaskProducts = 1 << 21;  // multiply-adds that one gemm task handles at least
constexpr int64_t kTasksPerThread = 4;      // so that a thread that is delayed does not delay the call
constexpr int64_t kColumnGranularity = 16;  // columns of y: whole cache lines of a float32 result

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(begin, end) over 0..count-1 in ranges of about `per_task`.
template <class Body>
void for_ranges(const Parallel& parallel, int64_t count, int64_t per_task, const Body& body) {
  per_task = std::max<int64_t>(1, per_task);
  parallel_for(parallel, ceil_div(count, per_task),
               [&](int64_t task) { body(task, task * per_task, std::min(count, (task + 1) * per_task)); });
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Scratch = std::unique_ptr<void, Free>;

}  // namespace

bool is_value_dtype(int dtype) { return dtype == MXFP8_FLOAT32 || dtype == MXFP8_FLOAT16 || dtype == MXFP8_BFLOAT16; }
bool is_element_format(int format) { return format == MXFP8_E4M3 || format == MXFP8_E5M2; }
size_t value_bytes(int dtype) { return dtype == MXFP8_FLOAT32 ? 4 : 2; }

uint32_t scale_increment(int format, int scale_rounding) {
  if (scale_rounding == MXFP8_CEIL) return 0x1fffff;  // carries when the mantissa exceeds 1.75
  if (scale_rounding == MXFP8_FLOOR) return 0;
  return format == MXFP8_E4M3 ? 1u << 19 : 1u << 20;  // half a unit in the last place of the element
}

void quantize(const Kernels& kernels, const Parallel& parallel, const QuantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_ranges(parallel, args.outer, kTaskValues / args.k,
               [&](int64_t, int64_t begin, int64_t end) { kernels.quantize_rows(args, begin, end, nullptr); });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_ranges(parallel, tiles, kTaskValues / tile_values,
               [&](int64_t, int64_t begin, int64_t end) { kernels.quantize_columns(args, begin, end); });
  }
}

void dequantize(const Kernels& kernels, const Parallel& parallel, const DequantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_ranges(parallel, args.outer, kTaskValues / args.k,
               [&](int64_t, int64_t begin, int64_t end) { kernels.dequantize_rows(args, begin, end); });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_ranges(parallel, tiles, kTaskValues / tile_values,
               [&](int64_t, int64_t begin, int64_t end) { kernels.dequantize_columns(args, begin, end); });
  }
}

void pack(const Kernels& kernels, const Parallel& parallel, const QuantizeArgs& args, bool transposed,
          mxfp8_pack_stats* result) {
  Stats total;
  if (args.outer != 0 && args.k != 0) {
    // Ranges do not depend on the number of threads, and are added in order: neither do the sums.
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
        kernels.pack_columns(args, begin, end, &parts[size_t(task)]);
      } else {
        kernels.quantize_rows(args, begin, end, &parts[size_t(task)]);
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

void gemm(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  const int64_t k_padded = ceil_div(args.k, 2 * kBlock) * 2 * kBlock;
  const int64_t most_rows = std::min(args.m, kGemmRows);
  Scratch packed;
  int scratch_value_bytes = 0;
  for (int64_t row = 0; row < args.m; row += kGemmRows) {
    const int64_t rows = std::min(kGemmRows, args.m - row);

    // Packs these rows for `kernel` and returns the lowest exponent in them.
    const auto pack_rows = [&](const GemmKernel& kernel) {
      if (kernel.value_bytes > scratch_value_bytes) {
        packed.reset(::operator new(size_t(most_rows * k_padded * kernel.value_bytes), std::align_val_t{64}));
        scratch_value_bytes = kernel.value_bytes;
      }
      int lowest[kGemmRows];
      const int64_t tiles = ceil_div(rows, kernel.tile_rows);
      const int64_t per_task = kTaskValues / std::max<int64_t>(1, kernel.tile_rows * args.k) + 1;
      for_ranges(parallel, tiles, per_task, [&](int64_t task, int64_t begin, int64_t end) {
        lowest[task] = kernel.pack(args, row, rows, begin, end, packed.get());
      });
      return *std::min_element(lowest, lowest + ceil_div(tiles, per_task));
    };

    // The first kernel that is there and can hold these rows; the last one can hold any.
    const bool fits_bf16 = args.a_scales != nullptr || args.a_format == MXFP8_BFLOAT16;
    const GemmKernel* kernel = nullptr;
    int exponent = kNotExact;
    const auto attempt = [&](const GemmKernel& candidate, bool wanted) {
      if (exponent != kNotExact || candidate.pack == nullptr || !wanted) return;
      kernel = &candidate;
      exponent = pack_rows(candidate);
    };
    attempt(kernels.gemm_skinny_bf16, fits_bf16 && rows <= kernels.gemm_skinny_bf16.tile_rows);
    attempt(kernels.gemm_skinny_f32,
            rows <= kernels.gemm_skinny_f32.tile_rows && !(fits_bf16 && kernels.gemm_bf16.pack != nullptr));
    attempt(kernels.gemm_bf16, fits_bf16);
    attempt(kernels.gemm_f32, true);

    const int64_t tiles = ceil_div(rows, kernel->tile_rows);
    const int64_t wanted = std::clamp<int64_t>(rows * args.n * args.k / kTaskProducts, 1,
                                               parallel.threads == 1 ? 1 : parallel.threads * kTasksPerThread);
    const int64_t columns =
        ceil_div(ceil_div(args.n, std::min(wanted, args.n)), kColumnGranularity) * kColumnGranularity;
    const int64_t across = ceil_div(args.n, columns);
    const int64_t tiles_per_task = ceil_div(tiles, std::min(tiles, ceil_div(wanted, across)));
    parallel_for(parallel, across * ceil_div(tiles, tiles_per_task), [&](int64_t task) {
      const int64_t tile = task / across * tiles_per_task;
      const int64_t column = task % across * columns;
      kernel->multiply(args, row, rows, tile, std::min(tiles, tile + tiles_per_task), column,
                       std::min(args.n, column + columns), packed.get(), exponent);
    });
  }
}

}  // namespace mxfp8
