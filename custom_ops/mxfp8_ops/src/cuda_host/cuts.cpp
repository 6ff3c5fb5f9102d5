#include "cuts.h"

#include <algorithm>

#include "planner.h"

namespace mxfp8::cuda {
namespace {

int64_t skinny_warps(int tiles_log2, bool few) { return tiles_log2 == 0 ? (few ? 1 : 2) : few ? 2 : 4; }

// Bytes of the weight that a block of gemm_skinny has on their way: a split that reads less gains nothing. And those
// that it streams while the launch that adds up splits takes place, which is not measured yet.
constexpr int64_t kAhead = 32 << 10, kSecondLaunch = 96 << 10;

}  // namespace

// The more warps share x the better, if that leaves work for every multiprocessor; two blocks fit one when x is small,
// and then both are wanted, for what they read ahead. Where even few warps leave multiprocessors idle, K is split: see
// gemm_skinny.cu.
SkinnyCut cut_skinny(const mxfp8_cuda_place& place, const Shape& s) {
  int tiles_log2 = 0;
  while (s.m * parts_of(s.x) > 8 << tiles_log2) ++tiles_log2;
  const bool two_blocks = tiles_log2 <= 1;  // as __launch_bounds__ of the kernel has it, for every dtype of x
  const int64_t wanted = place.processors * (two_blocks ? 2 : 1);
  bool few = 10 * ceil_div(s.n, 16 * skinny_warps(tiles_log2, false)) < 9 * wanted;
  if (place.warps != 0) few = place.warps < skinny_warps(tiles_log2, false);
  const int64_t rows = 16 * skinny_warps(tiles_log2, few), blocks = ceil_div(s.n, rows), streamed = rows * s.k;
  const int64_t splits = std::min(wanted / blocks, streamed / kAhead);
  const bool worth = splits > 1 && streamed * (splits - 1) >= kSecondLaunch * splits;
  return {tiles_log2, few, blocks, place.splits != 0 ? place.splits : worth ? splits : 1};
}

}  // namespace mxfp8::cuda
