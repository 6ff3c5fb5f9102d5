// MXFP8Attention for values rounded to bfloat16, on dot products of pairs: in registers, or in AMX tiles of 32 rows of
// queries with 32 keys or with 32 columns of values. Keys and values are packed as the second operand of either: a word
// has two values that are next to each other along the dimension of the sum.
//
// Products of bfloat16 are exact in float32, and the sums are float32. Numbers below 2^-126, operands and sums, count
// as 0.
#pragma once

#if defined(__AVX512BF16__)
#include "../common/transpose.h"
#include "attention.h"
#include "attention_products.h"
#if defined(__AMX_BF16__)
#include "../common/amx.h"
#endif

namespace mxfp8::MXFP8_ISA {

// The first `count` of 16 values, and zeros behind them.
MXFP8_INLINE __mmask16 lanes_of(int64_t count) { return __mmask16((1 << most_of(count, 0)) - 1); }
MXFP8_INLINE Vec widened(Float32, const float* from, int64_t count) {
  return count >= kLanes ? load(from) : _mm512_maskz_loadu_ps(lanes_of(count), from);
}
MXFP8_INLINE __m256i halves_at(const uint16_t* from, int64_t count) {
  if (count < kLanes) return _mm256_maskz_loadu_epi16(lanes_of(count), from);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
MXFP8_INLINE Vec widened(Float16, const uint16_t* from, int64_t count) {
  return _mm512_cvtph_ps(halves_at(from, count));
}
MXFP8_INLINE Vec widened(BFloat16, const uint16_t* from, int64_t count) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves_at(from, count)), 16));
}

// 16 words, each a pair of adjacent values.
MXFP8_INLINE Vec narrowed(Vec first, Vec second) {
  return _mm512_castsi512_ps(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}
MXFP8_INLINE void write_narrowed(float* to, Vec values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// Rows of queries or keys, each with zeros behind it up to `width` values, a multiple of 32.
MXFP8_NOINLINE void narrow_rows(const AttentionArgs& a, Source from, int64_t rows, int64_t width, float* to) {
  with_dtype(a.dtype, [&](auto dtype) {
    const auto* row = static_cast<const typename decltype(dtype)::Storage*>(from.data) + from.offset;
    for (int64_t i = 0; i < rows; ++i, row += from.stride, to += width / 2) {
      for (int64_t j = 0; j < width; j += 2 * kLanes) {
        const Vec first = widened(dtype, row + j, a.d - j);
        store(to + j / 2, narrowed(first, widened(dtype, row + j + kLanes, a.d - j - kLanes)));
      }
    }
  });
}

// Rows of values, as the second operand of multiply: rows 2 k and 2 k + 1 in the words of k.
template <class D>
struct SourcePairs {
  const typename D::Storage* from;
  int64_t stride, rows, count;
  __m512i alternating;
  SourcePairs(Source source, int64_t of_rows, int64_t of_columns)
      : from(static_cast<const typename D::Storage*>(source.data) + source.offset),
        stride(source.stride),
        rows(of_rows),
        count(of_columns) {
    const __m512i word = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    alternating = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(kLanes)), 16));
  }
  MXFP8_INLINE_MEMBER Vec load(int64_t k, int64_t column) const {
    const auto* row = from + 2 * k * stride + column;
    const Vec even = widened(D{}, row, 2 * k < rows ? count - column : 0);
    const Vec odd = widened(D{}, row + stride, 2 * k + 1 < rows ? count - column : 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(alternating, _mm512_castps_si512(narrowed(even, odd))));
  }
  static MXFP8_INLINE_MEMBER Vec add(Vec a, Vec b, Vec sum) { return add_pairs(a, b, sum); }
};

class PairRows {
 public:
#if defined(__AMX_BF16__)
  static constexpr int64_t kKeys = 128, kRows = 2 * kAmxRows, kRowPad = kRows;
#else
  static constexpr int64_t kKeys = 256, kRows = 2 * kTileRows, kRowPad = 1;
#endif

  PairRows(const AttentionArgs& args, const AttentionTask& task, Room* room)
      : a_(args),
        t_(task),
        d_(padded(args.d, kDepth)),
        dv_(padded(args.dv, kAttentionPad)),
        rows_(task.row_end - task.row_begin) {
    queries_ = room->reserve<float>(padded(rows_, kAttentionRowPad) * d_ / 2);
    keys_ = room->reserve<float>(d_ / 2 * kKeys);
    values_ = room->reserve<float>(kKeys / 2 * dv_);
    narrow_ = room->reserve<float>(kStep * d_ / 2);
    products_ = room->reserve<float>(kRows * kKeys);
    weights_ = room->reserve<float>(kRows * kKeys / 2);
  }

