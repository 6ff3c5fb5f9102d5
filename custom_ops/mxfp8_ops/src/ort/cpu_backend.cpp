// The nodes on this processor: ops.h on ONNX Runtime's own intra-op threads.
#include "../cpu/isa.h"
#include "../cpu/ops.h"
#include "backend.h"

namespace mxfp8::ort {
namespace {

// ONNX Runtime's intra-op pool. Its size is not part of the API; a session with fewer threads runs more tasks on each.
Parallel session_threads(const OrtKernelContext* context) {
  static const int processors = processor_count();
  const auto run = [](void* pool, void (*task)(void*, size_t), void* argument, size_t count) {
    if (OrtStatus* status =
            KernelContext_ParallelFor(static_cast<const OrtKernelContext*>(pool), task, count, count, argument)) {
      ReleaseStatus(status);  // the pool refused and has run nothing: run here
      for (size_t i = 0; i < count; ++i) task(argument, i);
    }
  };
  return {run, const_cast<OrtKernelContext*>(context), processors};
}

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const Kernels& kernels) : kernels_(kernels) {}

  void quantize(OrtKernelContext* context, QuantizeArgs args) const override {
    std::vector<uint8_t> unused;
    if (args.elements == nullptr || args.scales == nullptr) {
      unused.resize(size_t(args.outer * args.k * args.inner));
      if (args.elements == nullptr) args.elements = unused.data();
      if (args.scales == nullptr) args.scales = unused.data();
    }
    mxfp8::quantize(kernels_, session_threads(context), args);
  }

  void dequantize(OrtKernelContext* context, DequantizeArgs args) const override {
    mxfp8::dequantize(kernels_, session_threads(context), args);
  }

  void gemm(OrtKernelContext* context, GemmArgs args) const override {
    mxfp8::gemm(kernels_, session_threads(context), args);
  }

 private:
  const Kernels& kernels_;
};

}  // namespace

std::unique_ptr<const Backend> cpu_backend(const std::string& where) {
  const Kernels* found = kernels();
  if (found == nullptr) {
    throw NodeError(where + ": MXFP8_ISA names an instruction set this machine lacks; expected one of " +
                    available_isas() + "; correct the environment variable");
  }
  return std::make_unique<CpuBackend>(*found);
}

}  // namespace mxfp8::ort
