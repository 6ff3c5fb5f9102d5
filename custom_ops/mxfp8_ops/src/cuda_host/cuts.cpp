#include "cuts.h"

#include <algorithm>

#include "planner.h"

namespace mxfp8::cuda {
namespace {

int64_t skinny_warps(int tiles_log2, bool few) { return tiles_log2 == 0 ? (few ? 1 : 2) : few ? 2 : 4; }

// Bytes of the weight that a block of gemm_skinny has on their way: a split that reads less gains nothing. And those
// that it streams while the launch that adds up splits takes place, which is not measured yet.
constexpr int64_t kAhead = 32 << 10, kSecondLaunch = 96 << 10;

// For gemm_fused, in clocks of a multiprocessor; none is measured yet but the first, which is the most it can be.
constexpr int64_t kStepClocks = 512;  // 128 rows by 128 rows of x for 64 values of K
constexpr double kNarrow = 1.15;      // cost of 128 rows in a block instead of 256: x is read twice as often
constexpr int64_t kSecondLaunchClocks = 3500;
constexpr double kCacheBytes = 2800;  // bytes of sums a clock that go to the L2 cache or come from there
constexpr int64_t kLeastSteps = 16;   // least steps of 64 values of K in a part: fewer are loaded ahead anyway

}  // namespace

// The more warps share x the better, if that leaves work for every multiprocessor; two blocks fit one when x is small,
// and then both are wanted, for what they read ahead. Where even few warps leave multiprocessors idle, K is split: see
// gemm_skinny.cu.
SkinnyCut cut_skinny(const mxfp8_cuda_place& place, const Shape& s) {
  int tiles_log2 = 0;
  while (s.m * parts_of(s.x) > 8 << tiles_log2) ++tiles_log2;
  const bool two_blocks = tiles_log2 <= 1;  // as __launch_bounds__ of the kernel has it, for every dtype of x
  const int64_t wanted = place.processors * (two_blocks ? 2 : 1);
  const Variant chosen = tiles_log2 == 1 ? variant(kSkinnyPlain, sizes_of(place, s), place.variant) : kSkinnyPlain;
  const bool four_ahead = chosen == kSkinnyFourAhead;
  bool few = 10 * ceil_div(s.n, 16 * skinny_warps(tiles_log2, false)) < 9 * wanted;
  if (chosen == kSkinnyTwoWarps || four_ahead) few = !four_ahead;
  if (place.warps != 0) few = place.warps < skinny_warps(tiles_log2, false);
  const int64_t rows = 16 * skinny_warps(tiles_log2, few), blocks = ceil_div(s.n, rows), streamed = rows * s.k;
  const int64_t splits = std::min(wanted / blocks, streamed / kAhead);
  const bool worth = splits > 1 && streamed * (splits - 1) >= kSecondLaunch * splits;
  const int64_t planned = chosen == kSkinnyTwoSplits ? 2 : worth ? splits : 1;
  return {tiles_log2, few, blocks, place.splits != 0 ? place.splits : planned, four_ahead};
}

// The cut that should take the fewest clocks. A multiprocessor runs one thread block at a time (kFusedTwoBlocks: two,
// which share its tensor cores), so what counts is how many each has to run one after the other.
FusedCut cut_fused(const mxfp8_cuda_place& place, const Shape& s) {
  if (place.blocks < 0 || place.blocks > 2) {
    throw Error(MXFP8_BAD_ARGUMENT, "blocks of gemm_fused out of range", "0 to 2 blocks of 64 rows",
                "report this as a bug");
  }
  const int64_t steps = ceil_div(s.k, 64), most = std::max<int64_t>(1, std::min<int64_t>(8, steps / kLeastSteps));
  const Variant chosen = variant(kFusedPlain, sizes_of(place, s), place.variant);
  const bool two_blocks = chosen == kFusedTwoBlocks;
  const int64_t resident = two_blocks ? 2 : 1, room = resident * place.processors;
  FusedCut best = {};
  double fewest = 0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    for (int64_t blocks = 1; blocks <= (two_blocks ? 1 : 2); ++blocks) {
      const FusedCut cut = {place.blocks != 0 && !two_blocks ? place.blocks : blocks,
                            place.splits != 0 ? place.splits : splits, 0, chosen};
      const int64_t grid = cut.splits * ceil_div(s.m, kFusedTokens) * ceil_div(s.n, 128 * cut.blocks);
      const double each =
          double(ceil_div(steps, cut.splits) * cut.blocks * kStepClocks) * (cut.blocks == 1 ? kNarrow : 1);
      const double sums =
          cut.splits == 1 ? 0 : double(8 * cut.splits * s.m * s.n) / kCacheBytes + double(kSecondLaunchClocks);
      const int64_t turns = grid / room * resident + std::min(resident, ceil_div(grid % room, place.processors));
      const double clocks = double(turns) * each + sums;
      if (best.grid == 0 || clocks < fewest) best = {cut.blocks, cut.splits, grid, chosen}, fewest = clocks;
    }
  }
  return best;
}

}  // namespace mxfp8::cuda
