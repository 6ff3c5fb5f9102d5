// The nodes on a GPU: where their operands lie and on which stream they run. What they launch is planned in cuda_host.
#include <mutex>
#include <optional>

#include "../cpu/ops.h"
#include "../cuda_host/executor.h"
#include "../cuda_host/kernels.h"
#include "backend.h"

namespace mxfp8::ort {
namespace {

using cuda::CudaError;
using cuda::Current;
using cuda::Executor;
using cuda::Gpu;
using cuda::Plan;
using cuda::Stream;

constexpr int kCudaResourceVersion = 3, kCublasHandle = 10002;  // cuda_resource.h of ONNX Runtime

// The numbers of the kernels that a node may launch.
std::vector<int> kernels_of(const Overload& node, const Gpu& gpu) {
  const int first = node.inputs[0];
  switch (node.op) {
    case Op::kQuantize:
      return cuda::quantize_kernels(first, node.outputs[0]);
    case Op::kDequantize:
      return cuda::dequantize_kernels(first, node.outputs[0]);
    case Op::kGemm:
    case Op::kWeightGemm:
      break;
  }
  const bool cublas = node.device == Device::kCuda && gpu.knows_cublas();
  return cuda::gemm_kernels(first, node.inputs[size_t(row_of(node.op).b)], cublas);
}

Executor executor(const Overload& node, const Gpu& gpu) { return Executor(gpu, kernels_of(node, gpu)); }

int64_t address(const void* data) { return reinterpret_cast<int64_t>(data); }

Plan plan(const QuantizeArgs& q) {
  return cuda::plan(mxfp8_cuda_quantize{q.dtype, q.format, q.increment, MXFP8_PLAIN, address(q.x), q.outer, q.k,
                                        q.inner, address(q.elements), address(q.scales), 0, 0, 0, 0, 0});
}

Plan plan(const DequantizeArgs& d, const uint32_t* inexact = nullptr) {
  return cuda::plan(mxfp8_cuda_dequantize{d.format, d.dtype, address(d.elements), address(d.scales), d.outer, d.k,
                                          d.inner, address(d.y), address(inexact)});
}

// B [N, K] in bfloat16.
struct WideWeight {
  void* data;
  uint32_t* inexact;  // not 0 if bfloat16 cannot hold it
};

Plan plan(const mxfp8_cuda_place& place, const GemmArgs& g, const WideWeight& wide) {
  return cuda::plan(place, mxfp8_cuda_gemm{g.a_format, g.b_format, g.y_dtype, address(g.a), address(g.a_scales),
                                           address(g.b), address(g.b_scales), address(g.bias), address(g.y), g.m, g.n,
                                           g.k, address(wide.data), address(wide.inexact), 0, 0});
}

// An input that never changes, or nothing.
std::optional<Tensor> constant(const OrtKernelInfo* info, size_t index) {
  int found = 0;
  const OrtValue* value = nullptr;
  check(KernelInfoGetConstantInput_tensor(info, index, &found, &value));
  if (found == 0 || value == nullptr) return {};
  return describe(value);
}

void release(const Gpu& gpu, const std::vector<uint64_t>& memory) {
  void* previous = nullptr;
  if (gpu.driver().push_context(gpu.properties().context) != 0) return;  // the process is ending
  for (const uint64_t each : memory) gpu.driver().free(each);
  gpu.driver().pop_context(&previous);
}

// --- on the CUDA execution provider ---------------------------------------------------------------------------------

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
// what one stream frees no other gets before it is done. The second holds for KernelContext_GetScratchBuffer, which a
// null stream does not have; that one waits for all others by itself, but for streams made not to be waited for.
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

// ONNX Runtime's cuBLAS handle, set to its stream; null if it has none.
void* cublas_of(const OrtKernelContext* context) {
  void* handle = nullptr;
  if (OrtStatus* status = KernelContext_GetResource(context, kCudaResourceVersion, kCublasHandle, &handle)) {
    ReleaseStatus(status);
    return nullptr;
  }
  return handle;
}

class CudaBackend : public Backend {
 public:
  CudaBackend(const std::string& where, const Overload& node, const OrtKernelInfo* info)
      : memory_(info), gpu_(where, memory_.gpu()), executor_(executor(node, gpu_)) {
    if (node.keep_wide && row_of(node.op).b >= 0) keep_wide(info, node);
  }
  ~CudaBackend() override {
    if (kept_ != 0) release(gpu_, {kept_});
  }

