// The product of a few rows of x (m X::parts <= 8 * TILES, TILES <= 8) with 16 * WARPS rows of the weight, by a thread
// block: bfloat16 tensor cores, exact. k % 32 = 0, 0 < k < 2^25; x and b aligned to 16.
//
// The weight is the A operand of the mma (16 rows a warp), x the B operand (8 rows a tile). A step of the loop is STEP
// values of k for each warp. The weight goes from memory to registers, AHEAD steps ahead: no byte of it is used twice.
// x goes through shared memory, one step ahead, and is decoded there once for all warps.
//
// Lane t of a group of four takes 16 consecutive k of every 64 of its rows, which is half a block: the sum does not
// care in which order k is taken, as long as both operands take it alike. Elements become bfloat16 by moving their bits
// (E4M3::wide_shift), and one multiplication by 2^(s - bias) applies the scale; both are exact for codes
// first_exact..last_fast. A scale outside that range, or a NaN or Inf element, hardly ever occurs: the warp then sums
// that step in float32 instead.
//
// A row of float32 (float16) x is three (two) rows of bfloat16, its parts; bfloat16_parts.cu says why that is exact
// enough. A sum that is NaN or Inf is computed once more in float32: a part of Inf is NaN, and so is a zero
// part times an infinite weight.
#pragma once
#include "operand.cuh"
#include "wide.cuh"

// Eight float32 or float16 values as they are stored.
template <class X, int LOADS>
DEVICE void read8(const uint4 (&q)[LOADS], float (&v)[8]) {
  const uint4 last = q[LOADS - 1];
  const u32 w[8] = {q[0].x, q[0].y, q[0].z, q[0].w, last.x, last.y, last.z, last.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    v[i] = X::bytes == 4 ? float_of(w[i]) : from_float16(static_cast<u16>(i & 1 ? w[i >> 1] >> 16 : w[i >> 1]));
}

// The next parts of two values, as two bfloat16.
DEVICE u32 take_parts(float& low, float& high) { return bits_of(take_part(low)) >> 16 | bits_of(take_part(high)); }

// Which rows of x and y the tokens of a thread block are: token i is row i.
struct AllRows {
  DEVICE_MEMBER i64 of_x(i64 token) const { return token; }
  DEVICE_MEMBER i64 of_y(i64 token) const { return token; }
};

// Adds the products of `first` <= k < `end` to the lane's sums, in float32.
template <class X, class F, int TILES, int WARPS, class Rows>
DEVICE void add_exactly(float (&sums)[TILES][4], const Rows& rows_of, const u8* x, const u8* x_scales, const u8* b,
                        const u8* b_scales, i64 first_row, i64 m, i64 n, i64 first, i64 end, i64 k) {
  // One sum after the other, and nothing prepared ahead: this must not take registers from the loop that calls it.
  // Where that has none to spare, nothing that it computes is kept for here. Elsewhere this would cost an instruction.
  constexpr bool SCARCE = TILES >= 4 || F::is_integer;
  int thread = static_cast<int>(threadIdx.x);
  if constexpr (SCARCE) {
    x = opaque(x), x_scales = opaque(x_scales), b = opaque(b), b_scales = opaque(b_scales);
    n = opaque(n), first_row = opaque(first_row), thread = static_cast<int>(opaque(static_cast<i64>(thread)));
  }
  const int lane = thread & 31;
  i64 row = first_row + (thread >> 5) % WARPS * 16 + (lane >> 2);
  if constexpr (!SCARCE) row = opaque(row);
  m = opaque(m), k = opaque(k);
  const i64 rows[2] = {row < n ? row : n - 1, row + 8 < n ? row + 8 : n - 1};  // past the end: summed, never stored
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = i * 8 + (lane & 3) * 2 + (j & 1), token = column / X::parts;
      if (column % X::parts != 0) continue;  // the whole value counts where its first part would
#pragma unroll 1
      for (i64 at = first; at < end; ++at)
        sums[i][j] = fmaf(operand<F>(b, b_scales, rows[j >> 1], at, k),
                          operand<X>(x, x_scales, rows_of.of_x(token < m ? token : m - 1), at, k), sums[i][j]);
    }
}

// The part of the weight that a lane holds for one step: [row, row + 8][64 values of k], 16 of them each.
template <int CHUNKS>
struct Weights {
  uint4 elements[2][CHUNKS];
  u32 scales[2][CHUNKS];
};

