// Shared by the kernels of MXFP8Attention: where rows lie, the exponential, and the loop over blocks of keys.
//
// A task is parts of the keys and a block of the rows of one head of keys. The rows of a head of keys are those of the
// G query heads that share it, S rows each, one after the other. A task goes through the keys of a part kKeys at a
// time. Per row it keeps the highest score so far, the sum of the weights and the sum of the weighted values. Both sums
// take the highest score as 0: a higher score scales them down. Nothing of the size S x T is ever in memory.
//
// The bits of a row do not depend on other rows, only on whether these are few: keys that other rows see add zeros to
// its sums, and a mask that adds 0 changes no score.
#pragma once
#include "../../attention.h"
#include "../common/codec.h"
#include "../common/simd.h"

namespace mxfp8::MXFP8_ISA {

constexpr int64_t kFewRows = kAttentionFewRows, kFewKeys = 64;  // of engines that read keys and values in place
constexpr float kLog2e = 1.44269504f;

MXFP8_INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
MXFP8_INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }
MXFP8_INLINE int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

MXFP8_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b if one is NaN

MXFP8_INLINE float highest_lane(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[kLanes], highest = v[0];
  store(lanes, v);
  for (int i = 1; i < kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
  return highest;
#endif
}
MXFP8_INLINE float sum_of_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes], sum = 0;
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
#endif
}

// 2^z for z <= 0, within 3 units of 2^-24: the polynomial is off by 1.6, its evaluation by no more than the rest. The
// result is 0 below 2^-125; NaN stays NaN. The sum with 1.5 * 2^23 rounds z to a whole number, which is in the low bits
// of the sum.
MXFP8_INLINE Vec exp2_of(Vec z) {
  typedef uint32_t Bits __attribute__((vector_size(sizeof(Vec))));  // unsigned: where z is too low they wrap
  const Vec shifted = z + 12582912.0f, f = z - (shifted - 12582912.0f);
  Vec p = multiply_add(all_of(0.0013264727f), f, all_of(0.009671513f));
  p = multiply_add(p, f, all_of(0.055507336f));
  p = multiply_add(p, f, all_of(0.24022242f));
  p = multiply_add(p, f, all_of(0.693147f));
  p = multiply_add(p, f, all_of(1.0f));
  Bits bits, exponent;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  return z >= -125.0f ? power : larger(zero(), z);
}
MXFP8_INLINE float exp2_of(float z) { return exp2_of(all_of(z))[0]; }

// Where the keys and values of a head are: first the past ones, then the new ones. The new ones of other heads lie
// between these.
struct Source {
  const void* data;
  int64_t offset, stride;  // in values
};
MXFP8_INLINE Source source_at(const AttentionArgs& a, const AttentionTask& t, int64_t key, const void* past,
                              const void* fresh, int64_t d) {
  if (key < a.past) return {past, ((t.batch * a.kv_heads + t.head) * a.past + key) * d, d};
  return {fresh, ((t.batch * a.keys + key - a.past) * a.kv_heads + t.head) * d, a.kv_heads * d};
}
MXFP8_INLINE Source keys_at(const AttentionArgs& a, const AttentionTask& t, int64_t key) {
  return source_at(a, t, key, a.past_key, a.k, a.d);
}
MXFP8_INLINE Source values_at(const AttentionArgs& a, const AttentionTask& t, int64_t key) {
  return source_at(a, t, key, a.past_value, a.v, a.dv);
}

// A row of a task: its head of queries, and its place among the S rows of this head.
struct RowPlace {
  int64_t head, row;
};
MXFP8_INLINE RowPlace place_of(const AttentionArgs& a, const AttentionTask& t, int64_t row) {
  const int64_t at = t.row_begin + row;
  return {t.head * (a.q_heads / a.kv_heads) + at / a.rows, at % a.rows};
}
MXFP8_INLINE RowPlace after(const AttentionArgs& a, RowPlace place) {
  return place.row + 1 < a.rows ? RowPlace{place.head, place.row + 1} : RowPlace{place.head + 1, 0};
}
MXFP8_INLINE int64_t query_offset(const AttentionArgs& a, const AttentionTask& t, int64_t row, int64_t d) {
  const RowPlace place = place_of(a, t, row);
  return ((t.batch * a.rows + place.row) * a.q_heads + place.head) * d;
}

