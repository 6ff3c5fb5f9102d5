// The gemm of INT8 elements on dot products of integers.
//
// y [M, N] = A [M, K] . B [N, K]^T. The 32 products of a block add up in 32 bits, without rounding. The sum times both
// scales of the block, an exact float32, is added to the result. The headers of tiles say how many operations that
// takes.
//
//   bytes      B once, 33 for 32 weights; packed A from L2 for each panel of B
//
// Layout: panel.h. A block of B whose scale's products float32 cannot hold counts as zero here, and exact_dot adds it.
// A strip of A with such a block, or with a NaN scale, goes to another kernel.
#if defined(__AVX2__)
#include "int8_tile_x86.h"
#else
#include "int8_tile_neon.h"
#endif

namespace mxfp8::MXFP8_ISA {
namespace {

// A chunk of a panel, and which of its blocks count as zero (`strange`).
struct Panel {
  alignas(64) uint8_t elements[kPanel * kDepth];
  alignas(64) uint8_t codes[kPanel * kDepth / kBlock];
  uint32_t strange[kDepth / kBlock];  // a bit for each column
  bool any_strange;
};

MXFP8_NOINLINE void turn_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, Panel* panel) {
  panel->any_strange = false;
  turn_elements<kIntWord>(args, column, columns, chunk, kFlipped, kPanel * args.k, panel->elements);
  turn_codes<INT8>(args, column, columns, chunk, kLowestScale, kHighestScale, panel->codes,
                   [&](int64_t block, int64_t c) {
                     if (!panel->any_strange) std::memset(panel->strange, 0, sizeof panel->strange);
                     panel->any_strange = true;
                     panel->strange[block] |= uint32_t(1) << c;
                     panel->codes[block * kPanel + c] = kNeutralScale;
                     uint8_t* elements = panel->elements + (block * kBlock * kPanel) + c * kIntWord;
                     for (int64_t word = 0; word < kBlock / kIntWord; ++word) {
                       std::memset(elements + word * kPanel * kIntWord, kFlipped, kIntWord);
                     }
                   });
}

// Packs a chunk of a tile of the strip that begins with `row`. False if a scale does not fit.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, int64_t row, int64_t tile, Chunk chunk, const PackedA& to) {
  const int64_t first = to.tiles.first_row(tile);
  for (int64_t i = 0; i < to.tiles.rows_of(tile); ++i) {
    const auto* elements = static_cast<const uint8_t*>(args.a) + (row + first + i) * args.a_stride;
    const uint8_t* codes = args.a_scales + (row + first + i) * blocks_of(args.k);
    for (int64_t k = chunk.k; k < chunk.k + chunk.padded; k += kBlock) {
      alignas(32) uint8_t block[kBlock] = {};
      const int64_t left = args.k - k;
      if (left < kBlock) std::memcpy(block, elements + k, size_t(left < 0 ? 0 : left));
      uint32_t code = left > 0 ? codes[k / kBlock] : kNeutralScale;
      if (__builtin_expect(code < kLowestScale || code > kHighestScale, 0)) {
        if (has_values<INT8>(elements + k, left, uint8_t(code))) return false;
        code = kNeutralScale;
      }
      pack_block(to, chunk, tile, i, (k - chunk.k) / kBlock, left < kBlock ? block : elements + k, code);
    }
  }
  return true;
}

// Adds the blocks of a panel that count as zero to rows of a strip that begin with `row` of A.
MXFP8_NOINLINE void add_strange(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, Chunk chunk,
                                const Panel& panel, float* strip) {
  for (int64_t block = 0; block < blocks_of(chunk.count); ++block) {
    for (uint32_t strange = panel.strange[block]; strange != 0; strange &= strange - 1) {
      const int64_t c = __builtin_ctz(strange), k = chunk.k + block * kBlock;
      for (int64_t i = 0; i < rows; ++i) {
        strip[i * kGemmColumns + c] += exact_dot<INT8>(args, row + i, column + c, k, min_of(kBlock, args.k - k));
      }
    }
  }
}

}  // namespace

int gemm_int8_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  const PackedA to(packed, rows, args.k);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      if (!pack_chunk(args, row, tile, chunk_at(args.k, kDepth, c, kPanelPadding), to)) return kNotExact;
    }
  }
  return 0;
}

void gemm_int8_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int) {
  const PackedA a(packed, rows, args.k);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panel;
  RoomOfB room;
  const auto multiply_panel = [&](auto vectors, PanelView view, Chunk chunk, float* strip) {
    const OperandB b = operand_of(view, chunk.padded, &room);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      float* to = strip + (a.tiles.first_row(tile) - first) * kGemmColumns;
      with_rows<kRows>(a.tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, decltype(vectors)::value>(a, chunk, tile, b, to);
      });
    }
  };
  for_each_strip<Factor, int(kPanelPadding), kPanel>(
      args, row + first, count, column_begin, column_end, kDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column);
        PanelView view{panel.elements, panel.codes};
        if (args.panels != nullptr) {
          view = panel_at(args, args.panels->data, column, chunk.k);
        } else {
          turn_panel(args, column, columns, chunk, &panel);
        }
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        if (columns > kLanes) {
          multiply_panel(Rows<kPanelVectors>{}, view, chunk, strip);
        } else {
          multiply_panel(Rows<1>{}, view, chunk, strip);
        }
        if (args.panels == nullptr && __builtin_expect(panel.any_strange, 0)) {
          add_strange(args, row + first, count, column, chunk, panel, strip);
        }
      });
}

int64_t gemm_int8_panel_bytes(const GemmArgs& args, bool) { return bytes_of_panels(args); }

int gemm_int8_make_panels(const GemmArgs& args, bool, int64_t column_begin, int64_t column_end, void* data) {
  bool fits = true;
  for (int64_t column = column_begin; column < column_end; column += kPanel) {
    make_panel<INT8, kIntWord>(args, column, kFlipped, kLowestScale, kHighestScale, data,
                               [&](int64_t, int64_t) { fits = false; });
  }
  return fits ? 0 : kNotExact;
}

MXFP8_PANEL_KERNEL(gemm_int8, kRows, kPackedBytes);

}  // namespace mxfp8::MXFP8_ISA
