// A node in this library: how it infers shapes, and how it computes. Each is written in the file named for it.
#pragma once
#include <initializer_list>
#include <optional>

#include "backend.h"
#include "nodes.h"

namespace mxfp8::ort {

// A node of a session.
struct NodeKernel {
  Op op;
  std::string where;  // "MXFP8Gemm 'node name'"
  Attributes attributes;
  std::unique_ptr<const Backend> backend;
  // The matrices of b on the processor; empty unless they are copied (kernels.cpp).
  std::vector<std::shared_ptr<ConstantWeight>> weights;
  std::vector<uint8_t> rows;  // b of a convolution in whole blocks, if it is copied: conv_rows
};

struct Implementation {
  // Called with checked attributes.
  void (*infer_shapes)(OrtShapeInferContext*, const Node&, const Attributes&);
  void (*compute)(const NodeKernel&, OrtKernelContext*);
  // The numbers of the kernels that a GPU may launch for this overload; null: a node that runs on the processor alone.
  std::vector<int> (*cuda_kernels)(const Overload&, const mxfp8_cuda_place&);
  // Whether its body is made of other nodes; where a GPU may have kernels for those, it is not registered.
  bool fused = false;
  // Called once for each node on the processor; null: its weights are prepared as those of a gemm.
  void (*prepare)(const OrtKernelInfo*, const Overload&, NodeKernel*) = nullptr;
};

// Gives nodes an implementation: a constant in the file of the nodes, made when the library is loaded.
struct Implemented {
  Implemented(std::initializer_list<Op> ops, const Implementation& implementation);
  const Implementation implementation;
};

// Null for a node that has no kernel: it is not registered, and ONNX Runtime runs its function body.
const Implementation* implementation(Op op);

// --- for infer_shapes ------------------------------------------------------------------------------------------------

struct Dim {
  int64_t size;        // -1 if unknown
  std::string symbol;  // may be empty
};
using SymbolicDims = std::vector<Dim>;

// ONNX Runtime shows a tensor of unknown rank as one of rank 0, which no node accepts: a tensor without
// dimensions has unknown rank. A declared rank may be wrong too, and stock ONNX Runtime would run the node's body all
// the same: so infer_shapes never throws for a shape, and leaves open the dimensions that do not fit.
SymbolicDims input_dims(const OrtShapeInferContext*, size_t index);
int input_dtype(const OrtShapeInferContext*, size_t index);
void set_output(OrtShapeInferContext*, size_t index, int dtype, SymbolicDims);
// Sets the dtype of a node's elements, its first output, where their rank is unknown. ONNX Runtime assumes the first
// dtype of the port unless it gets another with a shape: so they get one dimension, by whose symbol input_dims knows
// them. It holds no tensor between nodes to its inferred shape, and in rewritten models nodes of this library alone
// read elements. Other nodes infer from the rank of what they read (node_check.py restores it for function bodies), so
// results that are values stay without a shape.
void set_elements_of_any_rank(OrtShapeInferContext*, const Node&, const Attributes&);
Dim scale_dim(const Dim&);
// The dimensions of a gemm's result, from those of a and b [..., N, K].
SymbolicDims gemm_dims(const SymbolicDims& a, const SymbolicDims& b);

// --- for compute -----------------------------------------------------------------------------------------------------

// Absent where the node has no such input: -1 is the index of one that its row lacks.
Tensor input(const OrtKernelContext*, int index);
// An input that never changes, or nothing.
std::optional<Tensor> constant(const OrtKernelInfo*, size_t index);
// Null for an output that the graph does not use.
void* output(OrtKernelContext*, size_t index, const Dims&);

int64_t product(Dims::const_iterator begin, Dims::const_iterator end);
Dims scale_dims(Dims, int64_t axis);
// The leading dimensions of a gemm, those of a and b broadcast as NumPy's are, and which matrix of an operand of these
// `dims` each batch takes. Throws NodeError.
Dims leading_dims(const std::string& where, const Dims& a, const Dims& b);
int64_t batch_index(const Dims& dims, const Dims& leading, int64_t batch);
// Throws NodeError.
void check_scales(const std::string& where, const char* name, const Tensor& elements, const Tensor& scales,
                  int64_t axis);

}  // namespace mxfp8::ort