// The sums of rows `first_row` .. of b, of the part `split` of k, for the m rows of x that `rows_of` names.
template <class X, class F, int TILES, int WARPS, int AHEAD, class Rows>
DEVICE void multiply_few_rows(const Rows& rows_of, const u8* __restrict__ x, const u8* __restrict__ x_scales,
                              const u8* __restrict__ b, const u8* __restrict__ b_scales, const float* __restrict__ bias,
                              u8* __restrict__ y, i64 m, i64 n, i64 k, i64 y_dtype, i64 splits, int split,
                              i64 first_row) {
  constexpr int DEEP = 8 / WARPS, ROWS = 16 * WARPS, TOKENS = 8 * TILES;
  constexpr int STEP = DEEP * TILES <= 16 ? 128 : 64, CHUNKS = STEP / 64, WIDE = DEEP * STEP;
  static_assert(TILES == 1 || WARPS >= 2, "x of one step would take too much shared memory");
  constexpr int MOST = TOKENS / X::parts;         // rows of x
  constexpr int VALUES = X::is_element ? 16 : 8;  // values of x in a unit, LOADS of 16 bytes
  constexpr int LOADS = X::parts == 3 ? 2 : 1, UNITS = MOST * WIDE / VALUES, MINE = (UNITS + 255) / 256;
  constexpr int TILE_BYTES = TOKENS * WIDE * 2, SUM_BYTES = DEEP * ROWS * (TOKENS + 1) * 4;
  // x of a step as bfloat16 [DEEP][TOKENS][STEP], at the end the warps' sums [DEEP][ROWS][TOKENS + 1].
  __shared__ __align__(16) u8 shared[TILE_BYTES > SUM_BYTES ? TILE_BYTES : SUM_BYTES];
  __shared__ u32 inexact[DEEP];  // 1 + the last step in which x is not what bfloat16 holds

  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const int group = lane >> 2, part = lane & 3, deep = warp / WARPS;
  const i64 row = first_row + (warp % WARPS) * 16 + group;
  // Steps first_step <= step < steps, and what of k they end with.
  const int all_steps = static_cast<int>((k + WIDE - 1) / WIDE), each = (all_steps + splits - 1) / splits;
  const int first_step = split * each, steps = first_step + each < all_steps ? first_step + each : all_steps;
  const i64 k_end = steps < all_steps ? static_cast<i64>(steps) * WIDE : k;
  if (thread < DEEP) inexact[thread] = 0;
  float sums[TILES][4] = {};

  // The addresses of a lane's rows, once: 64-bit products in the loop cost more instructions than the loads. Rows and k
  // past the end are the last ones again: those rows are never stored, and x is zero at those k. An element that is not
  // finite there takes the exact path, which ends at k.
  const int end_of_k = static_cast<int>(k_end), depth = deep * STEP + 16 * part;
  const u8 *elements[2], *scales[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 first = (row + 8 * r < n ? row + 8 * r : n - 1) * k;
    elements[r] = opaque(b + first), scales[r] = opaque(b_scales + (first >> 5));
  }
  auto load_weights = [&](Weights<CHUNKS>& w, int step) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int wanted = step * WIDE + depth + 64 * c, at = wanted < end_of_k ? wanted : end_of_k - 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        w.elements[r][c] = load_once16(elements[r] + at);
        w.scales[r][c] = load1(scales[r] + (at >> 5));
      }
    }
  };

  // Unit u of a step is VALUES of row u / (WIDE / VALUES) of x.
  uint4 next[MINE][LOADS];
  u32 next_scale[MINE];
  constexpr int BYTES = 16 * LOADS / VALUES, NEVER = 1 << 30;
  const u8 *x_row[MINE], *x_row_scales[MINE];
  int x_depth[MINE];  // where in a step, or NEVER
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int unit = thread + 256 * i, token = unit / (WIDE / VALUES);
    x_depth[i] = token < m && (UNITS % 256 == 0 || unit < UNITS) ? unit % (WIDE / VALUES) * VALUES : NEVER;
    const i64 first = token < m ? rows_of.of_x(token) * k : 0;
    x_row[i] = opaque(x + first * BYTES);
    x_row_scales[i] = X::is_element ? opaque(x_scales + (first >> 5)) : nullptr;
  }
  auto load_x = [&](int step) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int at = step * WIDE + x_depth[i];
      const bool live = at < end_of_k;
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
        next[i][j] = live ? load16(x_row[i] + static_cast<i64>(at) * BYTES + 16 * j) : make_uint4(0, 0, 0, 0);
      next_scale[i] = X::is_element && live ? load1(x_row_scales[i] + (at >> 5)) : 127u;
    }
  };
  // Neighbouring tokens swap neighbouring 16 bytes, so that eight lanes that read together meet in no bank.
  auto place = [&](int token, int at) {
    return shared + ((at / STEP) * TOKENS + token) * STEP * 2 + (((at % STEP) >> 3) ^ (token & 1)) * 16;
  };
  auto store_x = [&](int step) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int unit = thread + 256 * i, token = unit / (WIDE / VALUES), at = unit % (WIDE / VALUES) * VALUES;
      if (UNITS % 256 != 0 && unit >= UNITS) continue;
      const uint4 q = next[i][0];
      if constexpr (X::parts > 1) {
        float v[8];
        read8<X>(next[i], v);
#pragma unroll
        for (int p = 0; p < X::parts; ++p)
          store16(place(token * X::parts + p, at), make_uint4(take_parts(v[0], v[1]), take_parts(v[2], v[3]),
                                                              take_parts(v[4], v[5]), take_parts(v[6], v[7])));
      } else if constexpr (X::is_element) {
        if (!fast_elements<X>(q, next_scale[i])) inexact[at / STEP] = static_cast<u32>(step) + 1;
        const u32 scale = scale_bf16x2<X>(next_scale[i]);
        store16(place(token, at), make_uint4(decode_bf16x2<X, 0>(q.x, scale), decode_bf16x2<X, 1>(q.x, scale),
                                             decode_bf16x2<X, 0>(q.y, scale), decode_bf16x2<X, 1>(q.y, scale)));
        store16(place(token, at + 8), make_uint4(decode_bf16x2<X, 0>(q.z, scale), decode_bf16x2<X, 1>(q.z, scale),
                                                 decode_bf16x2<X, 0>(q.w, scale), decode_bf16x2<X, 1>(q.w, scale)));
      } else {
        store16(place(token, at), q);
      }
    }
  };

  auto run = [&](Weights<CHUNKS>& w, int step) {
    __syncthreads();  // everyone is done with the step before
    store_x(step);
    load_x(step + 1);
    __syncthreads();
    FastElements<F> seen;  // one test of all elements: a test and a branch for each is 95 instructions
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) seen.see(w.elements[r][c], w.scales[r][c]);
    const bool fast = seen.all() && !(X::is_element && inexact[deep] == static_cast<u32>(step) + 1);
    if (__all_sync(0xffffffffu, fast)) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const uint4 q[2] = {w.elements[0][c], w.elements[1][c]};
        const u32 words[2][4] = {{q[0].x, q[0].y, q[0].z, q[0].w}, {q[1].x, q[1].y, q[1].z, q[1].w}};
        const u32 scale[2] = {scale_bf16x2<F>(w.scales[0][c]), scale_bf16x2<F>(w.scales[1][c])};
        u32 a[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          a[j][0] = decode_bf16x2<F, 0>(words[0][j], scale[0]);
          a[j][1] = decode_bf16x2<F, 0>(words[1][j], scale[1]);
          a[j][2] = decode_bf16x2<F, 1>(words[0][j], scale[0]);
          a[j][3] = decode_bf16x2<F, 1>(words[1][j], scale[1]);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          const int at = deep * STEP + 64 * c + 16 * part;
          const uint4 p = load_shared16(place(i * 8 + group, at)), s = load_shared16(place(i * 8 + group, at + 8));
          mma_m16n8k16(sums[i], a[0], p.x, p.y);
          mma_m16n8k16(sums[i], a[1], p.z, p.w);
          mma_m16n8k16(sums[i], a[2], s.x, s.y);
          mma_m16n8k16(sums[i], a[3], s.z, s.w);
        }
      }
    } else {
      const i64 first = static_cast<i64>(step) * WIDE + deep * STEP, end = first + STEP < k ? first + STEP : k;
      add_exactly<X, F, TILES, WARPS>(sums, rows_of, x, x_scales, b, b_scales, first_row, m, n, first, end, k);
    }
  };

  Weights<CHUNKS> ahead[AHEAD];
  load_x(first_step);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) load_weights(ahead[i], first_step + i);
