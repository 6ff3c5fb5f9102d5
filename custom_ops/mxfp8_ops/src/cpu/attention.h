// MXFP8Attention: its arguments, its tasks, and the kernels that compute them.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

// q [batch, rows, q_heads * d], k [batch, keys, kv_heads * d], v [batch, keys, kv_heads * dv], past_key
// [batch, kv_heads, past, d] and past_value likewise; y [batch, rows, q_heads * dv]. All of one dtype.
struct AttentionArgs {
  int dtype;
  const void *q, *k, *v, *past_key, *past_value;
  int mask_dtype;           // MXFP8_BOOL or a value dtype
  const void* mask;         // null: none
  int64_t mask_strides[4];  // between batches, heads, rows and keys, in values; 0 where the mask has size 1
  void *y, *present_key, *present_value;  // the presents may be null
  int64_t batch, rows, keys, past, q_heads, kv_heads, d, dv;
  int64_t part;    // keys of a part, see AttentionTask; attention() sets it
  float scale;     // not 0
  bool causal;     // row i sees keys up to past + i
  bool rounds;     // q, k, v and weights are rounded to bfloat16 before they are multiplied
  bool nan_guard;  // rows without a sum give 0, not NaN
};

// A range of rows of one head of keys, and all keys or one part of them. The rows are numbered through the query heads
// that share the head of keys, `rows` for each. The kernel sums over each part alone and adds the sums of the parts in
// order. So the result is the same, whether one task has all parts or each task has one.
struct AttentionTask {
  int64_t batch, head, row_begin, row_end, key_begin, key_end;
};
constexpr int64_t kAttentionFewRows = 8;  // up to this number, keys and values are read where they are
constexpr int64_t kAttentionRowPad = 32;  // rows are padded to a multiple of it in a task's memory
constexpr int64_t kAttentionPad = 16;     // values of a row are padded to a multiple of it

// A task begins at a multiple of this number of rows. Rows of a group are computed together: with other groups, a NaN
// in a value that a row does not see could reach the row or not.
MXFP8_KERNEL_WITH_BF16(int64_t, attention_group, const AttentionArgs&)
// The number of floats in the state of a task (its running sums), and the bytes of scratch memory that it needs.
MXFP8_KERNEL_WITH_BF16(int64_t, attention_state, const AttentionArgs&, const AttentionTask&)
MXFP8_KERNEL_WITH_BF16(int64_t, attention_scratch, const AttentionArgs&, const AttentionTask&)
// Writes the task's rows of y; if `state` is not null, writes the state instead. Scratch memory starts at a cache line.
// `next` is the task that follows, for prefetching, or null.
MXFP8_KERNEL_WITH_BF16(void, attention, const AttentionArgs&, const AttentionTask&, const AttentionTask* next,
                       void* scratch, float* state)
// Writes the rows of y of `count` tasks that have the same rows but different keys, from their states, `distance`
// floats apart.
MXFP8_KERNEL_WITH_BF16(void, attention_merge, const AttentionArgs&, const AttentionTask&, float* states, int64_t count,
                       int64_t distance)

// Computes the whole attention. A scale of 0 stands for 1 / sqrt(d).
void attention(const Kernels&, const Parallel&, AttentionArgs);
// Sets the strides of a dense mask with these sizes.
void set_mask_strides(const int64_t (&sizes)[4], AttentionArgs*);

}  // namespace mxfp8
