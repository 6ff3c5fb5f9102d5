// MXFP8Attention. Its inputs are all there: see contract.py.
#include "../cpu/attention.h"

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

constexpr int kQ = 0, kK = 1, kV = 2, kMask = 3, kPastKey = 4, kPastValue = 5;

struct Attention final : Job {
  AttentionArgs args;
  explicit Attention(const AttentionArgs& arguments) : args(arguments) {}

  // On the processor nothing moves, and presents that the graph does not use are not written.
  void visit(Operands* operands) override {
    const int64_t values = args.batch * args.rows * args.q_heads * args.dv;
    operands->out(&args.y, values * value_bytes(args.dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { attention(kernels, parallel, args); }
};

// A size times `times`, over `parts`; unknown if it is unknown, or no such parts.
Dim scaled(const Dim& dim, int64_t times, int64_t parts) {
  if (dim.size >= 0 && dim.size % parts == 0) return {dim.size / parts * times, ""};
  return {-1, times == parts ? dim.symbol : ""};
}

// Dimensions that do not follow from Q, K and V stay open; ranks are always set, because no other rank is valid.
void infer(OrtShapeInferContext* context, const Node&, const Attributes& attributes) {
  const int dtype = input_dtype(context, kQ);
  const Dim unknown = {-1, ""};
  const auto dims_of = [&](int index) {
    SymbolicDims dims = input_dims(context, size_t(index));
    dims.resize(3, unknown);
    return dims;
  };
  const SymbolicDims q = dims_of(kQ), k = dims_of(kK), v = dims_of(kV), past = input_dims(context, kPastKey);
  const int64_t heads = attributes.q_num_heads, groups = attributes.kv_num_heads;
  set_output(context, 0, dtype, {q[0], q[1], scaled(v[2], heads, groups)});
  Dim total = unknown;
  if (past.size() == 1) total = k[1];
  if (past.size() == 4 && past[2].size >= 0 && k[1].size >= 0) total.size = past[2].size + k[1].size;
  // One dimension of unknown size must have one name.
  SymbolicDims present = {q[0], {groups, ""}, total, scaled(k[2], 1, groups)};
  set_output(context, 1, dtype, present);
  present[3] = scaled(v[2], 1, groups);
  set_output(context, 2, dtype, present);
}

[[noreturn]] void refuse(const NodeKernel& kernel, const std::string& text) {
  throw NodeError(kernel.where + ": " + text);
}

// Q [B, S, Hq * D], K [B, T, Hkv * D], V [B, T, Hkv * Dv].
void set_sizes(const NodeKernel& kernel, const Dims& q, const Dims& k, const Dims& v, AttentionArgs* a) {
  const int64_t heads = kernel.attributes.q_num_heads, groups = kernel.attributes.kv_num_heads;
  bool fits = q.size() == 3 && k.size() == 3 && v.size() == 3;
  fits = fits && q[0] == k[0] && q[0] == v[0] && k[1] == v[1];
  fits = fits && q[2] % heads == 0 && k[2] % groups == 0 && v[2] % groups == 0 && q[2] / heads == k[2] / groups;
  if (!fits) {
    refuse(kernel, "Q " + to_string(q) + ", K " + to_string(k) + " and V " + to_string(v) + " with " +
                       std::to_string(heads) + " and " + std::to_string(groups) +
                       " heads; expected [B, S, Hq * D], [B, T, Hkv * D] and [B, T, Hkv * Dv]; merge the heads into "
                       "the last dimension, and use one head size for Q and K");
  }
  a->batch = q[0], a->rows = q[1], a->keys = k[1], a->q_heads = heads, a->kv_heads = groups;
  a->d = q[2] / heads, a->dv = v[2] / groups;
}

void set_past(const NodeKernel& kernel, const Tensor& key, const Tensor& value, AttentionArgs* a) {
  a->past_key = key.data, a->past_value = value.data;
  const Dims none = {0};
  if (key.dims == none && value.dims == none) return;
  a->past = key.dims.size() == 4 ? key.dims[2] : 0;
  const Dims keys = {a->batch, a->kv_heads, a->past, a->d}, values = {a->batch, a->kv_heads, a->past, a->dv};
  if (key.dims != keys || value.dims != values) {
    refuse(kernel, "past_key " + to_string(key.dims) + " and past_value " + to_string(value.dims) +
                       "; expected [B, Hkv, P, D] and [B, Hkv, P, Dv] with B = " + std::to_string(a->batch) +
                       ", Hkv = " + std::to_string(a->kv_heads) + ", D = " + std::to_string(a->d) +
                       " and Dv = " + std::to_string(a->dv) +
                       ", or both [0] for no past; pass the present_key and present_value of the step before");
  }
}

void set_mask(const NodeKernel& kernel, const Tensor& mask, AttentionArgs* a) {
  const Dims full = {a->batch, a->q_heads, a->rows, a->past + a->keys};
  int64_t sizes[4] = {1, 1, 1, 1};
  const size_t rank = mask.dims.size(), before = 4 - std::min<size_t>(rank, 4);
  bool fits = rank <= 4;
  for (size_t i = 0; fits && i < rank; ++i) {
    sizes[before + i] = mask.dims[i];
    fits = mask.dims[i] == 1 || mask.dims[i] == full[before + i];
  }
  if (!fits) {
    refuse(kernel, "attn_mask has shape " + to_string(mask.dims) + "; expected one that broadcasts to " +
                       to_string(full) + "; reshape it");
  }
  a->mask = mask.data, a->mask_dtype = mask.dtype;
  set_mask_strides(sizes, a);
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor q = input(context, kQ), k = input(context, kK), v = input(context, kV);
  AttentionArgs a = {};
  set_sizes(kernel, q.dims, k.dims, v.dims, &a);
  set_past(kernel, input(context, kPastKey), input(context, kPastValue), &a);
  set_mask(kernel, input(context, kMask), &a);
  a.dtype = q.dtype, a.q = q.data, a.k = k.data, a.v = v.data;
  a.scale = kernel.attributes.scale, a.causal = kernel.attributes.is_causal != 0;
  a.rounds = kernel.attributes.activation_dtype == MXFP8_BFLOAT16, a.nan_guard = kernel.attributes.nan_guard != 0;
  a.y = output(context, 0, {a.batch, a.rows, a.q_heads * a.dv});
  a.present_key = output(context, 1, {a.batch, a.kv_heads, a.past + a.keys, a.d});
  a.present_value = output(context, 2, {a.batch, a.kv_heads, a.past + a.keys, a.dv});
  Attention job(a);
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kAttentionNode({Op::kAttention}, {infer, compute, nullptr, true});

}  // namespace mxfp8::ort
