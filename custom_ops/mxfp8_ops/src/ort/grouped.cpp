// MXFP8GroupedGemm and MXFP8GroupedWeightGemm, whose X has no scales.
#include "../cpu/grouped.h"

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

// A run of dimensions of the result: how many rows, and how far apart the rows of a and the indices of those are.
struct Run {
  int64_t size, a, experts;
};

constexpr size_t kMostRuns = 3;  // those of mxfp8_cuda_grouped

// The rows of the result, as few runs as there can be, the last first.
std::vector<Run> runs_of(const Dims& leading, const Dims& a, const Dims& experts) {
  const int64_t m = a[a.size() - 2];
  std::vector<Run> runs = {{m, 1, 0}};
  int64_t a_stride = m, experts_stride = 1;
  for (size_t i = 0; i < leading.size(); ++i) {
    const int64_t size = leading[leading.size() - 1 - i], a_size = i + 2 < a.size() ? a[a.size() - 3 - i] : 1;
    const int64_t experts_size = i < experts.size() ? experts[experts.size() - 1 - i] : 1;
    const Run next = {size, a_size > 1 ? a_stride : 0, experts_size > 1 ? experts_stride : 0};
    a_stride *= a_size, experts_stride *= experts_size;
    if (size == 1) continue;
    Run& last = runs.back();
    if (last.size == 1) {
      last = next;
    } else if (next.a == last.a * last.size && next.experts == last.experts * last.size) {
      last.size *= size;
    } else {
      runs.push_back(next);
    }
  }
  return runs;
}

struct GroupedGemm final : Job {
  GroupedArgs args;
  // For a GPU:
  std::string where;
  const int64_t* experts;
  int64_t indices, a_rows;
  std::vector<Run> runs;

  explicit GroupedGemm(const GroupedArgs& arguments) : args(arguments) {}

