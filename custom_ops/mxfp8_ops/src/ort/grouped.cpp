// MXFP8GroupedGemm and MXFP8GroupedWeightGemm, whose X has no scales. They run on the processor on every device.
#include "../cpu/grouped.h"

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

struct GroupedGemm final : Job {
  GroupedArgs args;
  explicit GroupedGemm(const GroupedArgs& arguments) : args(arguments) {}

  // On the processor nothing moves: only an output that the graph does not use needs memory.
  void visit(Operands* operands) override {
    const GemmArgs& g = args.gemm;
    operands->out(&args.gemm.y, g.m * g.n * value_bytes(g.y_dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { grouped_gemm(kernels, parallel, args); }
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
  check_experts(kernel.where, expert, product(experts.dims.begin(), experts.dims.end()), b.dims[0]);

  const Dims chosen = picked(experts.dims, b.dims), leading = leading_dims(kernel.where, a.dims, chosen);
  const int64_t m = a.dims[a.dims.size() - 2], n = b.dims[1], k = b.dims[2];
  Dims y_dims = leading;
  y_dims.insert(y_dims.end(), {m, n});
  void* y = output(context, 0, y_dims);
  const int64_t batches = product(leading.begin(), leading.end()), rows = batches * m;
  if (rows * n == 0) return;

  std::vector<int64_t> of_rows(static_cast<size_t>(rows)), sources(static_cast<size_t>(rows));
  for (int64_t batch = 0, row = 0; batch < batches; ++batch) {
    const int64_t index = batch_index(chosen, leading, batch), first = batch_index(a.dims, leading, batch) * m;
    for (int64_t i = 0; i < m; ++i, ++row) {
      of_rows[size_t(row)] = expert[index];
      sources[size_t(row)] = first + i;
    }
  }
  const uint8_t no_scales = 0;  // stands for those of K = 0
  const auto* scales = static_cast<const uint8_t*>(k == 0 ? &no_scales : a_scales.data);
  GroupedGemm job(
      {{a.dtype, a.data, quantized ? scales : nullptr, k, b.dtype, static_cast<const uint8_t*>(b.data),
        static_cast<const uint8_t*>(b_scales.data), nullptr, rows, n, k, int(kernel.attributes.output_dtype), y, n},
       b.dims[0],
       of_rows.data(),
       sources.data(),
       int(kernel.attributes.activation_dtype)});
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kGroupedGemmNode({Op::kGroupedGemm, Op::kGroupedWeightGemm}, {infer, compute, nullptr});

}  // namespace mxfp8::ort
