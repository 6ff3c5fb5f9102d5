// The gemm in float32 for strips of many rows: the same products as gemm_f32.cpp.
//
// y [M, N] = A [M, K] . B [N, K]^T, rows of A 256 at a time. Bytes moved: 1.03 N K once per 256 rows of A + 4 M K + the
// result.
//
// Layout: the lanes of a sum are rows of A, so that sums are not added up across lanes: with a K of a few hundred that
// would take a fifth of the time. A is turned while it is packed, once; B is decoded as it lies, in panels that stay in
// L1, and each of its values is broadcast. The result comes out turned: a strip of it is turned back when it is done.
#include "gemm.h"
#include "transpose.h"

#if defined(__AVX2__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kPanel = 8;    // rows of B decoded at a time
constexpr int64_t kDepth = 256;  // of a chunk
// A tile takes all registers: 3 x 8 sums and 3 + 1 operands of 32, or 3 x 4 sums and those of 16.
constexpr int kVectors = 3;  // of rows
constexpr int kManyColumns = kLanes == 16 ? 8 : 4;
constexpr int64_t kTurned = 32;  // rows of the result that are turned back at a time

// kLanes rows of kLanes values to columns.
MXFP8_INLINE void turn_tile(const float* from, int64_t stride, float* to, int64_t to_stride) {
  transpose_tile(reinterpret_cast<const char*>(from), stride, reinterpret_cast<char*>(to), to_stride);
}

// Multiplies V vectors of rows of A, `depth` steps each, with kManyColumns rows of a panel.
template <int V>
MXFP8_INLINE void multiply_tile(const float* a, const float* b, int64_t depth, float* strip, bool accumulate) {
  Vec sums[V][kManyColumns];
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kManyColumns; ++j) {
      sums[i][j] = accumulate ? load(strip + j * kGemmRows + i * kLanes) : zero();
    }
  }
  for (int64_t block = 0; block < depth; block += kBlock, b += kPanel * kBlock) {
#pragma GCC unroll 2
    for (int k = 0; k < kBlock; ++k, a += kLanes) {
      Vec rows[V];
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) rows[i] = load(a + i * depth * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kManyColumns; ++j) {
        const Vec column = all_of(b[j * kBlock + k]);
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) sums[i][j] = multiply_add(rows[i], column, sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kManyColumns; ++j) store(strip + j * kGemmRows + i * kLanes, sums[i][j]);
  }
}

// Fetches what the strip's rows will be stored over, kLanes columns from `column` on, while there is work to do
// meanwhile.
MXFP8_INLINE void prefetch_result(const GemmArgs& args, int64_t row, int64_t rows, int64_t column) {
  if (args.y == nullptr) return;
  const int64_t bytes = args.y_dtype == MXFP8_FLOAT32 ? 4 : 2;
  const char* y = static_cast<const char*>(args.y) + (row * args.y_stride + column) * bytes;
  for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(y + i * args.y_stride * bytes, 1, 2);
}

// Multiplies all rows, `vectors` of them, with a panel, in tiles as equal as they can be.
MXFP8_INLINE void multiply_panel(const float* a, const float* b, int64_t vectors, int64_t depth, float* strip,
                                 bool accumulate) {
  const int64_t tiles = (vectors + kVectors - 1) / kVectors;
  for (int64_t tile = 0, vector = 0; tile < tiles; ++tile) {
    const int64_t count = vectors / tiles + (tile < vectors % tiles);
    with_rows<kVectors>(count, [&](auto v) {
      for (int64_t j = 0; j < kPanel; j += kManyColumns) {
        multiply_tile<decltype(v)::value>(a + vector * depth * kLanes, b + j * kBlock, depth,
                                          strip + j * kGemmRows + vector * kLanes, accumulate);
      }
    });
    vector += count;
  }
}

}  // namespace

int gemm_many_f32_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                       void* packed) {
  alignas(64) float values[kLanes * kDepth];
  const int64_t vectors = (rows + kLanes - 1) / kLanes;
  for (int64_t vector = tile_begin; vector < tile_end; ++vector) {
    const int64_t count = min_of(kLanes, rows - vector * kLanes);
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      const Chunk chunk = chunk_at(args.k, kDepth, c, kBlock);
      if (count < kLanes) std::memset(values, 0, sizeof values);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < chunk.padded; k += kBlock) {
          load_a_block(args, row + vector * kLanes + i, (chunk.k + k) / kBlock, values + i * kDepth + k);
        }
      }
      float* out = static_cast<float*>(packed) + (chunk.k * vectors + vector * chunk.padded) * kLanes;
      for (int64_t k = 0; k < chunk.padded; k += kLanes) {
        turn_tile(values + k, kDepth, out + k * kLanes, kLanes);
      }
    }
  }
  return 0;
}

void gemm_many_f32_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                            int64_t column_end, const void* packed, int) {
  const auto* a = static_cast<const float*>(packed);
  const int64_t vectors = (rows + kLanes - 1) / kLanes, chunks = chunks_of(args.k, kDepth);
  alignas(64) float strip[kGemmColumns * kGemmRows], turned[kTurned * kGemmColumns], b[kPanel * kDepth];
  with_format(args.b_format, [&](auto format) {
    for (int64_t column = column_begin; column < column_end; column += kGemmColumns) {
      const int64_t width = min_of(kGemmColumns, column_end - column);
      if (chunks == 0) std::memset(strip, 0, sizeof strip);
      for (int64_t c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args.k, kDepth, c, kBlock);
        for (int64_t j = 0; j < width; j += kPanel) {
          if (c + 1 == chunks && j % kLanes == 0) prefetch_result(args, row, rows, column + j);
          decode_panel<decltype(format), kPanel>(args, column + j, column_end, chunk, b);
          multiply_panel(a + chunk.k * vectors * kLanes, b, vectors, chunk.padded, strip + j * kGemmRows, c > 0);
        }
      }
      for (int64_t i = 0; i < rows; i += kTurned) {
        for (int64_t j = 0; j < width; j += kLanes) {
          for (int64_t k = 0; k < kTurned; k += kLanes) {
            turn_tile(strip + j * kGemmRows + i + k, kGemmRows, turned + k * kGemmColumns + j, kGemmColumns);
          }
        }
        store_strip(args, row + i, min_of(kTurned, rows - i), column, width, turned);
      }
    }
  });
}

}  // namespace mxfp8::MXFP8_ISA

#endif
