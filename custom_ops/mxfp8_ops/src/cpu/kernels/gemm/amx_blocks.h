// Blocks of sums in the tiles of AMX, and the cut of rows of A into these tiles: A as bfloat16 values, or each value as
// parts whose sum is the value.
#pragma once
#include "amx_panel.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kPairColumns = 2 * kAmxColumns;  // columns of two tiles side by side

// A block of sums: rows `stride` values apart.
struct Sums {
  float* at;
  int64_t stride;
  bool add;  // to the sums in memory
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
      if (TwoPanels) _tile_loadd(1, sums.at + kAmxColumns, stride);
      if (TwoTiles) _tile_loadd(2, below, stride);
      if (TwoTiles && TwoPanels) _tile_loadd(3, below + kAmxColumns, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  // Adds the products of one step of K: `first` and `second` are the tiles of A, `left` and `right` the panels.
  static MXFP8_INLINE_MEMBER void step(const uint16_t* first, const uint16_t* second, const uint16_t* left,
                                       const uint16_t* right) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      _tile_loadd(6, left + odd * kAmxTile, kAmxRowBytes);
      if (TwoPanels) _tile_loadd(7, right + odd * kAmxTile, kAmxRowBytes);
      _tile_loadd(4, first + odd * kSlab, kStepBf16 * sizeof(uint16_t));
      _tile_dpbf16ps(0, 4, 6);
      if (TwoPanels) _tile_dpbf16ps(1, 4, 7);
      if (TwoTiles) {
        _tile_loadd(5, second + odd * kSlab, kStepBf16 * sizeof(uint16_t));
        _tile_dpbf16ps(2, 5, 6);
        if (TwoPanels) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

  static MXFP8_INLINE_MEMBER void finish(Sums sums, int64_t rows) {
    const size_t stride = size_t(sums.stride) * sizeof(float);
    float* below = sums.at + rows * sums.stride;
    _tile_stored(0, sums.at, stride);
    if (TwoPanels) _tile_stored(1, sums.at + kAmxColumns, stride);
    if (TwoTiles) _tile_stored(2, below, stride);
    if (TwoTiles && TwoPanels) _tile_stored(3, below + kAmxColumns, stride);
  }
};

// The same where Parts bfloat16 numbers of a row of A add up to each value. Tiles 2 and 3 add up the products with all
// parts after the first, which are 2^-8 of it: so these products add no more roundings than there are values.
template <int Parts, bool TwoPanels>
struct PartsBlock {
  static constexpr int parts = Parts;

  static MXFP8_INLINE_MEMBER void start(Sums sums, int64_t) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (sums.add) _tile_loadd(0, sums.at, size_t(sums.stride) * sizeof(float));
    if (sums.add && TwoPanels) _tile_loadd(1, sums.at + kAmxColumns, size_t(sums.stride) * sizeof(float));
  }

  static MXFP8_INLINE_MEMBER void step(const uint16_t* first, const uint16_t*, const uint16_t* left,
                                       const uint16_t* right) {
    constexpr size_t stride = Parts * kStepBf16 * sizeof(uint16_t);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      _tile_loadd(6, left + odd * kAmxTile, kAmxRowBytes);
      if (TwoPanels) _tile_loadd(7, right + odd * kAmxTile, kAmxRowBytes);
      _tile_loadd(4, first + odd * kSlab, stride);
      _tile_dpbf16ps(0, 4, 6);
      if (TwoPanels) _tile_dpbf16ps(1, 4, 7);
#pragma GCC unroll 2
      for (int part = 1; part < Parts; ++part) {
        _tile_loadd(5, first + part * kStepBf16 + odd * kSlab, stride);
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
    if (TwoPanels) _tile_stored(1, sums.at + kAmxColumns, stride);
    if (TwoPanels) _tile_stored(3, rest + kAmxColumns, kPairColumns * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < (TwoPanels ? kPairColumns : kAmxColumns); j += kLanes) {
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
      if (columns > kAmxColumns) return call(WholeBlock<true, true>{}, first, second);
      return call(WholeBlock<true, false>{}, first, second);
    }
    if (columns > kAmxColumns) return call(WholeBlock<false, true>{}, first, second);
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
    if (columns > kAmxColumns) return call(PartsBlock<parts, true>{}, rows, int64_t(0));
    return call(PartsBlock<parts, false>{}, rows, int64_t(0));
  }
};

}  // namespace mxfp8::MXFP8_ISA
