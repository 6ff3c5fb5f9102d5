// Panels of B: kPanel of its rows, turned, so that lanes of a register are columns of the result and sums stay in their
// lanes. Elements [word, column, 4]: a word is four elements along K, or eight for SMMLA. Scale codes [block, column].
//
// A panel is turned at every call, one chunk of K at a time. Panels of a constant weight are turned once
// (constant_weight.h), with the whole K: they lie one behind the other, first their elements, then their codes.
#pragma once
#include "columns.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kPanelVectors = 2;                             // registers of columns
constexpr int64_t kPanel = int64_t(kPanelVectors) * kLanes;  // rows of B
constexpr int64_t kPanelPadding = 64;                        // K is padded to a multiple of it
constexpr uint8_t kNeutralScale = 127;                       // 2^0
constexpr int64_t kPanelAhead = 8192;                        // bytes of a panel that are fetched ahead

MXFP8_INLINE int64_t panel_depth(int64_t k) { return (k + kPanelPadding - 1) / kPanelPadding * kPanelPadding; }

// A panel from some value of K on.
struct PanelView {
  const uint8_t* elements;
  const uint8_t* codes;
};

// Bytes of all panels of a weight.
MXFP8_INLINE int64_t bytes_of_panels(const GemmArgs& args) {
  return (args.n + kPanel - 1) / kPanel * kPanel * (panel_depth(args.k) + panel_depth(args.k) / kBlock);
}

// The panel of `column` among the panels in `data`, from `k` on.
MXFP8_INLINE PanelView panel_at(const GemmArgs& args, const void* data, int64_t column, int64_t k) {
  const auto* base = static_cast<const uint8_t*>(data);
  const int64_t depth = panel_depth(args.k), codes = (args.n + kPanel - 1) / kPanel * kPanel * depth;
  return {base + column * depth + k * kPanel, base + codes + (column * depth + k * kPanel) / kBlock};
}

// Whether a block has values other than 0, or a NaN scale: then its scale matters.
template <class F>
MXFP8_INLINE bool has_values(const uint8_t* elements, int64_t count, uint8_t code) {
  constexpr uint8_t value = F::is_integer ? 0xff : 0x7f;
  uint8_t any = 0;
  for (int64_t i = 0; i < min_of(count, kBlock); ++i) any |= elements[i];
  return code == kScaleNan || (any & value) != 0;
}

// Turns the scale codes of a chunk of a panel. Where a code is outside of lowest..highest, a block of zeros gets 2^0;
// for any other block it calls misfit(block, column).
template <class F, class Misfit>
MXFP8_INLINE void turn_codes(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, int lowest,
                             int highest, uint8_t* codes, const Misfit& misfit) {
  const int64_t blocks = blocks_of(chunk.count);
  std::memset(codes, kNeutralScale, size_t(chunk.padded / kBlock * kPanel));
  for (int64_t c = 0; c < columns; ++c) {
    const uint8_t* from = args.b_scales + (column + c) * blocks_of(args.k) + chunk.k / kBlock;
    uint8_t wrong = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      codes[block * kPanel + c] = from[block];
      wrong |= uint8_t((from[block] < lowest) | (from[block] > highest));
    }
    if (__builtin_expect(wrong == 0, 1)) continue;
    for (int64_t block = 0; block < blocks; ++block) {
      uint8_t& code = codes[block * kPanel + c];
      if (code >= lowest && code <= highest) continue;
      const int64_t k = chunk.k + block * kBlock;
      if (has_values<F>(args.b + (column + c) * args.k + k, args.k - k, code)) {
        misfit(block, c);
      } else {
        code = kNeutralScale;
      }
    }
  }
}

// Turns the elements of a chunk of a panel, with an exclusive or with `flipped`; prefetches the elements `ahead` bytes
// further.
#if defined(__AVX2__)
template <int64_t Word = kWord>
MXFP8_INLINE void turn_elements(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, uint8_t flipped,
                                int64_t ahead, uint8_t* elements) {
  static_assert(Word == kWord, "what turn_rows turns");
  for (int64_t vector = 0; vector < kPanelVectors; ++vector) {
    const int64_t c = vector * kLanes;
    const Stretch from{args.b + (column + c) * args.k + chunk.k, nullptr, args.k, 0, columns - c, chunk.count};
    for (int64_t k = 0; k < chunk.padded; k += kDecoded) {
      Bytes words[kLanes];
      if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
        for (int64_t i = 0; i < kLanes; ++i) __builtin_prefetch(from.elements + i * args.k + k + ahead, 0, 2);
        turn_rows(from.elements + k, args.k, words);
      } else {
        turn_fringe(from, k, words);
      }
#pragma GCC unroll 16
      for (int word = 0; word < kLanes; ++word) {
        const Bytes moved = words[word] ^ flipped;
        std::memcpy(elements + ((k / kWord + word) * kPanelVectors + vector) * kDecoded, &moved, sizeof moved);
      }
    }
  }
}

#else
template <int64_t Word = kWord>
MXFP8_INLINE void turn_elements(const GemmArgs& args, int64_t column, int64_t columns, Chunk chunk, uint8_t,
                                int64_t ahead, uint8_t* elements) {
  const uint8_t* from = args.b + column * args.k + chunk.k;
  if (columns < kPanel || chunk.count < chunk.padded) std::memset(elements, 0, size_t(chunk.padded * kPanel));
  for (int64_t k = 0; k < chunk.count; k += Word, elements += Word * kPanel) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t* word = from + c * args.k + k;
      if (k % 64 == 0) __builtin_prefetch(word + ahead, 0, 2);
      if (__builtin_expect(chunk.count - k >= Word, 1)) {
        std::memcpy(elements + c * Word, word, Word);
      } else {
        std::memcpy(elements + c * Word, word, size_t(chunk.count - k));
      }
    }
  }
}
#endif

// Makes the panel of a constant weight that begins with `column`.
template <class F, int64_t Word = kWord, class Misfit>
MXFP8_INLINE void make_panel(const GemmArgs& args, int64_t column, uint8_t flipped, int lowest, int highest, void* data,
                             const Misfit& misfit) {
  const int64_t columns = min_of(kPanel, args.n - column);
  const Chunk all = {0, args.k, panel_depth(args.k)};
  const PanelView panel = panel_at(args, data, column, 0);
  turn_elements<Word>(args, column, columns, all, flipped, kPanel * args.k, const_cast<uint8_t*>(panel.elements));
  turn_codes<F>(args, column, columns, all, lowest, highest, const_cast<uint8_t*>(panel.codes), misfit);
}

#if defined(__AVX2__)
// The scale codes of a register of columns.
MXFP8_INLINE Ints widen_codes(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(bytes));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes));
#endif
}
#endif

}  // namespace mxfp8::MXFP8_ISA