  void visit(Operands* operands) override {
    GemmArgs& g = args.gemm;
    const bool quantized = is_element_format(g.a_format);
    const int64_t blocks = scale_count(g.k), a_bytes = quantized ? 1 : value_bytes(g.a_format);
    operands->in(&g.a, a_rows * g.k * a_bytes);
    operands->in(&g.a_scales, quantized ? a_rows * blocks : 0);
    operands->in(&g.b, args.experts * g.n * g.k);
    operands->in(&g.b_scales, args.experts * g.n * blocks);
    operands->in(&experts, indices * int64_t(sizeof(int64_t)));
    operands->out(&g.y, g.m * g.n * value_bytes(g.y_dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { grouped_gemm(kernels, parallel, args); }
  cuda::Plan plan(const mxfp8_cuda_place&, const KeptWeight&, const cuda::Ask&) const override {
    const GemmArgs& g = args.gemm;
    if (runs.size() > kMostRuns) {
      throw NodeError(where + ": experts broadcast with rows in " + std::to_string(runs.size()) +
                      " runs of dimensions; expected " + std::to_string(kMostRuns) +
                      " at most on a GPU; expand one of them first");
    }
    mxfp8_cuda_grouped to = {};
    to.x_kind = g.a_format, to.b_kind = g.b_format, to.y_dtype = g.y_dtype, to.activation_dtype = args.activation_dtype;
    to.x = address(g.a), to.x_scales = g.k == 0 ? 0 : address(g.a_scales), to.b = address(g.b);
    to.b_scales = address(g.b_scales), to.experts = address(experts), to.y = address(g.y);
    to.x_rows = a_rows, to.indices = indices, to.count = args.experts, to.n = g.n, to.k = g.k;
    std::vector<Run> r = runs;
    r.resize(kMostRuns, {1, 0, 0});
    to.outer = r[2].size, to.middle = r[1].size, to.inner = r[0].size;
    to.x_outer = r[2].a, to.x_middle = r[1].a, to.x_inner = r[0].a;
    to.e_outer = r[2].experts, to.e_middle = r[1].experts, to.e_inner = r[0].experts;
    return cuda::plan(to);
  }
};

// Dimensions as those of a b of a gemm, if every index picked a matrix.
template <class Sizes>
Sizes picked(Sizes experts, const Sizes& b) {
  experts.insert(experts.end(), {b[1], b[2]});
  return experts;
}

void infer(OrtShapeInferContext* context, const Node& node, const Attributes& attributes) {
  const SymbolicDims a = input_dims(context, size_t(node.a)), b = input_dims(context, size_t(node.b));
  // Indices without dimensions may be one index for all rows, or of unknown rank: the shape is left open.
  const SymbolicDims experts = input_dims(context, size_t(node.experts));
  if (a.size() < 2 || b.size() != 3 || experts.empty()) return;
  set_output(context, 0, int(attributes.output_dtype), gemm_dims(a, picked(experts, b)));
}

void check_experts(const std::string& where, const int64_t* experts, int64_t size, int64_t count) {
  for (int64_t i = 0; i < size; ++i) {
    if (experts[i] >= -count && experts[i] <= count) continue;
    throw NodeError(where + ": expert " + std::to_string(experts[i]) + " of " + std::to_string(count) + "; expected " +
                    std::to_string(-count) + " to " + std::to_string(count - 1) + ", or " + std::to_string(count) +
                    " for none; correct the indices");
  }
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Node& node = row_of(kernel.op);
  const bool quantized = node.a_scales >= 0;
  const Tensor a = input(context, node.a), a_scales = input(context, node.a_scales);
  const Tensor b = input(context, node.b), b_scales = input(context, node.b_scales);
  const Tensor experts = input(context, node.experts);

  if (a.dims.size() < 2 || b.dims.size() != 3 || a.dims.back() != b.dims.back()) {
    throw NodeError(kernel.where + ": operands " + to_string(a.dims) + " and " + to_string(b.dims) +
                    "; expected [..., M, K] and [E, N, K] with the same K; store each expert's weight with K last");
  }
  if (quantized) check_scales(kernel.where, node.inputs[node.a_scales].name, a, a_scales, int64_t(a.dims.size()) - 1);
  check_scales(kernel.where, node.inputs[node.b_scales].name, b, b_scales, 2);
  const auto* expert = static_cast<const int64_t*>(experts.data);
  const int64_t indices = product(experts.dims.begin(), experts.dims.end());
  // Indices in the memory of a GPU are not looked at: that would wait for it.
  const bool on_host = kernel.backend->on_host();
  if (on_host) check_experts(kernel.where, expert, indices, b.dims[0]);

  const Dims chosen = picked(experts.dims, b.dims), leading = leading_dims(kernel.where, a.dims, chosen);
  const int64_t m = a.dims[a.dims.size() - 2], n = b.dims[1], k = b.dims[2];
  Dims y_dims = leading;
  y_dims.insert(y_dims.end(), {m, n});
  void* y = output(context, 0, y_dims);
  const int64_t batches = product(leading.begin(), leading.end()), rows = batches * m;
  if (rows * n == 0) return;

  std::vector<int64_t> of_rows(on_host ? size_t(rows) : 0), sources(on_host ? size_t(rows) : 0);
  for (int64_t batch = 0, row = 0; batch < batches && on_host; ++batch) {
    const int64_t index = batch_index(chosen, leading, batch), first = batch_index(a.dims, leading, batch) * m;
    for (int64_t i = 0; i < m; ++i, ++row) {
      of_rows[size_t(row)] = expert[index];
      sources[size_t(row)] = first + i;
    }
  }
  const uint8_t no_scales = 0;  // stands for those of K = 0
  const auto* scales = static_cast<const uint8_t*>(k == 0 ? &no_scales : a_scales.data);
  GroupedGemm job({{.a_format = a.dtype,
                    .a = a.data,
                    .a_scales = quantized ? scales : nullptr,
                    .a_stride = k,
                    .b_format = b.dtype,
                    .b = static_cast<const uint8_t*>(b.data),
                    .b_scales = static_cast<const uint8_t*>(b_scales.data),
                    .m = rows,
                    .n = n,
                    .k = k,
                    .y_dtype = int(kernel.attributes.output_dtype),
                    .y = y,
                    .y_stride = n},
                   b.dims[0],
                   of_rows.data(),
                   sources.data(),
                   int(kernel.attributes.activation_dtype)});
  if (!kernel.weights.empty()) job.args.weights = kernel.weights.data();
  job.where = kernel.where, job.experts = expert, job.indices = indices;
  job.a_rows = product(a.dims.begin(), a.dims.end() - 1), job.runs = runs_of(leading, a.dims, experts.dims);
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kGroupedGemmNode({Op::kGroupedGemm, Op::kGroupedWeightGemm},
                                   {infer, compute, [](const Overload& node, const mxfp8_cuda_place&) {
                                      return cuda::kernels<mxfp8_cuda_grouped>(node.inputs[0],
                                                                               node.inputs[size_t(row_of(node.op).b)]);
                                    }});

}  // namespace mxfp8::ort