  void begin() {
    for_queries(a_, t_,
                [&](Source from, int64_t i, int64_t rows) { narrow_rows(a_, from, rows, d_, queries_ + i * d_ / 2); });
#if defined(__AMX_BF16__)  // tiles have 32 rows, always
    tiles_.shape(kAmxRows, kAmxRows);
    const int64_t more = padded(rows_, kRows) - rows_;
    std::memset(queries_ + rows_ * d_ / 2, 0, size_t(more * d_ / 2) * sizeof *queries_);
    std::memset(weights_, 0, size_t(kRows * kKeys / 2) * sizeof *weights_);
#endif
  }

  MXFP8_INLINE_MEMBER void load_keys(int64_t key, int64_t count) {
    Source keys = keys_at(a_, t_, key), values = values_at(a_, t_, key);
    for (int64_t j = 0; j < padded(count, kDepth); j += kStep) {
      const int64_t rows = most_of(0, least_of(kStep, count - j));
      narrow_rows(a_, keys, rows, d_, narrow_);
      std::memset(narrow_ + rows * d_ / 2, 0, size_t((kStep - rows) * d_ / 2) * sizeof *narrow_);
      transpose_rows(narrow_, d_ / 2, d_ / 2, keys_ + j, kKeys);
      with_dtype(a_.dtype, [&](auto dtype) {
        const SourcePairs<decltype(dtype)> pairs(values, rows, a_.dv);
        for (int64_t i = 0; i < kStep / 2; ++i) {
          for (int64_t column = 0; column < dv_; column += kLanes) {
            store(values_ + (j / 2 + i) * dv_ + column, pairs.load(i, column));
          }
        }
      });
      keys.offset += kStep * keys.stride, values.offset += kStep * values.stride;
    }
  }

  MXFP8_INLINE_MEMBER float* products(int64_t row) { return products_ + row * kKeys; }
  MXFP8_INLINE_MEMBER int64_t width(int64_t used) const { return padded(used, kDepth); }
  MXFP8_INLINE_MEMBER void write(int64_t row, int64_t j, Vec weights) {
    write_narrowed(weights_ + (row * kKeys + j) / 2, weights);
  }

#if defined(__AMX_BF16__)
  MXFP8_INLINE_MEMBER void score(int64_t row, int64_t, int64_t used) {
    for (int64_t j = 0; j < used; j += 2 * kAmxRows) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < d_ / 2; k += kAmxRows) {
        multiply_tiles<true>(queries_ + row * d_ / 2 + k, d_ / 2, keys_ + k * kKeys + j, kKeys);
      }
      store_tiles<true>(products_ + j, kKeys);
    }
  }
  MXFP8_INLINE_MEMBER void add(int64_t, int64_t, int64_t used, float* out) {
    int64_t j = 0;
    for (; j + 2 * kAmxRows <= dv_; j += 2 * kAmxRows) add_columns<true>(used, j, out + j);
    if (j < dv_) add_columns<false>(used, j, out + j);
  }
#else
  MXFP8_INLINE_MEMBER void score(int64_t row, int64_t rows, int64_t used) {
    multiply(queries_ + row * d_ / 2, d_ / 2, Pairs{keys_, kKeys}, d_ / 2, products_, kKeys, rows, padded(used, kLanes),
             false);
  }
  MXFP8_INLINE_MEMBER void add(int64_t, int64_t rows, int64_t used, float* out) {
    multiply(weights_, kKeys / 2, Pairs{values_, dv_}, (used + 1) / 2, out, dv_, rows, dv_, true);
  }
#endif

 private:
  static constexpr int64_t kDepth = 32;  // values that one tile product sums over

