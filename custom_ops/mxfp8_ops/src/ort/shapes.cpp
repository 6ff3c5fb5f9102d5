// Shape and type inference of the nodes. Dimensions are numbers, or symbols the graph gave them; a dimension that has
// neither gets a symbol of its own, because ONNX Runtime would otherwise read its -1 literally.
#include <atomic>

#include "nodes.h"

namespace mxfp8::ort {
namespace {

struct Dim {
  int64_t size;        // -1 if unknown
  std::string symbol;  // may be empty
};
using SymbolicDims = std::vector<Dim>;

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
  return dims;
}

std::string unique_symbol() {
  static std::atomic<uint64_t> count{0};
  return "mxfp8_dim_" + std::to_string(count.fetch_add(1));
}

void set_output(OrtShapeInferContext* context, size_t index, int dtype, SymbolicDims dims) {
  Dims sizes;
  std::vector<const char*> symbols;
  for (Dim& dim : dims) {
    if (dim.size >= 0) {
      dim.symbol.clear();
    } else if (dim.symbol.empty()) {
      dim.symbol = unique_symbol();
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

void read(const OrtShapeInferContext* context, const char* name, int64_t* value) {
  const OrtOpAttr* attribute = nullptr;
  OrtStatus* status = ShapeInferContext_GetAttribute(context, name, &attribute);
  size_t size = 0;
  int64_t found = 0;
  if (status == nullptr && attribute != nullptr) status = ReadOpAttr(attribute, kInt, &found, sizeof found, &size);
  if (status != nullptr) {
    ReleaseStatus(status);  // not given: the default stands
  } else if (size == sizeof found) {
    *value = found;
  }
}

Dim scale_dim(const Dim& dim) {
  if (dim.size >= 0) return {scale_count(dim.size), ""};
  // Named after its source, so that equal K give equal numbers of blocks.
  return {-1, dim.symbol.empty() ? "" : "mxfp8_blocks_of_" + dim.symbol};
}

Dim broadcast(const Dim& a, const Dim& b) {
  if (a.size == 1) return b;
  if (b.size == 1) return a;
  if (a.size >= 0) return a;
  if (b.size >= 0) return b;
  if (a.symbol == b.symbol) return a;
  return {-1, ""};
}

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

}  // namespace

OrtStatus* infer_shapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  return guarded([&] {
    const auto& overload = *static_cast<const Overload*>(op);
    const Node& node = row_of(overload.op);
    const std::string where = node.name;
    Attributes attributes;
    read(context, "axis", &attributes.axis);
    read(context, "output_dtype", &attributes.output_dtype);
    check_attributes(where, overload.op, &attributes);
    const int dtype = int(attributes.output_dtype);
    const SymbolicDims first = input_dims(context, 0);
    // ONNX Runtime shows a tensor of unknown rank as one of rank 0, which no node accepts: leave the shape open.
    if (first.empty()) return;
    if (node.b >= 0) {
      const SymbolicDims weight = input_dims(context, size_t(node.b));
      if (weight.size() >= 2) set_output(context, 0, dtype, gemm_dims(first, weight));
      return;
    }
    const int64_t axis = normalize_axis(where, attributes.axis, int64_t(first.size()));
    set_output(context, 0, dtype, first);
    if (overload.op == Op::kQuantize) {
      SymbolicDims scales = first;
      scales[size_t(axis)] = scale_dim(first[size_t(axis)]);
      set_output(context, 1, node.outputs[1].dtypes[0], scales);
    }
  });
}

}  // namespace mxfp8::ort
