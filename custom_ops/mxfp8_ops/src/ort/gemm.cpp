// MXFP8Gemm and MXFP8WeightGemm, whose X has no scales; and the same with an epilogue, and with a factor.
#include "../cpu/gemm.h"

#include <algorithm>

#include "../cuda_host/kernels.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

struct Gemm final : Job {
  GemmArgs args;
  explicit Gemm(const GemmArgs& g) : args(g) {}

  void visit(Operands* operands) override {
    const bool quantized = is_element_format(args.a_format);  // with K = 0 there may be no scales
    const int64_t blocks = scale_count(args.k), a_bytes = quantized ? 1 : value_bytes(args.a_format);
    operands->in(&args.a, args.m * args.k * a_bytes);
    operands->in(&args.a_scales, quantized ? args.m * blocks : 0);
    operands->in(&args.b, args.n * args.k);
    operands->in(&args.b_scales, args.n * blocks);
    operands->in(&args.bias, int64_t(sizeof(float)) * args.n);
    operands->in(&args.factor, args.m * args.n * value_bytes(args.factor_dtype));
    operands->out(&args.y, args.m * args.n * value_bytes(args.y_dtype));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { gemm(kernels, parallel, args); }
  cuda::Plan plan(const mxfp8_cuda_place& place, const KeptWeight& kept, const cuda::Ask& ask) const override {
    const GemmArgs& g = args;
    return cuda::plan(
        place,
        mxfp8_cuda_gemm{g.a_format, g.b_format, g.y_dtype, address(g.a), address(g.a_scales), address(g.b),
                        address(g.b_scales), address(g.bias), address(g.y), g.m, g.n, g.k, address(kept.wide),
                        address(kept.inexact), g.rounds_a ? MXFP8_BFLOAT16 : MXFP8_FLOAT32, address(kept.swizzled)},
        ask);
  }
};

Dim broadcast(const Dim& a, const Dim& b) {
  if (a.size == 1) return b;
  if (b.size == 1) return a;
  if (a.size >= 0) return a;
  if (b.size >= 0) return b;
  if (a.symbol == b.symbol) return a;
  return {-1, ""};
}

}  // namespace

SymbolicDims gemm_dims(const SymbolicDims& a, const SymbolicDims& b) {
  const size_t rank_a = a.size() < 2 ? 0 : a.size() - 2, rank_b = b.size() - 2;
  const size_t rank = rank_a > rank_b ? rank_a : rank_b;
  const Dim one{1, ""};
  SymbolicDims dims;
  for (size_t i = 0; i < rank; ++i) {
    dims.push_back(
        broadcast(i < rank - rank_a ? one : a[i - (rank - rank_a)], i < rank - rank_b ? one : b[i - (rank - rank_b)]));
  }
  if (a.size() > 1) dims.push_back(a[a.size() - 2]);
  dims.push_back(b[b.size() - 2]);
  return dims;
}

namespace {

void infer(OrtShapeInferContext* context, const Node& node, const Attributes& attributes) {
  const SymbolicDims a = input_dims(context, size_t(node.a)), b = input_dims(context, size_t(node.b));
  if (a.empty() || b.size() < 2) return;
  set_output(context, 0, int(attributes.output_dtype), gemm_dims(a, b));
}

}  // namespace

Dims leading_dims(const std::string& where, const Dims& a, const Dims& b) {
  const size_t rank_a = a.size() - 2, rank_b = b.size() - 2;
  Dims result(std::max(rank_a, rank_b));
  for (size_t i = 0; i < result.size(); ++i) {
    const size_t skip_a = result.size() - rank_a, skip_b = result.size() - rank_b;
    const int64_t dim_a = i < skip_a ? 1 : a[i - skip_a];
    const int64_t dim_b = i < skip_b ? 1 : b[i - skip_b];
    if (dim_a != dim_b && dim_a != 1 && dim_b != 1) {
      throw NodeError(where + ": operands " + to_string(a) + " and " + to_string(b) +
                      "; expected leading dimensions that broadcast; reshape one");
    }
    result[i] = dim_a == 1 ? dim_b : dim_a;
  }
  return result;
}

int64_t batch_index(const Dims& dims, const Dims& leading, int64_t batch) {
  int64_t index = 0, stride = 1;
  const size_t rank = dims.size() - 2, skip = leading.size() - rank;
  for (size_t i = leading.size(); i-- > skip;) {
    const int64_t position = batch % leading[i];
    batch /= leading[i];
    const int64_t dim = dims[i - skip];
    index += (dim == 1 ? 0 : position) * stride;
    stride *= dim;
  }
  return index;
}

