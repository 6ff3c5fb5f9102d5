// The gemm of INT8 elements on dot products of integers.
//
// y [M, N] = A [M, K] . B [N, K]^T. The 32 products of a block add up in 32 bits, without rounding. The sum times both
// scales of the block, an exact float32, is added to the result. The headers of tiles say how many operations that
// takes.
//
//   bytes      B once, 33 for 32 weights; packed A from L2 for each panel of B
//
// Layout: panel.h. A block of A or B counts as zero here if products with its scale may leave the range of float32, or
// if its scale is NaN. Such blocks are outside of the range. They are added afterwards, one by one, so that a row has
// the same bits whatever rows or panels are beside it.
#if defined(__AVX2__)
#include "int8_tile_x86.h"
#else
#include "int8_tile_neon.h"
#endif

namespace mxfp8::MXFP8_ISA {
namespace {

// What the kernel returns of packed operands: whether a block is outside of the range.
constexpr int kInRange = kExact, kHasOutside = -1;

// A chunk of a panel.
struct Panel {
  alignas(64) uint8_t elements[kPanel * kTapsDepth];
  alignas(64) uint8_t codes[kPanel * kTapsDepth / kBlock];
};

MXFP8_INLINE bool is_outside(const uint8_t* elements, int64_t count, uint8_t code) {
  if (__builtin_expect(code >= kLowestScale && code <= kHighestScale, 1)) return false;
  return has_values<INT8>(elements, count, code);
}

// Makes a block of a column of a panel zero.
MXFP8_INLINE void clear_block(PanelView panel, int64_t block, int64_t column) {
  const_cast<uint8_t*>(panel.codes)[block * kPanel + column] = kNeutralScale;
  auto* elements = const_cast<uint8_t*>(panel.elements) + block * kBlock * kPanel + column * kIntWord;
  for (int64_t word = 0; word < kBlock / kIntWord; ++word) {
    std::memset(elements + word * kPanel * kIntWord, kFlipped, kIntWord);
  }
}

// Returns whether a block of the panel is outside of the range.
MXFP8_NOINLINE bool turn_panel(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, Panel* panel) {
  bool any = false;
  turn_elements<kIntWord>(args, column, columns, chunk, kFlipped, kPanel * args.k, panel->elements);
  turn_codes<INT8>(args, column, columns, chunk, kLowestScale, kHighestScale, panel->codes,
                   [&](int64_t block, int64_t c) {
                     any = true;
                     clear_block({panel->elements, panel->codes}, block, c);
                   });
  return any;
}

// Calls pack(elements, code) with a block of `count` elements: with zeros in place of a block outside of the range.
// Returns whether it is outside.
template <class Pack>
MXFP8_INLINE bool pack_in_range(const uint8_t* elements, int64_t count, uint32_t code, const Pack& pack) {
  alignas(32) uint8_t block[kBlock] = {};
  const bool fits = code >= kLowestScale && code <= kHighestScale;
  if (__builtin_expect(fits && count >= kBlock, 1)) return pack(elements, code), false;
  const bool outside = !fits && has_values<INT8>(elements, count, uint8_t(code));
  if (!outside) std::memcpy(block, elements, size_t(min_of(count, kBlock)));
  pack(block, fits ? code : kNeutralScale);
  return outside;
}

// Packs a chunk of a tile of the strip that begins with `row`. Returns whether a block is outside of the range.
MXFP8_INLINE bool pack_chunk(const GemmArgs& args, int64_t row, int64_t tile, Chunk chunk, const PackedA& to) {
  const int64_t first = to.tiles.first_row(tile);
  bool any = false;
  for (int64_t i = 0; i < to.tiles.rows_of(tile); ++i) {
    const auto [elements, codes] = row_of_a(args, row + first + i);
    for (int64_t k = chunk.k; k < chunk.k + chunk.count; k += kBlock) {
      any |= pack_in_range(elements + k, args.k - k, codes[k / kBlock],
                           [&](const uint8_t* block, uint32_t code) MXFP8_INLINE_LAMBDA {
                             pack_block(to, chunk, tile, i, (k - chunk.k) / kBlock, block, code);
                           });
    }
  }
  return any;
}

// Adds the blocks of a panel that are outside of the range to rows of a strip that begin with `row` of A.
MXFP8_NOINLINE void add_outside_of_b(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                     Chunk chunk, float* strip) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t k = chunk.k; k < chunk.k + chunk.count; k += kBlock) {
      const uint8_t code = args.b_scales[(column + c) * blocks_of(args.k) + k / kBlock];
      if (!is_outside(args.b + (column + c) * args.k + k, args.k - k, code)) continue;
      for (int64_t i = 0; i < rows; ++i) {
        strip[i * kGemmColumns + c] += exact_dot<INT8>(args, row + i, column + c, k, min_of(kBlock, args.k - k));
      }
    }
  }
}

