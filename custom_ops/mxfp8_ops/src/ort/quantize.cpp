// MXFP8Quantize and MXFP8Dequantize.
#include "../cpu/quantize.h"

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

// X as [outer, K, inner].
struct Blocked {
  int64_t outer, k, inner;
  Blocked(const Dims& dims, int64_t axis)
      : outer(product(dims.begin(), dims.begin() + axis)),
        k(dims[size_t(axis)]),
        inner(product(dims.begin() + axis + 1, dims.end())) {}
};

// --- MXFP8Quantize ---------------------------------------------------------------------------------------------------

struct Quantize final : Job {
  QuantizeArgs args;
  explicit Quantize(const QuantizeArgs& q) : args(q) {}

  void visit(Operands* operands) override {
    const int64_t values = args.outer * args.k * args.inner;
    operands->in(&args.x, values * value_bytes(args.dtype));
    operands->out(&args.elements, values);
    operands->out(&args.scales, args.outer * scale_count(args.k) * args.inner);
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { quantize(kernels, parallel, args); }
  cuda::Plan plan(const mxfp8_cuda_place&, const KeptWeight&, const cuda::Ask&) const override {
    return cuda::plan(mxfp8_cuda_quantize{args.dtype, args.format, args.increment, MXFP8_PLAIN, address(args.x),
                                          args.outer, args.k, args.inner, address(args.elements), address(args.scales),
                                          0, 0});
  }
};

void infer_quantize(OrtShapeInferContext* context, const Node& node, const Attributes& attributes) {
  SymbolicDims dims = input_dims(context, 0);
  if (dims.empty()) return set_elements_of_any_rank(context, node, attributes);
  const auto rank = int64_t(dims.size());
  if (attributes.axis < -rank || attributes.axis >= rank) return;
  const auto axis = size_t(attributes.axis < 0 ? attributes.axis + rank : attributes.axis);
  set_output(context, 0, int(attributes.output_dtype), dims);
  dims[axis] = scale_dim(dims[axis]);
  set_output(context, 1, node.outputs[1].dtypes[0], dims);
}

void compute_quantize(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor x = input(context, 0);
  const int64_t axis = normalize_axis(kernel.where, kernel.attributes.axis, int64_t(x.dims.size()));
  const Dims scales = scale_dims(x.dims, axis);
  auto* elements_data = static_cast<uint8_t*>(output(context, 0, x.dims));
  auto* scales_data = static_cast<uint8_t*>(output(context, 1, scales));
  const int format = int(kernel.attributes.output_dtype), rounding = rounding_code(kernel.attributes.scale_rounding);
  const Blocked b(x.dims, axis);
  Quantize job({x.dtype, x.data, b.outer, b.k, b.inner, b.k, format, scale_increment(format, rounding), elements_data,
                scales_data});
  kernel.backend->run(context, &job);
}

// --- MXFP8Dequantize -------------------------------------------------------------------------------------------------

struct Dequantize final : Job {
  DequantizeArgs args;
  explicit Dequantize(const DequantizeArgs& d) : args(d) {}

  void visit(Operands* operands) override {
    const int64_t values = args.outer * args.k * args.inner;
    operands->in(&args.elements, values);
    operands->in(&args.scales, args.outer * scale_count(args.k) * args.inner);
    operands->out(&args.y, values * value_bytes(args.dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { dequantize(kernels, parallel, args); }
  cuda::Plan plan(const mxfp8_cuda_place&, const KeptWeight&, const cuda::Ask&) const override {
    return cuda::plan(mxfp8_cuda_dequantize{args.format, args.dtype, address(args.elements), address(args.scales),
                                            args.outer, args.k, args.inner, address(args.y), 0});
  }
};

void infer_dequantize(OrtShapeInferContext* context, const Node&, const Attributes& attributes) {
  const SymbolicDims dims = input_dims(context, 0);
  if (!dims.empty()) set_output(context, 0, int(attributes.output_dtype), dims);
}

void compute_dequantize(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor elements = input(context, 0), scales = input(context, 1);
  const int64_t axis = normalize_axis(kernel.where, kernel.attributes.axis, int64_t(elements.dims.size()));
  check_scales(kernel.where, "scales", elements, scales, axis);
  void* y = output(context, 0, elements.dims);
  const Blocked b(elements.dims, axis);
  Dequantize job({elements.dtype, static_cast<const uint8_t*>(elements.data), static_cast<const uint8_t*>(scales.data),
                  b.outer, b.k, b.inner, int(kernel.attributes.output_dtype), y});
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kQuantizeNode({Op::kQuantize},
                                {infer_quantize, compute_quantize, [](const Overload& node, const mxfp8_cuda_place&) {
                                   return cuda::kernels<mxfp8_cuda_quantize>(node.inputs[0], node.outputs[0]);
                                 }});
const Implemented kDequantizeNode({Op::kDequantize}, {infer_dequantize, compute_dequantize,
                                                      [](const Overload& node, const mxfp8_cuda_place&) {
                                                        return cuda::kernels<mxfp8_cuda_dequantize>(node.inputs[0],
                                                                                                    node.outputs[0]);
                                                      }});

}  // namespace mxfp8::ort
