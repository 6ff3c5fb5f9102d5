// Rows of B become float32 columns: lane c of a register has a value of row c, so that sums over K stay in their lanes.
// Words of four elements are turned, decoded by shifts (shift_decode.h) and multiplied by their scales. Shifts do not
// decode NaN, or codes with scales near the ends: these are decoded one by one. For each 16 weights AVX-512 takes five
// operations to turn, check, decode and scale.
#pragma once
#include "../common/transpose.h"
#include "../common/turn.h"
#include "gemm.h"
#include "shift_decode.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kWord = 4;                        // elements, and scales, that are turned together
constexpr int64_t kStretch = kWord * kBlock;    // values along K whose scales are loaded together
constexpr int64_t kSquare = kLanes * kDecoded;  // elements of kLanes rows of kLanes words
static_assert(kStretch % kDecoded == 0, "a stretch is whole squares");

// kLanes rows of B, of which `columns` exist, kStretch values of each, of which `left` exist.
struct Stretch {
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t next_elements, next_scales;  // distance from a row to the next
  int64_t columns, left;
};

// kLanes rows of kLanes words to columns, in registers: words[i] has word i of each.
MXFP8_INLINE void turn_rows(const uint8_t* rows, int64_t stride, Bytes* words) {
#if defined(__AVX512F__)
  // Each cache line is read at once: where rows are 4 KiB apart, L1 has no room for sixteen.
  __m512i lines[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) lines[i] = _mm512_loadu_si512(rows + i * stride);
  turn(lines);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) words[i] = reinterpret_cast<Bytes>(lines[i]);
#else
  alignas(64) char turned[kSquare];
  transpose_tile(reinterpret_cast<const char*>(rows), stride, turned, kDecoded);
  for (int i = 0; i < kLanes; ++i) std::memcpy(words + i, turned + i * kDecoded, kDecoded);
#endif
}

// Turns words from value k on, with zeros for absent rows and values.
[[maybe_unused]] MXFP8_NOINLINE void turn_fringe(const Stretch& from, int64_t k, Bytes* words) {
  alignas(64) uint8_t padded[kSquare] = {};
  const int64_t count = min_of(from.left - k, kDecoded);
  for (int64_t c = 0; count > 0 && c < min_of(from.columns, kLanes); ++c) {
    std::memcpy(padded + c * kDecoded, from.elements + c * from.next_elements + k, size_t(count));
  }
  turn_rows(padded, kDecoded, words);
}

// A stretch's scales, a byte for each block. Absent blocks get 2^0, which fits in every format.
MXFP8_INLINE Ints load_scales(const Stretch& from) {
  alignas(64) uint32_t words[kLanes];
  for (uint32_t& word : words) word = 0x7f7f7f7f;
  const int64_t blocks = blocks_of(from.left);
  for (int64_t c = 0; c < min_of(from.columns, kLanes); ++c) {
    const uint8_t* scales = from.scales + c * from.next_scales;
    if (__builtin_expect(blocks >= kWord, 1)) {
      std::memcpy(words + c, scales, sizeof words[c]);
    } else {
      std::memcpy(words + c, scales, size_t(blocks > 0 ? blocks : 0));
    }
  }
  Ints all;
  std::memcpy(&all, words, sizeof all);
  return all;
}

// Whether each of these scales, times 2^bias_gap, is a normal float.
template <class F>
MXFP8_INLINE bool fit(Ints scales) {
  constexpr int highest = F::is_integer ? 254 : 254 - Shift<F>::bias_gap;
  constexpr int lowest = F::is_integer ? 1 - Shift<F>::bias_gap : 0;
  if (lowest > 0 && any_less(reinterpret_cast<SignedBytes>(scales ^ int(0x80808080)), int8_t(lowest - 128)))
    return false;
  return !any_less(reinterpret_cast<SignedBytes>(scales ^ 0x7f7f7f7f), int8_t(127 - highest));
}

// Decodes turned words, value k of lane c to out[k * kLanes + c]; `scales` begins with the scales of their first block.
// Returns false if the result is not exact.
template <class F, bool Plain>
MXFP8_INLINE bool decode_turned(const Bytes* words, Ints scales, float* out) {
  Bytes specials = {};
#pragma GCC unroll 16
  for (int word = 0; word < kLanes; ++word) {
    const Ints code = (scales >> (word * kWord / kBlock * 8)) & 0xff;
    Vec scale = reinterpret_cast<Vec>((code + Shift<F>::bias_gap) << 23), values[kWord];
    decode_step<F>(words[word], values);
    if (!Plain && look_at<F>(words[word], &specials)) {
      lift(values);
      scale *= 1.0f / (1 << kLift);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kWord; ++i) store(out + (word * kWord + i) * kLanes, values[i] * scale);
  }
  return Plain || !any_special<F>(specials);
}

template <class F>
MXFP8_NOINLINE void decode_exactly(const Stretch& from, int64_t k_begin, float* out) {
  for (int64_t c = 0; c < kLanes; ++c) {
    for (int64_t i = 0; i < kDecoded; ++i) {
      const int64_t k = k_begin + i;
      const bool inside = c < from.columns && k < from.left;
      out[i * kLanes + c] = inside ? decode<F>(from.elements[c * from.next_elements + k]) *
                                         scale_value(from.scales[c * from.next_scales + k / kBlock])
                                   : 0.0f;
    }
  }
}

template <class F>
MXFP8_NOINLINE bool decode_subnormals(const Bytes* words, const Ints& scales, float* out) {
  return decode_turned<F, false>(words, scales, out);
}

// Decodes a stretch to the end of a block, value k of lane c to out[k * kLanes + c]. Fetches the codes `ahead` bytes
// further into L2, because L1 may have no room for lines 4 KiB apart.
template <class F>
MXFP8_INLINE void decode_stretch(const Stretch& from, int64_t ahead, float* out) {
  const Ints scales = load_scales(from);
  const bool fits = fit<F>(scales);
  for (int64_t k = 0; k < min_of(kStretch, blocks_of(from.left) * kBlock); k += kDecoded, out += kDecoded * kLanes) {
    const Ints rest = scales >> int(k / kBlock * 8);
    Bytes words[kLanes];
    for (int64_t c = 0; c < kLanes; ++c) __builtin_prefetch(from.elements + c * from.next_elements + k + ahead, 0, 2);
    if (__builtin_expect(from.columns >= kLanes && from.left - k >= kDecoded, 1)) {
      turn_rows(from.elements + k, from.next_elements, words);
    } else {
      turn_fringe(from, k, words);
    }
    const auto codes = [&](int i) MXFP8_INLINE_LAMBDA { return words[i]; };
    if (__builtin_expect(fits && all_plain<F, kLanes>(codes), 1)) {
      decode_turned<F, true>(words, rest, out);
      continue;
    }
    Bytes copies[kLanes];  // so that `words` stay in registers
    std::memcpy(copies, words, sizeof copies);
    if (!fits || !decode_subnormals<F>(copies, rest, out)) decode_exactly<F>(from, k, out);
  }
}

}  // namespace mxfp8::MXFP8_ISA