// A block of a panel in float32.
struct DecodedBlock {
  alignas(64) float values[kBlock][kPanel];
};
MXFP8_INLINE void decode_panel_block(PanelView panel, int64_t block, DecodedBlock* to) {
  const uint8_t* elements = panel.elements + block * kBlock * kPanel;
  for (int64_t k = 0; k < kBlock; ++k) {
    for (int64_t c = 0; c < kPanel; ++c) {
      const auto code = int8_t(elements[(k / kIntWord * kPanel + c) * kIntWord + k % kIntWord] ^ kFlipped);
      to->values[k][c] = float(code) * float_of(uint32_t(panel.codes[block * kPanel + c] - kElementBits) << 23);
    }
  }
}

// Adds the blocks of A that are outside of the range. Its 32 products with a column add up front to back, on every
// instruction set. `both`: the panel has such blocks too. They are zeros there, which would make NaN of an infinite
// value of A, and add_outside_of_b has added them: so their columns keep their sums.
MXFP8_NOINLINE void add_outside_of_a(const GemmArgs& args, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                     PanelView panel, bool both, Chunk chunk, float* strip) {
  DecodedBlock decoded;
  const auto is_added = [&](int64_t c, int64_t k) {
    if (!both) return false;
    const uint8_t code = args.b_scales[(column + c) * blocks_of(args.k) + k / kBlock];
    return is_outside(args.b + (column + c) * args.k + k, args.k - k, code);
  };
  for (int64_t block = 0; block < blocks_of(chunk.count); ++block) {
    const int64_t k = chunk.k + block * kBlock;
    bool is_decoded = false;
    for (int64_t i = 0; i < rows; ++i) {
      const RowOfA<uint8_t> a = row_of_a(args, row + i, k / kBlock);
      if (!is_outside(a.values, args.k - k, *a.scales)) continue;
      if (!is_decoded) decode_panel_block(panel, block, &decoded);
      is_decoded = true;
      alignas(64) float x[kBlock];
      load_a_block(args, row + i, k / kBlock, x);
      alignas(64) float sums[kPanel];
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        Vec sum = zero();
        for (int64_t j = 0; j < kBlock; ++j) sum = multiply_add(all_of(x[j]), load(decoded.values[j] + c), sum);
        store(sums + c, sum);
      }
      for (int64_t c = 0; c < columns; ++c) {
        if (!is_added(c, k)) strip[i * kGemmColumns + c] += sums[c];
      }
    }
  }
}

}  // namespace

int gemm_int8_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                   void* packed) {
  const PackedA to(args, packed, rows);
  bool any = false;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
      any |= pack_chunk(args, row, tile, chunk_at(args.k, kDepth, c, kPanelPadding), to);
    }
  }
  return any ? kHasOutside : kInRange;
}

