// Many blocks at a time: sixteen along a row, or one per column of many. The scales and inverses, which depend on a
// block's largest magnitude, are computed for sixteen blocks at once, so no block waits for another. group_avx512.h has
// the functions for AVX-512; other sets use the compiler's vectors.
#pragma once
#include <limits>

#include "../common/codec.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kGroup = 16;  // blocks

// Where adjacent blocks are. For blocks that are not adjacent, use an array of pointers.
template <class T>
struct Adjacent {
  T* begin;
  MXFP8_INLINE_MEMBER T* operator[](int64_t block) const { return begin + block * kBlock; }
};

// Sums over one task, one lane per position so that the compiler needs no reassociation.
struct Sums {
  double signal[kColumnTile] = {};
  double noise[kColumnTile] = {};
  void add_to(Stats* stats) const {
    for (int i = 0; i < kColumnTile; ++i) {
      stats->signal += signal[i];
      stats->noise += noise[i];
    }
  }
};

// Largest magnitude of `count` stored values, as the bits of a float32: magnitudes order as their bits do, and NaN is
// above infinity. They are compared as signed numbers because every instruction set does that.
template <class D, class Count>
MXFP8_INLINE uint32_t largest_magnitude(const typename D::Storage* x, Count count) {
  using Bits = typename D::Bits;
  Bits largest = 0;
  for (Count i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= std::numeric_limits<Bits>::max();
    largest = bits > largest ? bits : largest;
  }
  typename D::Storage stored;
  std::memcpy(&stored, &largest, sizeof stored);
  return bits_of(D::load(stored));
}

// Prefetches the values `bytes` ahead, because the processor's own prefetcher stops at the end of every page.
template <class T>
MXFP8_INLINE void prefetch_block(const T* x, size_t bytes) {
  for (size_t byte = 0; byte < kBlock * sizeof *x; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(x) + bytes + byte);
  }
}
constexpr size_t kPrefetch = 4096;  // bytes

// Raises the largest magnitude of each column, as stored, to the largest of `Rows` rows.
template <class D, int Rows>
MXFP8_INLINE void raise_magnitudes(const typename D::Storage* x, int64_t stride, int64_t width,
                                   typename D::Bits* __restrict amax) {
  using Bits = typename D::Bits;
  const auto raise = [&](int64_t i) {
    Bits largest = amax[i];
    for (int row = 0; row < Rows; ++row) {
      Bits bits;
      std::memcpy(&bits, x + row * stride + i, sizeof bits);
      bits &= std::numeric_limits<Bits>::max();
      largest = bits > largest ? bits : largest;
    }
    amax[i] = largest;
  };
  constexpr int64_t line = 64 / sizeof *x;
  int64_t i = 0;
  for (; i + line <= width; i += line) {
    for (int row = 0; row < Rows; ++row) __builtin_prefetch(x + (row + Rows) * stride + i);
    for (int64_t j = i; j < i + line; ++j) raise(j);
  }
  for (; i < width; ++i) raise(i);
}

// Loads one row of columns, and raises their largest magnitudes, as float32 bits.
template <class D, int64_t Columns>
MXFP8_INLINE void load_columns(const typename D::Storage* x, float* __restrict values, int32_t* __restrict amax) {
  for (int64_t i = 0; i < Columns; ++i) {
    values[i] = D::load(x[i]);
    const int32_t magnitude = int32_t(bits_of(values[i]) & kMagnitude);
    amax[i] = magnitude > amax[i] ? magnitude : amax[i];
  }
}

// Groups of adjacent blocks only. with(group, f) calls f(x, elements): where the group's blocks are, and where their
// elements go.
template <class D>
struct AdjacentBlocks {
  const typename D::Storage* x;
  uint8_t* elements;
  MXFP8_INLINE_MEMBER void gather(int64_t) const {}
  template <class Call>
  MXFP8_INLINE_MEMBER auto with(int64_t group, const Call& call) const {
    const int64_t start = group * kGroup * kBlock;
    return call(Adjacent<const typename D::Storage>{x + start}, Adjacent<uint8_t>{elements + start});
  }
  MXFP8_INLINE_MEMBER void finish(int64_t) const {}
};

// Groups of blocks in rows of x that end in a partial block, or that have a gap behind them. Call gather for groups in
// order, from block number `block` of all rows on; you may gather one group before the group in front of it is
// finished. Partial blocks are copied, with zeros behind them.
template <class D>
struct ApartBlocks {
  using T = typename D::Storage;

  MXFP8_INLINE_MEMBER ApartBlocks(const QuantizeArgs& args, int64_t row, int64_t start)
      : k_(args.k),
        stride_(args.stride),
        end_(args.k % kBlock),
        start_(start),
        x_(static_cast<const T*>(args.x) + row * args.stride),
        elements_(args.elements + row * args.k) {}

  MXFP8_INLINE_MEMBER void gather(int64_t group) {
    Group& g = groups_[group % 2];
    const T* x = x_;
    uint8_t* elements = elements_;
    int64_t start = start_;
    int partial = 0;
    g.from[0] = x + start;
    g.to[0] = elements + start;
    g.adjacent = start + kGroup * kBlock < k_;
    if (g.adjacent) {
      start_ += kGroup * kBlock;
      return;
    }
    for (int b = 0; b < kGroup; ++b) {
      g.from[b] = x + start;
      g.to[b] = elements + start;
      start += kBlock;
      if (start < k_) continue;
      if (end_ != 0) {
        std::memcpy(g.padded[partial], g.from[b], size_t(end_) * sizeof(T));
        g.from[b] = g.padded[partial];
        g.ends[partial] = g.to[b];
        g.to[b] = g.codes[partial++];
      }
      start = 0;
      x += stride_;
      elements += k_;
    }
    g.partial = partial;
    start_ = start;
    x_ = x;
    elements_ = elements;
  }