  void quantize(OrtKernelContext* context, QuantizeArgs args) const override {
    const Stream stream = stream_of(context);
    const bool all = args.elements != nullptr && args.scales != nullptr;
    const Scratch unused(memory_, context, stream, all ? 0 : size_t(args.outer * args.k * args.inner));
    if (args.elements == nullptr) args.elements = unused.data();
    if (args.scales == nullptr) args.scales = unused.data();
    const Current current(gpu_);
    executor_.run(plan(args), {stream, nullptr, 0});
  }

  void dequantize(OrtKernelContext* context, DequantizeArgs args) const override {
    const Current current(gpu_);
    executor_.run(plan(args), {stream_of(context), nullptr, 0});
  }

  void gemm(OrtKernelContext* context, GemmArgs args) const override {
    const Stream stream = stream_of(context);
    void* cublas = cublas_of(context);
    const Plan planned = plan(executor_.place(cublas != nullptr), args, wide_);
    const Scratch scratch(memory_, context, stream, size_t(planned.scratch_bytes));
    const Current current(gpu_);
    executor_.run(planned, {stream, cublas, uint64_t(address(scratch.data()))});
  }

 private:
  // Where B is a constant matrix - which lies on the GPU already -, makes it wide now.
  void keep_wide(const OrtKernelInfo* info, const Overload& node) {
    const auto index = size_t(row_of(node.op).b);
    const std::optional<Tensor> b = constant(info, index), scales = constant(info, index + 1);
    if (!b || !scales || b->dims.size() != 2) return;
    const int64_t n = b->dims[0], k = b->dims[1];
    if (n * k == 0 || scales->dims != Dims{n, scale_count(k)}) return;  // the second is an error when the node runs
    if (!gpu_.knows_cublas()) {
      throw CudaError(gpu_.where() + ": a weight is to be kept in bfloat16, but there is no cuBLAS that reads it; " +
                      "expected that of ONNX Runtime's CUDA provider; leave keep_wide out");
    }
    const Current current(gpu_);
    gpu_.check(gpu_.driver().allocate(&kept_, size_t(256 + 2 * n * k)), "allocate memory for a weight");
    wide_ = {reinterpret_cast<void*>(kept_ + 256), reinterpret_cast<uint32_t*>(kept_)};
    const Stream stream = nullptr;  // any would do: ONNX Runtime has waited for its copies of constants
    try {
      const auto *elements = static_cast<const uint8_t*>(b->data), *codes = static_cast<const uint8_t*>(scales->data);
      const DequantizeArgs widened = {node.inputs[index], elements, codes, n, k, 1, MXFP8_BFLOAT16, wide_.data};
      executor_.run(plan(widened, wide_.inexact), {stream, nullptr, 0});
      gpu_.check(gpu_.driver().wait(stream), "dequantize a weight");
    } catch (...) {
      gpu_.driver().free(kept_);
      throw;
    }
  }

  Memory memory_;
  Gpu gpu_;
  Executor executor_;
  uint64_t kept_ = 0;  // memory of the word and the weight of wide_
  WideWeight wide_ = {};
};

// --- with copies, on the CPU provider --------------------------------------------------------------------------------

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
  static Shared* const made = new Shared;  // outlives every session
  return *made;
}

// A constant operand that lies on the GPU already.
struct Resident {
  const char* host;
  int64_t bytes;
  uint64_t data;
};

// One node's turn: takes its operands to the GPU and brings its results back.
class Turn {
 public:
  Turn(const Gpu& gpu, const std::vector<Resident>& residents, int64_t bytes)
      : gpu_(gpu), residents_(residents), lock_(shared().mutex), current_(gpu) {
    next_ = shared().operands.room(gpu, bytes);
  }
  ~Turn() { gpu_.driver().wait(kThreadStream); }  // also after an error: the memory must be free for the next node
  Turn(const Turn&) = delete;

  template <class T>
  T* in(T* host, int64_t bytes) {
    if (host == nullptr || bytes == 0) return nullptr;
    const auto* begin = reinterpret_cast<const char*>(host);
    for (const Resident& resident : residents_) {
      if (begin >= resident.host && begin + bytes <= resident.host + resident.bytes) {
        return reinterpret_cast<T*>(resident.data + uint64_t(begin - resident.host));
      }
    }
    const uint64_t at = take(bytes);
    gpu_.check(gpu_.driver().copy_in(at, host, size_t(bytes), kThreadStream), "copy an operand");
    return reinterpret_cast<T*>(at);
  }

