// MXFP8Gemm and MXFP8WeightGemm in float32: the products of the exact dequantized values, accumulated in float32.
//
// y [M, N] = A [M, K] . B [N, K]^T. A (values, or elements and scales) is packed as float32 once per 256 rows; rows of
// B are decoded, eight at a time and 512 deep, into 16 KiB that stay in L1. The register tile is kTileRows x 4 with
// lanes along K, so neither operand is transposed; lanes are added up once per chunk. Work is split over N (and M if N
// is small). Bytes moved: 1.03 N K (once per 256 rows of A) + 4 M K + the result.
#include "gemm.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kPanel = 8;    // rows of B decoded at a time: they stay in L1, with a tile of A
constexpr int64_t kDepth = 512;  // of a chunk

template <int R>
MXFP8_INLINE void multiply_tile(const float* a, const float* b, int64_t blocks, float* strip, bool accumulate) {
  Vec sums[R][kTileColumns];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kTileColumns; ++j) sums[i][j] = zero();
  }
  for (int64_t block = 0; block < blocks; ++block) {
    for (int lane = 0; lane < kBlock; lane += kLanes) {
      Vec column[kTileColumns];
      for (int j = 0; j < kTileColumns; ++j) column[j] = load(b + j * kBlock + lane);
      for (int i = 0; i < R; ++i) {
        const Vec row = load(a + i * kBlock + lane);
        for (int j = 0; j < kTileColumns; ++j) sums[i][j] = multiply_add(row, column[j], sums[i][j]);
      }
    }
    a += R * kBlock;
    b += kPanel * kBlock;
  }
  for (int i = 0; i < R; ++i) store_sums(sums[i], strip + i * kGemmColumns, accumulate);
}

}  // namespace

int gemm_f32_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, void* packed) {
  const Tiles tiles{rows};
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
  const Tiles tiles{rows};
  with_format(args.b_format, [&](auto format) {
    alignas(64) float b[kPanel * kDepth];
    const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
    for_each_strip<float, kBlock, kPanel>(args, row + first, count, column_begin, column_end, kDepth,
                                          [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
                                            decode_panel<decltype(format), kPanel>(args, column, column_end, chunk, b);
                                            for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
                                              const float* from = a + tiles.offset(chunk, tile);
                                              float* to = strip + (tiles.first_row(tile) - first) * kGemmColumns;
                                              with_rows(tiles.rows_of(tile), [&](auto r) {
                                                for (int64_t j = 0; j < kPanel; j += kTileColumns) {
                                                  multiply_tile<decltype(r)::value>(
                                                      from, b + j * kBlock, chunk.padded / kBlock, to + j, accumulate);
                                                }
                                              });
                                            }
                                          });
  });
}

}  // namespace mxfp8::MXFP8_ISA
