// The split of a gemm into strips of rows, and of each strip into tasks.
#include "gemm.h"

#include <vector>

#include "constant_weight.h"
#include "dtypes.h"
#include "profile.h"
#include "tasks.h"

namespace mxfp8 {
namespace {

constexpr int64_t kTaskProducts = 1 << 21;  // multiply-adds that one gemm task handles: 10 us
constexpr int64_t kDecodeRows = 12;         // reading and decoding B takes as long as the multiply-adds of so many rows
constexpr int64_t kGemmStep = 2 * kBlock;   // values that a gemm kernel multiplies at once, and pads rows of A to
constexpr int64_t kPackValues = 1 << 16;    // values of A that one task of a gemm packs
constexpr int64_t kPackedBytes = 8 << 20;   // bytes of A packed at a time
constexpr int64_t kStripBytes = 1 << 20;    // the most bytes of a strip of more than kGemmRows rows
constexpr int64_t kTasksPerThread = 4;      // so that a delayed thread does not delay the call
constexpr int64_t kSmallPanelBytes = 1 << 19;          // panels in float32 up to this size stay in L2
constexpr int64_t kColumnGranularity = kPanelColumns;  // columns of a task: whole panels, and whole cache lines of y

// Rows of A, packed for the kernel that multiplies them.
struct Strip {
  int64_t row, rows;
  const GemmRow* gemm;  // null before the first kernel is chosen
  void* packed;
  int exponent;  // exponent of the lowest bit in `packed`
};

// Whether a row of the table takes the formats of these operands.
bool takes(const Kernels& kernels, const GemmArgs& args, const GemmRow& row) {
  const bool fits_bf16 = args.a_scales != nullptr || args.rounds_a || args.a_format == MXFP8_BFLOAT16;
  const auto all = [&](int format) {
    return args.a_scales != nullptr && args.a_format == format && args.b_format == format;
  };
  const bool all_e4m3 = all(MXFP8_E4M3), all_int8 = all(MXFP8_INT8);
  const Values values = fits_bf16 && kernels.has_bf16 ? Values::kBf16 : Values::kOther;
  return row.values == values || row.values == Values::kAny || (row.values == Values::kE4M3 && all_e4m3) ||
         (row.values == Values::kInt8 && all_int8);
}

// Whether panels are used for this number of rows.
bool enough_for_panels(const Kernels& kernels, const GemmRow& row, int64_t rows) {
  return rows >= kernels.least_panel_rows || row.values == Values::kInt8;
}

// The kernel that keeps a small weight in float32: the one for many rows, if it takes any operands. Null for other
// weights, and where another kernel is faster with many rows.
const GemmKernel* kernel_of_small(const Kernels& kernels, const GemmArgs& args) {
  const GemmRow* row = kernels.gemms;
  while (row->most_rows < kGemmRows || !takes(kernels, args, *row)) ++row;
  const bool small = row->values == Values::kAny && row->kernel->panel_bytes(args) <= kSmallPanelBytes;
  return small ? row->kernel : nullptr;
}

// The next row of the table after `last`, or the first row if `last` is null, that takes these operands and this number
// of rows. If the call has panels, and enough rows for them, the first is the row of their kernel.
const GemmRow* next_gemm(const Kernels& kernels, const GemmArgs& args, int64_t rows, const GemmRow* last) {
  const GemmRow* next = last == nullptr ? kernels.gemms : last + 1;
  if (last == nullptr && args.panels != nullptr) {
    while (next->kernel != args.panels->kernel) ++next;
    if (enough_for_panels(kernels, *next, rows)) return next;
    next = kernels.gemms;
  }
  const bool small = rows > kRowsAsTheyLie && kernel_of_small(kernels, args) != nullptr;
  const auto fits = [&](const GemmRow& row) {
    // From three rows on, a small weight is multiplied by the kernel of its panels, also if it is not constant: so a
    // copy changes no bits.
    if (small && row.values == Values::kOther) return false;
    return rows >= row.least_rows && rows <= (args.k < kShortK ? row.most_short_rows : row.most_rows);
  };
  while (!fits(*next) || !takes(kernels, args, *next)) ++next;  // ends at the last row, which takes all operands
  return next;
}

// Appends strips of up to `most` rows, for gemms after `last`.
void add_strips(int64_t begin, int64_t end, int64_t most, const GemmRow* last, std::vector<Strip>* strips) {
  for (int64_t row = begin; row < end; row += most) {
    strips->push_back({row, std::min(most, end - row), last, nullptr, kNotExact});
  }
}

// Bytes of the strip's packed rows, rounded up to whole tiles.
size_t packed_bytes(const Strip& strip, int64_t k_padded) {
  const int64_t tile_rows = strip.gemm->kernel->tile_rows;
  return size_t(ceil_div(strip.rows, tile_rows) * tile_rows * k_padded * strip.gemm->kernel->value_bytes);
}

// Packs all strips in one parallel loop. Strips whose values the kernel cannot hold are packed again for the next
// kernel, cut into strips of kGemmRows, which every kernel takes.
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

// The number of rows to pack at a time: packed rows should stay in L2.
int64_t rows_of_strip(const Kernels& kernels, int64_t k) {
  int64_t rows = kernels.strip_rows;
  while (rows > kGemmRows && 2 * rows * k > kStripBytes) rows /= 2;
  return rows;
}

// Multiplies rows first..last-1 of A.
void multiply(const Kernels& kernels, const Parallel& parallel, const GemmArgs& args, int64_t first, int64_t last,
              GemmsUsed* used) {
  const int64_t strip_rows = rows_of_strip(kernels, args.k), rows = last - first;
  if (parallel.threads > 1 && rows >= parallel.threads * strip_rows * 3 / 4) {
    // There are enough rows for each thread to have its own strips. A packed strip then stays in the cache of its
    // thread, and no thread waits for another.
    const int64_t turns = ceil_div(rows, parallel.threads * strip_rows);
    const Parallel alone{nullptr, nullptr, 1};
    for_ranges(parallel, rows, ceil_div(rows, turns * parallel.threads), [&](int64_t, int64_t begin, int64_t end) {
      multiply(kernels, alone, args, first + begin, first + end, used);
    });
    return;
  }
  const int64_t strip_bytes = 2 * strip_rows * std::max<int64_t>(args.k, 1);
  const int64_t most_strips = std::max<int64_t>(1, kPackedBytes / strip_bytes);
  for (int64_t begin = first; begin < last; begin += most_strips * strip_rows) {
    const int64_t end = std::min(last, begin + most_strips * strip_rows);
    std::vector<Strip> strips;
    add_strips(begin, end, strip_rows, nullptr, &strips);
    std::vector<Scratch> scratch;
    pack_strips(kernels, parallel, args, used, &strips, &scratch);

    // Each task multiplies one strip with a range of columns. A partial step at the end of a row takes as long as a
    // whole one, so K is rounded up.
    const int64_t depth = ceil_div(args.k, kGemmStep) * kGemmStep;
    const int64_t work = (end - begin + int64_t(strips.size()) * kDecodeRows) * args.n * depth / kTaskProducts;
    int64_t wanted = 1;
    if (parallel.threads > 1 && work > 1) {
      wanted =
          ceil_div(std::min<int64_t>(work, parallel.threads * kTasksPerThread), parallel.threads) * parallel.threads;
    }
    const int64_t across = std::min(ceil_div(wanted, int64_t(strips.size())), args.n);
    const int64_t columns = ceil_div(ceil_div(args.n, across), kColumnGranularity) * kColumnGranularity;
    const int64_t ranges = ceil_div(args.n, columns);
    parallel_for(parallel, ranges * int64_t(strips.size()), [&](int64_t task) {
      const Strip& strip = strips[size_t(task / ranges)];
      const int64_t column = task % ranges * columns;
      GemmArgs g = args;
      if (g.panels != nullptr && g.panels->kernel != strip.gemm->kernel) g.panels = nullptr;  // of another kernel
      strip.gemm->kernel->multiply(g, strip.row, strip.rows, 0, ceil_div(strip.rows, strip.gemm->kernel->tile_rows),
                                   column, std::min(args.n, column + columns), strip.packed, strip.exponent);
    });
  }
}

}  // namespace

const GemmKernel* kernel_of_panels(const Kernels& kernels, const GemmArgs& args) {
  const GemmRow* row = kernels.gemms;
  for (; row->values != Values::kAny; ++row) {
    const bool makes = row->kernel->make_panels != nullptr && enough_for_panels(kernels, *row, args.m);
    if (makes && takes(kernels, args, *row)) return row->kernel;
  }
  return kernel_of_small(kernels, args);
}

const GemmRow* gemm_of_pixels(const Kernels& kernels, const GemmArgs& args) {
  const GemmRow* row = kernels.gemms;
  while (row->values != Values::kAny && (row->kernel->pack_pixels == nullptr || !takes(kernels, args, *row))) ++row;
  return row->kernel->pack_pixels == nullptr ? nullptr : row;
}

void multiply_pixels(const Kernels& kernels, const Parallel& parallel, const GemmRow& row, const GemmArgs& args) {
  const int64_t work = std::max<int64_t>(1, args.m * args.n * args.k / kTaskProducts);
  const int64_t columns =
      ceil_div(ceil_div(args.n, std::min<int64_t>(work, parallel.threads)), kColumnGranularity) * kColumnGranularity;
  for_ranges(parallel, args.n, columns, [&](int64_t, int64_t begin, int64_t end) {
    row.kernel->multiply(args, 0, args.m, 0, ceil_div(args.m, row.kernel->tile_rows), begin, end, args.taps->packed,
                         kExact);
  });
  if (GemmsUsed* used = gemms_used()) *used |= uint32_t(1) << (&row - kernels.gemms);
}

void gemm(const Kernels& kernels, const Parallel& parallel, GemmArgs args) {
  if (args.m == 0 || args.n == 0) return;
  if (args.weight != nullptr) args.panels = args.weight->panels(kernels, parallel, args);
  multiply(kernels, parallel, args, 0, args.m, gemms_used());
}

}  // namespace mxfp8
