// The nodes on a GPU: where their operands lie and on which stream they run. Which kernels: cuda_launch.h.
#include <mutex>
#include <optional>

#include "../cpu/ops.h"
#include "backend.h"
#include "cuda_launch.h"

namespace mxfp8::ort {
namespace {

constexpr int kCudaResourceVersion = 3, kCublasHandle = 10002;  // cuda_resource.h of ONNX Runtime

// The kernels of one node: one of the three is there.
struct NodeLaunches {
  NodeLaunches(const Gpu& gpu, const Overload& node) {
    const int first = node.inputs[0];
    switch (node.op) {
      case Op::kQuantize:
        quantize.emplace(gpu, first, node.outputs[0]);
        break;
      case Op::kDequantize:
        dequantize.emplace(gpu, first, node.outputs[0]);
        break;
      case Op::kGemm:
      case Op::kWeightGemm:
        gemm.emplace(gpu, first, node.inputs[node.op == Op::kGemm ? 2 : 1]);
    }
  }
  std::optional<CudaQuantize> quantize;
  std::optional<CudaDequantize> dequantize;
  std::optional<CudaGemm> gemm;
};

int64_t scale_count(int64_t k) { return (k + kBlock - 1) / kBlock; }

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
      : memory_(info), gpu_(where, memory_.gpu()), launches_(gpu_, node) {
    if (node.keep_wide && launches_.gemm) keep_wide(info, node.op == Op::kGemm ? 2 : 1);
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
    (*launches_.quantize)(args, stream);
  }

  void dequantize(OrtKernelContext* context, const DequantizeArgs& args) const override {
    const Current current(gpu_);
    (*launches_.dequantize)(args, stream_of(context));
  }

  void gemm(OrtKernelContext* context, const GemmArgs& args) const override {
    const Stream stream = stream_of(context);
    void* cublas = cublas_of(context);
    const WideWeight* wide = kept_ == 0 ? nullptr : &wide_;
    const size_t bytes = launches_.gemm->scratch_bytes(args, cublas != nullptr, wide != nullptr);
    const Scratch scratch(memory_, context, stream, bytes);
    const Current current(gpu_);
    (*launches_.gemm)(args, {stream, cublas, reinterpret_cast<char*>(scratch.data()), wide});
  }

 private:
  // Where B is a constant matrix - which lies on the GPU already -, makes it wide now.
  void keep_wide(const OrtKernelInfo* info, size_t index) {
    const std::optional<Tensor> b = constant(info, index), scales = constant(info, index + 1);
    if (!b || !scales || b->dims.size() != 2) return;
    const int64_t n = b->dims[0], k = b->dims[1];
    if (n * k == 0 || scales->dims != Dims{n, scale_count(k)}) return;  // the second is an error when the node runs
    const Current current(gpu_);
    gpu_.check(gpu_.driver().allocate(&kept_, size_t(256 + 2 * n * k)), "allocate memory for a weight");
    wide_ = {reinterpret_cast<void*>(kept_ + 256), reinterpret_cast<uint32_t*>(kept_)};
    const Stream stream = nullptr;  // any would do: ONNX Runtime has waited for its copies of constants
    try {
      gpu_.check(gpu_.driver().fill(kept_, 0, 1, stream), "clear memory");
      launches_.gemm->widen(static_cast<const uint8_t*>(b->data), static_cast<const uint8_t*>(scales->data), n, k,
                            wide_, stream);
      gpu_.check(gpu_.driver().wait(stream), "dequantize a weight");
    } catch (...) {
      gpu_.driver().free(kept_);
      throw;
    }
  }

  Memory memory_;
  Gpu gpu_;
  NodeLaunches launches_;
  uint64_t kept_ = 0;  // memory of the word and the weight of wide_
  WideWeight wide_ = {};
};

// --- with copies, on the CPU provider --------------------------------------------------------------------------------

constexpr int kCopiesGpu = 0;
const Stream kThreadStream = reinterpret_cast<Stream>(2);  // CU_STREAM_PER_THREAD

int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The memory of all nodes with copies: one node at a time uses it. It grows to what the largest node needs.
struct Arena {
  std::mutex mutex;
  uint64_t data = 0;
  int64_t bytes = 0;
};
Arena& arena() {
  static Arena* const made = new Arena;  // outlives every session
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
      : gpu_(gpu), residents_(residents), lock_(arena().mutex), current_(gpu) {
    Arena& memory = arena();
    if (bytes > memory.bytes) {
      if (memory.data != 0) gpu.check(gpu.driver().free(memory.data), "free memory");
      memory.data = 0, memory.bytes = 0;
      gpu.check(gpu.driver().allocate(&memory.data, size_t(bytes)), "allocate memory");
      memory.bytes = bytes;
    }
    next_ = memory.data;
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

  void finish() {
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
      : gpu_(where, kCopiesGpu), launches_(gpu_, node) {
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
    (*launches_.quantize)(args, kThreadStream);
    turn.finish();
  }

  void dequantize(OrtKernelContext*, const DequantizeArgs& given) const override {
    DequantizeArgs args = given;
    const int64_t values = args.outer * args.k * args.inner, scales = args.outer * scale_count(args.k) * args.inner;
    const int64_t y = values * int64_t(value_bytes(args.dtype));
    Turn turn(gpu_, residents_, rounded(values) + rounded(scales) + rounded(y));
    args.elements = turn.in(args.elements, values);
    args.scales = turn.in(args.scales, scales);
    args.y = turn.out(args.y, y);
    (*launches_.dequantize)(args, kThreadStream);
    turn.finish();
  }

  void gemm(OrtKernelContext*, const GemmArgs& given) const override {
    GemmArgs args = given;
    const bool quantized = args.a_scales != nullptr;
    const int64_t blocks = scale_count(args.k);
    const int64_t a = args.m * args.k * (quantized ? 1 : int64_t(value_bytes(args.a_format)));
    const int64_t b = args.n * args.k, y = args.m * args.n * int64_t(value_bytes(args.y_dtype));
    const int64_t a_scales = quantized ? args.m * blocks : 0, b_scales = args.n * blocks, bias = 4 * args.n;
    GemmArgs there = args;  // addresses on the GPU are aligned, or need no scratch memory
    there.a = there.y = nullptr, there.b = nullptr;
    const int64_t scratch = int64_t(launches_.gemm->scratch_bytes(there, false));
    Turn turn(gpu_, residents_,
              rounded(a) + rounded(a_scales) + rounded(b) + rounded(b_scales) + rounded(bias) + rounded(y) +
                  rounded(scratch));
    args.a = turn.in(args.a, a);
    args.a_scales = turn.in(args.a_scales, a_scales);
    args.b = turn.in(args.b, b);
    args.b_scales = turn.in(args.b_scales, b_scales);
    args.bias = turn.in(args.bias, bias);
    args.y = turn.out(args.y, y);
    char* const unused = nullptr;
    (*launches_.gemm)(args, {kThreadStream, nullptr, scratch == 0 ? nullptr : turn.out(unused, scratch)});
    turn.finish();
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
  NodeLaunches launches_;
  std::vector<Resident> residents_;
};

}  // namespace

std::unique_ptr<const Backend> cuda_backend(const std::string& where, const Overload& node, const OrtKernelInfo* info) {
  if (node.device == Device::kCudaCopies) return std::make_unique<CopiesBackend>(where, node, info);
  return std::make_unique<CudaBackend>(where, node, info);
}

}  // namespace mxfp8::ort
