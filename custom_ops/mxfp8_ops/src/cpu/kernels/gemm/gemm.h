// Shared by the gemm kernels: where packed values lie, the loop over strips of the result, and the store of a strip.
//
// Packed A, `rows` rows: chunks of K, `depth` deep. A chunk has tiles of up to kTileRows rows, of nearly equal size,
// because a thin tile keeps few sums busy. A tile has steps along K, a step has the values of each row of the tile. So
// a multiply reads packed A front to back.
#pragma once
#include "../../gemm.h"
#include "../common/codec.h"
#include "../common/simd.h"
#include "epilogue.h"

namespace mxfp8::MXFP8_ISA {

// Up to this many bytes in a column of A, B dominates the traffic: each of its rows is read front to back.
constexpr int64_t kFewRowsBytes = 128;
constexpr int kTileColumns = 4;  // rows of B that are multiplied with a tile at once: their sums stay in registers

MXFP8_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
MXFP8_INLINE int64_t blocks_of(int64_t k) { return (k + kBlock - 1) / kBlock; }

// One chunk of K: the depth that is multiplied before partial sums are stored.
struct Chunk {
  int64_t k, count;  // its elements
  int64_t padded;    // values of a packed row in it
};
MXFP8_INLINE int64_t chunks_of(int64_t k, int64_t depth) { return (k + depth - 1) / depth; }
// Packed rows are padded to a multiple of `step` values.
MXFP8_INLINE Chunk chunk_at(int64_t k, int64_t depth, int64_t index, int64_t step) {
  const int64_t begin = index * depth, count = min_of(depth, k - begin);
  return {begin, count, (count + step - 1) / step * step};
}

// How `rows` > 0 rows of A are cut into tiles of up to Most.
template <int Most = kTileRows>
struct Tiles {
  int64_t rows;
  int64_t count = (rows + Most - 1) / Most;             // their number
  int64_t least = rows / count, longer = rows % count;  // rows of a tile, and how many tiles have one more
  MXFP8_INLINE_MEMBER int64_t first_row(int64_t tile) const { return tile * least + min_of(tile, longer); }
  MXFP8_INLINE_MEMBER int64_t rows_of(int64_t tile) const { return least + (tile < longer); }
  // Offset, in values, in the packed A.
  MXFP8_INLINE_MEMBER int64_t offset(Chunk chunk, int64_t tile) const {
    return chunk.k * rows + chunk.padded * first_row(tile);
  }
};

// Decodes a block of `count` <= 32 elements, scaled, as float32; zeros follow.
template <class F>
MXFP8_INLINE void decode_block(const uint8_t* elements, int64_t count, uint8_t scale_of_block, float* out) {
  const float scale = scale_value(scale_of_block);
#if defined(__AVX2__)
  if (count >= kBlock) {
    // An E4M3 factor is 2^8 larger, see simd.h, and must not overflow; and 0x7f, its NaN, would be a float16 number.
    if (F::has_infinity || F::is_integer || (scale_of_block <= 246 && !any_nan_code(elements))) {
      return halves_to_floats<F>(elements, scale * kHalfFactor<F>, out);
    }
  }
#endif
  if (count >= kBlock) {
    for (int i = 0; i < kBlock; ++i) out[i] = decode<F>(elements[i]) * scale;
  } else {
    for (int i = 0; i < kBlock; ++i) out[i] = i < count ? decode<F>(elements[i]) * scale : 0.0f;
  }
}

// Each row of B is a new stream to the hardware prefetcher: this fetches the same chunk of a row of the next panel.
MXFP8_INLINE void prefetch_next_panel(const GemmArgs& args, int64_t row, Chunk chunk) {
  const uint8_t* next = args.b + row * args.k + chunk.k;
  for (int64_t i = 0; i < chunk.count; i += 64) __builtin_prefetch(next + i);
}

// Decodes a panel - Panel rows of B from `column` on, one chunk deep - as float32: [block, row, 32]. Rows past
// `column_end` are zero.
template <class F, int64_t Panel>
MXFP8_INLINE void decode_panel(const GemmArgs& args, int64_t column, int64_t column_end, Chunk chunk, float* out) {
  for (int64_t row = 0; row < Panel; ++row) {
    const bool inside = column + row < column_end;
    const uint8_t* elements = args.b + (column + row) * args.k;
    const uint8_t* scales = args.b_scales + (column + row) * blocks_of(args.k);
    prefetch_next_panel(args, column + row + Panel, chunk);
    for (int64_t i = 0; i < chunk.padded; i += kBlock) {
      float* to = out + i * Panel + row * kBlock;
      const int64_t k = chunk.k + i;
      if (inside) {
        decode_block<F>(elements + k, args.k - k, scales[k / kBlock], to);
      } else {
        std::memset(to, 0, kBlock * sizeof(float));
      }
    }
  }
}

// A row of A from one of its blocks on: its elements, or values of type T, and the scales of its blocks, which only
// elements have.
template <class T>
struct RowOfA {
  const T* values;
  const uint8_t* scales;
};

// All kernels read A through this function, or read the packed pixels of a convolution.
template <class T = uint8_t>
MXFP8_INLINE RowOfA<T> row_of_a(const GemmArgs& args, int64_t row, int64_t block = 0) {
  if (__builtin_expect(args.a_rows != nullptr, 0)) row = args.a_rows[row];
  const T* values = static_cast<const T*>(args.a) + row * args.a_stride + block * kBlock;
  return {values, sizeof(T) == 1 ? args.a_scales + row * blocks_of(args.k) + block : nullptr};
}

// Block `block` of a row of quantized A. The elements of a packed pixel are written to `room`.
MXFP8_INLINE RowOfA<uint8_t> block_of_a(const GemmArgs& args, int64_t row, int64_t block, uint8_t* room) {
  if (__builtin_expect(args.taps == nullptr, 1)) return row_of_a<uint8_t>(args, row, block);
  const TapRows& taps = *args.taps;
  const int64_t pixel = taps.pixels[block / taps.blocks * args.m + row], at = taps.first + block % taps.blocks;
  taps.unpack(taps.packed, pixel * taps.stride + at, room);
  return {room, taps.scales + pixel * taps.stride + at};
}

// Block `block` of a row of A as float32: dequantized if it is quantized, rounded if the caller asks for it. Zeros
// follow a partial block.
MXFP8_INLINE void load_a_block(const GemmArgs& args, int64_t row, int64_t block, float* out) {
  const int64_t count = args.k - block * kBlock;
  if (args.a_scales != nullptr) {
    uint8_t room[kBlock];
    const RowOfA<uint8_t> a = block_of_a(args, row, block, room);
    with_format(args.a_format, [&](auto format) { decode_block<decltype(format)>(a.values, count, *a.scales, out); });
  } else {
    with_dtype(args.a_format, [&](auto dtype) {
      using D = decltype(dtype);
      const auto* from = row_of_a<typename D::Storage>(args, row, block).values;
      if (count >= kBlock) {
        for (int i = 0; i < kBlock; ++i) out[i] = D::load(from[i]);
      } else {
        for (int i = 0; i < kBlock; ++i) out[i] = i < count ? D::load(from[i]) : 0.0f;
      }
    });
    if (args.rounds_a) {
      for (int i = 0; i < kBlock; ++i) out[i] = BFloat16::load(BFloat16::store(out[i]));
    }
  }
}

// One row of A times one row of B over a part of K, from the operands themselves, decoded to float32. The fast kernels
// use it where they are not exact.
template <class F>
MXFP8_NOINLINE float exact_dot(const GemmArgs& args, int64_t row, int64_t column, int64_t k_begin, int64_t count) {
  const auto* b = args.b + column * args.k;
  const uint8_t* b_scales = args.b_scales + column * blocks_of(args.k);
  float sum = 0;
  for (int64_t k = k_begin; k < k_begin + count; k += kBlock) {
    alignas(64) float x[kBlock], w[kBlock];
    load_a_block(args, row, k / kBlock, x);
    decode_block<F>(b + k, args.k - k, b_scales[k / kBlock], w);
    Vec sums = zero();
    for (int lane = 0; lane < kBlock; lane += kLanes) sums = multiply_add(load(x + lane), load(w + lane), sums);
    const Vec all[4] = {sums, zero(), zero(), zero()};
    float totals[4];
    store_sums(all, totals, false);
    sum += totals[0];
  }
  return sum;
}

// One row of A times one row of B whose sum in float32 overflowed. A multiply-add adds the exact product: +2^174 leaves
// a sum of -Inf as it is, though +2^174 is +Inf in float32. Here such a product is an infinity. The other products are
// added in float64, where their sum stays finite. So the result is infinite only where a product or the sum of the
// products is.
template <class F>
MXFP8_NOINLINE float dot_of_overflow(const GemmArgs& args, int64_t row, int64_t column) {
  const auto* b = args.b + column * args.k;
  const uint8_t* b_scales = args.b_scales + column * blocks_of(args.k);
  double sums[kBlock] = {};
  for (int64_t k = 0; k < args.k; k += kBlock) {
    alignas(64) float x[kBlock], w[kBlock];
    load_a_block(args, row, k / kBlock, x);
    decode_block<F>(b + k, args.k - k, b_scales[k / kBlock], w);
    for (int i = 0; i < kBlock; ++i) sums[i] += double(x[i] * w[i]);
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return float(sum);
}

// Computes the infinite sums of a strip again.
template <class F>
MXFP8_NOINLINE void correct_overflow(const GemmArgs& args, const Finished& part) {
  for (int64_t i = 0; i < part.rows; ++i) {
    for (int64_t j = 0; j < part.width; ++j) {
      float& sum = part.sums[i * part.stride + j];
      if ((bits_of(sum) & kMagnitude) == kInfinity) sum = dot_of_overflow<F>(args, part.row + i, part.column + j);
    }
  }
}

// Whether a value of a strip [rows, width] is infinite or NaN: such a value times 0 is NaN, any other value times 0 is
// 0.
MXFP8_INLINE bool any_nonfinite(const float* values, int64_t rows, int64_t width, int64_t stride) {
  if (width == stride) width *= rows, rows = 1;
  constexpr int unrolled = 4;
  Vec zeros[unrolled] = {zero(), zero(), zero(), zero()};
  float rest = 0;
  for (int64_t row = 0; row < rows; ++row, values += stride) {
    int64_t i = 0;
    for (; i + unrolled * kLanes <= width; i += unrolled * kLanes) {
      for (int j = 0; j < unrolled; ++j) zeros[j] = multiply_add(load(values + i + j * kLanes), zero(), zeros[j]);
    }
    for (; i + kLanes <= width; i += kLanes) zeros[0] = multiply_add(load(values + i), zero(), zeros[0]);
    for (; i < width; ++i) rest += values[i] * 0.0f;
  }
  float sums[kLanes];
  store(sums, (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]));
  for (const float sum : sums) rest += sum;
  return rest != 0;  // NaN is not equal to 0
}

// Finishes a strip [rows, width] of the result, its rows `stride` values apart.
MXFP8_INLINE void store_strip(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, int64_t width,
                              float* strip, int64_t stride = kGemmColumns) {
  // Rows that are looked at and stored while they are in L1; more for a `store`, which turns them to columns of y.
  const int64_t most = args.store == nullptr ? 32 : kGemmRows;
  for (int64_t first = 0; first < rows; first += most) {
    const Finished part = {row + first, min_of(most, rows - first), column, width, strip + first * stride, stride};
    if (__builtin_expect(any_nonfinite(part.sums, part.rows, width, stride), 0)) {
      with_format(args.b_format, [&](auto format) { correct_overflow<decltype(format)>(args, part); });
    }
    finish(args, part);
  }
}

// Calls panel(chunk, column, strip, accumulate) for strips of kGemmColumns columns of the result, in chunks `depth`
// deep. The call multiplies all tiles with one panel of B, which is PanelRows rows of it. T is the type of packed
// values.
template <class T, int Step, int64_t PanelRows, class Panel>
MXFP8_INLINE void for_each_strip(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin,
                                 int64_t column_end, int64_t depth, const Panel& panel) {
  alignas(64) float strip[kGemmRows * kGemmColumns];
  const int64_t chunks = chunks_of(args.k, depth);
  for (int64_t column = column_begin; column < column_end; column += kGemmColumns) {
    const int64_t width = min_of(kGemmColumns, column_end - column);
    if (chunks == 0) std::memset(strip, 0, size_t(rows * kGemmColumns) * sizeof(float));
    if (rows * int64_t(sizeof(T)) <= kFewRowsBytes) {
      for (int64_t j = 0; j < width; j += PanelRows) {
        for (int64_t c = 0; c < chunks; ++c) panel(chunk_at(args.k, depth, c, Step), column + j, strip + j, c > 0);
      }
    } else {
      for (int64_t c = 0; c < chunks; ++c) {
        for (int64_t j = 0; j < width; j += PanelRows)
          panel(chunk_at(args.k, depth, c, Step), column + j, strip + j, c > 0);
      }
    }
    store_strip(args, row, rows, column, width, strip);
  }
}

// Calls tile(integral constant R, packed A, strip) for every tile, R its number of rows.
template <int R>
struct Rows {
  static constexpr int value = R;
};
template <int R = kTileRows, class Call>
MXFP8_INLINE void with_rows(int64_t rows, const Call& call) {
  if constexpr (R == 1) {
    call(Rows<1>{});
  } else {
    if (rows >= R) {
      call(Rows<R>{});
    } else {
      with_rows<R - 1>(rows, call);
    }
  }
}

}  // namespace mxfp8::MXFP8_ISA
