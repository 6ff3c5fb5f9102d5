// MXFP8Attention for values rounded to bfloat16, in AMX tiles: 32 rows of queries with 32 keys, or columns of values,
// at a time. Keys and values are packed as the tiles want their second operand: pairs of what is summed over in one
// word.
//
// Products of bfloat16 are exact in float32, and added there. Numbers below 2^-126, operands and sums, count as 0.
#pragma once

#if defined(__AMX_BF16__)
#include "amx.h"
#include "attention.h"
#include "transpose.h"

namespace mxfp8::MXFP8_ISA {

class TileRows {
 public:
  static constexpr int64_t kKeys = 128, kRows = 32;

  TileRows(const AttentionArgs& args, const AttentionTask& task, Room* room)
      : a_(args),
        t_(task),
        d_(padded(args.d, kDepth)),
        dv_(padded(args.dv, kAttentionPad)),
        rows_(task.row_end - task.row_begin) {
    queries_ = room->take<uint16_t>(padded(rows_, kRows) * d_);
    keys_ = room->take<uint32_t>(d_ / 2 * kKeys);
    values_ = room->take<uint32_t>(kKeys / 2 * dv_);
    wide_ = room->take<float>(kStep * most_of(d_, dv_));
    narrow_ = room->take<uint16_t>(kStep * d_);
    products_ = room->take<float>(kRows * kKeys);
    weights_ = room->take<uint16_t>(kRows * kKeys);
  }

  void begin(const Running& running) {
    tiles_.shape(kAmxRows, kAmxRows);
    std::memset(queries_, 0, size_t(padded(rows_, kRows) * d_) * sizeof *queries_);
    std::memset(weights_, 0, size_t(kRows * kKeys) * sizeof *weights_);
    std::memset(running.out + rows_ * dv_, 0, size_t((padded(rows_, kRows) - rows_) * dv_) * sizeof(float));
    for (int64_t i = 0; i < rows_; ++i) {
      load_rows(a_, {a_.q, query_offset(a_, t_, i, a_.d), 0}, 1, a_.d, wide_, d_, false);
      narrow_row(wide_, d_, queries_ + i * d_);
    }
  }

  MXFP8_INLINE_MEMBER void take(int64_t key, int64_t count) {
    Source keys = keys_at(a_, t_, key), values = values_at(a_, t_, key);
    for (int64_t j = 0; j < padded(count, kDepth); j += kStep) {
      const int64_t rows = most_of(0, least_of(kStep, count - j));
      load_rows(a_, keys, rows, a_.d, wide_, d_, false);
      std::memset(wide_ + rows * d_, 0, size_t((kStep - rows) * d_) * sizeof *wide_);
      for (int64_t i = 0; i < kStep; ++i) narrow_row(wide_ + i * d_, d_, narrow_ + i * d_);
      transpose_rows(narrow_, d_ / 2, d_ / 2, keys_ + j, kKeys);

      load_rows(a_, values, rows, a_.dv, wide_, dv_, false);
      std::memset(wide_ + rows * dv_, 0, size_t((kStep - rows) * dv_) * sizeof *wide_);
      for (int64_t i = 0; i < kStep; i += 2) {
        pair_rows(wide_ + i * dv_, wide_ + (i + 1) * dv_, dv_, values_ + (j + i) / 2 * dv_);
      }
      keys.offset += kStep * keys.stride, values.offset += kStep * values.stride;
    }
  }

  MXFP8_INLINE_MEMBER void score(int64_t row, int64_t, int64_t used) {
    for (int64_t j = 0; j < used; j += 2 * kAmxRows) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < d_; k += kDepth) {
        multiply<true>(queries_ + row * d_ + k, d_, keys_ + k / 2 * kKeys + j, kKeys);
      }
      store_tiles<true>(products_ + j, kKeys);
    }
  }
  MXFP8_INLINE_MEMBER float* products(int64_t row) { return products_ + row * kKeys; }
  MXFP8_INLINE_MEMBER int64_t width(int64_t used) const { return padded(used, kDepth); }
  MXFP8_INLINE_MEMBER void write(int64_t row, int64_t j, Vec weights) {
    const auto narrow = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weights));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights_ + row * kKeys + j), narrow);
  }

  MXFP8_INLINE_MEMBER void add(int64_t, int64_t, int64_t used, float* out) {
    int64_t j = 0;
    for (; j + 2 * kAmxRows <= dv_; j += 2 * kAmxRows) add_columns<true>(used, j, out + j);
    if (j < dv_) add_columns<false>(used, j, out + j);
  }

 private:
  static constexpr int64_t kDepth = 32;  // values that one tile product sums over

  // Tiles 0 and 1, and 2 and 3 of the next 16 rows, += a . b; `Both`: 32 columns, not 16.
  template <bool Both>
  MXFP8_INLINE_MEMBER void multiply(const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride) {
    _tile_loadd(4, a, int(a_stride * 2));
    _tile_loadd(5, a + kAmxRows * a_stride, int(a_stride * 2));
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
    for (int64_t k = 0; k < used; k += kDepth) multiply<Both>(weights_ + k, kKeys, values_ + k / 2 * dv_ + column, dv_);
    store_tiles<Both>(out, dv_);
  }

  static MXFP8_INLINE_MEMBER __m256i narrowed(const float* from) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
  }
  static MXFP8_INLINE_MEMBER void narrow_row(const float* from, int64_t count, uint16_t* to) {
    for (int64_t j = 0; j < count; j += 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), narrowed(from + j));
  }
  static MXFP8_INLINE_MEMBER void pair_rows(const float* even, const float* odd, int64_t count, uint32_t* to) {
    for (int64_t j = 0; j < count; j += 16) {
      const __m512i low = _mm512_cvtepu16_epi32(narrowed(even + j)), high = _mm512_cvtepu16_epi32(narrowed(odd + j));
      _mm512_storeu_si512(to + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }

  const AttentionArgs& a_;
  const AttentionTask& t_;
  int64_t d_, dv_, rows_;
  AmxTiles tiles_;
  uint16_t *queries_, *narrow_, *weights_;
  uint32_t *keys_, *values_;
  float *wide_, *products_;
};

}  // namespace mxfp8::MXFP8_ISA

#endif
