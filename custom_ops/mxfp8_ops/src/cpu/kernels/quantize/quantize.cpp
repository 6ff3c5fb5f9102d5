// MXFP8Quantize: numerics.quantize, bit for bit. Two layouts:
//   rows     x [rows, K]            blocks lie contiguously: sixteen at a time, see group.h, and the rest one by one.
//   columns  x [outer, K, inner]    blocks lie `inner` apart: 64 neighbouring columns at a time, so every load is
//   contiguous.
// Work is split over rows, or over (outer, block of K, 64 columns). Bytes moved per value: 4 (f32) or 2 read, 1.03
// written.
#include "../../quantize.h"

#include "../common/codec.h"
#include "../common/turn.h"
#include "group.h"
#include "tiles.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kRun = 8;      // tiles side by side
constexpr int64_t kNarrow = 16;  // columns of a narrow tile: a few pixels, or the end of a row
template <int64_t Value>
struct Count {
  static constexpr int64_t value = Value;
};

// The difference of a value and its rounding is exact in float32: the two are within a factor of two of each other, or
// the rounding is zero.
template <class F>
MXFP8_INLINE void add_errors(const float* values, const uint8_t* elements, float scale, Sums* sums) {
  for (int i = 0; i < kBlock; ++i) {
    const double value = values[i];
    const double error = values[i] - decode<F>(elements[i]) * scale;
    sums->signal[i] += value * value;
    sums->noise[i] += error * error;
  }
}

template <class F>
MXFP8_INLINE uint32_t quantize_block(const float* values, uint32_t increment, uint8_t* elements) {
  const uint32_t scale = scale_code<F>(largest_magnitude<Float32>(values, int(kBlock)), increment);
  if (scale == kScaleNan) {
    std::memset(elements, kElementNan, kBlock);
    return scale;
  }
  const float inverse = inverse_scale_value(scale);
  for (int i = 0; i < kBlock; ++i) elements[i] = uint8_t(encode<F>(values[i] * inverse));
  return scale;
}

template <class D>
int64_t first_nonfinite(const typename D::Storage* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if ((bits_of(D::load(x[i])) & kMagnitude) >= kInfinity) return i;
  }
  return -1;
}

template <class D, class F>
void rows(const QuantizeArgs& args, int64_t row_begin, int64_t row_end, Stats* stats) {
  const int64_t row_blocks = (args.k + kBlock - 1) / kBlock;
  const bool adjacent = args.stride == args.k && args.k % kBlock == 0;
  const bool grouped = stats == nullptr || kGroupsAddErrors;
  alignas(64) float values[kBlock];
  alignas(64) uint8_t codes[kBlock];
  Sums sums;
  Sums* const wanted = stats == nullptr ? nullptr : &sums;
  // Blocks have numbers through all rows, because a group of blocks may go on in the next row.
  for (int64_t block = row_begin * row_blocks; true; ++block) {
    const int64_t groups = grouped ? (row_end * row_blocks - block) / kGroup : 0;
    if (adjacent) {
      const auto* x = static_cast<const typename D::Storage*>(args.x) + block * kBlock;
      AdjacentBlocks<D> blocks{x, args.elements + block * kBlock};
      block += kGroup * quantize_groups<D, F>(blocks, groups, args.increment, args.scales + block, wanted);
    } else if (groups > 0) {
      ApartBlocks<D> blocks(args, block / row_blocks, block % row_blocks * kBlock);
      block += kGroup * quantize_groups<D, F>(blocks, groups, args.increment, args.scales + block, wanted);
    }
    if (block >= row_end * row_blocks) break;
    const int64_t row = block / row_blocks, start = block % row_blocks * kBlock;
    const int64_t count = args.k - start < kBlock ? args.k - start : kBlock;
    const auto* x = static_cast<const typename D::Storage*>(args.x) + row * args.stride + start;
    uint8_t* elements = args.elements + row * args.k + start;
    if (count == kBlock) {
      for (int i = 0; i < kBlock; ++i) values[i] = D::load(x[i]);
    } else {
      for (int i = 0; i < kBlock; ++i) values[i] = i < count ? D::load(x[i]) : 0.0f;
    }
    const uint32_t scale = quantize_block<F>(values, args.increment, codes);
    args.scales[block] = uint8_t(scale);
    if (count == kBlock) {
      std::memcpy(elements, codes, kBlock);
    } else {
      std::memcpy(elements, codes, size_t(count));
    }
    if (stats == nullptr) continue;
    if (scale != kScaleNan) {
      add_errors<F>(values, codes, scale_value(scale), &sums);
    } else if (stats->first_nonfinite < 0) {
      stats->first_nonfinite = row * args.k + start + first_nonfinite<D>(x, count);
    }
  }
  if (stats != nullptr) sums.add_to(stats);
}

