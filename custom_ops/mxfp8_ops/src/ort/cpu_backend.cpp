// The nodes on this processor: ops.h on ONNX Runtime's own intra-op threads.
#include "../cpu/isa.h"
#include "../cpu/profile.h"
#include "../cpu/system.h"
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

  void run(OrtKernelContext* context, Job* job) const override {
    Unclaimed unclaimed(job);
    std::vector<char> unused(size_t(unclaimed.bytes()));
    unclaimed.give(unused.data());
    runs_on(kernels_);
    job->run(kernels_, session_threads(context));
  }

 private:
  const Kernels& kernels_;
};

}  // namespace

std::unique_ptr<const Backend> cpu_backend(const std::string& where) {
  const Kernels* table = kernels();
  if (table == nullptr) {
    throw NodeError(where + ": MXFP8_ISA names an instruction set that this machine lacks; expected one of " +
                    available_isas() + "; correct the environment variable");
  }
  return std::make_unique<CpuBackend>(*table);
}

}  // namespace mxfp8::ort