  template <class Call>
  MXFP8_INLINE_MEMBER auto with(int64_t group, const Call& call) const {
    const Group& g = groups_[group % 2];
    if (g.adjacent) return call(Adjacent<const T>{g.from[0]}, Adjacent<uint8_t>{g.to[0]});
    return call(static_cast<const T* const*>(g.from), static_cast<uint8_t* const*>(g.to));
  }

  MXFP8_INLINE_MEMBER void finish(int64_t group) const {
    const Group& g = groups_[group % 2];
    if (g.adjacent) return;
    for (int i = 0; i < g.partial; ++i) std::memcpy(g.ends[i], g.codes[i], size_t(end_));
  }

 private:
  struct Group {
    bool adjacent;
    int partial;  // number of partial blocks
    const T* from[kGroup];
    uint8_t* to[kGroup];
    uint8_t* ends[kGroup];  // where the elements of partial blocks belong
    alignas(64) uint8_t codes[kGroup][kBlock];
    alignas(64) T padded[kGroup][kBlock] = {};
  };
  const int64_t k_, stride_, end_;
  int64_t start_;  // start of the next block in its row
  const T* x_;     // this row
  uint8_t* elements_;
  Group groups_[2];
};

// A tile of 32 rows and 64 columns, and the tile after it. Rows from `depth` on are zeros.
template <class D>
struct ColumnTile {
  const typename D::Storage* x;
  int64_t stride, depth;
  const typename D::Storage* next;
  int64_t next_stride;

  MXFP8_INLINE_MEMBER void fetch(int64_t row) const {
    for (int64_t j = 0; j < kColumnTile; j += 64 / int64_t(sizeof *x)) __builtin_prefetch(next + row * next_stride + j);
  }
};

}  // namespace mxfp8::MXFP8_ISA

// Both headers below provide:
//
// quantize_groups: quantizes `groups` times kGroup blocks of AdjacentBlocks or ApartBlocks, and adds up their errors if
//   `sums` is not null. Returns how many groups it did.
// kGroupsAddErrors: whether `sums` may be a pointer other than null.
// quantize_turned: quantizes a tile of 32 rows and 64 columns, each column one block, and stores it turned: element k
//   of column c is turned[c * stride + k]. Fetches the tile at `next`. `sums` may be null. Returns whether it did it.
// encode_columns: encodes a row of columns, each with its own scale.
//
// quantize_groups and quantize_turned stop at a block that holds a NaN or Inf, whose largest element may be infinite,
// or whose scale code is in doubt; or they do nothing at all. Ignore what they wrote past the blocks that they did.
#if defined(__AVX512BW__)
#include "group_avx512.h"
#else

namespace mxfp8::MXFP8_ISA {

template <class D, class F>
MXFP8_INLINE void encode_columns(const typename D::Storage* x, const float* inverse, int64_t width, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kBlock <= width; i += kBlock) {
    alignas(64) float room[kBlock];
    const float* values = D::load_block(x + i, room);
    for (int64_t j = 0; j < kBlock; ++j) codes[i + j] = uint8_t(encode<F>(values[j] * inverse[i + j]));
  }
  for (; i < width; ++i) codes[i] = uint8_t(encode<F>(D::load(x[i]) * inverse[i]));
}

constexpr bool kGroupsAddErrors = false;

template <class D, class F, class From, class To>
MXFP8_INLINE bool quantize_group(const From& x, uint32_t increment, const To& elements, uint8_t* scales, Sums*) {
  uint32_t amax[kGroup];
  float inverse[kGroup];
  for (int b = 0; b < kGroup; ++b) {
    prefetch_block(x[b], kPrefetch);
    amax[b] = largest_magnitude<D>(x[b], int(kBlock));
  }
  bool finite = true;
  for (int b = 0; b < kGroup; ++b) {
    const uint32_t scale = fast_scale_code<F>(amax[b], increment);
    scales[b] = uint8_t(scale);
    inverse[b] = inverse_scale_value(scale);
    finite = finite && scale != kScaleNan;
  }
  if (F::emax == 0 ? any_in_doubt<F>(scales, kGroup) : !finite) return false;  // the faster test, as measured
  for (int b = 0; b < kGroup; ++b) {
    alignas(64) float room[kBlock];
    const float* values = D::load_block(x[b], room);
    uint8_t* codes = elements[b];
    for (int i = 0; i < kBlock; ++i) codes[i] = uint8_t(encode<F>(values[i] * inverse[b]));
  }
  return true;
}

template <class D, class F, class Blocks>
MXFP8_INLINE int64_t quantize_groups(Blocks& blocks, int64_t groups, uint32_t increment, uint8_t* scales, Sums* sums) {
  for (int64_t i = 0; i < groups; ++i) {
    blocks.gather(i);
    const bool done = blocks.with(i, [&](auto x, auto elements) MXFP8_INLINE_LAMBDA {
      return quantize_group<D, F>(x, increment, elements, scales + i * kGroup, sums);
    });
    if (!done) return i;
    blocks.finish(i);
  }
  return groups;
}

template <class D, class F>
MXFP8_INLINE bool quantize_turned(const ColumnTile<D>&, uint32_t, uint8_t*, int64_t, uint8_t*, Sums*) {
  return false;
}

}  // namespace mxfp8::MXFP8_ISA

#endif
