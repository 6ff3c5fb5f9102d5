// What does the arithmetic of the nodes: this processor, or a GPU. Arguments are checked before they come here.
#pragma once
#include <memory>
#include <string>

#include "../cpu/kernels/kernels.h"
#include "nodes.h"

namespace mxfp8::ort {

// Any number of threads may call one backend at once. Pointers in the arguments are what ONNX Runtime gave: memory of
// the device that the overload is registered for.
class Backend {
 public:
  virtual ~Backend() = default;
  // args.elements or args.scales is null if nobody asked for that output.
  virtual void quantize(OrtKernelContext*, QuantizeArgs args) const = 0;
  virtual void dequantize(OrtKernelContext*, DequantizeArgs args) const = 0;
  virtual void gemm(OrtKernelContext*, GemmArgs args) const = 0;
};

// Throws NodeError, which begins with `where`, if MXFP8_ISA names an instruction set this machine lacks.
std::unique_ptr<const Backend> cpu_backend(const std::string& where);

// On the GPU that ONNX Runtime made the node for, or, for an overload with copies, GPU 0. Throws CudaError, which
// begins with `where`, if there is no such GPU or no kernels for it.
std::unique_ptr<const Backend> cuda_backend(const std::string& where, const Overload&, const OrtKernelInfo*);

}  // namespace mxfp8::ort