#if defined(__AMX_BF16__)
  // Tiles 0 and 1, and 2 and 3 of the next 16 rows, += a . b; `Both`: 32 columns, not 16.
  template <bool Both>
  MXFP8_INLINE_MEMBER void multiply_tiles(const float* a, int64_t a_stride, const float* b, int64_t b_stride) {
    _tile_loadd(4, a, int(a_stride * 4));
    _tile_loadd(5, a + kAmxRows * a_stride, int(a_stride * 4));
    _tile_loadd(6, b, int(b_stride * 4));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Both) {
      _tile_loadd(7, b + kAmxRows, int(b_stride * 4));
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  template <bool Both>
  MXFP8_INLINE_MEMBER void store_tiles(float* to, int64_t stride) {
    _tile_stored(0, to, int(stride * 4));
    _tile_stored(2, to + kAmxRows * stride, int(stride * 4));
    if constexpr (Both) {
      _tile_stored(1, to + kAmxRows, int(stride * 4));
      _tile_stored(3, to + kAmxRows * stride + kAmxRows, int(stride * 4));
    }
  }
  template <bool Both>
  MXFP8_INLINE_MEMBER void add_columns(int64_t used, int64_t column, float* out) {
    _tile_loadd(0, out, int(dv_ * 4));
    _tile_loadd(2, out + kAmxRows * dv_, int(dv_ * 4));
    if constexpr (Both) {
      _tile_loadd(1, out + kAmxRows, int(dv_ * 4));
      _tile_loadd(3, out + kAmxRows * dv_ + kAmxRows, int(dv_ * 4));
    }
    for (int64_t k = 0; k < used; k += kDepth) {
      multiply_tiles<Both>(weights_ + k / 2, kKeys / 2, values_ + k / 2 * dv_ + column, dv_);
    }
    store_tiles<Both>(out, dv_);
  }

  AmxTiles tiles_;
#endif

  const AttentionArgs& a_;
  const AttentionTask& t_;
  int64_t d_, dv_, rows_;
  float *queries_, *keys_, *values_, *narrow_, *products_, *weights_;  // a word is a pair, except in products_
};

// Few rows: keys and values are narrowed in registers.
class FewPairRows {
 public:
  static constexpr int64_t kKeys = kFewKeys, kRows = kFewRows, kRowPad = 1;

  FewPairRows(const AttentionArgs& args, const AttentionTask& task, Room* room)
      : a_(args), t_(task), d_(padded(args.d, 32)), dv_(padded(args.dv, kAttentionPad)) {
    queries_ = room->reserve<float>(kRows * d_ / 2);
    products_ = room->reserve<float>(kRows * kKeys);
    weights_ = room->reserve<float>(kRows * kKeys / 2);
  }
  void begin() {
    for_queries(a_, t_,
                [&](Source from, int64_t i, int64_t rows) { narrow_rows(a_, from, rows, d_, queries_ + i * d_ / 2); });
  }
  MXFP8_INLINE_MEMBER void load_keys(int64_t key, int64_t) {
    keys_ = keys_at(a_, t_, key), values_ = values_at(a_, t_, key);
  }
  MXFP8_INLINE_MEMBER void score(int64_t, int64_t rows, int64_t used) {
    with_dtype(a_.dtype, [&](auto dtype) {
      const auto* first = static_cast<const typename decltype(dtype)::Storage*>(keys_.data) + keys_.offset;
      for (int64_t j = 0; j < used; j += 4) {
        for (int64_t i = 0; i < rows; ++i) {
          Vec sums[4] = {zero(), zero(), zero(), zero()};
          for (int64_t at = 0; at < d_; at += 32) {
            const Vec part = load(queries_ + (i * d_ + at) / 2);
            for (int64_t c = 0; c < 4; ++c) {
              const auto* key = first + least_of(j + c, used - 1) * keys_.stride + at;
              const Vec low = widened(dtype, key, a_.d - at), high = widened(dtype, key + kLanes, a_.d - at - kLanes);
              sums[c] = add_pairs(part, narrowed(low, high), sums[c]);
            }
          }
          store_sums(sums, products_ + i * kKeys + j, false);
        }
      }
    });
  }
  MXFP8_INLINE_MEMBER float* products(int64_t row) { return products_ + row * kKeys; }
  MXFP8_INLINE_MEMBER int64_t width(int64_t used) const { return padded(used, kLanes); }
  MXFP8_INLINE_MEMBER void write(int64_t row, int64_t j, Vec weights) {
    write_narrowed(weights_ + (row * kKeys + j) / 2, weights);
  }
  MXFP8_INLINE_MEMBER void add(int64_t, int64_t rows, int64_t used, float* out) {
    with_dtype(a_.dtype, [&](auto dtype) {
      const SourcePairs<decltype(dtype)> pairs(values_, used, a_.dv);
      multiply(weights_, kKeys / 2, pairs, (used + 1) / 2, out, dv_, rows, dv_, true);
    });
  }

 private:
  const AttentionArgs& a_;
  const AttentionTask& t_;
  int64_t d_, dv_;
  float *queries_, *products_, *weights_;  // a word is a pair, except in products_
  Source keys_, values_;
};

}  // namespace mxfp8::MXFP8_ISA

#endif