#pragma unroll 1
  for (int step = first_step; step < steps; step += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (step + i < steps) {
        run(ahead[i], step + i);
        load_weights(ahead[i], step + i + AHEAD);
      }

  __syncthreads();
  float* parts = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      parts[(deep * ROWS + (warp % WARPS) * 16 + group + (j >> 1) * 8) * (TOKENS + 1) + i * 8 + part * 2 + (j & 1)] =
          sums[i][j];
  __syncthreads();
  for (int e = thread; e < ROWS * MOST; e += 256) {
    const int r = e % ROWS, token = e / ROWS;
    if (token >= m || first_row + r >= n) continue;
    const float start = bias == nullptr ? 0.0f : bias[first_row + r];
    float sum = 0.0f;
#pragma unroll
    for (int p = X::parts - 1; p >= 0; --p) {
      float part_sum = p == 0 ? start : 0.0f;
#pragma unroll
      for (int d = 0; d < DEEP; ++d) part_sum += parts[(d * ROWS + r) * (TOKENS + 1) + token * X::parts + p];
      sum = p == X::parts - 1 ? part_sum : sum * 0x1p-8f + part_sum;
    }
    if (X::parts > 1 && magnitude(sum) >= INFINITY_BITS) {
      sum = start;
#pragma unroll 1
      for (i64 at = static_cast<i64>(first_step) * WIDE; at < k_end; ++at)
        sum = fmaf(operand<F>(b, b_scales, first_row + r, at, k), operand<X>(x, x_scales, rows_of.of_x(token), at, k),
                   sum);
    }
    write_value(y, (split * m + rows_of.of_y(token)) * n + first_row + r, sum, y_dtype);
  }
}