// The loop reads x twice: the second time from L2.
template <class D, class F>
void columns(const QuantizeArgs& args, int64_t tile_begin, int64_t tile_end) {
  alignas(64) typename D::Bits amax[kRun * kColumnTile];
  alignas(64) float inverse[kRun * kColumnTile];
  for_each_run(args, tile_begin, tile_end, kRun, [&](const TileRun& run) {
    const auto* x = static_cast<const typename D::Storage*>(args.x) + run.start;
    uint8_t* elements = args.elements + run.start;
    uint8_t* scales = args.scales + run.scale;
    std::memset(amax, 0, sizeof amax);
    int64_t row = 0;
    for (; row + 4 <= run.depth; row += 4) raise_magnitudes<D, 4>(x + row * args.inner, args.inner, run.width, amax);
    for (; row < run.depth; ++row) raise_magnitudes<D, 1>(x + row * args.inner, args.inner, run.width, amax);
    const auto set_scale = [&](int64_t i, const auto& code_of) MXFP8_INLINE_LAMBDA {
      typename D::Storage largest;
      std::memcpy(&largest, amax + i, sizeof largest);
      const uint32_t code = code_of(bits_of(D::load(largest)), args.increment);
      scales[i] = uint8_t(code);
      inverse[i] = code == kScaleNan ? 0.0f : inverse_scale_value(code);
    };
    for (int64_t i = 0; i < run.width; ++i) set_scale(i, fast_scale_code<F>);
    const bool in_doubt = any_in_doubt<F>(scales, run.width);
    if (F::emax == 0 && __builtin_expect(in_doubt, 0)) {
      for (int64_t i = 0; i < run.width; ++i) set_scale(i, scale_code<F>);
    }
    for (row = 0; row < run.depth; ++row) {
      encode_columns<D, F>(x + row * args.inner, inverse, run.width, elements + row * args.inner);
    }
    for (int64_t i = 0; in_doubt && i < run.width; ++i) {
      if (scales[i] != kScaleNan) continue;
      for (row = 0; row < run.depth; ++row) elements[row * args.inner + i] = kElementNan;
    }
  });
}

// Quantizes the first `Columns` columns of a tile; each is one block. The values stay as float32 meanwhile, because
// neighbouring rows of x may evict each other from L1.
template <int64_t Columns, class D, class F>
MXFP8_INLINE void quantize_tile(const ColumnTile<D>& tile, uint32_t increment, uint8_t (*codes)[kColumnTile],
                                uint8_t* scales, Sums* sums) {
  alignas(64) float values[kBlock][kColumnTile];
  alignas(64) int32_t amax[kColumnTile] = {};
  alignas(64) float inverse[kColumnTile];
  alignas(64) float scale[kColumnTile];
  alignas(64) uint32_t counts[kColumnTile];  // a mask: all bits; no bits for a column with a NaN or Inf
  for (int64_t row = tile.depth; row < kBlock; ++row) std::memset(values[row], 0, sizeof values[row]);
  for (int64_t row = 0; row < tile.depth; ++row) {
    load_columns<D, Columns>(tile.x + row * tile.stride, values[row], amax);
    tile.fetch(row);
  }
  bool finite = true;
  for (int64_t column = 0; column < Columns; ++column) {
    const uint32_t code = scale_code<F>(uint32_t(amax[column]), increment);
    scales[column] = uint8_t(code);
    inverse[column] = code == kScaleNan ? 0.0f : inverse_scale_value(code);
    scale[column] = scale_value(code);
    counts[column] = code != kScaleNan ? ~0u : 0u;
    finite = finite && code != kScaleNan;
  }
  for (int64_t row = 0; row < kBlock; ++row) encode_columns<Float32, F>(values[row], inverse, Columns, codes[row]);
  for (int64_t column = 0; !finite && column < Columns; ++column) {
    if (scales[column] != kScaleNan) continue;
    for (int64_t row = 0; row < kBlock; ++row) codes[row][column] = kElementNan;
  }
  if (sums == nullptr) return;
  double* __restrict signals = sums->signal;
  double* __restrict noises = sums->noise;
  for (int64_t row = 0; row < kBlock; ++row) {
    for (int64_t column = 0; column < Columns; ++column) {
      const float rounded = decode<F>(codes[row][column]) * scale[column];
      const float value = float_of(bits_of(values[row][column]) & counts[column]);
      const float error = float_of(bits_of(values[row][column] - rounded) & counts[column]);
      signals[column] += double(value) * double(value);
      noises[column] += double(error) * double(error);
    }
  }
}

// Turns the codes of these columns: element k of column c becomes turned[c * stride + k].
template <int64_t Columns>
MXFP8_INLINE void turn_tile(const uint8_t (*codes)[kColumnTile], uint8_t* turned, int64_t stride) {
#if defined(__AVX2__)
  for (int64_t k = 0; k < kBlock; k += kTurnRows) {
    for (int64_t c = 0; c < Columns; c += kTurnRows) {
      __m128i square[kTurnRows];
      for (int i = 0; i < kTurnRows; ++i)
        square[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(codes[k + i] + c));
      turn(square);
      for (int i = 0; i < kTurnRows; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(turned + (c + i) * stride + k), square[i]);
      }
    }
  }
#else
  for (int64_t c = 0; c < Columns; ++c) {
    for (int64_t k = 0; k < kBlock; ++k) turned[c * stride + k] = codes[k][c];
  }
