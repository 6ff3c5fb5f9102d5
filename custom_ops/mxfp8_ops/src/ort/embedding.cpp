// MXFP8Embedding.
#include "../cpu/embedding.h"

#include "../cpu/indices.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

constexpr size_t kIndices = 0, kB = 1, kBScales = 2;

struct Embedding final : Job {
  EmbeddingArgs args;
  explicit Embedding(const EmbeddingArgs& e) : args(e) {}

  void visit(Operands* operands) override {
    operands->in(&args.indices, args.count * index_bytes(args.index_dtype));
    operands->in(&args.b, args.v * args.d);
    operands->in(&args.b_scales, args.v * scale_count(args.d));
    operands->out(&args.y, args.count * args.d * value_bytes(args.y_dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { embedding(kernels, parallel, args); }
  cuda::Plan plan(const mxfp8_cuda_place&, const KeptWeight&, const cuda::Ask&) const override {
    return cuda::plan(mxfp8_cuda_embedding{args.index_dtype, args.b_format, args.y_dtype, address(args.indices),
                                           address(args.b), address(args.b_scales), args.count, args.v, args.d,
                                           address(args.y)});
  }
};

void infer(OrtShapeInferContext* context, const Node&, const Attributes& attributes) {
  SymbolicDims dims = input_dims(context, kIndices);
  const SymbolicDims b = input_dims(context, kB);
  // Indices without dimensions may be of any rank: see input_dims.
  if (dims.empty() || b.size() != 2) return;
  dims.push_back(b[1]);
  set_output(context, 0, int(attributes.output_dtype), dims);
}

// Where an element of a tensor is: "(1, 0)".
std::string place(const Dims& dims, int64_t position) {
  Dims at(dims.size());
  for (size_t i = dims.size(); i-- > 0;) {
    at[i] = position % dims[i];
    position /= dims[i];
  }
  return to_string(at);
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor indices = input(context, kIndices), b = input(context, kB), b_scales = input(context, kBScales);
  if (b.dims.size() != 2) {
    throw NodeError(kernel.where + ": a table of shape " + to_string(b.dims) +
                    "; expected [V, D], one row for each index; reshape the table");
  }
  check_scales(kernel.where, "B_scales", b, b_scales, 1);
  Dims y_dims = indices.dims;
  y_dims.push_back(b.dims[1]);
  void* y = output(context, 0, y_dims);
  Embedding job({indices.dtype, indices.data, product(indices.dims.begin(), indices.dims.end()), b.dtype,
                 static_cast<const uint8_t*>(b.data), static_cast<const uint8_t*>(b_scales.data), b.dims[0], b.dims[1],
                 int(kernel.attributes.output_dtype), y});
  // Indices in the memory of a GPU are not looked at: that would wait for it.
  const int64_t wrong = kernel.backend->on_host() ? first_outside(job.args) : -1;
  if (wrong >= 0) throw outside(job.args, wrong, place(indices.dims, wrong));
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kEmbeddingNode({Op::kEmbedding}, {infer, compute, [](const Overload& node, const mxfp8_cuda_place&) {
                                                      return cuda::kernels<mxfp8_cuda_embedding>(node.inputs[kB],
                                                                                                 node.outputs[0]);
                                                    }});

}  // namespace mxfp8::ort
