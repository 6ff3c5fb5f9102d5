// The gemms on AMX, which multiplies tiles of bfloat16: up to 16 rows of A with 16 rows of B, 32 values deep, in 16
// cycles. Exact as told in gemm_bf16.cpp: TDPBF16PS, too, flushes subnormal numbers.
//
// y [M, N] = A [M, K] . B [N, K]^T, rows of A kAmxStripRows at a time. Work is split over M and N. Flops: 2 M N K, at
// 1024 a cycle and core. Bytes moved: 1.03 N K once per strip of A + 2 M K + the result. Decoding a value of B takes as
// long as multiplying it with 100 rows.
//
// Layout: B is decoded in panels of 16 rows, turned, so that a row of a tile holds two values along K of 16 columns.
// Panels are decoded a group at a time, one chunk deep, and wait in L2; a tile or two of A stay in L1 meanwhile. Packed
// A: chunks of K; in a chunk, tiles of 16 rows; in a tile, steps of 64 values along K; in a step, rows; of a row, the
// even values, then the odd ones, as decoding gives those of B. Where A has parts, see below, all of a row's lie
// together.
#include "amx.h"
#include "bf16.h"
#include "turn.h"

#if defined(__AMX_BF16__)

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kStepBf16;
constexpr int kPanel = kTurnRows;       // rows of B decoded at a time: columns of a tile
constexpr int64_t kDepth = 384;         // of a chunk: two tiles of A, and as much of two panels, fill L1
constexpr int64_t kGroupColumns = 128;  // of a group: its panels wait in L2
constexpr int kGroup = 4;               // values along K that are turned together
constexpr int kGroups = kStep / kGroup;
constexpr int64_t kSlab = 32;                            // values along K of a tile
constexpr int64_t kPairColumns = 2 * kPanel;             // of two tiles side by side
constexpr int64_t kPanelStep = int64_t(kPanel) * kStep;  // values of a panel in a step

// Loads the scales of a panel, 127 where there are none, and turns them: row i holds block i of every column.
MXFP8_INLINE void load_panel_scales(const uint8_t* scales, int64_t blocks, int64_t columns, int64_t count,
                                    __m128i* turned) {
  const __mmask16 present = __mmask16((1u << count) - 1);
  for (int c = 0; c < kPanel; ++c) {
    turned[c] = _mm_set1_epi8(127);
    if (c < columns) turned[c] = _mm_mask_loadu_epi8(turned[c], present, scales + c * blocks);
  }
  turn(turned);
}

// Fetches a range of B in order of its addresses, a bit with every step that is decoded elsewhere: the processor's own
// prefetcher joins in, which reading many rows side by side does not wake.
struct Ahead {
  const uint8_t* elements;
  const uint8_t* scales;

  MXFP8_INLINE_MEMBER Ahead(const GemmArgs& args, int64_t column)
      : elements(args.b + column * args.k), scales(args.b_scales + column * blocks_of(args.k)) {}
  MXFP8_INLINE_MEMBER void fetch_step() {
    for (int64_t i = 0; i < kPanelStep; i += 64) __builtin_prefetch(elements + i, 0, 2);
    __builtin_prefetch(scales, 0, 2);
    elements += kPanelStep;
    scales += kPanelStep / kBlock;
  }
};

// A panel: kPanel rows of B from `column` on; those past `column_end` are zero. Decodes it one chunk after the other,
// step by step.
template <class F>
class Panel {
 public:
  MXFP8_INLINE_MEMBER Panel(const GemmArgs& args, int64_t column, int64_t column_end, int lowest)
      : k_(args.k),
        columns_(min_of(kPanel, column_end - column)),
        b_(args.b + column * args.k),
        b_scales_(args.b_scales + column * blocks_of(args.k)),
        lowest_(lowest) {}

  MXFP8_INLINE_MEMBER void begin(Chunk chunk) {
    elements_ = b_ + chunk.k, scales_ = b_scales_ + chunk.k / kBlock, count_ = chunk.count;
    load_panel_scales(scales_, blocks_of(k_), columns_, blocks_of(count_), turned_);
  }