// Calls call(rows of queries, index of the first, how many) for all rows of a task, once for each head's rows.
template <class Call>
MXFP8_INLINE void for_queries(const AttentionArgs& a, const AttentionTask& t, const Call& call) {
  const int64_t rows = t.row_end - t.row_begin;
  for (int64_t i = 0, count = 0; i < rows; i += count) {
    count = least_of(rows - i, a.rows - place_of(a, t, i).row);
    call(Source{a.q, query_offset(a, t, i, a.d), a.q_heads * a.d}, i, count);
  }
}

// Stores `rows` rows of `count` values as float32, `to_stride` apart, with zeros behind them. If `rounds`, rounds them
// to bfloat16 first.
template <class D>
MXFP8_INLINE void load_rows_of(Source from, int64_t rows, int64_t count, float* to, int64_t to_stride, bool rounds) {
  for (int64_t i = 0; i < rows; ++i, to += to_stride) {
    const auto* row = static_cast<const typename D::Storage*>(from.data) + from.offset + i * from.stride;
    int64_t j = rounds && sizeof *row == sizeof *to ? count : 0;  // float32 is rounded from where it is
    const auto* values = j == 0 ? to : reinterpret_cast<const float*>(row);
    for (; j + kBlock <= count; j += kBlock) {
      const float* block = D::load_block(row + j, to + j);
      if (block != to + j) std::memcpy(to + j, block, kBlock * sizeof *to);
    }
    for (; j < count; ++j) to[j] = D::load(row[j]);
    if (rounds) {
      for (j = 0; j < count; ++j) to[j] = BFloat16::load(BFloat16::store(values[j]));
    }
    for (j = count; j < to_stride; ++j) to[j] = 0;
  }
}
MXFP8_NOINLINE void load_rows(const AttentionArgs& a, Source from, int64_t rows, int64_t count, float* to,
                              int64_t to_stride, bool rounds) {
  with_dtype(a.dtype, [&](auto dtype) { load_rows_of<decltype(dtype)>(from, rows, count, to, to_stride, rounds); });
}

// Scratch memory, in whole cache lines. With the start 0 it only counts bytes.
struct Room {
  uintptr_t next;
  template <class T>
  T* reserve(int64_t count) {
    T* reserved = reinterpret_cast<T*>(next);
    next += uintptr_t(padded(count * int64_t(sizeof(T)), 64));
    return reserved;
  }
};

// The running sums of a row.
struct RunningRow {
  float *highest, *sum, *out;
};

// The state of a task: its rows, after the keys of the part so far.
struct Running {
  float* highest;  // [rows], of scores as the engine gives them
  float* sum;      // [rows], of weights
  float* out;      // [rows padded, dv padded], weighted values
  MXFP8_INLINE_MEMBER RunningRow row(int64_t i, int64_t dv) const { return {highest + i, sum + i, out + i * dv}; }
};
MXFP8_INLINE Running running_in(int64_t rows, float* memory) {
  const int64_t lead = padded(rows, kAttentionRowPad);
  return {memory, memory + lead, memory + 2 * lead};
}

MXFP8_INLINE int64_t mask_offset(const AttentionArgs& a, const AttentionTask& t, RowPlace place, int64_t key) {
  const int64_t* s = a.mask_strides;
  return t.batch * s[0] + place.head * s[1] + place.row * s[2] + key * s[3];
}

