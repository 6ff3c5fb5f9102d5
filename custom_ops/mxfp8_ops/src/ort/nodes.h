// The nodes as ONNX Runtime sees them: the rows of contract.py, one overload per combination of dtypes.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../contract.h"
#include "../cpu/constant_weight.h"
#include "../cpu/dtypes.h"
#include "abi.h"

namespace mxfp8::ort {

inline const Node& row_of(Op op) { return kNodes[size_t(op)]; }

// The attributes of any node, with the defaults of the contract.
struct Attributes {
#define MXFP8_MEMBER(type, name, ...) type name = __VA_ARGS__;  // a list has commas
  MXFP8_ATTRIBUTES(MXFP8_MEMBER)
#undef MXFP8_MEMBER
};

// Calls visit(name, address) for each.
template <class Visit>
void for_each_attribute(Attributes* attributes, const Visit& visit) {
#define MXFP8_VISIT(type, name, ...) visit(#name, &attributes->name);
  MXFP8_ATTRIBUTES(MXFP8_VISIT)
#undef MXFP8_VISIT
}

// Where nodes run: the values of the session option mxfp8.device; see mxfp8_cuda.h.
enum class Device { kCpu, kCuda, kCudaCopies };

// Where nodes run and what they keep, by the session options: see mxfp8_cuda.h and mxfp8_ops.h.
struct Place {
  Device device = Device::kCpu;
  bool keep_wide = false;  // on Device::kCuda: constant weights in bfloat16 too
  bool prepack = true;     // copies constant weights into the layout of the kernel
};

// Overloads share a name; ONNX Runtime picks the one whose dtypes fit. OrtCustomOp is the base, so that the pointer
// ONNX Runtime hands back is the overload.
struct Overload : OrtCustomOp {
  Op op;
  Place place;
  std::vector<int> inputs;
  std::vector<int> outputs;
};

// "<where>: <what is>; expected <what>; <what to do>"
struct NodeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Dims = std::vector<int64_t>;
std::string to_string(const Dims& dims);

struct Tensor {
  const void* data = nullptr;  // null in an empty tensor too: is_absent() says whether there is a tensor
  int dtype = 0;
  Dims dims;
  bool is_absent() const { return dtype == 0; }
};
// Throws StatusError.
Tensor describe(const OrtValue* value);

// Whether a port takes tensors of this dtype.
bool accepts(const Port& port, int64_t dtype);

// Fills in the default output_dtype and checks every attribute the op has. Throws NodeError.
void check_attributes(const std::string& where, Op op, Attributes* attributes);

// Index in kScaleRoundings or kEpilogues, the code of mxfp8_ops.h; -1 if it is none.
int rounding_code(const std::string& name);
int epilogue_code(const std::string& name);

// `axis` as 0..rank-1. Throws NodeError.
int64_t normalize_axis(const std::string& where, int64_t axis, int64_t rank);

// ONNX Runtime's status of a call inside a body that catches it.
struct StatusError {
  OrtStatus* status;
};
inline void check(OrtStatus* status) {
  if (status != nullptr) throw StatusError{status};
}

// Releases a shape that the caller owns.
struct OwnedShape {
  Shape* shape = nullptr;
  ~OwnedShape() {
    if (shape != nullptr) ReleaseTensorTypeAndShapeInfo(shape);
  }
};

// Runs a callback's body: nothing it throws crosses into ONNX Runtime.
template <class Body>
OrtStatus* guarded(const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const StatusError& error) {
    return error.status;
  } catch (const NodeError& error) {
    return CreateStatus(kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return CreateStatus(kFail, "mxfp8: out of memory; expected memory for one packed operand; use a smaller batch");
  } catch (const std::exception& error) {
    return CreateStatus(kFail, error.what());
  }
}

// Callbacks of OrtCustomOp; kernels.cpp and shapes.cpp.
OrtStatus* create_kernel(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
OrtStatus* compute(void* kernel, OrtKernelContext*);
void destroy_kernel(void* kernel);
OrtStatus* infer_shapes(const OrtCustomOp*, OrtShapeInferContext*);

}  // namespace mxfp8::ort