  // Decodes the values from k on, in the chunk, into two tiles.
  MXFP8_INLINE_MEMBER void step(int64_t k, uint16_t* out) {
    const int64_t left = count_ - k;
    __m512i codes[kPanel];
    if (__builtin_expect(columns_ == kPanel && left >= kStep, 1)) {
      for (int c = 0; c < kPanel; ++c) codes[c] = _mm512_loadu_si512(elements_ + c * k_ + k);
    } else {
      for (int c = 0; c < kPanel; ++c) {
        codes[c] = c < columns_ ? load_codes(elements_ + c * k_ + k, left) : _mm512_setzero_si512();
      }
    }
    turn(codes);
    for (int half = 0; half < 2; ++half) {
      const __m128i scales = turned_[k / kBlock + half];
      if (left > half * kBlock) check_scales(k + half * kBlock, scales);
      const __m512i exponents = exponents_of(scales);
#pragma GCC unroll 8
      for (int i = 0; i < kGroups / 2; ++i) {
        const int group = half * kGroups / 2 + i;
        const Values values = decoder_.values(codes[group], &highest_);
        _mm512_store_si512(out + group * kSlab, add_exponents(values.even, exponents));
        _mm512_store_si512(out + kAmxTile + group * kSlab, add_exponents(values.odd, exponents));
      }
    }
  }

  // A bit for every row that did not fit since this was asked last; what was decoded there is of no use.
  MXFP8_INLINE_MEMBER uint32_t misfits() {
    uint64_t special = _mm512_cmpeq_epi8_mask(highest_, _mm512_set1_epi8(0x7f));
    uint32_t found = misfits_;
    for (int c = 0; special != 0; ++c, special >>= kGroup) found |= uint32_t((special & 0xf) != 0) << c;
    highest_ = _mm512_setzero_si512(), misfits_ = 0;
    return found;
  }

 private:
  MXFP8_INLINE_MEMBER void check_scales(int64_t k, __m128i scales) {
    uint32_t wrong = outside(scales, lowest_, kMaxScale<F>) & ((1u << columns_) - 1);
    for (; __builtin_expect(wrong != 0, 0); wrong &= wrong - 1) {
      const int c = __builtin_ctz(wrong);
      if (!is_zero(elements_ + c * k_ + k, count_ - k, scales_[c * blocks_of(k_) + k / kBlock])) misfits_ |= 1u << c;
    }
  }

  const int64_t k_, columns_;
  const uint8_t* const b_;
  const uint8_t* const b_scales_;
  const int lowest_;
  const Decoder<F> decoder_;
  const uint8_t* elements_ = nullptr;
  const uint8_t* scales_ = nullptr;
  int64_t count_ = 0;
  __m128i turned_[kPanel];
  __m512i highest_ = _mm512_setzero_si512();
  uint32_t misfits_ = 0;
};

// A block of sums: rows `stride` values apart.
struct Sums {
  float* at;
  int64_t stride;
  bool add;  // to what is there
};

// The sums of up to two tiles of rows of A with one panel of B or two, in tiles 0 to 3.
template <bool TwoTiles, bool TwoPanels>
struct WholeBlock {
  static constexpr int parts = 1;