// The scores in a mask's row for keys key..key + count - 1, with zeros up to the next whole vector.
template <class T, class Load>
MXFP8_INLINE void load_mask_as(const AttentionArgs& a, int64_t offset, int64_t count, float* to, const Load& load) {
  const T* from = static_cast<const T*>(a.mask) + offset;
  if (a.mask_strides[3] == 1) {
    for (int64_t j = 0; j < count; ++j) to[j] = load(from[j]);
  } else {
    for (int64_t j = 0; j < count; ++j) to[j] = load(from[0]);
  }
}
MXFP8_NOINLINE void load_mask(const AttentionArgs& a, const AttentionTask& t, RowPlace place, int64_t key,
                              int64_t count, float* to) {
  const int64_t offset = mask_offset(a, t, place, key);
  if (a.mask_dtype == MXFP8_BOOL) {
    load_mask_as<uint8_t>(a, offset, count, to, [](uint8_t seen) { return seen ? 0.0f : -__builtin_inff(); });
  } else {
    with_dtype(a.mask_dtype, [&](auto dtype) {
      using D = decltype(dtype);
      load_mask_as<typename D::Storage>(a, offset, count, to, [](auto value) { return D::load(value); });
    });
  }
  for (int64_t j = count; j < padded(count, kLanes); ++j) to[j] = 0;
}

// How products become weights: score = scale * product + mask; weight = e^(score - highest). Without a mask, the
// product is multiplied by `late` where its weight is computed, which saves a pass. Otherwise `late` is 1.
struct Scaling {
  float early, late;
  explicit Scaling(const AttentionArgs& a) : early(a.scale), late(1) {
    if (a.mask == nullptr && a.scale > 0) early = 1, late = a.scale;
  }
};

// Turns products of one row into scores / late, in place, with -Inf for keys from `seen` on up to a whole vector.
// Returns the highest score, or -Inf if all are NaN.
MXFP8_INLINE float score_row(const Scaling& scaling, float* products, const float* mask, int64_t seen) {
  if (mask != nullptr) {
    for (int64_t j = 0; j < seen; j += kLanes) {
      store(products + j, multiply_add(load(products + j), all_of(scaling.early), load(mask + j)));
    }
  } else if (scaling.early != 1) {
    for (int64_t j = 0; j < seen; j += kLanes) store(products + j, load(products + j) * scaling.early);
  }
  for (int64_t j = seen; j < padded(seen, kLanes); ++j) products[j] = -__builtin_inff();
  Vec top = all_of(-__builtin_inff());
  for (int64_t j = 0; j < seen; j += kLanes) top = larger(load(products + j), top);
  return highest_lane(top) * scaling.late;
}

// Turns scores / late [count] of one row, of which `highest` is the highest score, into weights; `write(j, weights)`
// takes them. Keys from `seen` on have no weight. The row's running sums are scaled to the new highest score.
template <class Write>
MXFP8_INLINE void weigh(const Scaling& scaling, const float* scores, int64_t seen, int64_t count, float block,
                        RunningRow row, int64_t dv, const Write& write) {
  const float before = *row.highest, now = block > before ? block : before;
  int64_t j = 0;
  if (now == -__builtin_inff()) {  // nothing seen, or NaN alone, which must show
    Vec nan = zero();
    for (; j < seen; j += kLanes) {
      const Vec score = load(scores + j) * scaling.late, weight = score == score ? zero() : score;
      nan += weight;
      write(j, weight);
    }
    *row.sum += sum_of_lanes(nan);
  } else {
    Vec total = zero();
    for (; j < seen; j += kLanes) {
      const Vec weight = exp2_of((load(scores + j) * scaling.late - now) * kLog2e);
      total += weight;
      write(j, weight);
    }
    if (now != before) {
      *row.highest = now;
      if (before != -__builtin_inff()) {  // otherwise the sums are 0 or NaN
        const float shrink = exp2_of((before - now) * kLog2e);
        *row.sum *= shrink;
        for (int64_t i = 0; i < dv; i += kLanes) store(row.out + i, load(row.out + i) * shrink);
      }
    }
    *row.sum += sum_of_lanes(total);
  }
  for (; j < count; j += kLanes) write(j, zero());
}

// The end of the keys that a row may see, up to key_end.
MXFP8_INLINE int64_t seen_end(const AttentionArgs& a, int64_t row, int64_t key_end) {
  return a.causal ? least_of(key_end, a.past + row + 1) : key_end;
}

