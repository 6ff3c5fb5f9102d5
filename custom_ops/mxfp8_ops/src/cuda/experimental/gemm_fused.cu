// Both gemms for more than a few rows on Hopper's tensor cores, exact, without the weight in bfloat16 in memory.
//
//   x [m, k] as tile<X, PAIRED> makes it        b [n, k] F with b_scales        bias [n] float32, or null
//   y [m, n] of dtype `y_dtype`, or, for splits > 1, float32 [splits, m, n] that finish.cu adds up
//   k % 32 = 0, k < 2^25; x and b aligned to 16
//   inexact   a word that becomes 1 if y is wrong, because some of the weight is not `fast_elements` (wide.cuh). Then
//             gemm_float32.cu has to do it again
//   grid      splits * ceil(n / (128 * BLOCKS)) * ceil(m / 128) thread blocks of two warpgroups, those that share rows
//             of the weight one after the other: it comes from memory once. kFusedShared bytes of shared memory
//   bytes     33/32 n k for the weight; from the L2 cache that ceil(m / 128) times and 2 m k ceil(n / (128 * BLOCKS))
//
// Has not run on a GPU. On an H200, n = k = 8192, the floor is 69 MB at 4.3 TB/s, 16 us, or 2 m n k operations at the
// 0.75 PFLOP/s that cuBLAS reaches: 23 us for m = 128, 92 us for m = 512. With the decoding hidden behind the products
// (218 instructions a warp in a step, by the machine code, which two warps a scheduler issue in 436 of the 512 clocks
// of its products; BLOCKS = 2: 754 of 1024) and 33 KB in those clocks from the L2 cache, this should reach 0.75 to 0.85
// of cuBLAS on bfloat16 weights for m = 256 .. 2048; for m = 128, in two splits, about the 31 us in which cuBLAS reads
// those weights. Dequantizing the weight first is bound by 0.40 (m = 128), 0.63 (512), 0.77 (1024) and 0.85 (2048).
//
// The weight is the A operand of wgmma, from registers: it is loaded, AHEAD steps of 64 values of k ahead, and decoded
// by the lane that holds it, and each byte of it is used by one lane only. Lane t of a group of four takes 16
// consecutive k; tile.cu puts x in the same order, see there. x is the B operand, from a ring of STAGES tiles in shared
// memory that one thread keeps full. It is tiled in memory first because then one bulk copy brings a tile as wgmma
// wants it: no tensor map (a call of the driver for each x), and no work for the threads that decode (4-byte cp.async
// into the order of k would be 16 copies and their addresses in each step, and a memory barrier). That costs reading
// and writing x once, or nothing where x is quantized and has to be dequantized anyway.
//
// PAIRED decodes bytes 0, 2 and 1, 3 of a word together and tests once, after the loop, whether all was exact: about
// 205 instructions a step, and no branch in it. RESIDENT = 2 blocks a multiprocessor, with BLOCKS = 1, read half as far
// ahead each, and one decodes while the other waits at its barrier. measured.h says which of these is fastest where.
//
// While the products of half a step run, the operands of the next half are decoded. At the barrier of a step all
// products of the step before the last are done, so its tile is free.
#include "hopper.cuh"
#include "wide.cuh"

// The part of the weight that a lane holds for one step: 16 of its 64 values of k, in rows g and g + 8 of each block of
// 64 rows.
template <int BLOCKS>
struct Packed {
  uint4 elements[BLOCKS][2];
  u32 scales[BLOCKS][2];
};

// The A operands of the products for half a step: for 16 values of k twice.
template <int BLOCKS>
struct Decoded {
  u32 a[2][BLOCKS][4];
};

template <class F, bool PAIRED, int BLOCKS>
DEVICE void decode_half(Decoded<BLOCKS>& to, const Packed<BLOCKS>& w, int half) {
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 q = w.elements[i][r];
      const u32 words[2] = {half == 0 ? q.x : q.z, half == 0 ? q.y : q.w}, scale = scale_bf16x2<F>(w.scales[i][r]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        to.a[j][i][r] = PAIRED ? decode_apart_bf16x2<F, 0>(words[j], scale) : decode_bf16x2<F, 0>(words[j], scale);
        to.a[j][i][r + 2] = PAIRED ? decode_apart_bf16x2<F, 1>(words[j], scale) : decode_bf16x2<F, 1>(words[j], scale);
      }
    }
}

template <class F, int BLOCKS>
DEVICE bool all_fast(const Packed<BLOCKS>& w) {
  bool fast = true;
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; ++i) fast &= fast_elements<F>(w.elements[i >> 1][i & 1], w.scales[i >> 1][i & 1]);
  return fast;
}

