#include "variants.h"

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace mxfp8::cuda {
namespace {

constexpr mxfp8_cuda_variant kNames[kVariants] = {
    {"gemm_skinny", "plain"},       // as cuts.cpp cuts it up
    {"gemm_skinny", "two_warps"},   // two of a block's warps share x, not four: twice as many blocks
    {"gemm_skinny", "four_ahead"},  // the weight is read four steps ahead, by one block a multiprocessor
    {"gemm_skinny", "two_splits"},  // K in two parts
    {"gemm_fused", "plain"},
    {"gemm_fused", "paired"},       // bytes 0, 2 and 1, 3 are decoded together, one check at the end; fewer launches
    {"gemm_fused", "two_blocks"},   // the same with two blocks a multiprocessor, of 128 rows of the weight each
    {"quantize_columns", "plain"},  // transposed: a thread block takes 32 rows and 512 columns
    {"quantize_columns", "bands"},  // quantize_bands.cu: 128 rows and 128 columns
    {"quantize_both", "plain"},     // the same along both axes
    {"quantize_both", "bands"},
};

struct Plain {
  int of[kVariants];
};

// For each variant, the plain one of its kernel.
constexpr Plain plain_of_each() {
  Plain plain = {};
  for (int i = 1; i < kVariants; ++i) {
    const bool same = std::string_view(kNames[i].kernel) == std::string_view(kNames[i - 1].kernel);
    plain.of[i] = same ? plain.of[i - 1] : i;
  }
  return plain;
}

constexpr Plain kPlain = plain_of_each();

// For measured.h, which does not compile with a name that is not above.
constexpr int64_t number(std::string_view kernel, std::string_view name) {
  for (int64_t i = 0; i < kVariants; ++i) {
    if (kernel == kNames[i].kernel && name == kNames[i].name) return i;
  }
  throw std::invalid_argument("measured.h names a variant that does not exist");
}

#include "measured.h"

bool fits(const mxfp8_cuda_measurement& row, const Sizes& s) {
  return row.nanoseconds != 0 && row.capability == s.capability && row.processors == s.processors &&
         row.x_dtype == s.x_dtype && row.least_m <= s.m && s.m <= row.most_m && row.least_n <= s.n && s.n <= row.most_n;
}

}  // namespace

Variant variant(Variant plain, const Sizes& sizes, int64_t forced) {
  if (forced > 0 && forced <= kVariants && kPlain.of[forced - 1] == plain) return Variant(forced - 1);
  int64_t of_plain = 0, fewest = 0, best = plain;
  for (const mxfp8_cuda_measurement& row : kMeasured) {
    if (kPlain.of[row.variant] != plain || !fits(row, sizes)) continue;
    if (row.variant == plain) of_plain = row.nanoseconds;
    if (fewest == 0 || row.nanoseconds < fewest) fewest = row.nanoseconds, best = row.variant;
  }
  return 100 * fewest <= 98 * of_plain ? Variant(best) : plain;  // less is noise
}

}  // namespace mxfp8::cuda

using namespace mxfp8::cuda;

extern "C" {

MXFP8_API const mxfp8_cuda_variant* mxfp8_cuda_variant_at(int number) {
  return number >= 0 && number < kVariants ? &kNames[number] : nullptr;
}
MXFP8_API const mxfp8_cuda_measurement* mxfp8_cuda_measurement_at(int row) {
  return row >= 0 && row < int(std::size(kMeasured)) ? &kMeasured[row] : nullptr;
}

}  // extern "C"