namespace {

// Sets the epilogue and the results of m rows, the first of which is `row`.
void set_end(const Attributes& attributes, const Tensor& factor, void* y, int64_t row, GemmArgs* args) {
  const int64_t first = row * args->n;
  args->epilogue = epilogue_code(attributes.epilogue);
  args->y_dtype = int(attributes.output_dtype);
  args->y = static_cast<char*>(y) + first * value_bytes(args->y_dtype);
  if (!factor.is_absent()) {
    args->factor_dtype = factor.dtype;
    args->factor = static_cast<const char*>(factor.data) + first * value_bytes(factor.dtype);
  }
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Node& node = row_of(kernel.op);
  const bool quantized = node.a_scales >= 0;
  Tensor a = input(context, node.a);
  const Tensor a_scales = input(context, node.a_scales), b = input(context, node.b);
  const Tensor b_scales = input(context, node.b_scales), bias = input(context, node.bias),
               factor = input(context, node.factor);

  if (a.dims.empty() || b.dims.size() < 2 || a.dims.back() != b.dims.back()) {
    throw NodeError(kernel.where + ": operands " + to_string(a.dims) + " and " + to_string(b.dims) +
                    "; expected [..., M, K] and [..., N, K] with the same K; store the second operand with K last");
  }
  if (quantized) check_scales(kernel.where, node.inputs[node.a_scales].name, a, a_scales, int64_t(a.dims.size()) - 1);
  check_scales(kernel.where, node.inputs[node.b_scales].name, b, b_scales, int64_t(b.dims.size()) - 1);
  const int64_t n = b.dims[b.dims.size() - 2], k = b.dims.back();
  if (!bias.is_absent() && bias.dims != Dims{n}) {
    throw NodeError(kernel.where + ": bias has shape " + to_string(bias.dims) + "; expected " + to_string({n}) +
                    ", one value per output column; reshape it");
  }

  const bool vector = a.dims.size() == 1;
  if (vector) a.dims.insert(a.dims.begin(), 1);
  const Dims leading = leading_dims(kernel.where, a.dims, b.dims);
  int64_t m = a.dims[a.dims.size() - 2];
  Dims y_dims = leading;
  if (!vector) y_dims.push_back(m);
  y_dims.push_back(n);
  if (!factor.is_absent() && factor.dims != y_dims) {
    throw NodeError(kernel.where + ": factor has shape " + to_string(factor.dims) + "; expected " + to_string(y_dims) +
                    ", that of the result; broadcast it first");
  }
  void* y = output(context, 0, y_dims);

  int64_t batches = product(leading.begin(), leading.end());
  if (b.dims.size() == 2) {  // one weight: the leading dimensions of A are more rows
    m *= batches;
    batches = 1;
  }
  const int64_t blocks = scale_count(k);
  const int64_t a_bytes = quantized ? 1 : value_bytes(a.dtype);
  if (m * n == 0) return;  // however many batches of nothing there are
  for (int64_t batch = 0; batch < batches; ++batch) {
    const bool flat = b.dims.size() == 2;
    const int64_t a_row = flat ? 0 : batch_index(a.dims, leading, batch) * m;
    const int64_t b_row = flat ? 0 : batch_index(b.dims, leading, batch) * n;
    Gemm job({.a_format = a.dtype,
              .a = static_cast<const char*>(a.data) + a_row * k * a_bytes,
              .a_scales = quantized ? static_cast<const uint8_t*>(a_scales.data) + a_row * blocks : nullptr,
              .a_stride = k,
              .b_format = b.dtype,
              .b = static_cast<const uint8_t*>(b.data) + b_row * k,
              .b_scales = static_cast<const uint8_t*>(b_scales.data) + b_row * blocks,
              .bias = static_cast<const float*>(bias.data),
              .m = m,
              .n = n,
              .k = k,
              .y_stride = n,
              .rounds_a = kernel.attributes.activation_dtype == MXFP8_BFLOAT16});
    set_end(kernel.attributes, factor, y, batch * m, &job.args);
    if (!kernel.weights.empty()) job.args.weight = kernel.weights[size_t(b_row / n)].get();
    kernel.backend->run(context, &job);
  }
}

}  // namespace

const Implemented kGemmNode({Op::kGemm, Op::kWeightGemm},
                            {infer, compute, [](const Overload& node, const mxfp8_cuda_place& place) {
                               return cuda::gemm_kernels(node.inputs[0], node.inputs[size_t(row_of(node.op).b)], place);
                             }});

const Implemented kFusedGemmNode({Op::kFusedGemm, Op::kFusedWeightGemm, Op::kGatedGemm, Op::kGatedWeightGemm},
                                 {infer, compute, nullptr, true});

}  // namespace mxfp8::ort
