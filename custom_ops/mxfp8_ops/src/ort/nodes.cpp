// Attribute rules of the nodes, shared by shape inference and kernel creation, and what a tensor is.
#include "nodes.h"

#include <algorithm>
#include <iterator>

namespace mxfp8::ort {
namespace {

// "a, b or c"
std::string choices(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return text;
}

// "16 (bfloat16)"
std::string choice(const Dtype& row) { return std::to_string(row.code) + " (" + row.name + ")"; }

// "1 (float), 10 (float16) or 16 (bfloat16)": what a port accepts.
std::string choices(const Port& port) {
  std::vector<std::string> names;
  const auto add = [&](const Dtype& row) {
    if (accepts(port, row.code)) names.push_back(choice(row));
  };
  std::for_each(std::begin(kValueDtypes), std::end(kValueDtypes), add);
  std::for_each(std::begin(kElementFormats), std::end(kElementFormats), add);
  return choices(names);
}

// Index of a name in a table, -1 if it is not there.
template <size_t N>
int index_of(const char* const (&names)[N], const std::string& name) {
  const auto* match = std::find(std::begin(names), std::end(names), name);
  return match == std::end(names) ? -1 : int(match - names);
}

template <size_t N>
void check_name(const std::string& where, const char* attribute, const char* const (&names)[N],
                const std::string& name) {
  if (index_of(names, name) >= 0) return;
  throw NodeError(where + ": " + attribute + " '" + name + "'; expected " +
                  choices({std::begin(names), std::end(names)}) + "; correct the attribute");
}

}  // namespace

bool accepts(const Port& port, int64_t dtype) {
  return dtype != 0 && std::find(std::begin(port.dtypes), std::end(port.dtypes), dtype) != std::end(port.dtypes);
}

int rounding_code(const std::string& name) { return index_of(kScaleRoundings, name); }
int epilogue_code(const std::string& name) { return index_of(kEpilogues, name); }

std::string to_string(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

Tensor describe(const OrtValue* value) {
  Tensor tensor;
  OwnedShape owned;
  check(GetTensorTypeAndShape(value, &owned.shape));
  const Shape* shape = owned.shape;
  size_t rank = 0;
  check(GetDimensionsCount(shape, &rank));
  tensor.dims.resize(rank);
  check(GetDimensions(shape, tensor.dims.data(), rank));
  check(GetTensorElementType(shape, &tensor.dtype));
  void* data = nullptr;
  check(GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

void check_attributes(const std::string& where, Op op, Attributes* attributes) {
  const Node& node = row_of(op);
  if (attributes->output_dtype == 0) attributes->output_dtype = node.output_dtype;
  if (attributes->block_size != kBlock) {
    throw NodeError(where + ": block_size " + std::to_string(attributes->block_size) + "; expected " +
                    std::to_string(kBlock) + "; quantize the model again with blocks of " + std::to_string(kBlock));
  }
  if (node.output_dtype != 0 && !accepts(node.outputs[0], attributes->output_dtype)) {
    throw NodeError(where + ": output_dtype " + std::to_string(attributes->output_dtype) + "; expected " +
                    choices(node.outputs[0]) + "; correct the attribute");
  }
  const auto is_asked_for = [&](const Dtype& row) { return row.code == attributes->activation_dtype; };
  if (std::none_of(std::begin(kActivationDtypes), std::end(kActivationDtypes), is_asked_for)) {
    std::vector<std::string> names;
    for (const Dtype& row : kActivationDtypes) names.push_back(choice(row));
    throw NodeError(where + ": activation_dtype " + std::to_string(attributes->activation_dtype) + "; expected " +
                    choices(names) + "; correct the attribute");
  }
  check_name(where, "scale_rounding", kScaleRoundings, attributes->scale_rounding);
  if (op != Op::kConv) check_name(where, "epilogue", kEpilogues, attributes->epilogue);  // it has more: conv.cpp
  const int64_t q = attributes->q_num_heads, kv = attributes->kv_num_heads;
  if (kv < 1 || q < 1 || q % kv != 0) {
    throw NodeError(where + ": " + std::to_string(q) + " heads of Q and " + std::to_string(kv) +
                    " of K and V; expected 1 or more of each, and for Q a multiple of the number for K and V; correct "
                    "q_num_heads and kv_num_heads");
  }
}

int64_t normalize_axis(const std::string& where, int64_t axis, int64_t rank) {
  if (axis < -rank || axis >= rank) {
    throw NodeError(where + ": axis " + std::to_string(axis) + " of a " + std::to_string(rank) +
                    "-D tensor; expected " + std::to_string(-rank) + " <= axis < " + std::to_string(rank) +
                    "; correct the axis");
  }
  return axis < 0 ? axis + rank : axis;
}

}  // namespace mxfp8::ort
