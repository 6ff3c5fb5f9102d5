// Attribute rules of the nodes, shared by shape inference and kernel creation, and what a tensor is.
#include "nodes.h"

#include "../cpu/mxfp8_ops.h"
#include "../cpu/ops.h"

namespace mxfp8::ort {

const char* name_of(Op op) {
  switch (op) {
    case Op::kQuantize:
      return "MXFP8Quantize";
    case Op::kDequantize:
      return "MXFP8Dequantize";
    case Op::kGemm:
      return "MXFP8Gemm";
    case Op::kWeightGemm:
      break;
  }
  return "MXFP8WeightGemm";
}

std::string to_string(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

Tensor describe(const OrtValue* value) {
  Tensor tensor;
  Shape* shape = nullptr;
  check(GetTensorTypeAndShape(value, &shape));
  struct Release {
    Shape* shape;
    ~Release() { ReleaseTensorTypeAndShapeInfo(shape); }
  } release{shape};
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
  const bool quantizes = op == Op::kQuantize;
  if (attributes->output_dtype == 0) attributes->output_dtype = quantizes ? MXFP8_E4M3 : MXFP8_FLOAT32;
  if (attributes->block_size != 32) {
    throw NodeError(where + ": block_size " + std::to_string(attributes->block_size) +
                    "; expected 32; quantize the model again with blocks of 32");
  }
  const int64_t dtype = attributes->output_dtype;
  if (quantizes && !is_element_format(int(dtype))) {
    throw NodeError(where + ": output_dtype " + std::to_string(dtype) +
                    "; expected 17 (float8e4m3fn) or 19 (float8e5m2); correct the attribute");
  }
  if (!quantizes && !is_value_dtype(int(dtype))) {
    throw NodeError(where + ": output_dtype " + std::to_string(dtype) +
                    "; expected 1 (float), 10 (float16) or 16 (bfloat16); correct the attribute");
  }
  const std::string& rounding = attributes->scale_rounding;
  if (rounding != "ceil" && rounding != "floor" && rounding != "even") {
    throw NodeError(where + ": scale_rounding '" + rounding + "'; expected ceil, floor or even; correct the attribute");
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
