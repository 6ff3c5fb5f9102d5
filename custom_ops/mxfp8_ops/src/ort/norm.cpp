// MXFP8NormQuantize and MXFP8AddNormQuantize.
#include "../cpu/norm.h"

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

constexpr size_t kElements = 0, kScales = 1, kNormalized = 2, kSum = 3;

struct NormQuantize final : Job {
  NormArgs args;
  explicit NormQuantize(const NormArgs& n) : args(n) {}

  // Normalized and sum may stay null: the kernel then leaves them out.
  void visit(Operands* operands) override {
    const int64_t values = args.rows * args.k, bytes = values * value_bytes(args.dtype);
    operands->in(&args.x, bytes);
    operands->in(&args.residual, bytes);
    operands->in(&args.scale, args.k * int64_t(sizeof(float)));
    operands->in(&args.bias, args.k * int64_t(sizeof(float)));
    operands->out(&args.elements, values);
    operands->out(&args.scales, args.rows * scale_count(args.k));
    if (args.normalized != nullptr) operands->out(&args.normalized, bytes);
    if (args.sum != nullptr) operands->out(&args.sum, bytes);
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { norm_quantize(kernels, parallel, args); }
};

// The inputs behind X; a residual comes first.
struct Inputs {
  int residual, scale, bias;
};
Inputs inputs_of(Op op) { return op == Op::kAddNormQuantize ? Inputs{1, 2, 3} : Inputs{-1, 1, 2}; }

void infer(OrtShapeInferContext* context, const Node& node, const Attributes& attributes) {
  SymbolicDims dims = input_dims(context, 0);
  if (dims.empty()) return set_elements_of_any_rank(context, node, attributes);
  set_output(context, kElements, int(attributes.output_dtype), dims);
  for (size_t i = kNormalized; node.outputs[i].name != nullptr; ++i)
    set_output(context, i, input_dtype(context, 0), dims);
  dims.back() = scale_dim(dims.back());
  set_output(context, kScales, node.outputs[kScales].dtypes[0], dims);
}

void check_row(const NodeKernel& kernel, const char* name, const Tensor& row, const Tensor& x) {
  if (row.dims == Dims{x.dims.back()}) return;
  throw NodeError(kernel.where + ": " + name + " has shape " + to_string(row.dims) + "; expected " +
                  to_string({x.dims.back()}) + ", one value for each column; broadcast it first");
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Inputs at = inputs_of(kernel.op);
  const Tensor x = input(context, 0), residual = input(context, at.residual), scale = input(context, at.scale),
               bias = input(context, at.bias);
  if (x.dims.empty()) throw NodeError(kernel.where + ": X is a scalar; expected [..., K]; reshape it");
  check_row(kernel, "scale", scale, x);
  if (!bias.is_absent()) check_row(kernel, "bias", bias, x);
  if (!residual.is_absent() && residual.dims != x.dims) {
    throw NodeError(kernel.where + ": residual has shape " + to_string(residual.dims) + "; expected " +
                    to_string(x.dims) + ", that of X; broadcast it first");
  }
  const Attributes& attributes = kernel.attributes;
  const int format = int(attributes.output_dtype);
  auto* elements = static_cast<uint8_t*>(output(context, kElements, x.dims));
  auto* scales = static_cast<uint8_t*>(output(context, kScales, scale_dims(x.dims, int64_t(x.dims.size()) - 1)));
  void* normalized = output(context, kNormalized, x.dims);
  void* sum = at.residual < 0 ? nullptr : output(context, kSum, x.dims);
  NormQuantize job(
      {x.dtype, x.data, residual.data, static_cast<const float*>(scale.data), static_cast<const float*>(bias.data),
       product(x.dims.begin(), x.dims.end() - 1), x.dims.back(), norm_code(attributes.norm), attributes.epsilon, format,
       scale_increment(format, rounding_code(attributes.scale_rounding)), elements, scales, normalized, sum});
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kNormQuantizeNode({Op::kNormQuantize, Op::kAddNormQuantize}, {infer, compute, nullptr, true});

}  // namespace mxfp8::ort