template <class F, int BLOCKS, bool PAIRED = false, int RESIDENT = 1>
__global__ void __launch_bounds__(256, RESIDENT)
    gemm_fused(const u8* __restrict__ x, const u8* __restrict__ b, const u8* __restrict__ b_scales,
               const float* __restrict__ bias, u8* __restrict__ y, i64 m, i64 n, i64 k, i64 y_dtype, i64 splits,
               u32* __restrict__ inexact) {
  constexpr int ROWS = 128 * BLOCKS, TOKENS = 128, STAGES = 6, STAGE_BYTES = TOKENS * 128;
  constexpr int AHEAD = 4 / BLOCKS / RESIDENT;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const int group = lane >> 2, part = lane & 3;
  const int across = static_cast<int>((m + TOKENS - 1) / TOKENS), down = static_cast<int>((n + ROWS - 1) / ROWS);
  const int block = static_cast<int>(blockIdx.x), token_tile = block % across, split = block / across / down;
  const i64 first_row = static_cast<i64>(block / across % down) * ROWS;
  const int rows = n - first_row < ROWS ? static_cast<int>(n - first_row) : ROWS;
  const int row = (warp >> 2) * 64 * BLOCKS + (warp & 3) * 16 + group;  // the first of this lane
  // Steps first_step <= step < steps, and what of k they end with.
  const int all_steps = static_cast<int>((k + 63) >> 6);
  const int each = (all_steps + static_cast<int>(splits) - 1) / static_cast<int>(splits);
  const int first_step = split * each, steps = first_step + each < all_steps ? first_step + each : all_steps;
  const int k_end = steps < all_steps ? steps * 64 : static_cast<int>(k);

  const u32 ring = (shared_address(launch_shared()) + 1023) & ~1023u, landed = ring + STAGES * STAGE_BYTES;
  const u8* tiles = x + static_cast<i64>(token_tile) * all_steps * STAGE_BYTES;
  auto load_x = [&](int stage, int step) {
    if (step >= steps) return;
    const u8* from = tiles + static_cast<i64>(step) * STAGE_BYTES;
    copy_async(ring + stage * STAGE_BYTES, from, STAGE_BYTES, landed + 8 * stage);
  };
  if (thread == 0) {
    make_barriers(landed, STAGES);
    for (int i = 0; i < STAGES - 2; ++i) load_x(i, first_step + i);
  }

  // Instead of rows past the end, the last one again: summed, never stored. Instead of k past the end, the last ones
  // again: x has zeros there.
  const u8 *elements[BLOCKS][2], *scales[BLOCKS][2];
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = row + 64 * i + 8 * r;
      const i64 at = opaque((first_row + (mine < rows ? mine : rows - 1)) * k);
      elements[i][r] = b + at;
      scales[i][r] = b_scales + (at >> 5);
    }
  auto load_weights = [&](Packed<BLOCKS>& w, int step) {
    const int wanted = step * 64 + 16 * part, at = wanted < k_end ? wanted : k_end - 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        w.elements[i][r] = load_once16(elements[i][r] + at);
        w.scales[i][r] = scales[i][r][at >> 5];
      }
  };

  float sums[BLOCKS][64] = {};
  auto multiply = [&](const Decoded<BLOCKS>& half, u64 tile) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        wgmma_m64n128k16(sums[i], half.a[j][i], tile + static_cast<u64>(2 * j));  // 16 values of k are 32 bytes
    wgmma_commit();
  };

  Packed<BLOCKS> ahead[AHEAD];
  Decoded<BLOCKS> halves[2];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) load_weights(ahead[i], first_step + i);
  decode_half<F, PAIRED>(halves[0], ahead[0], 0);
  bool wrong = false;
  FastElements<F> seen;
  int stage = 0;
  u32 odd = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) keep_behind(sums[i]);
#pragma unroll 1
  for (int step = first_step; step < steps; step += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (step + i >= steps) break;
      __syncthreads();
      if (thread == 0) load_x(stage < 2 ? stage + STAGES - 2 : stage - 2, step + i + STAGES - 2);
      wait_barrier(landed + 8 * stage, odd);
      const u64 tile = swizzled_rows(ring + stage * STAGE_BYTES);
      multiply(halves[0], tile);
      wgmma_wait<1>();
      decode_half<F, PAIRED>(halves[1], ahead[i], 1);
      if constexpr (PAIRED) {
#pragma unroll
        for (int j = 0; j < 2 * BLOCKS; ++j) seen.see(ahead[i].elements[j >> 1][j & 1], ahead[i].scales[j >> 1][j & 1]);
      } else {
        wrong |= !all_fast<F>(ahead[i]);
      }
      multiply(halves[1], tile + 4);
      wgmma_wait<1>();
      decode_half<F, PAIRED>(halves[0], ahead[(i + 1) % AHEAD], 0);
      load_weights(ahead[i], step + i + AHEAD);
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      odd ^= stage == 0;
    }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) keep_behind(sums[i]);
  if (PAIRED ? !seen.all() : wrong) *inexact = 1;

  // Through shared memory, 32 tokens at a time, so that a thread has eight neighbours of y.
  constexpr int PITCH = ROWS + 4, PASS = 32, EIGHTS = ROWS / 8;
  float* passed = reinterpret_cast<float*>(launch_shared());
  const int first = thread % EIGHTS * 8;
  const bool whole = n % 8 == 0 && reinterpret_cast<u64>(y) % 16 == 0;
  float add[8];
#pragma unroll
  for (int j = 0; j < 8; ++j)
    add[j] = bias != nullptr && first + j < rows ? bias[first_row + first + j] : -0.0f;  // adds nothing
#pragma unroll
  for (int pass = 0; pass < TOKENS / PASS; ++pass) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        passed[((j >> 2) * 8 + part * 2 + (j & 1)) * PITCH + row + 64 * i + ((j >> 1) & 1) * 8] =
            sums[i][pass * 16 + j];
    __syncthreads();
#pragma unroll 1
    for (int t = thread / EIGHTS; t < PASS; t += 256 / EIGHTS) {
      const i64 token = static_cast<i64>(token_tile) * TOKENS + pass * PASS + t;
      if (token >= m || first >= rows) break;
      const i64 to = (split * m + token) * n + first_row + first;
      const uint4 low = load_shared16(passed + t * PITCH + first), high = load_shared16(passed + t * PITCH + first + 4);
      const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = float_of(words[j]) + add[j];
      if (whole) {
        write8(y, to, v, y_dtype);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (first + j < rows) write_value(y, to + j, v[j], y_dtype);
      }
    }
  }
}
