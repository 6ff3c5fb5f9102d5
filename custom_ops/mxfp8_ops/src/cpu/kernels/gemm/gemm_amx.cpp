// The gemms on AMX, which multiplies tiles of bfloat16: up to 16 rows of A with 16 rows of B, 32 values deep, in 16
// cycles. Exact for the reasons in gemm_bf16.cpp: TDPBF16PS, too, flushes subnormal numbers.
//
// y [M, N] = A [M, K] . B [N, K]^T, rows of A kAmxStripRows at a time. Work is split over M and N. Flops: 2 M N K, at
// 1024 a cycle and core. Bytes moved: 1.03 N K once per strip of A + 2 M K + the result. Decoding a value of B takes as
// long as multiplying it with 100 rows.
//
// Layout: B is decoded in panels of 16 rows, turned, so that a row of a tile holds two values along K of 16 columns.
// Panels are decoded a group at a time, one chunk deep, and stay in L2, with a tile or two of A in L1. Packed A: chunks
// of K; in a chunk, tiles of 16 rows; in a tile, steps of 64 values along K; in a step, rows; of a row, the even
// values, then the odd ones, in the order in which B is decoded. Where values of A have parts (amx_blocks.h), all parts
// of a row lie together.
#include "amx_blocks.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kDepth = 384;         // depth of a chunk: two tiles of A, and as much of two panels, fill L1
constexpr int64_t kGroupColumns = 128;  // columns of a group: its panels stay in L2

// A group of panels, decoded, one chunk deep.
struct Group {
  int64_t column, columns;
  Chunk chunk;
  uint32_t misfits[kGroupColumns / kAmxColumns];
  alignas(64) uint16_t b[kGroupColumns * kDepth];
};

template <class F>
MXFP8_INLINE void decode_group(const GemmArgs& args, Ahead* ahead, int lowest, Group* group) {
  for (int64_t j = 0; j < group->columns; j += kAmxColumns) {
    Panel<F> panel(args, group->column + j, group->column + group->columns, lowest);
    panel.begin(group->chunk);
    uint16_t* out = group->b + j * group->chunk.padded;
    for (int64_t k = 0; k < group->chunk.count; k += kStepBf16, out += kPanelStep) {
      ahead->fetch_step();
      panel.step(k, out);
    }
    group->misfits[j / kAmxColumns] = panel.misfits();
  }
}

// Replaces the sums of columns that did not fit by exact sums. `before` [rows, kPairColumns] are the sums before the
// chunk.
template <class F>
MXFP8_NOINLINE void correct(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, Chunk chunk,
                            uint32_t misfits, const float* before, Sums sums) {
  for (; misfits != 0; misfits &= misfits - 1) {
    const int64_t c = __builtin_ctz(misfits);
    for (int64_t i = 0; i < rows; ++i) {
      sums.at[i * sums.stride + c] =
          before[i * kPairColumns + c] + exact_dot<F>(args, row + i, column + c, chunk.k, chunk.count);
    }
  }
}

// Adds the products of a chunk of A, from `a` on, to a block. The chunk has a tile of `first` rows and then one of
// `second` rows; the panels of B are `next` values apart.
template <class A, class Block>
MXFP8_INLINE void multiply_chunk(Block block, const uint16_t* a, int64_t first, int64_t second, const uint16_t* b,
                                 int64_t next, int64_t depth) {
  const uint16_t* below = a + first * depth * A::parts;
  for (int64_t k = 0; k < depth; k += kStepBf16, b += kPanelStep) {
    block.step(a, below, b, b + next);
    a += first * kStepBf16 * A::parts;
    below += second * kStepBf16 * A::parts;
  }
}

// Multiplies `rows` rows of A, from `row` on, with two panels of the group, from its column `j` on.
template <class F, class A>
MXFP8_INLINE void multiply_pair(const GemmArgs& args, AmxTiles* tiles, const uint16_t* a, int64_t row, int64_t rows,
                                const Group& group, int64_t j, Sums sums) {
  const int64_t columns = min_of(kPairColumns, group.columns - j), panel = j / kAmxColumns;
  const uint32_t misfits = group.misfits[panel] | (columns > kAmxColumns ? group.misfits[panel + 1] << kAmxColumns : 0);
  float before[A::rows_at_once * kPairColumns];
  if (__builtin_expect(misfits != 0, 0)) {
    for (int64_t i = 0; i < rows * kPairColumns; ++i) {
      before[i] = sums.add ? sums.at[i / kPairColumns * sums.stride + i % kPairColumns] : 0;
    }
  }
  A::with_block(tiles, rows, columns, [&](auto block, int64_t first, int64_t second) MXFP8_INLINE_LAMBDA {
    block.start(sums, first);
    multiply_chunk<A>(block, a, first, second, group.b + j * group.chunk.padded, kAmxColumns * group.chunk.padded,
                      group.chunk.padded);
    block.finish(sums, first);
  });
  if (__builtin_expect(misfits != 0, 0))
    correct<F>(args, row, rows, group.column + j, group.chunk, misfits, before, sums);
}

