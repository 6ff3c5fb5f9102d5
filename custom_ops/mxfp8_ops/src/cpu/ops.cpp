// How each operation is split into tasks. A task is about kTaskWork units of work, so that small calls stay on the
// caller's thread; the numerics are in kernels/.
#include "ops.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>
#include <vector>

#include "profile.h"

namespace mxfp8 {
namespace {

constexpr int64_t kTaskValues = 1 << 18;    // values that one quantize, dequantize or pack task handles: 30 us
constexpr int64_t kLeastValues = 1 << 16;   // values worth a second thread
constexpr int64_t kTaskProducts = 1 << 21;  // multiply-adds that one gemm task handles: 10 us
constexpr int64_t kDecodeRows = 12;         // rows whose multiply-adds take as long as reading and decoding B
constexpr int64_t kGemmStep = 2 * kBlock;   // values that a gemm kernel multiplies at once, and pads rows of A to
constexpr int64_t kPackValues = 1 << 16;    // values of A that one task of a gemm packs
constexpr int64_t kPackedBytes = 8 << 20;   // bytes of A packed at a time
constexpr int64_t kStripBytes = 1 << 20;    // bytes of a strip that has more rows than any kernel takes
constexpr int64_t kTasksPerThread = 4;      // so that a thread that is delayed does not delay the call
constexpr int64_t kColumnGranularity = 16;  // columns of y: whole cache lines of a float32 result; kBlock if quantized

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(begin, end) over 0..count-1 in ranges of about `per_task`.
template <class Body>
void for_ranges(const Parallel& parallel, int64_t count, int64_t per_task, const Body& body) {
  per_task = std::max<int64_t>(1, per_task);
  parallel_for(parallel, ceil_div(count, per_task),
               [&](int64_t task) { body(task, task * per_task, std::min(count, (task + 1) * per_task)); });
}

// How many ranges `count` things of so many values are cut into: as many for each thread.
int64_t equal_ranges(const Parallel& parallel, int64_t count, int64_t values_each) {
  const int64_t values = count * values_each;
  return values < kLeastValues ? 1 : ceil_div(ceil_div(values, kTaskValues), parallel.threads) * parallel.threads;
}

// The same in ranges of equal size.
template <class Body>
void for_equal_ranges(const Parallel& parallel, int64_t count, int64_t values_each, const Body& body) {
  for_ranges(parallel, count, ceil_div(count, equal_ranges(parallel, count, values_each)), body);
}

// The row of a code, or null.
template <size_t N>
const Dtype* find(const Dtype (&rows)[N], int code) {
  const Dtype* row = std::find_if(rows, rows + N, [code](const Dtype& each) { return each.code == code; });
  return row == rows + N ? nullptr : row;
}

template <size_t N>
const Dtype& row_with_code(const Dtype (&rows)[N], int code) {
  const Dtype* row = find(rows, code);
  if (row == nullptr) std::abort();
  return *row;
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Scratch = std::unique_ptr<void, Free>;

}  // namespace

bool is_value_dtype(int dtype) { return find(kValueDtypes, dtype) != nullptr; }
bool is_element_format(int format) { return find(kElementFormats, format) != nullptr; }
size_t value_bytes(int dtype) { return size_t(row_with_code(kValueDtypes, dtype).bytes); }
uint32_t scale_increment(int format, int scale_rounding) {
  if (scale_rounding < 0 || scale_rounding >= int(std::size(kScaleRoundings))) std::abort();
  return row_with_code(kElementFormats, format).increments[scale_rounding];
}

void quantize(const Kernels& kernels, const Parallel& parallel, const QuantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_equal_ranges(parallel, args.outer, args.k,
                     [&](int64_t, int64_t begin, int64_t end) { kernels.quantize_rows(args, begin, end, nullptr); });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_equal_ranges(parallel, tiles, tile_values,
                     [&](int64_t, int64_t begin, int64_t end) { kernels.quantize_columns(args, begin, end); });
  }
}

void dequantize(const Kernels& kernels, const Parallel& parallel, const DequantizeArgs& args) {
  if (args.outer == 0 || args.k == 0 || args.inner == 0) return;
  if (args.inner == 1) {
    for_equal_ranges(parallel, args.outer, args.k,
                     [&](int64_t, int64_t begin, int64_t end) { kernels.dequantize_rows(args, begin, end); });
  } else {
    const int64_t tiles = args.outer * ceil_div(args.k, kBlock) * ceil_div(args.inner, kColumnTile);
    const int64_t tile_values = std::min(args.k, kBlock) * std::min(args.inner, kColumnTile);
    for_equal_ranges(parallel, tiles, tile_values,
                     [&](int64_t, int64_t begin, int64_t end) { kernels.dequantize_columns(args, begin, end); });
  }
}

void embedding(const Kernels& kernels, const Parallel& parallel, const EmbeddingArgs& args) {
  if (args.count == 0 || args.d == 0) return;
  for_equal_ranges(parallel, args.count, args.d,
                   [&](int64_t, int64_t begin, int64_t end) { kernels.embedding(args, begin, end); });
}

void norm_quantize(const Kernels& kernels, const Parallel& parallel, const NormArgs& args) {
  if (args.rows == 0 || args.k == 0) return;
  const int64_t tasks = equal_ranges(parallel, args.rows, args.k), per_task = ceil_div(args.rows, tasks);
  const int64_t room = ceil_div(std::min(norm_rows(args.k), per_task) * args.k, 16) * 16;  // whole cache lines
  const auto bytes = size_t(ceil_div(args.rows, per_task) * room) * sizeof(float);
  const Scratch rooms(::operator new(bytes, std::align_val_t{64}));
  for_ranges(parallel, args.rows, per_task, [&](int64_t task, int64_t begin, int64_t end) {
    kernels.norm_quantize(args, begin, end, static_cast<float*>(rooms.get()) + task * room);
  });
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

namespace {

// Rows of A, packed for the kernel that multiplies them.
struct Strip {
  int64_t row, rows;
  const GemmRow* gemm;
  void* packed;
  int exponent;  // exponent of the lowest bit in `packed`
};

// The first row of the table after `last` for these rows; null stands for before the first.
const GemmRow* next_gemm(const Kernels& kernels, const GemmArgs& args, int64_t rows, const GemmRow* last) {
  const bool fits_bf16 = args.a_scales != nullptr || args.rounds_a || args.a_format == MXFP8_BFLOAT16;
  const auto all = [&](int format) {
    return args.a_scales != nullptr && args.a_format == format && args.b_format == format;
  };
  const bool all_e4m3 = all(MXFP8_E4M3), all_int8 = all(MXFP8_INT8);
  const Values values = fits_bf16 && kernels.has_bf16 ? Values::kBf16 : Values::kOther;
  const auto takes = [&](const GemmRow& row) {
    if (rows < row.least_rows || rows > row.most_rows) return false;
    return row.values == values || row.values == Values::kAny || (row.values == Values::kE4M3 && all_e4m3) ||
           (row.values == Values::kInt8 && all_int8);
  };
  const GemmRow* next = last == nullptr ? kernels.gemms : last + 1;
  while (!takes(*next)) ++next;  // ends at the last, which takes anything
  return next;
}

// Appends strips of up to `most` rows, for gemms after `last`.
void add_strips(int64_t begin, int64_t end, int64_t most, const GemmRow* last, std::vector<Strip>* strips) {
  for (int64_t row = begin; row < end; row += most) {
    strips->push_back({row, std::min(most, end - row), last, nullptr, kNotExact});
  }
}

// Bytes of the strip's packed rows, whole tiles of them.
size_t packed_bytes(const Strip& strip, int64_t k_padded) {
  const int64_t tile_rows = strip.gemm->kernel->tile_rows;
  return size_t(ceil_div(strip.rows, tile_rows) * tile_rows * k_padded * strip.gemm->kernel->value_bytes);
}

// Packs the strips, all in one turn of the threads; those whose values a kernel cannot hold once more, for the next, in
// strips of as many rows as any kernel takes.
void pack_strips(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args, GemmsUsed* used,
                 std::vector<Strip>* strips, std::vector<Scratch>* scratch) {
  const int64_t k_padded = ceil_div(args.k, kGemmStep) * kGemmStep;
  std::vector<Strip> open;
  open.swap(*strips);
  while (!open.empty()) {
    size_t bytes = 0;
    for (Strip& strip : open) {
      strip.gemm = next_gemm(kernels, args, strip.rows, strip.gemm);
      bytes += packed_bytes(strip, k_padded);
    }
    scratch->emplace_back(::operator new(bytes, std::align_val_t{64}));
    auto* room = static_cast<char*>(scratch->back().get());
    for (Strip& strip : open) {
      strip.packed = room;
      room += packed_bytes(strip, k_padded);
    }
    const int64_t parts = std::max<int64_t>(1, ceil_div(open[0].rows * args.k, kPackValues));  // tasks for a strip
    std::vector<int> lowest(open.size() * size_t(parts), kAllZero);
    parallel_for(parallel, int64_t(open.size()) * parts, [&](int64_t task) {
      const Strip& strip = open[size_t(task / parts)];
      const int64_t tiles = ceil_div(strip.rows, strip.gemm->kernel->tile_rows);
      const int64_t begin = tiles * (task % parts) / parts, end = tiles * (task % parts + 1) / parts;
      if (begin == end) return;
      lowest[size_t(task)] = strip.gemm->kernel->pack(args, strip.row, strip.rows, begin, end, strip.packed);
    });
    std::vector<Strip> misfits;
    for (size_t i = 0; i < open.size(); ++i) {
      const auto first = lowest.begin() + int64_t(i) * parts;
      open[i].exponent = *std::min_element(first, first + parts);
      if (open[i].exponent == kNotExact) {
        add_strips(open[i].row, open[i].row + open[i].rows, kGemmRows, open[i].gemm, &misfits);
      } else {
        strips->push_back(open[i]);
        if (used != nullptr) *used |= uint32_t(1) << (open[i].gemm - kernels.gemms);
      }
    }
    open = misfits;
  }
}

// How many rows to pack at a time: the packed rows should stay in L2.
int64_t rows_of_strip(const Kernels& kernels, int64_t k) {
  int64_t rows = kernels.strip_rows;
  while (rows > kGemmRows && 2 * rows * k > kStripBytes) rows /= 2;
  return rows;
}

// The arguments of some of the rows.
GemmArgs rows_of(const GemmArgs& args, int64_t begin, int64_t end) {
  GemmArgs part = args;
  const int64_t a_bytes = args.a_scales != nullptr || args.k == 0 ? 1 : int64_t(value_bytes(args.a_format));
  part.m = end - begin;
  part.a = static_cast<const char*>(args.a) + begin * args.a_stride * a_bytes;
  if (args.y != nullptr) {
    part.y = static_cast<char*>(args.y) + begin * args.y_stride * int64_t(value_bytes(args.y_dtype));
  }
  if (args.y_format != 0) {
    part.y_elements = args.y_elements + begin * args.n;
    part.y_scales = args.y_scales + begin * ceil_div(args.n, kBlock);
  }
  if (args.a_scales != nullptr) part.a_scales = args.a_scales + begin * ceil_div(args.k, kBlock);
  if (args.factor != nullptr) {
    part.factor = static_cast<const char*>(args.factor) + begin * args.n * int64_t(value_bytes(args.factor_dtype));
  }
  return part;
}

void multiply(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args, GemmsUsed* used) {
  const int64_t strip_rows = rows_of_strip(kernels, args.k);
  if (parallel.threads > 1 && args.m >= parallel.threads * strip_rows * 3 / 4) {
    // Rows enough for strips of each thread's own: a packed strip stays in the cache of its thread, and no thread waits
    // for another.
    const int64_t turns = ceil_div(args.m, parallel.threads * strip_rows);
    const Parallel alone{nullptr, nullptr, 1};
    for_ranges(parallel, args.m, ceil_div(args.m, turns * parallel.threads),
               [&](int64_t, int64_t begin, int64_t end) { multiply(kernels, alone, rows_of(args, begin, end), used); });
    return;
  }
  const int64_t strip_bytes = 2 * strip_rows * std::max<int64_t>(args.k, 1);
  const int64_t most_strips = std::max<int64_t>(1, kPackedBytes / strip_bytes);
  for (int64_t begin = 0; begin < args.m; begin += most_strips * strip_rows) {
    const int64_t end = std::min(args.m, begin + most_strips * strip_rows);
    std::vector<Strip> strips;
    add_strips(begin, end, strip_rows, nullptr, &strips);
    std::vector<Scratch> scratch;
    pack_strips(kernels, parallel, args, used, &strips, &scratch);

    // Each task multiplies one strip with a range of columns. The end of a row costs what a whole step does.
    const int64_t depth = ceil_div(args.k, kGemmStep) * kGemmStep;
    const int64_t work = (end - begin + int64_t(strips.size()) * kDecodeRows) * args.n * depth / kTaskProducts;
    int64_t wanted = 1;
    if (parallel.threads > 1 && work > 1) {
      wanted =
          ceil_div(std::min<int64_t>(work, parallel.threads * kTasksPerThread), parallel.threads) * parallel.threads;
    }
    const int64_t across = std::min(ceil_div(wanted, int64_t(strips.size())), args.n);
    const int64_t granularity = args.y_format != 0 ? kBlock : kColumnGranularity;
    const int64_t columns = ceil_div(ceil_div(args.n, across), granularity) * granularity;
    const int64_t ranges = ceil_div(args.n, columns);
    parallel_for(parallel, ranges * int64_t(strips.size()), [&](int64_t task) {
      const Strip& strip = strips[size_t(task / ranges)];
      const int64_t column = task % ranges * columns;
      strip.gemm->kernel->multiply(args, strip.row, strip.rows, 0, ceil_div(strip.rows, strip.gemm->kernel->tile_rows),
                                   column, std::min(args.n, column + columns), strip.packed, strip.exponent);
    });
  }
}

}  // namespace

void gemm(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args) {
  if (args.m != 0 && args.n != 0) multiply(kernels, parallel, args, gemms_used());
}

}  // namespace mxfp8
