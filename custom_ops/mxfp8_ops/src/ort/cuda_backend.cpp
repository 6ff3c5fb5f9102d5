// The nodes on the CUDA execution provider: in its memory and on its stream.
#include "cuda_backend.h"

#include "../cuda_host/cublaslt.h"
#include "../cuda_host/routes.h"
#include "../error.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

using cuda::CudaError;
using cuda::Current;
using cuda::Executor;
using cuda::Gpu;
using cuda::Plan;
using cuda::Stream;

// That provider's memory on the node's GPU.
class Memory {
 public:
  explicit Memory(const OrtKernelInfo* info) {
    check(KernelInfoGetAllocator(info, 0, &allocator_));  // 0: the provider's default memory
    if (OrtStatus* status = AllocatorGetInfo(allocator_, &info_)) {
      ReleaseAllocator(allocator_);
      throw StatusError{status};
    }
  }
  ~Memory() { ReleaseAllocator(allocator_); }
  Memory(const Memory&) = delete;

  OrtAllocator* allocator() const { return allocator_; }
  const OrtMemoryInfo* info() const { return info_; }
  int gpu() const {
    int index = 0;
    check(MemoryInfoGetId(info_, &index));
    return index;
  }

 private:
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* info_ = nullptr;
};

// Memory for the time of one node, from ONNX Runtime's arena: nothing new is allocated once each shape has run, and
// memory that one stream frees goes to no other before that one is done. The second holds for
// KernelContext_GetScratchBuffer, which a null stream does not have; that one waits for all others by itself, but for
// streams made not to be waited for.
class Scratch {
 public:
  Scratch(const Memory& memory, const OrtKernelContext* context, Stream stream, size_t bytes) : memory_(memory) {
    if (bytes == 0) return;
    check(stream == nullptr ? AllocatorAlloc(memory.allocator(), bytes, &data_)
                            : KernelContext_GetScratchBuffer(context, memory.info(), bytes, &data_));
  }
  ~Scratch() {
    if (data_ == nullptr) return;
    if (OrtStatus* status = AllocatorFree(memory_.allocator(), data_)) ReleaseStatus(status);
  }
  Scratch(const Scratch&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  const Memory& memory_;
  void* data_ = nullptr;
};

Stream stream_of(const OrtKernelContext* context) {
  void* stream = nullptr;
  check(KernelContext_GetGPUComputeStream(context, &stream));
  return stream;
}

class CudaBackend : public Backend {
 public:
  CudaBackend(const std::string& where, const Overload& node, const OrtKernelInfo* info)
      : memory_(info), gpu_(where, memory_.gpu()), executor_(executor(node, gpu_)) {
    if (row_of(node.op).b >= 0) keep(info, node);
  }
  ~CudaBackend() override {
    if (memory_of_kept_ != 0) release(gpu_, {memory_of_kept_});
  }

  void run(OrtKernelContext* context, Job* job) const override {
    const Stream stream = stream_of(context);
    Unclaimed unclaimed(job);
    const Scratch unused(memory_, context, stream, size_t(unclaimed.bytes()));
    unclaimed.give(unused.data());
    cuda::Warning warning(gpu_);
    const Plan planned = job->plan(gpu_.place(), kept_, executor_.ask(&warning));
    const Scratch scratch(memory_, context, stream, size_t(planned.scratch_bytes));
    const Current current(gpu_);
    executor_.run(planned, {stream, uint64_t(address(scratch.data()))});
  }

  bool on_host() const override { return false; }

 private:
  // Where B is a constant matrix - which lies on the GPU already -, makes what products of many rows read of it.
  void keep(const OrtKernelInfo* info, const Overload& node) {
    const auto index = size_t(row_of(node.op).b);
    const std::optional<Tensor> b = constant(info, index), scales = constant(info, index + 1);
    if (!b || !scales || b->dims.size() != 2) return;
    const int64_t n = b->dims[0], k = b->dims[1];
    if (n * k == 0 || scales->dims != Dims{n, scale_count(k)}) return;  // the second is an error when the node runs
    const bool wide = node.place.keep_wide;
    const cuda::LtProduct product = {
        MXFP8_BFLOAT16, MXFP8_BFLOAT16, MXFP8_FLOAT32, cuda::kSkinnyRows + 1, n, k, 16, 16, 16};
    const Current current(gpu_);
    const std::string refusal = wide ? cuda::CublasLt::of(gpu_).refusal(gpu_, product) : "";
    if (!refusal.empty()) {
      throw CudaError(
          gpu_.where() + ": keep_wide needs products of cuBLASLt (" + refusal + "); expected one that " +
          "multiplies bfloat16; install or upgrade nvidia-cublas (CUDA 12: nvidia-cublas-cu12), or omit keep_wide");
    }
    const cuda::Shape many = cuda::many_rows(cuda::kind_of(node.inputs[0]), cuda::kind_of(node.inputs[index]), n, k,
                                             address(b->data) % 16 == 0);
    const bool swizzled = cuda::choose(gpu_.place(), many) == cuda::kBlockScaled;
    const int64_t wide_bytes = wide ? 256 + (2 * n * k + 255) / 256 * 256 : 0;
    const int64_t swizzled_bytes = swizzled ? mxfp8_cuda_swizzled_bytes(n, k) : 0;
    if (wide_bytes + swizzled_bytes == 0) return;
    gpu_.check(gpu_.driver().allocate(&memory_of_kept_, size_t(wide_bytes + swizzled_bytes)),
               "allocate memory for a weight");
    const auto at = [&](int64_t bytes) { return reinterpret_cast<void*>(memory_of_kept_ + uint64_t(bytes)); };
    const Stream stream = nullptr;  // any would do: ONNX Runtime has waited for its copies of constants
    try {
      if (wide) {
        kept_.wide = at(256), kept_.inexact = static_cast<uint32_t*>(at(0));
        executor_.run(cuda::plan(mxfp8_cuda_dequantize{node.inputs[index], MXFP8_BFLOAT16, address(b->data),
                                                       address(scales->data), n, k, 1, address(kept_.wide),
                                                       address(kept_.inexact)}),
                      {stream, 0});
      }
      if (swizzled) {
        kept_.swizzled = at(wide_bytes);
        executor_.run(cuda::swizzle(address(scales->data), n, k, address(kept_.swizzled)), {stream, 0});
      }
      gpu_.check(gpu_.driver().wait(stream), "prepare a weight");
    } catch (...) {
      gpu_.driver().free(memory_of_kept_);
      throw;
    }
  }

  Memory memory_;
  Gpu gpu_;
  Executor executor_;
  uint64_t memory_of_kept_ = 0;
  KeptWeight kept_ = {};
};

}  // namespace

Executor executor(const Overload& node, const Gpu& gpu) {
  std::vector<int> kernels;
  try {
    kernels = implementation(node.op)->cuda_kernels(node, gpu.place());
  } catch (const Error& error) {  // there are none for these operands
    throw CudaError(gpu.where() + ": " + error.what());
  }
  return Executor(gpu, kernels);
}

void release(const Gpu& gpu, const std::vector<uint64_t>& memory) {
  void* previous = nullptr;
  if (gpu.driver().push_context(gpu.properties().context) != 0) return;  // the process is ending
  for (const uint64_t each : memory) gpu.driver().free(each);
  gpu.driver().pop_context(&previous);
}

std::unique_ptr<const Backend> cuda_backend(const std::string& where, const Overload& node, const OrtKernelInfo* info) {
  return std::make_unique<CudaBackend>(where, node, info);
}

}  // namespace mxfp8::ort