void gemm_int8_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t tile_begin, int64_t tile_end,
                        int64_t column_begin, int64_t column_end, const void* packed, int outside) {
  const PackedA a(args, packed, rows);
  const int64_t first = a.tiles.first_row(tile_begin), count = a.tiles.first_row(tile_end) - first;
  Panel panel;
  RoomOfB room;
  const auto multiply_panel = [&](auto vectors, PanelView view, Chunk chunk, float* strip) {
    const OperandB b = operand_of(view, chunk.padded, &room);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      float* to = strip + (a.tiles.first_row(tile) - first) * kGemmColumns;
      with_rows<kRows>(a.tiles.rows_of(tile), [&](auto r) {
        multiply_tile<decltype(r)::value, decltype(vectors)::value>(a, chunk, tile, b, args.block_values, to);
      });
    }
  };
  for_each_strip<Factor, int(kPanelPadding), kPanel>(
      args, row + first, count, column_begin, column_end, args.taps == nullptr ? kDepth : kTapsDepth,
      [&](Chunk chunk, int64_t column, float* strip, bool accumulate) {
        const int64_t columns = min_of(kPanel, column_end - column);
        PanelView view{panel.elements, panel.codes};
        bool outside_of_b = false;
        if (args.panels != nullptr) {
          view = panel_at(args, args.panels->data, column, chunk.k);
          outside_of_b = args.panels->outside_range;
        } else {
          outside_of_b = turn_panel(args, column, columns, chunk, &panel);
        }
        if (!accumulate) {
          for (int64_t i = 0; i < count; ++i) std::memset(strip + i * kGemmColumns, 0, size_t(kPanel) * sizeof(float));
        }
        if (columns > kLanes) {
          multiply_panel(Rows<kPanelVectors>{}, view, chunk, strip);
        } else {
          multiply_panel(Rows<1>{}, view, chunk, strip);
        }
        if (__builtin_expect(outside_of_b, 0)) {
          add_outside_of_b(args, row + first, count, column, columns, chunk, strip);
        }
        if (__builtin_expect(outside == kHasOutside, 0)) {
          add_outside_of_a(args, row + first, count, column, columns, view, outside_of_b, chunk, strip);
        }
      });
}

int64_t gemm_int8_panel_bytes(const GemmArgs& args) { return bytes_of_panels(args); }

bool gemm_int8_make_panels(const GemmArgs& args, int64_t column_begin, int64_t column_end, void* data) {
  bool outside = false;
  for (int64_t column = column_begin; column < column_end; column += kPanel) {
    make_panel<INT8, kIntWord>(args, column, kFlipped, kLowestScale, kHighestScale, data,
                               [&](int64_t block, int64_t c) {
                                 outside = true;
                                 clear_block(panel_at(args, data, column, 0), block, c);
                               });
  }
  return outside;
}

#if defined(__AVX2__)
bool gemm_int8_pack_pixels(const PixelBlocks& pixels, void* first, int64_t stride) {
  auto* to = static_cast<BlockOfA*>(first);
  bool any = false;
  for (int64_t i = 0; i < pixels.pixels; ++i, to += stride) {
    for (int64_t b = 0; b < pixels.blocks; ++b) {
      any |= pack_in_range(
          pixels.elements + i * pixels.row_bytes + b * kBlock, kBlock, pixels.scales[i * pixels.blocks + b],
          [&](const uint8_t* elements, uint32_t code) MXFP8_INLINE_LAMBDA { pack_block(elements, code, to + b); });
    }
  }
  return !any;
}

void gemm_int8_unpack_block(const void* packed, int64_t index, uint8_t* elements) {
  unpack_block(static_cast<const BlockOfA*>(packed)[index], elements);
}

MXFP8_PANEL_KERNEL(gemm_int8, kRows, kPackedBytes, gemm_int8_pack_pixels, gemm_int8_unpack_block, sizeof(BlockOfA));
#else
MXFP8_PANEL_KERNEL(gemm_int8, kRows, kPackedBytes);
#endif

}  // namespace mxfp8::MXFP8_ISA