// The same of rows first..first + count - 1 of a task.
MXFP8_INLINE int64_t seen_end(const AttentionArgs& a, const AttentionTask& t, int64_t first, int64_t count,
                              int64_t key_end) {
  if (!a.causal) return key_end;
  const RowPlace begin = place_of(a, t, first), last = place_of(a, t, first + count - 1);
  return seen_end(a, begin.head == last.head ? last.row : a.rows - 1, key_end);
}

// Prefetches the next block of keys and values and, at the end of a task, the rows of the next task. Rows of a head lie
// too far apart for the processor's own prefetcher. Each call of `ask` prefetches the share of the rows that are
// weighed then.
class Prefetch {
 public:
  Prefetch(const AttentionArgs& a, int64_t rows) : a_(a), rows_(rows) {}
  MXFP8_INLINE_MEMBER void schedule(const AttentionTask& task, int64_t key, int64_t count, int64_t rows) {
    task_ = task, key_ = key, count_ = count, queries_ = rows;
  }
  MXFP8_INLINE_MEMBER void issue(int64_t row, int64_t rows) const {
    const auto bytes = int64_t(a_.dtype == MXFP8_FLOAT32 ? 4 : 2);
    for (int64_t j = count_ * row / rows_; j < count_ * (row + rows) / rows_; ++j) {
      prefetch(keys_at(a_, task_, key_ + j), a_.d, bytes);
      prefetch(values_at(a_, task_, key_ + j), a_.dv, bytes);
    }
    for (int64_t i = queries_ * row / rows_; i < queries_ * (row + rows) / rows_; ++i) {
      prefetch({a_.q, query_offset(a_, task_, i, a_.d), 0}, a_.d, bytes);
      prefetch({a_.y, query_offset(a_, task_, i, a_.dv), 0}, a_.dv, bytes);
    }
    if (a_.mask == nullptr || a_.mask_strides[2] == 0) return;
    const int64_t width = a_.mask_dtype == MXFP8_BOOL ? 1 : a_.mask_dtype == MXFP8_FLOAT32 ? 4 : 2;
    for (int64_t i = row; i < least_of(row + rows, task_.row_end - task_.row_begin); ++i) {
      const int64_t offset = mask_offset(a_, task_, place_of(a_, task_, i), key_);
      prefetch({a_.mask, offset, 0}, a_.mask_strides[3] == 0 ? 1 : count_, width);
    }
  }

 private:
  static MXFP8_INLINE_MEMBER void prefetch(Source from, int64_t count, int64_t bytes) {
    const char* row = static_cast<const char*>(from.data) + from.offset * bytes;
    for (int64_t at = 0; at < count * bytes; at += 64) __builtin_prefetch(row + at);
  }

  const AttentionArgs& a_;
  int64_t rows_;
  AttentionTask task_ = {};
  int64_t key_ = 0, count_ = 0, queries_ = 0;
};

// How many keys from `key` on are done at once: past and new keys are done apart.
template <class Engine>
MXFP8_INLINE int64_t keys_from(const AttentionArgs& a, int64_t key, int64_t key_end) {
  const int64_t end = key < a.past ? least_of(a.past, key_end) : key_end;
  return least_of(Engine::kKeys, end - key);
}

