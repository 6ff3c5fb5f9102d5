// The nodes of the CPU provider on GPU 0: operands and results are copied at each node.
#include <mutex>

#include "cuda_backend.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

using cuda::Current;
using cuda::Executor;
using cuda::Gpu;
using cuda::Stream;

constexpr int kCopiesGpu = 0;
const Stream kThreadStream = reinterpret_cast<Stream>(2);  // CU_STREAM_PER_THREAD

int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Memory of all nodes with copies, of which one at a time runs. It grows to what the largest node needs.
class Arena {
 public:
  uint64_t room(const Gpu& gpu, int64_t bytes) {
    if (bytes > bytes_) {
      if (data_ != 0) gpu.check(gpu.driver().free(data_), "free memory");
      data_ = 0, bytes_ = 0;
      gpu.check(gpu.driver().allocate(&data_, size_t(bytes)), "allocate memory");
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  uint64_t data_ = 0;
  int64_t bytes_ = 0;
};
struct Shared {
  std::mutex mutex;
  Arena operands, scratch;
};
Shared& shared() {
  static Shared* const instance = new Shared;  // outlives every session
  return *instance;
}

// A constant operand that lies on the GPU already.
struct Resident {
  const char* host;
  int64_t bytes;
  uint64_t data;
};

// One node's turn: takes its operands to the GPU and brings its results back.
class Turn final : public Operands {
 public:
  Turn(const Gpu& gpu, const std::vector<Resident>& residents, Job* job)
      : gpu_(gpu), residents_(residents), lock_(shared().mutex), current_(gpu) {
    job->visit(this);  // counts their bytes
    next_ = shared().operands.room(gpu, int64_t(next_));
    counts_ = false;
  }
  ~Turn() { gpu_.driver().wait(kThreadStream); }  // also after an error: the memory must be free for the next node
  Turn(const Turn&) = delete;

  void run(const Executor& executor, Job* job, cuda::Warning* warning) {
    job->visit(this);
    const cuda::Plan plan = job->plan(gpu_.place(), {}, executor.ask(warning));
    const uint64_t scratch = shared().scratch.room(gpu_, plan.scratch_bytes);
    executor.run(plan, {kThreadStream, scratch});
    for (const Result& result : results_) {
      if (result.bytes == 0) continue;
      gpu_.check(gpu_.driver().copy_out(result.host, result.data, size_t(result.bytes), kThreadStream),
                 "copy a result");
    }
    gpu_.check(gpu_.driver().wait(kThreadStream), "run the node");
  }

 private:
  struct Result {
    void* host;
    int64_t bytes;
    uint64_t data;
  };

  const void* input(const void* host, int64_t bytes) override {
    if (counts_) {
      reserve(bytes);
      return host;
    }
    if (host == nullptr || bytes == 0) return nullptr;
    const auto* begin = static_cast<const char*>(host);
    for (const Resident& resident : residents_) {
      if (begin >= resident.host && begin + bytes <= resident.host + resident.bytes) {
        return reinterpret_cast<const void*>(resident.data + uint64_t(begin - resident.host));
      }
    }
    const uint64_t at = reserve(bytes);
    gpu_.check(gpu_.driver().copy_in(at, host, size_t(bytes), kThreadStream), "copy an operand");
    return reinterpret_cast<const void*>(at);
  }

  void* output(void* host, int64_t bytes) override {
    const uint64_t at = reserve(bytes);
    if (counts_) return host;
    if (host != nullptr) results_.push_back({host, bytes, at});
    return reinterpret_cast<void*>(at);
  }

  uint64_t reserve(int64_t bytes) {
    const uint64_t at = next_;
    next_ += uint64_t(rounded(bytes));
    return at;
  }

  const Gpu& gpu_;
  const std::vector<Resident>& residents_;
  std::lock_guard<std::mutex> lock_;
  Current current_;
  bool counts_ = true;
  uint64_t next_ = 0;
  std::vector<Result> results_;
};

class CopiesBackend : public Backend {
 public:
  CopiesBackend(const std::string& where, const Overload& node, const OrtKernelInfo* info)
      : gpu_(where, kCopiesGpu), executor_(executor(node, gpu_)) {
    size_t inputs = 0;
    check(KernelInfo_GetInputCount(info, &inputs));
    try {
      for (size_t i = 0; i < inputs; ++i) keep_if_constant(info, i);
    } catch (...) {
      release_residents();  // C++ runs no destructor after a constructor that throws
      throw;
    }
  }
  ~CopiesBackend() override { release_residents(); }

  void run(OrtKernelContext*, Job* job) const override {
    cuda::Warning warning(gpu_);
    Turn(gpu_, residents_, job).run(executor_, job, &warning);
  }

 private:
  void keep_if_constant(const OrtKernelInfo* info, size_t index) {
    const std::optional<Tensor> tensor = constant(info, index);
    if (!tensor) return;
    int64_t bytes = is_value_dtype(tensor->dtype) ? value_bytes(tensor->dtype) : 1;
    for (const int64_t dim : tensor->dims) bytes *= dim;
    if (bytes == 0) return;
    const Current current(gpu_);
    Resident resident{static_cast<const char*>(tensor->data), bytes, 0};
    gpu_.check(gpu_.driver().allocate(&resident.data, size_t(bytes)), "allocate memory for a weight");
    residents_.push_back(resident);
    gpu_.check(gpu_.driver().copy_in(resident.data, resident.host, size_t(bytes), kThreadStream), "copy a weight");
    gpu_.check(gpu_.driver().wait(kThreadStream), "copy a weight");
  }

  void release_residents() {
    std::vector<uint64_t> memory;
    for (const Resident& resident : residents_) memory.push_back(resident.data);
    if (!memory.empty()) release(gpu_, memory);
  }

  Gpu gpu_;
  Executor executor_;
  std::vector<Resident> residents_;
};

}  // namespace

std::unique_ptr<const Backend> cuda_copies_backend(const std::string& where, const Overload& node,
                                                   const OrtKernelInfo* info) {
  return std::make_unique<CopiesBackend>(where, node, info);
}

}  // namespace mxfp8::ort
