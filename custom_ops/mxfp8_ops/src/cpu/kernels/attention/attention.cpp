// MXFP8Attention: attention.attention, in float32; attention_bf16.h has the engines that round to bfloat16 first.
//
// q [B, S, Hq * D], k [B, T, Hkv * D], v [B, T, Hkv * Dv], pasts [B, Hkv, P, ...]: read where they lie; y
// [B, S, Hq * Dv]. Work is split over B, Hkv, blocks of the G * S rows that share keys, and, where those are few, over
// keys. Bytes moved: q, k, v, the past and y once, keys and values once more per further block of rows. Multiply-adds:
// B * Hq * S * (P + T) * (D + Dv), half of them if causal; exponentials: B * Hq * S * (P + T).
//
// Many rows: keys are packed transposed, so that lanes are keys in one product and values in the other; one function
// computes both. Few rows, as in generation: keys and values are read in place, once, with lanes along D.
#include "attention.h"

#include "../common/transpose.h"
#include "attention_bf16.h"
#include "attention_products.h"

namespace mxfp8::MXFP8_ISA {
namespace {

// --- many rows ---

class ManyRows {
 public:
  static constexpr int64_t kKeys = 128, kRows = 24, kRowPad = 1;

  ManyRows(const AttentionArgs& args, const AttentionTask& task, Room* room)
      : a_(args), t_(task), dv_(padded(args.dv, kAttentionPad)), rows_(task.row_end - task.row_begin) {
    queries_ = room->reserve<float>(rows_ * a_.d);
    keys_ = room->reserve<float>(a_.d * kKeys);
    values_ = room->reserve<float>(kKeys * dv_);
    step_ = room->reserve<float>(kStep * a_.d);
    products_ = room->reserve<float>(kRows * kKeys);
  }
  void begin() {
    for_queries(a_, t_, [&](Source from, int64_t i, int64_t rows) {
      load_rows(a_, from, rows, a_.d, queries_ + i * a_.d, a_.d, a_.rounds);
    });
  }
  MXFP8_INLINE_MEMBER void load_keys(int64_t key, int64_t count) {
    Source keys = keys_at(a_, t_, key);
    for (int64_t j = 0; j < count; j += kStep, keys.offset += kStep * keys.stride) {
      const int64_t rows = least_of(kStep, count - j);
      load_rows(a_, keys, rows, a_.d, step_, a_.d, a_.rounds);
      std::memset(step_ + rows * a_.d, 0, size_t((kStep - rows) * a_.d) * sizeof(float));
      transpose_rows(step_, a_.d, a_.d, keys_ + j, kKeys);
    }
    load_rows(a_, values_at(a_, t_, key), count, a_.dv, values_, dv_, a_.rounds);
  }
  MXFP8_INLINE_MEMBER void score(int64_t row, int64_t rows, int64_t used) {
    multiply(queries_ + row * a_.d, a_.d, Floats{keys_, kKeys}, a_.d, products_, kKeys, rows, padded(used, kLanes),
             false);
  }
  MXFP8_INLINE_MEMBER float* products(int64_t row) { return products_ + row * kKeys; }
  MXFP8_INLINE_MEMBER int64_t width(int64_t used) const { return padded(used, kLanes); }
  MXFP8_INLINE_MEMBER void write(int64_t row, int64_t j, Vec weights) { store(products_ + row * kKeys + j, weights); }
  MXFP8_INLINE_MEMBER void add(int64_t, int64_t rows, int64_t used, float* out) {
    multiply(products_, kKeys, Floats{values_, dv_}, used, out, dv_, rows, dv_, true);
  }

 private:
  const AttentionArgs& a_;
  const AttentionTask& t_;
  int64_t dv_, rows_;
  float *queries_, *keys_, *values_, *step_, *products_;
};

// --- few rows ---

class FewRows {
 public:
  static constexpr int64_t kKeys = kFewKeys, kRows = kFewRows, kRowPad = 1;

