// MXFP8Conv.
#include "../cpu/conv.h"

#include <algorithm>

#include "../cpu/dtypes.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

constexpr int kX = 0, kB = 1, kBScales = 2, kBias = 3, kResidual = 4;
constexpr const char* kConvEpilogues[] = {"clip", "leaky_relu", "hard_swish"};  // from MXFP8_CLIP on

struct Conv final : Job {
  ConvArgs args;
  explicit Conv(const ConvArgs& c) : args(c) {}

  void visit(Operands* operands) override {
    const int64_t taps = args.axes[0].kernel * args.axes[1].kernel, channels = args.c / args.group;
    const int64_t results = args.n * args.o * conv_pixels(args);
    operands->in(&args.x, args.n * args.c * args.axes[0].in * args.axes[1].in * value_bytes(args.x_dtype));
    operands->in(&args.b, args.o * taps * channels);
    operands->in(&args.b_scales, args.o * taps * scale_count(channels));
    operands->in(&args.bias, args.o * int64_t(sizeof(float)));
    operands->in(&args.residual, results * value_bytes(args.residual_dtype));
    operands->out(&args.y, results * value_bytes(args.y_dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { conv(kernels, parallel, args); }
};

void infer(OrtShapeInferContext* context, const Node&, const Attributes& attributes) {
  SymbolicDims dims = input_dims(context, kX);
  const SymbolicDims b = input_dims(context, kB);
  if (dims.size() < 3 || b.size() != dims.size()) return;
  dims[1] = b[0];
  for (size_t i = 2; i < dims.size(); ++i) dims[i] = {-1, ""};  // ONNX Runtime shows no lists here
  set_output(context, 0, int(attributes.output_dtype), dims);
}

// A list of the node, with one value for each of `count` places; a single value stands for all.
Dims list_of(const std::string& where, const char* name, const Dims& values, size_t count, int64_t least) {
  const Dims list = values.size() == 1 ? Dims(count, values[0]) : values;
  const auto fits = [&](int64_t value) { return value >= least && value <= INT32_MAX; };
  if (list.size() == count && std::all_of(list.begin(), list.end(), fits)) return list;
  throw NodeError(where + ": " + name + " " + to_string(values) + "; expected " + std::to_string(count) +
                  " integers of at least " + std::to_string(least) + ", or one for all; correct the attribute");
}

// Sets the axes of a convolution of x with b.
void set_axes(const std::string& where, const Attributes& attributes, const Dims& x, const Dims& b, ConvArgs* args) {
  const size_t count = x.size() - 2;
  const Dims strides = list_of(where, "strides", attributes.strides, count, 1);
  const Dims dilations = list_of(where, "dilations", attributes.dilations, count, 1);
  const Dims pads = list_of(where, "pads", attributes.pads, 2 * count, 0);
  for (size_t i = 0; i < count; ++i) {
    const int64_t padded = x[i + 2] + pads[i] + pads[i + count], reach = dilations[i] * (b[i + 1] - 1) + 1;
    if (b[i + 1] < 1 || padded < reach) {
      throw NodeError(where + ": " + std::to_string(padded) + " padded pixels; expected at least " +
                      std::to_string(reach) + ", a kernel of " + std::to_string(b[i + 1]) + " with dilation " +
                      std::to_string(dilations[i]) + "; pad X");
    }
    args->axes[i + 2 - count] = {x[i + 2], (padded - reach) / strides[i] + 1, b[i + 1], strides[i], dilations[i],
                                 pads[i]};
  }
}

int conv_epilogue(const std::string& where, const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kConvEpilogues[i]) return MXFP8_CLIP + i;
  }
  if (const int code = epilogue_code(name); code >= 0) return code;
  throw NodeError(where + ": epilogue '" + name + "'; expected one of the contract; correct the attribute");
}

void check_shapes(const std::string& where, const Tensor& x, const Tensor& b, int64_t group) {
  const size_t rank = x.dims.size();
  if ((rank != 3 && rank != 4) || b.dims.size() != rank) {
    throw NodeError(where + ": operands " + to_string(x.dims) + " and " + to_string(b.dims) +
                    "; expected [N, C, D] and [O, k, C / group], or [N, C, H, W] and [O, kh, kw, C / group]; reshape "
                    "one");
  }
  const int64_t channels = b.dims.back();
  if (group < 1 || x.dims[1] / group != channels || x.dims[1] % group != 0 || b.dims[0] % group != 0) {
    throw NodeError(where + ": operands " + to_string(x.dims) + " and " + to_string(b.dims) + " with group " +
                    std::to_string(group) + "; expected C = " + std::to_string(channels) +
                    " x group channels, and O a multiple of group; correct group");
  }
  if (group > 1 && channels % kBlock != 0) {
    throw NodeError(where + ": " + std::to_string(channels) + " channels in a group; expected a multiple of " +
                    std::to_string(kBlock) + "; keep it in float32");
  }
}

ConvArgs arguments(const NodeKernel& kernel, const Tensor& x, const Tensor& b, const Tensor& b_scales) {
  const Attributes& a = kernel.attributes;
  check_shapes(kernel.where, x, b, a.group);
  check_scales(kernel.where, "B_scales", b, b_scales, int64_t(b.dims.size()) - 1);
  ConvArgs args = {};
  args.x_dtype = x.dtype, args.x = x.data;
  args.n = x.dims[0], args.c = x.dims[1], args.o = b.dims[0], args.group = a.group;
  set_axes(kernel.where, a, x.dims, b.dims, &args);
  args.x_format = int(a.x_dtype), args.increment = scale_increment(args.x_format, rounding_code(a.scale_rounding));
  args.b_format = b.dtype, args.b = static_cast<const uint8_t*>(b.data);
  args.b_scales = static_cast<const uint8_t*>(b_scales.data);
  args.epilogue = conv_epilogue(kernel.where, a.epilogue), args.alpha = a.alpha, args.beta = a.beta;
  args.y_dtype = int(a.output_dtype);
  return args;
}

// Whether a residual is [0], which stands for none.
bool is_stand_in(const Tensor& residual) {
  const auto* bytes = static_cast<const char*>(residual.data);
  return residual.dims == Dims{1} &&
         std::all_of(bytes, bytes + value_bytes(residual.dtype), [](char byte) { return byte == 0; });
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor x = input(context, kX), b = input(context, kB), b_scales = input(context, kBScales);
  const Tensor bias = input(context, kBias), residual = input(context, kResidual);
  Conv job(arguments(kernel, x, b, b_scales));
  ConvArgs& args = job.args;
  Dims y_dims = {args.n, args.o};
  for (size_t i = 4 - x.dims.size(); i < 2; ++i) y_dims.push_back(args.axes[i].out);
  if (!bias.is_absent() && bias.dims != Dims{args.o}) {
    throw NodeError(kernel.where + ": bias has shape " + to_string(bias.dims) + "; expected " + to_string({args.o}) +
                    ", one value per output channel; reshape it");
  }
  args.bias = static_cast<const float*>(bias.data);
  args.residual_dtype = MXFP8_FLOAT32;
  if (!residual.is_absent() && !is_stand_in(residual)) {
    if (residual.dims != y_dims) {
      throw NodeError(kernel.where + ": residual has shape " + to_string(residual.dims) + "; expected " +
                      to_string(y_dims) + ", that of the result; broadcast it first");
    }
    args.residual_dtype = residual.dtype, args.residual = residual.data;
    args.residual_after = kernel.attributes.residual_at == "after";
  }
  if (!kernel.weights.empty()) args.weights = &kernel.weights;
  if (!kernel.rows.empty()) args.rows = kernel.rows.data();
  args.y = output(context, 0, y_dims);
  kernel.backend->run(context, &job);
}

// Checks the attributes that no other node has, and prepares a constant weight for the processor.
void prepare(const OrtKernelInfo* info, const Overload& overload, NodeKernel* kernel) {
  const Attributes& a = kernel->attributes;
  conv_epilogue(kernel->where, a.epilogue);
  if (a.residual_at != "before" && a.residual_at != "after") {
    throw NodeError(kernel->where + ": residual_at '" + a.residual_at +
                    "'; expected one of before, after; correct the attribute");
  }
  if (!accepts(row_of(Op::kConv).inputs[kB], a.x_dtype)) {
    throw NodeError(kernel->where + ": x_dtype " + std::to_string(a.x_dtype) +
                    "; expected an element format; correct the attribute");
  }
  const std::optional<Tensor> b = constant(info, kB);
  if (!b || !constant(info, kBScales) || b->dims.size() < 3 || a.group < 1 || !overload.place.prepack) return;
  ConvArgs args = {};
  args.group = a.group, args.c = b->dims.back() * a.group, args.o = b->dims[0];
  args.axes[1].kernel = product(b->dims.begin() + 1, b->dims.end() - 1);
  args.b = static_cast<const uint8_t*>(b->data);
  kernel->rows = conv_rows(args);
  for (int64_t i = 0; i < a.group; ++i) kernel->weights.push_back(std::make_shared<ConstantWeight>());
}

}  // namespace

// A GPU has no kernel for it: its body is made of nodes that a GPU has kernels for.
const Implemented kConvNode({Op::kConv}, {infer, compute, nullptr, true, prepare});

}  // namespace mxfp8::ort