// Goes through the keys of one part, all of which a row of the task sees; `next`, if it is not null, is the task after
// it.
template <class Engine>
MXFP8_INLINE void attend(const AttentionArgs& a, const AttentionTask& t, const AttentionTask* next, Engine& engine,
                         const Running& running) {
  const Scaling scaling(a);
  const int64_t rows = t.row_end - t.row_begin, dv = padded(a.dv, kAttentionPad);
  const bool one_mask = a.mask != nullptr && a.mask_strides[1] == 0 && a.mask_strides[2] == 0;
  alignas(64) float mask[Engine::kKeys];
  float highest[Engine::kRows];
  int64_t seen[Engine::kRows];
  for (int64_t i = 0; i < rows; ++i) running.highest[i] = -__builtin_inff(), running.sum[i] = 0;
  std::memset(running.out, 0, size_t(padded(rows, Engine::kRowPad) * dv) * sizeof(float));
  const int64_t key_end = t.key_end;
  Prefetch ahead(a, rows);
  for (int64_t key = t.key_begin, count = 0; key < key_end; key += count) {
    count = keys_from<Engine>(a, key, key_end);
    engine.load_keys(key, count);
    if (key + count < key_end) {
      ahead.schedule(t, key + count, keys_from<Engine>(a, key + count, key_end), 0);
    } else if (next != nullptr) {
      const int64_t keys = next->key_begin < next->key_end ? keys_from<Engine>(a, next->key_begin, next->key_end) : 0;
      ahead.schedule(*next, next->key_begin, keys, next->row_end - next->row_begin);
    } else {
      ahead.schedule(t, 0, 0, 0);
    }
    if (one_mask) load_mask(a, t, place_of(a, t, 0), key, count, mask);
    for (int64_t row = 0; row < rows; row += Engine::kRows) {
      const int64_t these = least_of(Engine::kRows, rows - row);
      const int64_t used = least_of(count, seen_end(a, t, row, these, key_end) - key);
      if (used <= 0) continue;
      engine.score(row, these, used);
      ahead.issue(row, these);
      RowPlace place = place_of(a, t, row);
      for (int64_t i = 0; i < these; ++i, place = after(a, place)) {
        seen[i] = most_of(0, least_of(used, seen_end(a, place.row, key_end) - key));
        if (a.mask != nullptr && !one_mask) load_mask(a, t, place, key, used, mask);
        highest[i] = score_row(scaling, engine.products(i), a.mask == nullptr ? nullptr : mask, seen[i]);
      }
      for (int64_t i = 0; i < these; ++i) {
        weigh(scaling, engine.products(i), seen[i], engine.width(used), highest[i], running.row(row + i, dv), dv,
              [&](int64_t j, Vec weight) MXFP8_INLINE_LAMBDA { engine.write(i, j, weight); });
      }
      engine.add(row, these, used, running.out + row * dv);
    }
  }
}

// Adds the sums of a later part to those of `first`. Rows that see nothing of that part do not change.
MXFP8_INLINE void merge_part(int64_t rows, int64_t dv, const Running& first, const Running& part) {
  for (int64_t row = 0; row < rows; row += kLanes) {  // states have room for whole vectors of rows
    const Vec a = load(first.highest + row), b = load(part.highest + row), now = a > b ? a : b;
    const Vec none = all_of(-__builtin_inff());  // neither has a score, or all are NaN
    float shrink[kLanes], add[kLanes];
    store(shrink, now == none ? all_of(1) : exp2_of((a - now) * kLog2e));
    store(add, now == none ? all_of(1) : exp2_of((b - now) * kLog2e));
    for (int64_t i = row; i < least_of(rows, row + kLanes); ++i) {
      if (part.sum[i] == 0) continue;
      const float old_share = shrink[i - row], share = add[i - row];
      first.sum[i] = first.sum[i] * old_share + part.sum[i] * share;
      for (int64_t j = i * dv; j < (i + 1) * dv; j += kLanes) {
        store(first.out + j, multiply_add(load(part.out + j), all_of(share), load(first.out + j) * old_share));
      }
    }
    store(first.highest + row, now);
  }
}

// Goes through all parts of the keys of a task, up to the last key that a row sees. `part` is memory for the state of
// one.
template <class Engine>
MXFP8_INLINE void attend_parts(const AttentionArgs& a, const AttentionTask& t, const AttentionTask* next,
                               Engine& engine, const Running& running, const Running& part) {
  const int64_t rows = t.row_end - t.row_begin, end = seen_end(a, t, 0, rows, t.key_end);
  AttentionTask now = t, after = t;
  do {
    now.key_end = least_of(end, now.key_begin + a.part);
    after.key_begin = now.key_end, after.key_end = least_of(end, now.key_end + a.part);
    const bool first = now.key_begin == t.key_begin;
    attend(a, now, now.key_end < end ? &after : next, engine, first ? running : part);
    if (!first) merge_part(rows, padded(a.dv, kAttentionPad), running, part);
    now.key_begin = now.key_end;
  } while (now.key_end < end);
}

}  // namespace mxfp8::MXFP8_ISA
