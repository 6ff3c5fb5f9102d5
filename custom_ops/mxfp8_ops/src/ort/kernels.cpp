// Kernel creation (attributes are read and checked once) and compute: checks shapes, then calls a backend. Kernels keep
// no state but their attributes and that, so any number of threads may run one at once.
#include <algorithm>

#include "../cpu/ops.h"
#include "backend.h"

namespace mxfp8::ort {
namespace {

struct Kernel {
  Op op;
  std::string where;  // "MXFP8Gemm 'node name'"
  Attributes attributes;
  std::unique_ptr<const Backend> backend;
};

// Reads an attribute or leaves `value` alone: every attribute has a default.
void read(const OrtKernelInfo* info, const char* name, int64_t* value) {
  if (OrtStatus* missing = KernelInfoGetAttribute_int64(info, name, value)) ReleaseStatus(missing);
}

void read(const OrtKernelInfo* info, const char* name, std::string* value) {
  size_t size = 0;
  if (OrtStatus* missing = KernelInfoGetAttribute_string(info, name, nullptr, &size)) {
    ReleaseStatus(missing);
    return;
  }
  std::vector<char> text(size);
  check(KernelInfoGetAttribute_string(info, name, text.data(), &size));
  *value = text.data();
}

std::string node_name(const OrtKernelInfo* info) {
  size_t size = 0;
  check(KernelInfo_GetNodeName(info, nullptr, &size));
  std::vector<char> text(size + 1);
  check(KernelInfo_GetNodeName(info, text.data(), &size));
  return text.data();
}

// An input that is absent has no data; -1 is the index of one that the node does not have.
Tensor input(const OrtKernelContext* context, int index) {
  size_t count = 0;
  const OrtValue* value = nullptr;
  check(KernelContext_GetInputCount(context, &count));
  if (index >= 0 && size_t(index) < count) check(KernelContext_GetInput(context, size_t(index), &value));
  return value == nullptr ? Tensor{} : describe(value);
}

void* output(OrtKernelContext* context, size_t index, const Dims& dims) {
  OrtValue* value = nullptr;
  check(KernelContext_GetOutput(context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;  // an output nobody asked for
  void* data = nullptr;
  check(GetTensorMutableData(value, &data));
  return data;
}

int64_t product(Dims::const_iterator begin, Dims::const_iterator end) {
  int64_t result = 1;
  for (; begin != end; ++begin) result *= *begin;
  return result;
}

Dims scale_dims(Dims dims, int64_t axis) {
  dims[size_t(axis)] = scale_count(dims[size_t(axis)]);
  return dims;
}

void check_scales(const std::string& where, const char* name, const Tensor& elements, const Tensor& scales,
                  int64_t axis) {
  const Dims expected = scale_dims(elements.dims, axis);
  if (scales.dims != expected) {
    throw NodeError(where + ": " + name + " has shape " + to_string(scales.dims) + "; expected " + to_string(expected) +
                    " for elements " + to_string(elements.dims) + "; pass the scales MXFP8Quantize gave");
  }
}

void quantize_node(const Kernel& kernel, OrtKernelContext* context) {
  const Tensor x = input(context, 0);
  const int64_t axis = normalize_axis(kernel.where, kernel.attributes.axis, int64_t(x.dims.size()));
  const Dims scales = scale_dims(x.dims, axis);
  auto* elements_data = static_cast<uint8_t*>(output(context, 0, x.dims));
  auto* scales_data = static_cast<uint8_t*>(output(context, 1, scales));
  const int format = int(kernel.attributes.output_dtype), rounding = rounding_code(kernel.attributes.scale_rounding);
  const int64_t k = x.dims[size_t(axis)];
  kernel.backend->quantize(context, {x.dtype, x.data, product(x.dims.begin(), x.dims.begin() + axis), k,
                                     product(x.dims.begin() + axis + 1, x.dims.end()), k, format,
                                     scale_increment(format, rounding), elements_data, scales_data});
}

void dequantize_node(const Kernel& kernel, OrtKernelContext* context) {
  const Tensor elements = input(context, 0);
  const Tensor scales = input(context, 1);
  const int64_t axis = normalize_axis(kernel.where, kernel.attributes.axis, int64_t(elements.dims.size()));
  check_scales(kernel.where, "scales", elements, scales, axis);
  void* y = output(context, 0, elements.dims);
  const Dims& dims = elements.dims;
  kernel.backend->dequantize(
      context, {elements.dtype, static_cast<const uint8_t*>(elements.data), static_cast<const uint8_t*>(scales.data),
                product(dims.begin(), dims.begin() + axis), dims[size_t(axis)],
                product(dims.begin() + axis + 1, dims.end()), int(kernel.attributes.output_dtype), y});
}

// Leading dimensions that broadcast as NumPy's do, and where each batch starts in an operand.
Dims broadcast(const std::string& where, const Dims& a, const Dims& b) {
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

// Both gemms: MXFP8WeightGemm's X has no scales.
void gemm_node(const Kernel& kernel, OrtKernelContext* context) {
  const Node& node = row_of(kernel.op);
  const bool quantized = node.a_scales >= 0;
  Tensor a = input(context, node.a);
  const Tensor a_scales = input(context, node.a_scales), b = input(context, node.b);
  const Tensor b_scales = input(context, node.b_scales), bias = input(context, node.bias);

  if (a.dims.empty() || b.dims.size() < 2 || a.dims.back() != b.dims.back()) {
    throw NodeError(kernel.where + ": operands " + to_string(a.dims) + " and " + to_string(b.dims) +
                    "; expected [..., M, K] and [..., N, K] with the same K; store the second operand with K last");
  }
  if (quantized) check_scales(kernel.where, node.inputs[node.a_scales].name, a, a_scales, int64_t(a.dims.size()) - 1);
  check_scales(kernel.where, node.inputs[node.b_scales].name, b, b_scales, int64_t(b.dims.size()) - 1);
  const int64_t n = b.dims[b.dims.size() - 2], k = b.dims.back();
  if (bias.data != nullptr && bias.dims != Dims{n}) {
    throw NodeError(kernel.where + ": bias has shape " + to_string(bias.dims) + "; expected " + to_string({n}) +
                    ", one value per output column; reshape it");
  }

  const bool vector = a.dims.size() == 1;
  if (vector) a.dims.insert(a.dims.begin(), 1);
  const Dims leading = broadcast(kernel.where, a.dims, b.dims);
  int64_t m = a.dims[a.dims.size() - 2];
  Dims y_dims = leading;
  if (!vector) y_dims.push_back(m);
  y_dims.push_back(n);
  auto* y = static_cast<char*>(output(context, 0, y_dims));

  int64_t batches = product(leading.begin(), leading.end());
  if (b.dims.size() == 2) {  // one weight: the leading dimensions of A are more rows
    m *= batches;
    batches = 1;
  }
  const int y_dtype = int(kernel.attributes.output_dtype);
  const int64_t blocks = scale_count(k);
  const int64_t a_bytes = quantized ? 1 : int64_t(value_bytes(a.dtype));
  const int64_t y_bytes = int64_t(value_bytes(y_dtype));
  for (int64_t batch = 0; batch < batches; ++batch) {
    const bool flat = b.dims.size() == 2;
    const int64_t a_row = flat ? 0 : batch_index(a.dims, leading, batch) * m;
    const int64_t b_row = flat ? 0 : batch_index(b.dims, leading, batch) * n;
    kernel.backend->gemm(
        context,
        {a.dtype, static_cast<const char*>(a.data) + a_row * k * a_bytes,
         quantized ? static_cast<const uint8_t*>(a_scales.data) + a_row * blocks : nullptr, k, b.dtype,
         static_cast<const uint8_t*>(b.data) + b_row * k, static_cast<const uint8_t*>(b_scales.data) + b_row * blocks,
         static_cast<const float*>(bias.data), m, n, k, y_dtype, y + batch * m * n * y_bytes, n});
  }
}

}  // namespace

OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  return guarded([&] {
    const auto& overload = *static_cast<const Overload*>(op);
    const std::string where = std::string(row_of(overload.op).name) + " '" + node_name(info) + "'";
    Attributes attributes;
    read(info, "axis", &attributes.axis);
    read(info, "block_size", &attributes.block_size);
    read(info, "output_dtype", &attributes.output_dtype);
    read(info, "scale_rounding", &attributes.scale_rounding);
    check_attributes(where, overload.op, &attributes);
    if (overload.outputs[0] != attributes.output_dtype) {
      // Shape inference tells ONNX Runtime the output's type; without a rank to report it cannot (shapes.cpp).
      throw NodeError(where + ": output_dtype " + std::to_string(attributes.output_dtype) +
                      " on an input of unknown rank; expected an input whose rank is known; give the graph's inputs "
                      "shapes and run onnx.shape_inference");
    }
    auto backend = overload.device == Device::kCpu ? cpu_backend(where) : cuda_backend(where, overload, info);
    *kernel = new Kernel{overload.op, where, attributes, std::move(backend)};
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  return guarded([&] {
    const auto& self = *static_cast<const Kernel*>(kernel);
    switch (self.op) {
      case Op::kQuantize:
        return quantize_node(self, context);
      case Op::kDequantize:
        return dequantize_node(self, context);
      case Op::kGemm:
      case Op::kWeightGemm:
        return gemm_node(self, context);
    }
  });
}

void destroy_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

}  // namespace mxfp8::ort
