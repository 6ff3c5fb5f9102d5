// MXFP8Attention: the split into tasks, which kernels/attention computes, and the presents.
//
// A task is one head of keys and up to about kTaskRows of the rows that share it. If there are fewer such tasks than
// threads, as in generation, each part of the keys is a task; it writes a state, and the states are merged. Each run of
// tasks has its own scratch memory. A part depends on the number of keys and the size of a head: with another number of
// threads there are other tasks, and the same sums.
#include "attention.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "arguments.h"
#include "tasks.h"

namespace mxfp8 {
namespace {

constexpr int64_t kTaskProducts = 1 << 20;  // multiply-adds worth a task: 10 us
constexpr int64_t kReadValues = 1 << 17;    // values of keys and values that a task reads for few rows: 10 us too
constexpr int64_t kPartKeys = 256;          // the fewest keys of a part, if there are two
constexpr int64_t kPartValues = 1 << 16;    // the fewest values too: a merge takes about 1% of their time
constexpr int64_t kPartPad = 64;            // parts are multiples of it, so that blocks of keys are whole
constexpr int64_t kTaskRows = 512;          // rows that share packed keys and values
constexpr int64_t kLeastRows = 64;          // the fewest rows for which packing keys and values pays
constexpr int64_t kTasksPerThread = 4;      // so that a delayed thread does not delay the call

// The rows that share a head of keys.
int64_t rows_of(const AttentionArgs& a) { return a.rows * (a.q_heads / a.kv_heads); }

// The number of blocks of rows: two per thread, unless their rows would be too few to pay for packing.
int64_t wanted_blocks(const AttentionArgs& a, int64_t rows, int64_t threads) {
  const int64_t for_threads = ceil_div(2 * threads, a.batch * a.kv_heads);
  return std::max(ceil_div(rows, kTaskRows), std::min(for_threads, ceil_div(rows, kLeastRows)));
}

// The keys of a part. The bits of the result depend on it, so it may depend on nothing but these sizes.
int64_t part_keys(const AttentionArgs& a) {
  const int64_t total = a.past + a.keys, least = std::max(kPartKeys, kPartValues / std::max<int64_t>(1, a.d + a.dv));
  const int64_t most = total / least, parts = most < 4 ? most : most / 4 * 4;  // 2 or 4 threads get equal shares
  return ceil_div(ceil_div(total, std::max<int64_t>(1, parts)), kPartPad) * kPartPad;
}

// The tasks of an attention: each head of keys has `blocks` blocks of rows, and each block has `parts` tasks.
struct Split {
  int64_t rows, each, blocks, total, parts, keys, tasks;
  double worth;  // the number of tasks that are long enough
  Split(const AttentionArgs& a, int64_t group, int threads) : rows(rows_of(a)), total(a.past + a.keys) {
    each = std::min(rows, ceil_div(ceil_div(rows, wanted_blocks(a, rows, threads)), group) * group);
    blocks = ceil_div(rows, each);
    tasks = a.batch * a.kv_heads * blocks;
    const double values = double(tasks) * double(total) * double(a.d + a.dv);
    worth = values * std::max(1.0 / kReadValues, double(each) / kTaskProducts);
    parts = tasks < threads && worth >= 2 && total > 0 ? ceil_div(total, a.part) : 1;
    keys = parts == 1 ? total : a.part;
    tasks *= parts;
  }
  AttentionTask at(const AttentionArgs& a, int64_t index) const {
    const int64_t part = index % parts, block = index / parts % blocks, head = index / parts / blocks;
    return {head / a.kv_heads, head % a.kv_heads,
            block * each,      std::min(rows, (block + 1) * each),
            part * keys,       std::min(total, (part + 1) * keys)};
  }
};

// Copies a task's keys, or its values, to `present`: first the past ones, then the new ones. Each has `width` bytes.
void put_together(const AttentionArgs& a, const AttentionTask& t, const void* past, const void* fresh, void* present,
                  size_t width) {
  if (present == nullptr || width == 0) return;
  const int64_t index = t.batch * a.kv_heads + t.head, old_end = std::min(a.past, t.key_end);
  char* to = static_cast<char*>(present) + size_t(index * (a.past + a.keys) + t.key_begin) * width;
  if (t.key_begin < old_end) {
    const char* from = static_cast<const char*>(past) + size_t(index * a.past + t.key_begin) * width;
    std::memcpy(to, from, size_t(old_end - t.key_begin) * width);
    to += size_t(old_end - t.key_begin) * width;
  }
  for (int64_t key = std::max(a.past, t.key_begin); key < t.key_end; ++key, to += width) {
    const int64_t row = (t.batch * a.keys + key - a.past) * a.kv_heads + t.head;
    std::memcpy(to, static_cast<const char*>(fresh) + size_t(row) * width, width);
  }
}
void write_presents(const AttentionArgs& a, const AttentionTask& t) {
  const auto bytes = size_t(value_bytes(a.dtype));
  put_together(a, t, a.past_key, a.k, a.present_key, size_t(a.d) * bytes);
  put_together(a, t, a.past_value, a.v, a.present_value, size_t(a.dv) * bytes);
}

// A mask as rows of bytes. Batches and heads that share a mask count once.
class MaskRows {
 public:
  explicit MaskRows(const AttentionArgs& a)
      : a_(a),
        width_(a.mask_dtype == MXFP8_BOOL ? 1 : value_bytes(a.mask_dtype)),
        heads_(a.mask_strides[1] == 0 ? 1 : a.q_heads),
        masks_(heads_ * (a.mask_strides[0] == 0 ? 1 : a.batch)),
        bytes_(width_ * (a.mask_strides[3] == 0 ? 1 : a.past + a.keys)) {}

