// The rows of a grouped product sorted by expert, and cut into slots of `tokens` rows of one expert: what
// gemm_grouped.cu multiplies. The order is stable, so a product gives the same bytes each time.
//
//   experts   int64; -1 is the last one, `count` is none; another that is no expert counts as count + 1
//   places    [rows] {row of y, row of x}, int32, sorted by expert
//   slots     [rows / tokens + min(count + 2, rows)] {expert, first place, number of places, 0}, int32; cleared before,
//             and an empty slot stays so
//   grid      count + 2 thread blocks of 256, one for each expert, for none, and for wrong indices
//   bytes     16 rows for each block, from the L2 cache
//
// Row i of y is (outer, middle, inner) in row-major order. The strides say which row of x and which index it has.
//
// Slots of expert e begin at before / tokens + min(e, before), where `before` counts the rows of experts below e:
// blocks need not know how many slots the others fill, and no two slots meet, since a group of c > 0 rows has at most
// c / tokens + 1 slots.
#include "device.cuh"

__global__ void __launch_bounds__(256)
    group_rows(const i64* __restrict__ experts, int* __restrict__ places, int* __restrict__ slots, i64 rows, i64 count,
               i64 tokens, i64 middle, i64 inner, i64 x_outer, i64 x_middle, i64 x_inner, i64 e_outer, i64 e_middle,
               i64 e_inner) {
  __shared__ int of_warps[8];
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const i64 expert = static_cast<i64>(blockIdx.x);
  auto strided = [&](i64 row, i64 outer_stride, i64 middle_stride, i64 inner_stride) {
    const i64 above = row / inner, outer = above / middle;
    return outer * outer_stride + (above - outer * middle) * middle_stride + (row - above * inner) * inner_stride;
  };
  auto expert_of = [&](i64 row) {
    i64 e = experts[strided(row, e_outer, e_middle, e_inner)];
    if (e < 0) e += count;
    return e < 0 || e > count ? count + 1 : e;
  };
  // The sum over the block's threads; `below` becomes that of the warps before.
  auto sum_of_warps = [&](int of_warp, int& below) {
    __syncthreads();
    if (lane == 0) of_warps[warp] = of_warp;
    __syncthreads();
    int sum = 0;
    below = 0;
    for (int i = 0; i < 8; ++i) {
      if (i < warp) below += of_warps[i];
      sum += of_warps[i];
    }
    return sum;
  };

  int before = 0, below = 0;
  for (i64 row = thread; row < rows; row += 256) before += expert_of(row) < expert;
  for (int mask = 16; mask > 0; mask >>= 1) before += __shfl_xor_sync(0xffffffffu, before, mask);
  before = sum_of_warps(before, below);
  int done = 0;
  for (i64 first = 0; first < rows; first += 256) {
    const i64 row = first + thread;
    const bool mine = row < rows && expert_of(row) == expert;
    const u32 votes = __ballot_sync(0xffffffffu, mine);
    const int sum = sum_of_warps(__popc(votes), below);
    if (mine) {
      const i64 at = before + done + below + __popc(votes & ((1u << lane) - 1));
      places[2 * at] = static_cast<int>(row);
      places[2 * at + 1] = static_cast<int>(strided(row, x_outer, x_middle, x_inner));
    }
    done += sum;
  }
  const i64 first_slot = before / tokens + (expert < before ? expert : before);
  for (i64 i = thread; i * tokens < done; i += 256) {
    int* slot = slots + 4 * (first_slot + i);
    slot[0] = static_cast<int>(expert);
    slot[1] = static_cast<int>(before + i * tokens);
    slot[2] = static_cast<int>(done - i * tokens < tokens ? done - i * tokens : tokens);
  }
}