// Multiplies all rows from `first` to `end` of the strip with columns of the result.
template <class F, class A>
MXFP8_INLINE void multiply_many(const GemmArgs& args, int64_t row, int64_t rows, int64_t first, int64_t end,
                                int64_t column_begin, int64_t column_end, const uint16_t* a, int lowest) {
  const int64_t chunks = chunks_of(args.k, kDepth);
  AmxTiles tiles;
  Group group;
  alignas(64) float block[A::rows_at_once * kPairColumns];  // sums of a pair of panels
  alignas(64) float strip[kAmxStripRows * kGroupColumns];   // for sums over several chunks
  for (group.column = column_begin; group.column < column_end; group.column += kGroupColumns) {
    group.columns = min_of(kGroupColumns, column_end - group.column);
    Ahead ahead(args, group.column + group.columns);
    for (int64_t c = 0; c < chunks; ++c) {
      group.chunk = chunk_at(args.k, kDepth, c, kStepBf16);
      decode_group<F>(args, &ahead, lowest, &group);
      for (int64_t i = first; i < end; i += A::rows_at_once) {
        const int64_t count = min_of(A::rows_at_once, end - i);
        const uint16_t* from = a + (group.chunk.k * rows + group.chunk.padded * i) * A::parts;
        for (int64_t j = 0; j < group.columns; j += kPairColumns) {
          const Sums sums = chunks == 1 ? Sums{block, kPairColumns, false}
                                        : Sums{strip + i * kGroupColumns + j, kGroupColumns, c > 0};
          multiply_pair<F, A>(args, &tiles, from, row + i, count, group, j, sums);
          if (c < chunks - 1) continue;
          store_strip(args, row + i, count, group.column + j, min_of(kPairColumns, group.columns - j), sums.at,
                      sums.stride);
        }
      }
    }
  }
}

// The same for rows that fit in the tiles at once. Each step of B is decoded, and multiplied one step later, so that
// the tiles work during the next decode. The sums stay in the tiles along all of K.
template <class F, class A>
MXFP8_INLINE void multiply_few(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin,
                               int64_t column_end, const uint16_t* a, int lowest) {
  AmxTiles tiles;
  alignas(64) uint16_t b[2][2 * kPanelStep];
  alignas(64) float block[A::rows_at_once * kPairColumns];
  const Sums sums{block, kPairColumns, false};
  for (int64_t column = column_begin; column < column_end; column += kPairColumns) {
    const int64_t columns = min_of(kPairColumns, column_end - column);
    Panel<F> left(args, column, column_end, lowest), right(args, column + kAmxColumns, column_end, lowest);
    Ahead ahead(args, column + columns);
    A::with_block(&tiles, rows, columns, [&](auto block, int64_t first, int64_t second) MXFP8_INLINE_LAMBDA {
      const uint16_t *above = nullptr, *below = nullptr;
      int buffer = 0;
      block.start(sums, first);
      for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
        const Chunk chunk = chunk_at(args.k, kDepth, c, kStepBf16);
        left.begin(chunk);
        if (columns > kAmxColumns) right.begin(chunk);
        for (int64_t k = 0; k < chunk.count; k += kStepBf16, buffer ^= 1) {
          ahead.fetch_step();
          left.step(k, b[buffer]);
          if (columns > kAmxColumns) {
            ahead.fetch_step();
            right.step(k, b[buffer] + kPanelStep);
          }
          if (above != nullptr) block.step(above, below, b[buffer ^ 1], b[buffer ^ 1] + kPanelStep);
          const uint16_t* from = a + chunk.k * rows * A::parts;
          above = from + k * first * A::parts;
          below = from + (chunk.padded * first + k * second) * A::parts;
        }
      }
      block.step(above, below, b[buffer ^ 1], b[buffer ^ 1] + kPanelStep);
      block.finish(sums, first);
    });
    const uint32_t misfits = left.misfits() | (columns > kAmxColumns ? right.misfits() << kAmxColumns : 0);
    if (__builtin_expect(misfits != 0, 0)) {
      const float before[A::rows_at_once * kPairColumns] = {};
      correct<F>(args, row, rows, column, Chunk{0, args.k, 0}, misfits, before, sums);
    }
    store_strip(args, row, rows, column, columns, block, kPairColumns);
  }
}

// With K = 0 every sum is empty.
void store_nothing(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin, int64_t column_end) {
  float sums[kPairColumns] = {};
  for (int64_t column = column_begin; column < column_end; column += kPairColumns) {
    store_strip(args, row, rows, column, min_of(kPairColumns, column_end - column), sums, 0);
  }
}

template <class A>
MXFP8_INLINE void multiply_strip(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                                 int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  const int64_t first = tile_begin * kAmxRows, end = min_of(tile_end * kAmxRows, rows);
  if (args.k == 0) return store_nothing(args, row + first, end - first, column_begin, column_end);
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    const int lowest = lowest_scale<F>(exponent);
    if (rows <= A::rows_at_once) {
      multiply_few<F, A>(args, row, rows, column_begin, column_end, a, lowest);
    } else {
      multiply_many<F, A>(args, row, rows, first, end, column_begin, column_end, a, lowest);
    }
  });
}