  FewRows(const AttentionArgs& args, const AttentionTask& task, Room* room)
      : a_(args), t_(task), d_(padded(args.d, kAttentionPad)), dv_(padded(args.dv, kAttentionPad)) {
    queries_ = room->reserve<float>(kRows * d_);
    products_ = room->reserve<float>(kRows * kKeys);
    key_room_ = room->reserve<float>(kKeys * d_);
    value_room_ = room->reserve<float>(kKeys * dv_);
  }
  void begin() {
    for_queries(a_, t_, [&](Source from, int64_t i, int64_t rows) {
      load_rows(a_, from, rows, a_.d, queries_ + i * d_, d_, a_.rounds);
    });
  }
  MXFP8_INLINE_MEMBER void load_keys(int64_t key, int64_t count) {
    keys_ = in_place(keys_at(a_, t_, key), count, a_.d, d_, key_room_, &key_stride_);
    values_ = in_place(values_at(a_, t_, key), count, a_.dv, dv_, value_room_, &value_stride_);
  }
  MXFP8_INLINE_MEMBER void score(int64_t row, int64_t rows, int64_t used) {
    for (int64_t j = 0; j < used; j += 4) {
      const float* keys[4];
      for (int64_t c = 0; c < 4; ++c) keys[c] = keys_ + least_of(j + c, used - 1) * key_stride_;
      for (int64_t i = 0; i < rows; ++i) {
        const float* query = queries_ + (row + i) * d_;
        Vec sums[4] = {zero(), zero(), zero(), zero()};
        for (int64_t at = 0; at < d_; at += kLanes) {
          const Vec part = load(query + at);
          for (int c = 0; c < 4; ++c) sums[c] = multiply_add(part, load(keys[c] + at), sums[c]);
        }
        store_sums(sums, products_ + i * kKeys + j, false);
      }
    }
  }
  MXFP8_INLINE_MEMBER float* products(int64_t row) { return products_ + row * kKeys; }
  MXFP8_INLINE_MEMBER int64_t width(int64_t used) const { return padded(used, kLanes); }
  MXFP8_INLINE_MEMBER void write(int64_t row, int64_t j, Vec weights) { store(products_ + row * kKeys + j, weights); }
  MXFP8_INLINE_MEMBER void add(int64_t, int64_t rows, int64_t used, float* out) {
    multiply(products_, kKeys, Floats{values_, value_stride_}, used, out, dv_, rows, dv_, true);
  }

 private:
  // The rows in place, if they are whole vectors of the type that is multiplied, or else copies.
  MXFP8_INLINE_MEMBER const float* in_place(Source from, int64_t count, int64_t d, int64_t wide, float* room,
                                            int64_t* stride) {
    if (a_.dtype == MXFP8_FLOAT32 && !a_.rounds && d == wide) {
      *stride = from.stride;
      return static_cast<const float*>(from.data) + from.offset;
    }
    *stride = wide;
    load_rows(a_, from, count, d, room, wide, a_.rounds);
    return room;
  }

