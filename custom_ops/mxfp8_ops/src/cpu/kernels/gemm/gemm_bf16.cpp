// The gemms on the bf16 dot product (VDPBF16PS; BFMMLA on Arm), which multiplies MXFP8 exactly. An element times its
// scale has four significant bits, so it is a bfloat16. The product of two bfloat16 numbers is exact in the float32
// accumulator.
//
// y [M, N] = A [M, K] . B [N, K]^T. Work is split over M and N. Bytes moved: 1.03 N K once per 256 rows of A + 2 M K +
// the result.
//
// The limit: these instructions read subnormal inputs as zero and flush subnormal results, whatever the processor's
// mode. Let ea and eb be the exponents of the lowest bit set anywhere in A and in a chunk of a panel of B. Every
// product, and every sum of products before rounding, is a multiple of 2^(ea + eb). With ea, eb >= -126 no input is
// subnormal, and with ea + eb >= -126 no result is. So there are two ways to apply the scales of B:
//   to the weights' exponents, once for all rows, if a column of the panel passes this test and has no NaN;
//   for few rows to the sum of each block, as float32: weights go from their codes to the dot product in registers, and
//   every scale is allowed that keeps the weights finite. eb is then the exponent of the elements.
// exact_dot computes the other columns, and gemm_f32.cpp computes an A that does not fit. An all-zero block whose scale
// fails with every A counts as a block with the scale 2^0.
//
// Layout: panel.h; the headers of tiles give the order in which A is packed.
#if defined(__AVX2__)
#include "bf16_tile_x86.h"
#else
#include "bf16_tile_neon.h"
#endif

namespace mxfp8::MXFP8_ISA {
namespace {

// A chunk of a panel: turned at this call, and decoded.
struct Room {
  alignas(64) uint8_t elements[kPanel * kDepth];
  alignas(64) uint8_t codes[kPanel * kDepth / kBlock];
  alignas(64) uint16_t values[kPanel * kDepth];
};

// A chunk of a panel of B: decoded values, or, where `values` is null, codes. `misfits` has a bit for each column for
// which these are not exact.
struct ChunkOfB {
  const uint16_t* values;
  PanelView codes;
  uint32_t misfits;
};
template <class F>
MXFP8_INLINE ChunkOfB chunk_of_b(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int64_t rows,
                                 int lowest, Room* room) {
  PanelView codes = {room->elements, room->codes};
  if (args.panels != nullptr) {
    codes = panel_at(args, args.panels->data, column, chunk.k);
  } else {
    turn_elements(args, column, columns, chunk, 0, kPanel * args.k, room->elements);
    // The limit is kMinScale, not `lowest`: panels of a constant weight do not depend on A, and must have the same
    // misfits.
    turn_codes<F>(args, column, columns, chunk, kMinScale<F>, kMaxScale<F>, room->codes, [](int64_t, int64_t) {});
  }
  if (rows <= kFewRows) return {nullptr, codes, columns_outside(codes.codes, chunk.padded, 0, kMaxScale<F>)};
  const uint32_t outside = columns_outside(codes.codes, chunk.padded, lowest, kMaxScale<F>);
  return {room->values, codes, outside | decode_panel<F>(codes, chunk.padded, room->values)};
}

}  // namespace

int gemm_bf16_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  auto* out = static_cast<uint16_t*>(packed);
  Extent extent;
  bool fits = true;
  const Bf16Tiles tiles{rows};
  with_a_format(args, [&](auto format) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const int64_t first = tiles.first_row(tile), tile_rows = tiles.rows_of(tile);
      for (int64_t i = 0; i < tile_rows; ++i) {
        for (int64_t c = 0; c < chunks_of(args.k, kDepth) && fits; ++c) {
          const Chunk chunk = chunk_at(args.k, kDepth, c, kStepBf16);
          fits = pack_chunk(format, args, row + first + i, chunk, tile_rows, i, out + offset_of(tiles, chunk, tile),
                            &extent);
        }
      }
    }
  });
  return fits && multiplies_codes(args, extent) ? extent.lowest : kNotExact;
}

void gemm_bf16_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int exponent) {
  const auto* a = static_cast<const uint16_t*>(packed);
  const Bf16Tiles tiles{rows};
  const int64_t first = tiles.first_row(tile_begin), count = tiles.first_row(tile_end) - first;
  Room room;
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    for_each_strip<uint16_t, kStepBf16, kPanel>(
        args, row + first, count, column_begin, column_end, kDepth,
        [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
          const int64_t columns = min_of(kPanel, column_end - column);
          const ChunkOfB b = chunk_of_b<F>(args, column, columns, chunk, count, lowest_scale<F>(exponent), &room);
          float before[kGemmRows * kPanel];
          for (int64_t i = 0; __builtin_expect(b.misfits != 0, 0) && i < count * kPanel; ++i) {
            before[i] = accumulate ? strip[i / kPanel * kGemmColumns + i % kPanel] : 0;
          }
          for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
            const uint16_t* from = a + offset_of(tiles, chunk, tile);
            float* to = strip + (tiles.first_row(tile) - first) * kGemmColumns;
            multiply_rows<F>(from, tiles.rows_of(tile), b.values, b.codes, columns, chunk.padded, to, accumulate);
          }
          for (uint32_t misfits = b.misfits; misfits != 0; misfits &= misfits - 1) {
            const int c = __builtin_ctz(misfits);
            if (c < columns)
              correct_column<F, kPanel>(args, row + first, count, column + c, chunk, before + c, strip + c);
          }
        });
  });
}

int64_t gemm_bf16_panel_bytes(const GemmArgs& args) { return bytes_of_panels(args); }

bool gemm_bf16_make_panels(const GemmArgs& args, int64_t column_begin, int64_t column_end, void* data) {
  make_bf16_panels(args, column_begin, column_end, data);
  return false;
}

MXFP8_PANEL_KERNEL(gemm_bf16, kRows, sizeof(uint16_t));

}  // namespace mxfp8::MXFP8_ISA
