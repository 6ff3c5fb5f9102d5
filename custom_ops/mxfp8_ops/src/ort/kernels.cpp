// Kernel creation reads and checks attributes once; compute checks shapes, then calls a backend. The state of a kernel
// is its attributes and its backend, both constant, and weights that any number of threads may use, so any number of
// threads may run one at once.
#include <iterator>
#include <stdexcept>
#include <string>

#include "../cpu/profile.h"
#include "../error.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

const Implementation** implementations() {
  static const Implementation* of_op[std::size(kNodes)] = {};  // not a global: constants of other files write to it
  return of_op;
}

// Reads an attribute or leaves `value` alone: every attribute has a default.
void read(const OrtKernelInfo* info, const char* name, int64_t* value) {
  if (OrtStatus* missing = KernelInfoGetAttribute_int64(info, name, value)) ReleaseStatus(missing);
}

void read(const OrtKernelInfo* info, const char* name, float* value) {
  if (OrtStatus* missing = KernelInfoGetAttribute_float(info, name, value)) ReleaseStatus(missing);
}

// What has a size: `get` returns it, and then the values.
template <class T, class Get>
bool read_array(const OrtKernelInfo* info, const char* name, const Get& get, std::vector<T>* values) {
  size_t size = 0;
  if (OrtStatus* missing = get(info, name, nullptr, &size)) {
    ReleaseStatus(missing);
    return false;
  }
  values->resize(size);
  check(get(info, name, values->data(), &size));
  return true;
}

void read(const OrtKernelInfo* info, const char* name, std::string* value) {
  std::vector<char> text;
  if (read_array(info, name, KernelInfoGetAttribute_string, &text)) *value = text.data();
}

inline void read(const OrtKernelInfo* info, const char* name, std::vector<int64_t>* value) {
  read_array(info, name, KernelInfoGetAttributeArray_int64, value);
}

std::string node_name(const OrtKernelInfo* info) {
  size_t size = 0;
  check(KernelInfo_GetNodeName(info, nullptr, &size));
  std::vector<char> text(size + 1);
  check(KernelInfo_GetNodeName(info, text.data(), &size));
  return text.data();
}

}  // namespace

Implemented::Implemented(std::initializer_list<Op> ops, const Implementation& callbacks) : implementation(callbacks) {
  for (const Op op : ops) implementations()[size_t(op)] = &implementation;
}

const Implementation* implementation(Op op) { return implementations()[size_t(op)]; }

Tensor input(const OrtKernelContext* context, int index) {
  size_t count = 0;
  const OrtValue* value = nullptr;
  check(KernelContext_GetInputCount(context, &count));
  if (index >= 0 && size_t(index) < count) check(KernelContext_GetInput(context, size_t(index), &value));
  return value == nullptr ? Tensor{} : describe(value);
}

std::optional<Tensor> constant(const OrtKernelInfo* info, size_t index) {
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) return {};
  return describe(value);
}

void* output(OrtKernelContext* context, size_t index, const Dims& dims) {
  OrtValue* value = nullptr;
  check(KernelContext_GetOutput(context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;  // an output that the graph does not use
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
                    " for elements " + to_string(elements.dims) + "; pass the scales that MXFP8Quantize returned");
  }
}

// The matrices of b of a gemm on the processor, if b and its scales never change and the session copies weights.
std::vector<std::shared_ptr<ConstantWeight>> constant_weights(const OrtKernelInfo* info, const Overload& overload) {
  const Node& node = row_of(overload.op);
  const std::optional<Tensor> b = node.b < 0 || !overload.place.prepack ? std::nullopt : constant(info, size_t(node.b));
  if (!b || b->dims.size() < 2 || !constant(info, size_t(node.b_scales))) return {};
  std::vector<std::shared_ptr<ConstantWeight>> weights(size_t(product(b->dims.begin(), b->dims.end() - 2)));
  for (auto& weight : weights) weight = std::make_shared<ConstantWeight>();
  return weights;
}

OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  return guarded([&] {
    const auto& overload = *static_cast<const Overload*>(op);
    const std::string where = std::string(row_of(overload.op).name) + " '" + node_name(info) + "'";
    Attributes attributes;
    for_each_attribute(&attributes, [&](const char* name, auto* value) { read(info, name, value); });
    check_attributes(where, overload.op, &attributes);
    if (row_of(overload.op).output_dtype != 0 && overload.outputs[0] != attributes.output_dtype) {
      // Shape inference tells ONNX Runtime the output's type; without a rank to report it cannot (shapes.cpp).
      throw NodeError(
          where + ": output_dtype " + std::to_string(attributes.output_dtype) +
          " on an input of unknown rank; expected an input of known rank; declare the shapes of the graph's "
          "inputs and run onnx.shape_inference");
    }
    const Device device = overload.place.device;
    auto backend = device == Device::kCpu    ? cpu_backend(where)
                   : device == Device::kCuda ? cuda_backend(where, overload, info)
                                             : cuda_copies_backend(where, overload, info);
    auto made = std::make_unique<NodeKernel>(NodeKernel{overload.op, where, attributes, std::move(backend), {}, {}});
    const auto prepare = implementation(overload.op)->prepare;
    if (prepare != nullptr) {
      prepare(info, overload, made.get());
    } else if (device == Device::kCpu) {
      made->weights = constant_weights(info, overload);
    }
    *kernel = made.release();
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  return guarded([&] {
    const auto& self = *static_cast<const NodeKernel*>(kernel);
    const ProfiledCall call(self.where.c_str());
    try {
      implementation(self.op)->compute(self, context);
    } catch (const Error& error) {  // of what does not know the name of the node
      throw NodeError(self.where + ": " + error.what());
    }
  });
}

void destroy_kernel(void* kernel) { delete static_cast<NodeKernel*>(kernel); }

}  // namespace mxfp8::ort