// Values of dtype D, to be packed as parts that add up to the value, each the next 8 bits of it.
template <class D, int Parts>
struct AsParts {};

// 16 values of dtype D as float32; absent values are zero.
MXFP8_INLINE __m512 load_values(Float32, const float* from, __mmask16 present) {
  return _mm512_maskz_loadu_ps(present, from);
}
MXFP8_INLINE __m512 load_values(Float16, const uint16_t* from, __mmask16 present) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, from));
}

template <class D, int Parts>
MXFP8_INLINE bool pack_row(AsParts<D, Parts>, const GemmArgs& args, int64_t row, int64_t k, int64_t count,
                           int64_t stride, uint16_t* out, Extent* extent) {
  const auto* values = row_of_a<typename D::Storage>(args, row, k / kBlock).values;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), infinity = _mm512_set1_epi32(0x7f800000);
  Exponents exponents;
  for (int64_t i = 0; i < count; i += kStepBf16, out += stride) {
    __m256i words[Parts][4];
    for (int j = 0; j < 4; ++j) {
      const int64_t left = count - i - j * 16;
      const __mmask16 present = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
      __m512 rest = load_values(D{}, values + i + j * 16, present);
      const __mmask16 nan = _mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q);
      rest = _mm512_mask_mov_ps(rest, nan, _mm512_set1_ps(__builtin_nanf("")));  // its upper bits are a NaN too
      const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(rest), infinity);
      const __mmask16 finite = _mm512_cmpneq_epi32_mask(magnitude, infinity);
      for (int part = 0; part < Parts; ++part) {
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
        words[part][j] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
        rest = _mm512_maskz_sub_ps(finite, rest, _mm512_castsi512_ps(bits));  // exact; the rest of Inf is 0
      }
    }
    for (int part = 0; part < Parts; ++part) {
      const __m512i half[2] = {_mm512_inserti64x4(_mm512_castsi256_si512(words[part][0]), words[part][1], 1),
                               _mm512_inserti64x4(_mm512_castsi256_si512(words[part][2]), words[part][3], 1)};
      for (const __m512i& some : half) exponents.add(some);
      const Values both = dealt(half);
      _mm512_store_si512(out + part * kStepBf16, both.even);
      _mm512_store_si512(out + part * kStepBf16 + kSlab, both.odd);
    }
  }
  exponents.add_to(extent);
  return true;
}

// Packs tiles of A; `with_type` calls its argument with the type of A.
template <int Parts, class WithType>
MXFP8_INLINE int pack_tiles(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                            void* packed, const WithType& with_type) {
  auto* out = static_cast<uint16_t*>(packed);
  Extent extent;
  bool fits = true;
  with_type([&](auto type) {
    for (int64_t first = tile_begin * kAmxRows; first < min_of(tile_end * kAmxRows, rows); first += kAmxRows) {
      const int64_t count = min_of(kAmxRows, rows - first);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < chunks_of(args.k, kDepth) && fits; ++c) {
          const Chunk chunk = chunk_at(args.k, kDepth, c, kStepBf16);
          uint16_t* tile = out + (chunk.k * rows + chunk.padded * first) * Parts;
          fits = pack_row(type, args, row + first + i, chunk.k, chunk.count, count * Parts * kStepBf16,
                          tile + i * Parts * kStepBf16, &extent);
        }
      }
    }
  });
  return fits && extent.lowest >= kLowestNormal ? extent.lowest : kNotExact;
}

}  // namespace

int gemm_amx_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end, void* packed) {
  return pack_tiles<1>(args, row, rows, tile_begin, tile_end, packed,
                       [&](const auto& pack) { with_a_format(args, pack); });
}

int gemm_amx_parts_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        void* packed) {
  return pack_tiles<3>(args, row, rows, tile_begin, tile_end, packed, [&](const auto& pack) {
    if (args.a_format == MXFP8_FLOAT16) return pack(AsParts<Float16, 3>{});
    pack(AsParts<Float32, 3>{});
  });
}

void gemm_amx_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                       int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  multiply_strip<Whole>(args, row, rows, tile_begin, tile_end, column_begin, column_end, packed, exponent);
}

void gemm_amx_parts_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                             int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  multiply_strip<InParts>(args, row, rows, tile_begin, tile_end, column_begin, column_end, packed, exponent);
}

int64_t gemm_amx_panel_bytes(const GemmArgs& args) { return bytes_of_panels(args); }

bool gemm_amx_make_panels(const GemmArgs& args, int64_t column_begin, int64_t column_end, void* data) {
  make_bf16_panels(args, column_begin, column_end, data);
  return false;
}

constexpr auto gemm_amx_parts_panel_bytes = gemm_amx_panel_bytes;
constexpr auto gemm_amx_parts_make_panels = gemm_amx_make_panels;

MXFP8_PANEL_KERNEL(gemm_amx, int(kAmxRows), sizeof(uint16_t));
MXFP8_PANEL_KERNEL(gemm_amx_parts, int(kAmxRows), 3 * sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