  template <class T>
  T* out(T* host, int64_t bytes) {
    const uint64_t at = take(bytes);
    if (host != nullptr) results_.push_back({reinterpret_cast<char*>(host), bytes, at});
    return reinterpret_cast<T*>(at);
  }

  void run(const Executor& executor, const Plan& plan) {
    executor.run(plan, {kThreadStream, nullptr, shared().scratch.room(gpu_, plan.scratch_bytes)});
    for (const Result& result : results_) {
      if (result.bytes == 0) continue;
      gpu_.check(gpu_.driver().copy_out(result.host, result.data, size_t(result.bytes), kThreadStream),
                 "copy a result");
    }
    gpu_.check(gpu_.driver().wait(kThreadStream), "run the node");
  }

 private:
  struct Result {
    char* host;
    int64_t bytes;
    uint64_t data;
  };

  uint64_t take(int64_t bytes) {
    const uint64_t at = next_;
    next_ += uint64_t(rounded(bytes));
    return at;
  }

  const Gpu& gpu_;
  const std::vector<Resident>& residents_;
  std::lock_guard<std::mutex> lock_;
  Current current_;
  uint64_t next_;
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
      release_residents();  // the destructor of what was not made does not run
      throw;
    }
  }
  ~CopiesBackend() override { release_residents(); }

  void quantize(OrtKernelContext*, QuantizeArgs args) const override {
    const int64_t values = args.outer * args.k * args.inner, scales = args.outer * scale_count(args.k) * args.inner;
    const int64_t x = values * int64_t(value_bytes(args.dtype));
    Turn turn(gpu_, residents_, rounded(x) + rounded(values) + rounded(scales));
    args.x = turn.in(args.x, x);
    args.elements = turn.out(args.elements, values);
    args.scales = turn.out(args.scales, scales);
    turn.run(executor_, plan(args));
  }

  void dequantize(OrtKernelContext*, DequantizeArgs args) const override {
    const int64_t values = args.outer * args.k * args.inner, scales = args.outer * scale_count(args.k) * args.inner;
    const int64_t y = values * int64_t(value_bytes(args.dtype));
    Turn turn(gpu_, residents_, rounded(values) + rounded(scales) + rounded(y));
    args.elements = turn.in(args.elements, values);
    args.scales = turn.in(args.scales, scales);
    args.y = turn.out(args.y, y);
    turn.run(executor_, plan(args));
  }

  void gemm(OrtKernelContext*, GemmArgs args) const override {
    const bool quantized = args.a_scales != nullptr;
    const int64_t blocks = scale_count(args.k);
    const int64_t a = args.m * args.k * (quantized ? 1 : int64_t(value_bytes(args.a_format)));
    const int64_t b = args.n * args.k, y = args.m * args.n * int64_t(value_bytes(args.y_dtype));
    const int64_t a_scales = quantized ? args.m * blocks : 0, b_scales = args.n * blocks, bias = 4 * args.n;
    Turn turn(gpu_, residents_,
              rounded(a) + rounded(a_scales) + rounded(b) + rounded(b_scales) + rounded(bias) + rounded(y));
    args.a = turn.in(args.a, a);
    args.a_scales = turn.in(args.a_scales, a_scales);
    args.b = turn.in(args.b, b);
    args.b_scales = turn.in(args.b_scales, b_scales);
    args.bias = turn.in(args.bias, bias);
    args.y = turn.out(args.y, y);
    turn.run(executor_, plan(executor_.place(false), args, {}));
  }

 private:
  void keep_if_constant(const OrtKernelInfo* info, size_t index) {
    const std::optional<Tensor> tensor = constant(info, index);
    if (!tensor) return;
    int64_t bytes = is_value_dtype(tensor->dtype) ? int64_t(value_bytes(tensor->dtype)) : 1;
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

std::unique_ptr<const Backend> cuda_backend(const std::string& where, const Overload& node, const OrtKernelInfo* info) {
  if (node.device == Device::kCudaCopies) return std::make_unique<CopiesBackend>(where, node, info);
  return std::make_unique<CudaBackend>(where, node, info);
}

}  // namespace mxfp8::ort