#endif
}

// The pack of a transposed weight: x [K, N] -> elements [N, K]. A task's tile is 64 columns by 8 blocks, so that each
// row of the result is written 256 bytes at a time. The numbers of tiles go along the columns first. Zeros complete a
// tile at the ends of x.
template <class D, class F>
void transposed(const QuantizeArgs& args, int64_t tile_begin, int64_t tile_end, Stats* stats) {
  using T = typename D::Storage;
  constexpr int64_t turned_bytes = kPackDepth * kBlock;
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  const int64_t across = (args.outer + kColumnTile - 1) / kColumnTile;
  alignas(64) uint8_t codes[kBlock][kColumnTile];
  alignas(64) uint8_t room[kColumnTile][turned_bytes];
  alignas(64) uint8_t scales[kColumnTile];
  alignas(64) T padded[kBlock][kColumnTile];
  uint8_t* const turned = args.whole_tile ? args.elements : room[0];
  Sums sums;
  Sums* const wanted = stats == nullptr ? nullptr : &sums;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t column = tile % across * kColumnTile;
    const int64_t block_begin = tile / across * kPackDepth;
    const int64_t width = args.outer - column < kColumnTile ? args.outer - column : kColumnTile;
    const int64_t block_end = block_begin + kPackDepth < blocks ? block_begin + kPackDepth : blocks;
    const int64_t k_begin = block_begin * kBlock;
    const int64_t k_end = block_end * kBlock < args.k ? block_end * kBlock : args.k;
    if (width < kColumnTile) std::memset(padded, 0, sizeof padded);
    const T* const first = static_cast<const T*>(args.x) + k_begin * args.stride + column;
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int64_t k = block * kBlock;
      const int64_t depth = args.k - k < kBlock ? args.k - k : kBlock;
      const T* x = first + (k - k_begin) * args.stride;
      const T* next = block + 1 < block_end ? x + kBlock * args.stride : first + kColumnTile;
      ColumnTile<D> part = {x, args.stride, depth, next, args.stride};
      if (width < kColumnTile) {  // columns from `width` on stay 0
        for (int64_t row = 0; row < depth; ++row) {
          std::memcpy(padded[row], x + row * args.stride, size_t(width) * sizeof(T));
        }
        part.x = padded[0], part.stride = kColumnTile;
      }
      uint8_t* to = turned + k - k_begin;
      if (!quantize_turned<D, F>(part, args.increment, to, turned_bytes, scales, wanted)) {
        const auto quantize = [&](auto columns) MXFP8_INLINE_LAMBDA {
          quantize_tile<decltype(columns)::value, D, F>(part, args.increment, codes, scales, wanted);
          turn_tile<decltype(columns)::value>(codes, to, turned_bytes);
        };
        width > kNarrow ? quantize(Count<kColumnTile>{}) : quantize(Count<kNarrow>{});
      }
      for (int64_t c = 0; c < width; ++c) {
        args.scales[(column + c) * blocks + block] = scales[c];
        if (stats == nullptr || scales[c] != kScaleNan) continue;
        for (int64_t row = 0; row < depth; ++row) {
          if (first_nonfinite<D>(x + row * args.stride + c, 1) < 0) continue;
          const int64_t index = (k + row) * args.outer + column + c;
          if (stats->first_nonfinite < 0 || index < stats->first_nonfinite) stats->first_nonfinite = index;
          break;
        }
      }
    }
    for (int64_t c = 0; c < width && !args.whole_tile; ++c) {
      uint8_t* to = args.elements + (column + c) * args.k + k_begin;
      const uint8_t* from = room[c];
      const int64_t count = k_end - k_begin, whole = count / kBlock * kBlock;
      for (int64_t i = 0; i < whole; i += kBlock) std::memcpy(to + i, from + i, kBlock);
      if (count > whole) std::memcpy(to + whole, from + whole, size_t(count - whole));
    }
  }
  if (stats != nullptr) sums.add_to(stats);
}

}  // namespace

void quantize_rows(const QuantizeArgs& args, int64_t row_begin, int64_t row_end, Stats* stats) {
  with_dtype(args.dtype, [&](auto dtype) {
    with_format(args.format,
                [&](auto format) { rows<decltype(dtype), decltype(format)>(args, row_begin, row_end, stats); });
  });
}

void quantize_columns(const QuantizeArgs& args, int64_t tile_begin, int64_t tile_end) {
  with_dtype(args.dtype, [&](auto dtype) {
    with_format(args.format,
                [&](auto format) { columns<decltype(dtype), decltype(format)>(args, tile_begin, tile_end); });
  });
}

void pack_columns(const QuantizeArgs& args, int64_t tile_begin, int64_t tile_end, Stats* stats) {
  with_dtype(args.dtype, [&](auto dtype) {
    with_format(args.format,
                [&](auto format) { transposed<decltype(dtype), decltype(format)>(args, tile_begin, tile_end, stats); });
  });
}

}  // namespace mxfp8::MXFP8_ISA
