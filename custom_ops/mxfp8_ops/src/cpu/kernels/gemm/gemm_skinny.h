// Shared by the two kernels for few rows: the loop over the result. A few rows of A are packed as one tile, in groups
// of at most Most rows. The row kernel multiplies one group with one row of B, which it decodes in registers. So B is
// read from memory once. At most a part of a row of it is written, which stays in L1.
//
// Packed A: groups; in a group, steps of Step values along K; in a step, each of its rows. The order of the values in a
// step is the one in which the row kernel decodes B.
#pragma once
#include "gemm.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kGroupBytes = 32 << 10;      // bytes of the packed rows that one pass over B reads: they stay in L1
constexpr int64_t kPassStep = 128;             // a pass is a multiple of this deep, unless it ends the row
constexpr int64_t kSumRows = kSkinnyRows + 4;  // sums are added four at a time
constexpr int64_t kAheadBytes = 4096;          // how far ahead B is fetched, rounded up to rows

// Groups of nearly equal size.
struct Groups {
  int64_t count, small, large;  // the first `large` groups have small + 1 rows, the others `small`
  Groups(int64_t rows, int64_t most) : count((rows + most - 1) / most), small(rows / count), large(rows % count) {}
  int64_t first(int64_t group) const { return group * small + min_of(group, large); }
  int64_t rows(int64_t group) const { return small + (group < large ? 1 : 0); }
};

// Calls call(Rows<R>) with R = rows, which is in Least..Most.
template <int Least, int Most, class Call>
MXFP8_INLINE void with_group(int64_t rows, const Call& call) {
  if constexpr (Least == Most) {
    call(Rows<Most>{});
  } else {
    if (rows >= Most) {
      call(Rows<Most>{});
    } else {
      with_group<Least, Most - 1>(rows, call);
    }
  }
}

// A group of rows, a part of K, and the columns of the result to which these contribute.
template <class T>
struct Work {
  const GemmArgs& args;
  const T* a;               // the packed group, from k on
  int64_t row;              // the first of the group
  int64_t k, count;         // part of K
  int64_t column, columns;  // columns of the result
  int64_t ahead;            // how many rows of B to fetch ahead
  float* sums;              // [columns, kSumRows]: sums are added here
};

// One or more rows of B in it.
struct Pass {
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t next_elements, next_scales;  // distance from a row to the next
  int64_t count;
  int64_t ahead, ahead_scales;  // distance to what to fetch
  int64_t readable_scales;      // from `scales` to the end of the array: those of later rows follow
};

// Calls dot(Columns<C>, Pass, sums) for every column of `work`, C at a time. dot adds R sums for each column to `sums`,
// kSumRows apart; if it cannot do so exactly, it adds nothing and returns false. Then each column is tried alone, so
// that one column does not change the sum of another.
template <int C>
using Columns = Rows<C>;
template <class F, int R, int C, class T, class Dot>
MXFP8_INLINE void for_each_column(const Work<T>& work, const Dot& dot) {
  const GemmArgs& args = work.args;
  const int64_t blocks = blocks_of(args.k);
  const auto call = [&](auto columns, int64_t j) MXFP8_INLINE_LAMBDA {
    const int64_t column = work.column + j, scale = column * blocks + work.k / kBlock;
    return dot(columns,
               Pass{args.b + column * args.k + work.k, args.b_scales + scale, args.k, blocks, work.count,
                    (work.ahead + C - 1) * args.k, (work.ahead + C - 1) * blocks, args.n * blocks - scale},
               work.sums + j * kSumRows);
  };
  for (int64_t j = 0; j < work.columns;) {
    if (C > 1 && j + C <= work.columns && __builtin_expect(call(Columns<C>{}, j), 1)) {
      j += C;
      continue;
    }
    for (const int64_t end = min_of(j + C, work.columns); j < end; ++j) {
      if (__builtin_expect(call(Columns<1>{}, j), 1)) continue;
      for (int r = 0; r < R; ++r) {
        work.sums[j * kSumRows + r] += exact_dot<F>(args, work.row + r, work.column + j, work.k, work.count);
      }
    }
  }
}

// Multiplies columns column_begin..column_end-1 of the result: calls multiply(Rows<R>, Work<T>). The part of a group
// that one pass reads has at most `Bytes`; B is fetched `Ahead` bytes ahead.
template <class T, int Step, int Least, int Most, int64_t Bytes = kGroupBytes, int64_t Ahead = kAheadBytes,
          class Multiply>
MXFP8_INLINE void for_each_group(const GemmArgs& args, int64_t row, int64_t rows, int64_t column_begin,
                                 int64_t column_end, const T* packed, const Multiply& multiply) {
  alignas(64) float strip[kSkinnyRows * kGemmColumns], sums[kGemmColumns * kSumRows];
  const Groups groups(rows, Most);
  const int64_t padded = (args.k + Step - 1) / Step * Step;
  const int64_t deepest = Bytes / int64_t(sizeof(T)) / groups.rows(0) / kPassStep * kPassStep;
  const int64_t passes = (args.k + deepest - 1) / deepest;
  const int64_t depth = passes == 0 ? 0 : (args.k + passes * kPassStep - 1) / (passes * kPassStep) * kPassStep;
  const int64_t ahead = depth == 0 ? 0 : (Ahead + depth - 1) / depth;
  for (int64_t column = column_begin; column < column_end; column += kGemmColumns) {
    const int64_t width = min_of(kGemmColumns, column_end - column);
    std::memset(sums, 0, sizeof sums);
    for (int64_t k = 0; k < args.k; k += depth) {
      for (int64_t group = 0; group < groups.count; ++group) {
        const int64_t first = groups.first(group);
        with_group<Least, Most>(groups.rows(group), [&](auto r) {
          multiply(r, Work<T>{args, packed + first * padded + k * decltype(r)::value, row + first, k,
                              min_of(depth, args.k - k), column, width, ahead, sums + first});
        });
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < kGemmColumns; ++j) strip[i * kGemmColumns + j] = sums[j * kSumRows + i];
    }
    store_strip(args, row, rows, column, width, strip);
  }
}

// Adds the lanes of R vectors to R sums.
template <int R>
MXFP8_INLINE void add_lanes(const Vec* lanes, float* sums) {
  for (int r = 0; r < R; r += 4) {
    const Vec four[4] = {lanes[r], r + 1 < R ? lanes[r + 1] : zero(), r + 2 < R ? lanes[r + 2] : zero(),
                         r + 3 < R ? lanes[r + 3] : zero()};
    store_sums(four, sums + r, true);
  }
}

}  // namespace mxfp8::MXFP8_ISA