  const AttentionArgs& a_;
  const AttentionTask& t_;
  int64_t d_, dv_, key_stride_, value_stride_;
  float *queries_, *products_, *key_room_, *value_room_;
  const float *keys_, *values_;
};

// --- tasks ---

// Stores a row of weighted values, divided by the sum of the weights.
template <class D>
MXFP8_INLINE void store_row(const AttentionArgs& a, float sum, const float* out, int64_t offset) {
  const float empty = a.past + a.keys == 0 || a.nan_guard ? 0.0f : float_of(kQuietNan);
  auto* y = static_cast<typename D::Storage*>(a.y) + offset;
  if (sum > 0) {
    const float inverse = 1 / sum;
    for (int64_t j = 0; j < a.dv; ++j) y[j] = D::store(out[j] * inverse);
  } else {  // 0, or NaN
    for (int64_t j = 0; j < a.dv; ++j) y[j] = D::store(empty);
  }
}

void store_rows(const AttentionArgs& a, const AttentionTask& t, const Running& running) {
  const int64_t dv = padded(a.dv, kAttentionPad);
  with_dtype(a.dtype, [&](auto dtype) {
    for (int64_t i = 0; i < t.row_end - t.row_begin; ++i) {
      store_row<decltype(dtype)>(a, running.sum[i], running.out + i * dv, query_offset(a, t, i, a.dv));
    }
  });
}

template <class Engine>
MXFP8_NOINLINE void run(const AttentionArgs& a, const AttentionTask& t, const AttentionTask* next, Room room,
                        const Running& running, const Running& part) {
  Engine engine(a, t, &room);
  engine.begin();
  attend_parts(a, t, next, engine, running, part);
}

template <class Engine>
int64_t bytes(const AttentionArgs& a, const AttentionTask& t, Room room) {
  Engine(a, t, &room);
  return int64_t(room.next);
}

// By the rows of the call, not of a task: the engine sets the order of the sums.
bool are_few(const AttentionArgs& a) { return a.rows * (a.q_heads / a.kv_heads) <= kFewRows; }

int64_t state_of(const AttentionArgs& a, const AttentionTask& t) {
  return padded(t.row_end - t.row_begin, kAttentionRowPad) * (2 + padded(a.dv, kAttentionPad));
}

// Memory for the state of one more part, if the task has several.
float* reserve_part(const AttentionArgs& a, const AttentionTask& t, Room* room) {
  return room->reserve<float>(t.key_end - t.key_begin > a.part ? state_of(a, t) : 0);
}

}  // namespace

int64_t attention_state(const AttentionArgs& args, const AttentionTask& task) { return state_of(args, task); }

int64_t attention_group([[maybe_unused]] const AttentionArgs& args) {
#if defined(__AVX512BF16__)
  if (args.rounds) return PairRows::kRows;
#endif
  return ManyRows::kRows;
}

int64_t attention_scratch(const AttentionArgs& args, const AttentionTask& task) {
  Room room{0};
  room.reserve<float>(state_of(args, task));
  reserve_part(args, task, &room);
#if defined(__AVX512BF16__)
  if (args.rounds) return are_few(args) ? bytes<FewPairRows>(args, task, room) : bytes<PairRows>(args, task, room);
#endif
  if (are_few(args)) return bytes<FewRows>(args, task, room);
  return bytes<ManyRows>(args, task, room);
}

void attention(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, void* scratch,
               float* state) {
  Room room{reinterpret_cast<uintptr_t>(scratch)};
  float* own = room.reserve<float>(state_of(args, task));
  const int64_t rows = task.row_end - task.row_begin;
  const Running running = running_in(rows, state == nullptr ? own : state);
  const Running part = running_in(rows, reserve_part(args, task, &room));
  const bool few = are_few(args);
#if defined(__AVX512BF16__)
  if (args.rounds) {
    few ? run<FewPairRows>(args, task, next, room, running, part)
        : run<PairRows>(args, task, next, room, running, part);
  } else
#endif
  {
    few ? run<FewRows>(args, task, next, room, running, part) : run<ManyRows>(args, task, next, room, running, part);
  }
  if (state == nullptr) store_rows(args, task, running);
}

void attention_merge(const AttentionArgs& args, const AttentionTask& task, float* states, int64_t count,
                     int64_t distance) {
  const int64_t rows = task.row_end - task.row_begin;
  const Running first = running_in(rows, states);
  for (int64_t i = 1; i < count; ++i) {
    const Running part = running_in(rows, states + i * distance);
    merge_part(rows, padded(args.dv, kAttentionPad), first, part);
  }
  store_rows(args, task, first);
}

}  // namespace mxfp8::MXFP8_ISA
