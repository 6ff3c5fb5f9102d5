// Variants of kernels: the same results in other ways, of which only a measurement says where each is fastest.
// Experimental: no GPU has measured one, and nothing takes one by default.
//
// measured.h is the table of measurements; benchmarks/gpu_bench.py writes it. Where it has no row for a card and a
// size, the plain variant runs: another variant is the default only where it was measured to be faster.
#pragma once
#include "../mxfp8_cuda_plan.h"

namespace mxfp8::cuda {

// Numbers of mxfp8_cuda_variant_at. The plain variant of a kernel is followed by its others.
enum Variant {
  kSkinnyPlain,
  kSkinnyTwoWarps,
  kSkinnyFourAhead,
  kSkinnyTwoSplits,
  kFusedPlain,
  kFusedPaired,
  kFusedTwoBlocks,
  kColumnsPlain,
  kColumnsBands,
  kBothPlain,
  kBothBands,
  kVariants
};

// The properties that decide a variant: the card, and a size as measured.h counts it.
struct Sizes {
  int64_t capability, processors;
  int64_t x_dtype, m, n;
};

// The variant for the kernel that `plain` belongs to: `forced` - 1 if that is one of its variants, else the fastest
// measured.
Variant variant(Variant plain, const Sizes&, int64_t forced);

}  // namespace mxfp8::cuda
