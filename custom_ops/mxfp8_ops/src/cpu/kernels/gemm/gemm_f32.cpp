// MXFP8Gemm and MXFP8WeightGemm in float32: the products of the exact dequantized values, accumulated in float32.
//
// y [M, N] = A [M, K] . B [N, K]^T. A (values, or elements and scales) is packed as float32 once per 256 rows; rows of
// B are decoded, two registers of them at a time and 256 deep, into L1. Work is split over N (and M if N is
// small). Bytes moved: 1.03 N K (once per 256 rows of A) + 4 M K + the result.
//
// Layout: the lanes of a sum are columns of the result, so that all lanes have work with any number of rows, and sums
// over K stay in their lanes. columns.h decodes B; values of A are broadcast. Panels of a small constant weight are
// decoded once: with few rows that takes longer than the products.
#include "columns.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kVectors = 2;                // vectors of columns in a register tile
constexpr int kPanel = kVectors * kLanes;  // rows of B decoded at a time
constexpr int64_t kDepth = 256;            // depth of a chunk
static_assert(kDepth % kStretch == 0, "chunks are whole stretches");

using FloatTiles = Tiles<kFloatRows>;

// Decodes a panel, one chunk deep, as [vector, kDepth, kLanes], and fetches what lies `ahead` bytes further.
template <class F>
MXFP8_NOINLINE void decode_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t ahead,
                                 float* out) {
  const int64_t blocks = blocks_of(args.k);
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t k = 0; k < chunk.count; k += kStretch) {
      const uint8_t* elements = args.b + (column + c) * args.k + chunk.k + k;
      const uint8_t* scales = args.b_scales + (column + c) * blocks + (chunk.k + k) / kBlock;
      decode_stretch<F>({elements, scales, args.k, blocks, columns - c, chunk.count - k}, ahead,
                        out + c * kDepth + k * kLanes);
    }
  }
}

// The decoded panel of `column` among the panels in `data`, from chunk `index` on.
MXFP8_INLINE const float* panel_at(const GemmArgs& args, const void* data, int64_t column, int64_t index) {
  return static_cast<const float*>(data) + (column * chunks_of(args.k, kDepth) + index * kPanel) * kDepth;
}

// Multiplies R rows of A, `depth` values each, with V registers of columns of a panel.
template <int R, int V>
MXFP8_NOINLINE void multiply_tile(const float* a, const float* b, int64_t depth, float* strip, bool accumulate) {
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < V; ++j) sums[i][j] = zero();
  }
  for (int64_t block = 0; block < depth; block += kBlock, a += R * kBlock) {
#pragma GCC unroll 2
    for (int k = 0; k < kBlock; ++k, b += kLanes) {
      Vec columns[V];
      for (int j = 0; j < V; ++j) columns[j] = load(b + j * kDepth * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const Vec row = all_of(a[i * kBlock + k]);
        for (int j = 0; j < V; ++j) sums[i][j] = multiply_add(row, columns[j], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < V; ++j) {
      float* to = strip + i * kGemmColumns + j * kLanes;
      store(to, accumulate ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

}  // namespace

int gemm_f32_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, void* packed) {
  const FloatTiles tiles{rows};
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = tiles.first_row(tile), tile_rows = tiles.rows_of(tile);
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      const Chunk chunk = chunk_at(args.k, kDepth, c, kBlock);
      float* out = static_cast<float*>(packed) + tiles.offset(chunk, tile);
      for (int64_t i = 0; i < tile_rows; ++i) {
        for (int64_t k = 0; k < chunk.padded; k += kBlock) {
          load_a_block(args, row + first + i, (chunk.k + k) / kBlock, out + k * tile_rows + i * kBlock);
        }
      }
    }
  }
  return 0;
}

void gemm_f32_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                       int64_t column_begin, int64_t column_end, const void* packed, int) {
  const auto* a = static_cast<const float*>(packed);
  const FloatTiles tiles{rows};
  const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
  alignas(64) float decoded[kPanel * kDepth];
  const auto multiply_panel = [&](auto vectors, const float* b, Chunk chunk, float* strip, bool accumulate) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const float* from = a + tiles.offset(chunk, tile);
      float* to = strip + (tiles.first_row(tile) - first) * kGemmColumns;
      with_rows<kFloatRows>(tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, decltype(vectors)::value>(from, b, chunk.padded, to, accumulate);
      });
    }
  };
  with_format(args.b_format, [&](auto format) {
    for_each_strip<float, kBlock, kPanel>(
        args, row + first, count, column_begin, column_end, kDepth,
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const int64_t columns = min_of(kPanel, column_end - column);
          const float* b = decoded;
          if (args.panels != nullptr) {
            b = panel_at(args, args.panels->data, column, chunk.k / kDepth);
          } else {
            const bool along_k = count * int64_t(sizeof(float)) <= kFewRowsBytes && chunk.k + kDepth < args.k;
            decode_panel<decltype(format)>(args, column, columns, chunk, along_k ? kDepth : kPanel * args.k, decoded);
          }
          if (columns > kLanes) {
            multiply_panel(Rows<kVectors>{}, b, chunk, strip, accumulate);
          } else {
            multiply_panel(Rows<1>{}, b, chunk, strip, accumulate);
          }
        });
  });
}

int64_t gemm_f32_panel_bytes(const GemmArgs& args) {
  const int64_t columns = (args.n + kPanel - 1) / kPanel * kPanel;
  return columns * chunks_of(args.k, kDepth) * kDepth * int64_t(sizeof(float));
}

bool gemm_f32_make_panels(const GemmArgs& args, int64_t column_begin, int64_t column_end, void* data) {
  with_format(args.b_format, [&](auto format) {
    for (int64_t column = column_begin; column < column_end; column += kPanel) {
      for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
        auto* to = const_cast<float*>(panel_at(args, data, column, c));
        decode_panel<decltype(format)>(args, column, min_of(kPanel, args.n - column),
                                       chunk_at(args.k, kDepth, c, kBlock), 0, to);
      }
    }
  });
  return false;
}

MXFP8_PANEL_KERNEL(gemm_f32, kFloatRows, sizeof(float));

}  // namespace mxfp8::MXFP8_ISA