  // Whether all rows of each mask are equal, as in a mask of padding that an exporter expands to every row.
  bool are_equal(const Parallel& parallel) const {
    std::atomic<bool> equal{true};
    for_ranges(parallel, masks_ * a_.rows, kMaskBytes / bytes_, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && equal; ++i) {
        const int64_t mask = i / a_.rows;
        if (std::memcmp(row(mask, i % a_.rows), row(mask, 0), size_t(bytes_)) != 0) equal = false;
      }
    });
    return equal;
  }
  // Whether the first row of every mask hides no key and adds 0.
  bool hide_nothing() const {
    for (int64_t mask = 0; mask < masks_; ++mask) {
      const void* first = row(mask, 0);
      const auto is_zero = [](auto value) { return value == 0; };
      if (a_.mask_dtype == MXFP8_BOOL) {
        if (std::memchr(first, 0, size_t(bytes_)) != nullptr) return false;
      } else if (a_.mask_dtype == MXFP8_FLOAT32) {
        const auto* values = static_cast<const float*>(first);
        if (!std::all_of(values, values + bytes_ / width_, is_zero)) return false;
      } else {
        const auto* values = static_cast<const uint16_t*>(first);
        const auto is_half_zero = [](uint16_t value) { return (value & 0x7fff) == 0; };
        if (!std::all_of(values, values + bytes_ / width_, is_half_zero)) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kMaskBytes = 1 << 18;  // bytes that one task compares: 10 us
  const char* row(int64_t mask, int64_t row) const {
    const int64_t* s = a_.mask_strides;
    return static_cast<const char*>(a_.mask) + (mask / heads_ * s[0] + mask % heads_ * s[1] + row * s[2]) * width_;
  }

  const AttentionArgs& a_;
  int64_t width_, heads_, masks_, bytes_;
};

// Loading a mask for every row and head takes as long as the products, so this replaces equal rows by one, and drops a
// mask that changes no score.
void simplify_mask(const Parallel& parallel, AttentionArgs* args) {
  if (args->mask == nullptr || args->past + args->keys == 0) return;
  const MaskRows rows(*args);
  if (args->mask_strides[2] != 0 && rows.are_equal(parallel)) args->mask_strides[2] = 0;
  if (args->mask_strides[2] == 0 && rows.hide_nothing()) args->mask = nullptr;
}

}  // namespace

void set_mask_strides(const int64_t (&sizes)[4], AttentionArgs* args) {
  uint64_t stride = 1;  // wraps only where a mask has no values, and is not read
  for (int i = 3; i >= 0; --i) {
    args->mask_strides[i] = sizes[i] == 1 ? 0 : int64_t(stride);
    stride *= uint64_t(sizes[i]);
  }
}

void attention(const Kernels& kernels, const Parallel& parallel, AttentionArgs args) {
  if (args.scale == 0) args.scale = 1 / std::sqrt(float(std::max<int64_t>(1, args.d)));
  if (args.batch == 0) return;
  if (args.rows == 0 || args.dv == 0) {
    const bool keys = args.present_key != nullptr && args.d > 0, values = args.present_value != nullptr && args.dv > 0;
    const int64_t heads = (keys || values) && args.past + args.keys > 0 ? args.batch * args.kv_heads : 0;
    // y is empty, but the presents may not be.
    return parallel_for(parallel, heads, [&](int64_t i) {
      write_presents(args, {i / args.kv_heads, i % args.kv_heads, 0, 0, 0, args.past + args.keys});
    });
  }
  simplify_mask(parallel, &args);
  args.part = part_keys(args);
  const Split split(args, attention_group_kernels[kernels.column](args), parallel.threads);
  const AttentionTask first = split.at(args, 0);  // the largest task: its scratch memory fits every task
  const int64_t count = split.tasks, state = attention_state_kernels[kernels.column](args, first);
  const int64_t each = attention_scratch_kernels[kernels.column](args, first);
  auto most = int64_t(std::min(split.worth, double(parallel.threads * kTasksPerThread)));
  if (most > parallel.threads) most -= most % parallel.threads;  // as many for each thread
  const int64_t runs = std::max<int64_t>(1, std::min(count, most));
  const Scratch scratch = scratch_of(runs * each);
  const Scratch states = scratch_of(split.parts == 1 ? 0 : count * state * int64_t(sizeof(float)));
  auto* state_of = split.parts == 1 ? nullptr : static_cast<float*>(states.get());
  parallel_for(parallel, runs, [&](int64_t run) {
    const int64_t end = count * (run + 1) / runs;
    for (int64_t i = count * run / runs; i < end; ++i) {
      const AttentionTask task = split.at(args, i), next = split.at(args, i + 1);
      if (task.row_begin == 0) write_presents(args, task);  // the kernel finds them in the cache
      attention_kernels[kernels.column](args, task, i + 1 < end ? &next : nullptr,
                                        static_cast<char*>(scratch.get()) + run * each,
                                        state_of == nullptr ? nullptr : state_of + i * state);
    }
  });
  if (split.parts == 1) return;
  parallel_for(parallel, count / split.parts, [&](int64_t block) {
    const AttentionTask task = split.at(args, block * split.parts);
    attention_merge_kernels[kernels.column](args, task, state_of + block * split.parts * state, split.parts, state);
  });
}

}  // namespace mxfp8

using namespace mxfp8;

namespace {

// Each size of a mask is the size of the scores, or 1.
void check_mask(const mxfp8_attention_arguments& g) {
  if (g.mask_dtype != MXFP8_BOOL) check_value_dtype("mask_dtype", g.mask_dtype);
  const int64_t full[] = {g.batch, g.q_heads, g.rows, g.past + g.keys};
  for (int i = 0; i < 4; ++i) {
    if (g.mask_sizes[i] != 1) check_range({"an entry of mask_sizes", g.mask_sizes[i]}, full[i], full[i]);
  }
  const int64_t bytes = g.mask_dtype == MXFP8_BOOL ? 1 : value_bytes(g.mask_dtype);
  check_array(array("mask", g.mask, bytes), {g.mask_sizes[0], g.mask_sizes[1], g.mask_sizes[2], g.mask_sizes[3]});
}

void check_attention(const mxfp8_attention_arguments& g) {
  check_value_dtype("dtype", g.dtype);
  check_activation_dtype("activation_dtype", g.activation_dtype);
  check_sizes({{"batch", g.batch}, {"rows", g.rows}, {"d", g.d}, {"dv", g.dv}});
  check_range({"kv_heads", g.kv_heads}, 1, INT32_MAX);
  check_range({"q_heads", g.q_heads}, g.kv_heads, INT32_MAX);
  check_range({"q_heads modulo kv_heads", g.q_heads % g.kv_heads}, 0, 0);
  check_range({"keys", g.keys}, 0, kMostBytes);
  check_range({"past", g.past}, 0, kMostBytes);
  const int64_t bytes = value_bytes(g.dtype), total = g.past + g.keys;
  check_array(array("q", g.q, bytes), {g.batch, g.rows, g.q_heads, g.d});
  check_array(array("k", g.k, bytes), {g.batch, g.keys, g.kv_heads, g.d});
  check_array(array("v", g.v, bytes), {g.batch, g.keys, g.kv_heads, g.dv});
  check_array(array("past_key", g.past_key, bytes), {g.batch, g.kv_heads, g.past, g.d});
  check_array(array("past_value", g.past_value, bytes), {g.batch, g.kv_heads, g.past, g.dv});
  check_array(array("y", g.y, bytes), {g.batch, g.rows, g.q_heads, g.dv});
  if (g.present_key != nullptr) {
    check_array(array("present_key", g.present_key, bytes), {g.batch, g.kv_heads, total, g.d});
  }
  if (g.present_value != nullptr) {
    check_array(array("present_value", g.present_value, bytes), {g.batch, g.kv_heads, total, g.dv});
  }
  if (g.mask != nullptr) check_mask(g);
}

}  // namespace

extern "C" {

int mxfp8_attention(const mxfp8_attention_arguments* arguments, int threads) {
  return computed([&] {
    check_array(array("arguments", arguments, alignof(mxfp8_attention_arguments)),
                {sizeof *arguments / alignof(mxfp8_attention_arguments)});
    const mxfp8_attention_arguments& g = *arguments;
    check_attention(g);
    AttentionArgs a = {};
    a.dtype = g.dtype, a.mask_dtype = g.mask_dtype;
    a.q = g.q, a.k = g.k, a.v = g.v, a.past_key = g.past_key, a.past_value = g.past_value, a.mask = g.mask;
    a.y = g.y, a.present_key = g.present_key, a.present_value = g.present_value;
    a.batch = g.batch, a.rows = g.rows, a.keys = g.keys, a.past = g.past;
    a.q_heads = g.q_heads, a.kv_heads = g.kv_heads, a.d = g.d, a.dv = g.dv;
    a.scale = g.scale, a.causal = g.causal != 0, a.nan_guard = g.nan_guard != 0;
    a.rounds = g.activation_dtype == MXFP8_BFLOAT16;
    set_mask_strides(g.mask_sizes, &a);
    attention(kernels_in_use(), checked_threads(threads), a);
  });
}

}  // extern "C"
