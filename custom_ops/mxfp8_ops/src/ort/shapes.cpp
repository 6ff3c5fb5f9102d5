// Shape and type inference of the nodes. Dimensions are numbers, or symbols the graph gave them; a dimension that has
// neither gets a symbol of its own, because ONNX Runtime would otherwise read its -1 literally.
#include <atomic>

#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

constexpr char kAnyRank[] = "mxfp8_any_rank_";  // begins the symbol that stands for dimensions of unknown number

std::string unique_symbol(const char* begin) {
  static std::atomic<uint64_t> count{0};
  return begin + std::to_string(count.fetch_add(1));
}

void read(const OrtShapeInferContext* context, const char* name, int64_t* value) {
  const OrtOpAttr* attribute = nullptr;
  OrtStatus* status = ShapeInferContext_GetAttribute(context, name, &attribute);
  size_t size = 0;
  int64_t number = 0;
  if (status == nullptr && attribute != nullptr) status = ReadOpAttr(attribute, kInt, &number, sizeof number, &size);
  if (status != nullptr) {
    ReleaseStatus(status);  // the attribute is absent: the default stands
  } else if (size == sizeof number) {
    *value = number;
  }
}

}  // namespace

SymbolicDims input_dims(const OrtShapeInferContext* context, size_t index) {
  Shape* shape = nullptr;  // belongs to the context
  check(ShapeInferContext_GetInputTypeShape(context, index, &shape));
  size_t rank = 0;
  check(GetDimensionsCount(shape, &rank));
  Dims sizes(rank);
  std::vector<const char*> symbols(rank);
  check(GetDimensions(shape, sizes.data(), rank));
  check(GetSymbolicDimensions(shape, symbols.data(), rank));
  SymbolicDims dims(rank);
  for (size_t i = 0; i < rank; ++i) dims[i] = {sizes[i], symbols[i] == nullptr ? "" : symbols[i]};
  if (rank == 1 && dims[0].symbol.rfind(kAnyRank, 0) == 0) return {};
  return dims;
}

int input_dtype(const OrtShapeInferContext* context, size_t index) {
  Shape* shape = nullptr;  // belongs to the context
  check(ShapeInferContext_GetInputTypeShape(context, index, &shape));
  int dtype = 0;
  check(GetTensorElementType(shape, &dtype));
  return dtype;
}

void set_output(OrtShapeInferContext* context, size_t index, int dtype, SymbolicDims dims) {
  Dims sizes;
  std::vector<const char*> symbols;
  for (Dim& dim : dims) {
    if (dim.size >= 0) {
      dim.symbol.clear();
    } else if (dim.symbol.empty()) {
      dim.symbol = unique_symbol("mxfp8_dim_");
    }
    sizes.push_back(dim.size);
    symbols.push_back(dim.symbol.c_str());
  }
  OwnedShape owned;
  check(CreateTensorTypeAndShapeInfo(&owned.shape));
  Shape* shape = owned.shape;
  check(SetTensorElementType(shape, dtype));
  check(SetDimensions(shape, sizes.data(), sizes.size()));
  check(SetSymbolicDimensions(shape, symbols.data(), symbols.size()));
  check(ShapeInferContext_SetOutputTypeShape(context, index, shape));
}

void set_elements_of_any_rank(OrtShapeInferContext* context, const Node& node, const Attributes& attributes) {
  if (attributes.output_dtype == node.outputs[0].dtypes[0]) return;
  set_output(context, 0, int(attributes.output_dtype), {{-1, unique_symbol(kAnyRank)}});
}

Dim scale_dim(const Dim& dim) {
  if (dim.size >= 0) return {scale_count(dim.size), ""};
  // Named after its source, so that equal K give equal numbers of blocks.
  return {-1, dim.symbol.empty() ? "" : "mxfp8_blocks_of_" + dim.symbol};
}

OrtStatus* infer_shapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  return guarded([&] {
    const auto& overload = *static_cast<const Overload*>(op);
    const Node& node = row_of(overload.op);
    Attributes attributes;
    read(context, "axis", &attributes.axis);
    read(context, "output_dtype", &attributes.output_dtype);
    read(context, "q_num_heads", &attributes.q_num_heads);
    read(context, "kv_num_heads", &attributes.kv_num_heads);
    check_attributes(node.name, overload.op, &attributes);
    implementation(overload.op)->infer_shapes(context, node, attributes);
  });
}

}  // namespace mxfp8::ort
