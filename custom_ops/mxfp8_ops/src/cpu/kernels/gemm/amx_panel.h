// B for the tiles of AMX: 16 of its rows at a time are decoded and turned, so that a row of a tile holds two values
// along K of 16 columns. A step, 64 values along K, makes two tiles: of the even values, and of the odd ones.
//
// Codes of a constant weight are read turned, from panels of panel.h, each of which is two of these side by side.
#pragma once
#include "../common/amx.h"
#include "bf16.h"
#include "panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kAmxColumns = kTurnRows;  // rows of B decoded at a time: columns of a tile
constexpr int kGroup = 4;               // values along K that are turned together
constexpr int kGroups = kStepBf16 / kGroup;
constexpr int64_t kSlab = 32;                                     // values along K of a tile
constexpr int64_t kPanelStep = int64_t(kAmxColumns) * kStepBf16;  // values of a panel in a step: two tiles

// The codes of the 16 columns from `column` on in panels of a constant weight; null where the call has no panels.
MXFP8_INLINE PanelView turned_at(const GemmArgs& args, int64_t column) {
  if (args.panels == nullptr) return {};
  const PanelView pair = panel_at(args, args.panels->data, column / kPanel * kPanel, 0);
  return {pair.elements + column % kPanel * kGroup, pair.codes + column % kPanel};
}

// Loads the scales of a panel, with 127 in place of absent ones, and turns them: row i holds block i of every column.
MXFP8_INLINE void load_panel_scales(const uint8_t* scales, int64_t blocks, int64_t columns, int64_t count,
                                    __m128i* turned) {
  const __mmask16 present = __mmask16((1u << count) - 1);
  for (int c = 0; c < kAmxColumns; ++c) {
    turned[c] = _mm_set1_epi8(127);
    if (c < columns) turned[c] = _mm_mask_loadu_epi8(turned[c], present, scales + c * blocks);
  }
  turn(turned);
}

// Fetches a range of B in the order of its addresses, a part for each decoded step of other columns. The processor's
// own prefetcher then starts too; it does not start where many rows are read side by side.
struct Ahead {
  const uint8_t* elements;
  const uint8_t* scales;

  MXFP8_INLINE_MEMBER Ahead(const GemmArgs& args, int64_t column)
      : elements(args.b + column * args.k), scales(args.b_scales + column * blocks_of(args.k)) {
    const PanelView turned = turned_at(args, column);
    if (turned.elements != nullptr) elements = turned.elements, scales = turned.codes;
  }
  MXFP8_INLINE_MEMBER void fetch_step() {
    for (int64_t i = 0; i < kPanelStep; i += 64) __builtin_prefetch(elements + i, 0, 2);
    __builtin_prefetch(scales, 0, 2);
    elements += kPanelStep;
    scales += kPanelStep / kBlock;
  }
};

// A panel: kAmxColumns rows of B from `column` on; rows past `column_end` are zero. Decodes chunk after chunk, step by
// step.
template <class F>
class Panel {
 public:
  MXFP8_INLINE_MEMBER Panel(const GemmArgs& args, int64_t column, int64_t column_end, int lowest)
      : k_(args.k),
        columns_(min_of(kAmxColumns, column_end - column)),
        b_(args.b + column * args.k),
        b_scales_(args.b_scales + column * blocks_of(args.k)),
        turned_b_(turned_at(args, column)),
        lowest_(lowest) {}

  MXFP8_INLINE_MEMBER void begin(Chunk chunk) {
    elements_ = b_ + chunk.k, scales_ = b_scales_ + chunk.k / kBlock, count_ = chunk.count;
    if (turned_b_.elements == nullptr) {
      return load_panel_scales(scales_, blocks_of(k_), columns_, blocks_of(count_), turned_);
    }
    turned_elements_ = turned_b_.elements + chunk.k * kPanel;
    const auto* codes = reinterpret_cast<const __m128i*>(turned_b_.codes + chunk.k / kBlock * kPanel);
    for (int64_t i = 0; i < chunk.padded / kBlock; ++i) turned_[i] = _mm_load_si128(codes + i * kPanel / kAmxColumns);
  }

  // Decodes the values from k on, in the chunk, into two tiles.
  MXFP8_INLINE_MEMBER void step(int64_t k, uint16_t* out) {
    const int64_t left = count_ - k;
    __m512i codes[kAmxColumns];
    if (turned_b_.elements != nullptr) {
      const uint8_t* from = turned_elements_ + k * kPanel;
      for (int i = 0; i < kGroups; ++i) codes[i] = _mm512_load_si512(from + i * kGroup * kPanel);
    } else if (__builtin_expect(columns_ == kAmxColumns && left >= kStepBf16, 1)) {
      for (int c = 0; c < kAmxColumns; ++c) codes[c] = _mm512_loadu_si512(elements_ + c * k_ + k);
    } else {
      for (int c = 0; c < kAmxColumns; ++c) {
        codes[c] = c < columns_ ? load_codes(elements_ + c * k_ + k, left) : _mm512_setzero_si512();
      }
    }
    if (turned_b_.elements == nullptr) turn(codes);
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

  // A bit for every row that did not fit since the last call. Do not use the values of these rows that were decoded
  // since.
  MXFP8_INLINE_MEMBER uint32_t misfits() {
    uint64_t special = _mm512_cmpeq_epi8_mask(highest_, _mm512_set1_epi8(0x7f));
    uint32_t rows = misfits_;
    for (int c = 0; special != 0; ++c, special >>= kGroup) rows |= uint32_t((special & 0xf) != 0) << c;
    highest_ = _mm512_setzero_si512(), misfits_ = 0;
    return rows;
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
  const PanelView turned_b_;
  const int lowest_;
  const Decoder<F> decoder_;
  const uint8_t* elements_ = nullptr;
  const uint8_t* scales_ = nullptr;
  const uint8_t* turned_elements_ = nullptr;
  int64_t count_ = 0;
  __m128i turned_[kAmxColumns];
  __m512i highest_ = _mm512_setzero_si512();
  uint32_t misfits_ = 0;
};

}  // namespace mxfp8::MXFP8_ISA