  static MXFP8_INLINE_MEMBER void start(Sums sums, int64_t rows) {
    const size_t stride = size_t(sums.stride) * sizeof(float);
    float* below = sums.at + rows * sums.stride;
    if (sums.add) {
      _tile_loadd(0, sums.at, stride);
      if (TwoPanels) _tile_loadd(1, sums.at + kPanel, stride);
      if (TwoTiles) _tile_loadd(2, below, stride);
      if (TwoTiles && TwoPanels) _tile_loadd(3, below + kPanel, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  // Adds the products of one step of K: of the first tile of A, of the second, of the two panels.
  static MXFP8_INLINE_MEMBER void step(const uint16_t* first, const uint16_t* second, const uint16_t* left,
                                       const uint16_t* right) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      _tile_loadd(6, left + odd * kAmxTile, kAmxRowBytes);
      if (TwoPanels) _tile_loadd(7, right + odd * kAmxTile, kAmxRowBytes);
      _tile_loadd(4, first + odd * kSlab, kStep * sizeof(uint16_t));
      _tile_dpbf16ps(0, 4, 6);
      if (TwoPanels) _tile_dpbf16ps(1, 4, 7);
      if (TwoTiles) {
        _tile_loadd(5, second + odd * kSlab, kStep * sizeof(uint16_t));
        _tile_dpbf16ps(2, 5, 6);
        if (TwoPanels) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  static MXFP8_INLINE_MEMBER void finish(Sums sums, int64_t rows) {
    const size_t stride = size_t(sums.stride) * sizeof(float);
    float* below = sums.at + rows * sums.stride;
    _tile_stored(0, sums.at, stride);
    if (TwoPanels) _tile_stored(1, sums.at + kPanel, stride);
    if (TwoTiles) _tile_stored(2, below, stride);
    if (TwoTiles && TwoPanels) _tile_stored(3, below + kPanel, stride);
  }
};

// The same where a row of A is Parts bfloat16 numbers that add up to each value. The products with all but the first,
// 2^-8 of it, are added up apart, in tiles 2 and 3: then they add no more roundings than there are values.
template <int Parts, bool TwoPanels>
struct PartsBlock {
  static constexpr int parts = Parts;

  static MXFP8_INLINE_MEMBER void start(Sums sums, int64_t) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (sums.add) _tile_loadd(0, sums.at, size_t(sums.stride) * sizeof(float));
    if (sums.add && TwoPanels) _tile_loadd(1, sums.at + kPanel, size_t(sums.stride) * sizeof(float));
  }

  static MXFP8_INLINE_MEMBER void step(const uint16_t* first, const uint16_t*, const uint16_t* left,
                                       const uint16_t* right) {
    constexpr size_t stride = Parts * kStep * sizeof(uint16_t);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      _tile_loadd(6, left + odd * kAmxTile, kAmxRowBytes);
      if (TwoPanels) _tile_loadd(7, right + odd * kAmxTile, kAmxRowBytes);
      _tile_loadd(4, first + odd * kSlab, stride);
      _tile_dpbf16ps(0, 4, 6);
      if (TwoPanels) _tile_dpbf16ps(1, 4, 7);
#pragma GCC unroll 2
      for (int part = 1; part < Parts; ++part) {
        _tile_loadd(5, first + part * kStep + odd * kSlab, stride);
        _tile_dpbf16ps(2, 5, 6);
        if (TwoPanels) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  static MXFP8_INLINE_MEMBER void finish(Sums sums, int64_t rows) {
    const size_t stride = size_t(sums.stride) * sizeof(float);
    alignas(64) float rest[kAmxRows * kPairColumns];
    _tile_stored(0, sums.at, stride);
    _tile_stored(2, rest, kPairColumns * sizeof(float));
    if (TwoPanels) _tile_stored(1, sums.at + kPanel, stride);
    if (TwoPanels) _tile_stored(3, rest + kPanel, kPairColumns * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < (TwoPanels ? kPairColumns : kPanel); j += kLanes) {
        float* to = sums.at + i * sums.stride + j;
        _mm512_storeu_ps(to, _mm512_add_ps(load(to), load(rest + i * kPairColumns + j)));
      }
    }
  }
};

// A as bfloat16 values. with_block calls call(block, rows of the first tile, rows of the second) with the block for up
// to `rows_at_once` rows and two panels.
struct Whole {
  static constexpr int parts = 1;
  static constexpr int64_t rows_at_once = 2 * kAmxRows;

  template <class Call>
  static MXFP8_INLINE_MEMBER void with_block(AmxTiles* tiles, int64_t rows, int64_t columns, const Call& call) {
    const int64_t first = min_of(rows, kAmxRows), second = rows - first;
    tiles->shape(int(first), int(second > 0 ? second : first));
    if (second > 0) {
      if (columns > kPanel) return call(WholeBlock<true, true>{}, first, second);
      return call(WholeBlock<true, false>{}, first, second);
    }
    if (columns > kPanel) return call(WholeBlock<false, true>{}, first, second);
    return call(WholeBlock<false, false>{}, first, second);
  }
};

// A in three parts.
struct InParts {
  static constexpr int parts = 3;
  static constexpr int64_t rows_at_once = kAmxRows;

  template <class Call>
  static MXFP8_INLINE_MEMBER void with_block(AmxTiles* tiles, int64_t rows, int64_t columns, const Call& call) {
    tiles->shape(int(rows), int(rows));
    if (columns > kPanel) return call(PartsBlock<parts, true>{}, rows, int64_t(0));
    return call(PartsBlock<parts, false>{}, rows, int64_t(0));
  }
};

// A group of panels, decoded, one chunk deep.
struct Group {
  int64_t column, columns;
  Chunk chunk;
  uint32_t misfits[kGroupColumns / kPanel];
  alignas(64) uint16_t b[kGroupColumns * kDepth];
};

template <class F>
MXFP8_INLINE void decode_group(const GemmArgs& args, Ahead* ahead, int lowest, Group* group) {
  for (int64_t j = 0; j < group->columns; j += kPanel) {
    Panel<F> panel(args, group->column + j, group->column + group->columns, lowest);
    panel.begin(group->chunk);
    uint16_t* out = group->b + j * group->chunk.padded;
    for (int64_t k = 0; k < group->chunk.count; k += kStep, out += kPanelStep) {
      ahead->fetch_step();
      panel.step(k, out);
    }
    group->misfits[j / kPanel] = panel.misfits();
  }
}

// Replaces the sums of columns that did not fit, which were `before` [rows, kPairColumns], by exact ones.
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

// Multiplies `rows` rows of A, from `row` on, with two panels of the group, `j` columns in it.
template <class F, class A>
MXFP8_INLINE void multiply_pair(const GemmArgs& args, AmxTiles* tiles, const uint16_t* a, int64_t row, int64_t rows,
                                const Group& group, int64_t j, Sums sums) {
  const int64_t columns = min_of(kPairColumns, group.columns - j), panel = j / kPanel, depth = group.chunk.padded;
  const uint32_t misfits = group.misfits[panel] | (columns > kPanel ? group.misfits[panel + 1] << kPanel : 0);
  float before[A::rows_at_once * kPairColumns];
  if (__builtin_expect(misfits != 0, 0)) {
    for (int64_t i = 0; i < rows * kPairColumns; ++i) {
      before[i] = sums.add ? sums.at[i / kPairColumns * sums.stride + i % kPairColumns] : 0;
    }
  }
  A::with_block(tiles, rows, columns, [&](auto block, int64_t first, int64_t second) MXFP8_INLINE_LAMBDA {
    const uint16_t* above = a;
    const uint16_t* below = a + first * depth * A::parts;
    const uint16_t* b = group.b + j * depth;
    block.start(sums, first);
    for (int64_t k = 0; k < depth; k += kStep, b += kPanelStep) {
      block.step(above, below, b, b + kPanel * depth);
      above += first * kStep * A::parts;
      below += second * kStep * A::parts;
    }
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
  alignas(64) float block[A::rows_at_once * kPairColumns];  // of a pair of panels
  alignas(64) float strip[kAmxStripRows * kGroupColumns];   // where a sum is made of several chunks
  for (group.column = column_begin; group.column < column_end; group.column += kGroupColumns) {
    group.columns = min_of(kGroupColumns, column_end - group.column);
    Ahead ahead(args, group.column + group.columns);
    for (int64_t c = 0; c < chunks; ++c) {
      group.chunk = chunk_at(args.k, kDepth, c, kStep);
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

// The same for rows that are multiplied at once: B is multiplied right after it is decoded, a step behind, so that the
// tiles work meanwhile, and sums stay in them along all of K.
template <class F, class A>
MXFP8_INLINE void multiply_few(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin,
                               int64_t column_end, const uint16_t* a, int lowest) {
  AmxTiles tiles;
  alignas(64) uint16_t b[2][2 * kPanelStep];
  alignas(64) float block[A::rows_at_once * kPairColumns];
  const Sums sums{block, kPairColumns, false};
  for (int64_t column = column_begin; column < column_end; column += kPairColumns) {
    const int64_t columns = min_of(kPairColumns, column_end - column);
    Panel<F> left(args, column, column_end, lowest), right(args, column + kPanel, column_end, lowest);
    Ahead ahead(args, column + columns);
    A::with_block(&tiles, rows, columns, [&](auto block, int64_t first, int64_t second) MXFP8_INLINE_LAMBDA {
      const uint16_t *above = nullptr, *below = nullptr;
      int buffer = 0;
      block.start(sums, first);
      for (int64_t c = 0; c < chunks_of(args.k, kDepth); ++c) {
        const Chunk chunk = chunk_at(args.k, kDepth, c, kStep);
        left.begin(chunk);
        if (columns > kPanel) right.begin(chunk);
        for (int64_t k = 0; k < chunk.count; k += kStep, buffer ^= 1) {
          ahead.fetch_step();
          left.step(k, b[buffer]);
          if (columns > kPanel) {
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
    const uint32_t misfits = left.misfits() | (columns > kPanel ? right.misfits() << kPanel : 0);
    if (__builtin_expect(misfits != 0, 0)) {
      const float before[A::rows_at_once * kPairColumns] = {};
      correct<F>(args, row, rows, column, Chunk{0, args.k, 0}, misfits, before, sums);
    }
    store_strip(args, row, rows, column, columns, block, kPairColumns);
  }
}

// With K = 0 every sum is empty.
void store_nothing(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin, int64_t column_end) {
  const float sums[kPairColumns] = {};
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

// Values of dtype D, to be packed as the parts they are made of, cut off after 8 bits each.
template <class D, int Parts>
struct AsParts {};

// 16 values of dtype D as float32; zeros where there are none.
MXFP8_INLINE __m512 load_values(Float32, const float* from, __mmask16 present) {
  return _mm512_maskz_loadu_ps(present, from);
}
MXFP8_INLINE __m512 load_values(Float16, const uint16_t* from, __mmask16 present) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, from));
}

template <class D, int Parts>
MXFP8_INLINE bool pack_row(AsParts<D, Parts>, const GemmArgs& args, int64_t row, int64_t k, int64_t count,
                           int64_t stride, uint16_t* out, Extent* extent) {
  const auto* values = static_cast<const typename D::Storage*>(args.a) + row * args.a_stride + k;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), infinity = _mm512_set1_epi32(0x7f800000);
  Exponents exponents;
  for (int64_t i = 0; i < count; i += kStep, out += stride) {
    __m256i words[Parts][4];
    for (int j = 0; j < 4; ++j) {
      const int64_t left = count - i - j * 16;
      const __mmask16 present = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
      __m512 rest = load_values(D{}, values + i + j * 16, present);
      const __mmask16 nan = _mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q);
      rest = _mm512_mask_mov_ps(rest, nan, _mm512_set1_ps(__builtin_nanf("")));  // one that is cut off stays one
      const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(rest), infinity);
      const __mmask16 finite = _mm512_cmpneq_epi32_mask(magnitude, infinity);
      for (int part = 0; part < Parts; ++part) {
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
        words[part][j] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
        rest = _mm512_maskz_sub_ps(finite, rest, _mm512_castsi512_ps(bits));  // exact; nothing is left of Inf
      }
    }
    for (int part = 0; part < Parts; ++part) {
      const __m512i half[2] = {_mm512_inserti64x4(_mm512_castsi256_si512(words[part][0]), words[part][1], 1),
                               _mm512_inserti64x4(_mm512_castsi256_si512(words[part][2]), words[part][3], 1)};
      for (const __m512i& some : half) exponents.add(some);
      const Values both = dealt(half);
      _mm512_store_si512(out + part * kStep, both.even);
      _mm512_store_si512(out + part * kStep + kSlab, both.odd);
    }
  }
  exponents.add_to(extent);
  return true;
}

// Packs tiles of A; `with_type` calls its argument with what A is made of.
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
          const Chunk chunk = chunk_at(args.k, kDepth, c, kStep);
          uint16_t* tile = out + (chunk.k * rows + chunk.padded * first) * Parts;
          fits = pack_row(type, args, row + first + i, chunk.k, chunk.count, count * Parts * kStep,
                          tile + i * Parts * kStep, &extent);
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

}  // namespace mxfp8::MXFP8_ISA

#endif
