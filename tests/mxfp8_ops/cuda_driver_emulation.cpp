// A CUDA driver on the CPU: what libmxfp8_ops uses of libcuda, over the kernels of cuda_emulation.py.
//
// Its memory is the host's, poisoned, and bounded unless the test has memory of its own: a copy outside it, or a kernel
// that is given an address which is not of it, is an error. So are a launch without a current context and calls on any
// stream but the one that is expected.
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

// Kernel -1: zeros into `grid` words from the first parameter on.
struct Launch {
  int64_t kernel, grid, stream;
  uint64_t parameters[16];
};

std::mutex mutex;  // the emulation runs one block at a time
std::map<uint64_t, size_t> memory;
std::vector<Launch> launches;
int (*emulate)(int, unsigned, int, const uint64_t*);
int (*parameter_count)(int);
uint64_t expected_stream;
bool bounded;
thread_local std::vector<void*> contexts;

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kIllegalAddress = 700;
size_t most;                                      // bytes one allocation may have
size_t copied_in;                                 // bytes
constexpr uint64_t kLargest = uint64_t(1) << 32;  // above every parameter of these tests that is not an address

constexpr uint64_t kAnyStream = ~uint64_t(0);

bool usable(const void* stream) {
  return !contexts.empty() && (expected_stream == kAnyStream || reinterpret_cast<uint64_t>(stream) == expected_stream);
}

bool inside(uint64_t address, size_t bytes) {
  if (!bounded) return true;
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

}  // namespace

extern "C" {

void start(void* emulate_function, void* parameter_function, uint64_t stream, int only_own_memory) {
  emulate = reinterpret_cast<decltype(emulate)>(emulate_function);
  parameter_count = reinterpret_cast<decltype(parameter_count)>(parameter_function);
  expected_stream = stream;
  bounded = only_own_memory != 0;
  most = size_t(1) << 30;
  copied_in = 0;
  launches.clear();
}
size_t launch_count() { return launches.size(); }
const Launch* launch(size_t i) { return &launches[i]; }
// Memory that the test allocates and frees.
void adopt(uint64_t address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  memory[address] = bytes;
}
void disown(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  memory.erase(address);
}
size_t memory_count() { return memory.size(); }
size_t bytes_copied_in() { return copied_in; }
void set_most(size_t bytes) { most = bytes; }
size_t context_depth() { return contexts.size(); }

int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (contexts.empty()) return kInvalidContext;
  if (bytes == 0) return kInvalidValue;
  if (bytes > most) return kOutOfMemory;
  void* data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(data, 0xAA, bytes);
  *address = reinterpret_cast<uint64_t>(data);
  memory[*address] = bytes;
  return 0;
}

int cuMemFree_v2(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (contexts.empty()) return kInvalidContext;
  if (memory.erase(address) == 0) return kInvalidValue;
  free(reinterpret_cast<void*>(address));
  return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!usable(stream)) return kInvalidContext;
  if (!inside(to, bytes) || inside(reinterpret_cast<uint64_t>(from), 1)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  copied_in += bytes;
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!usable(stream)) return kInvalidContext;
  if (!inside(from, bytes) || inside(reinterpret_cast<uint64_t>(to), 1)) return kInvalidValue;
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t words, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!usable(stream)) return kInvalidContext;
  if (!inside(address, 4 * words)) return kInvalidValue;
  for (size_t i = 0; i < words; ++i) reinterpret_cast<unsigned*>(address)[i] = value;
  launches.push_back({-1, int64_t(words), int64_t(reinterpret_cast<intptr_t>(stream)), {address}});
  return 0;
}

int cuStreamSynchronize(void* stream) { return usable(stream) ? 0 : kInvalidContext; }

// A function is its number among cuda_emulation.kernels(), plus one.
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* stream, void** parameters, void** extra) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!usable(stream)) return kInvalidContext;
  if (x == 0 || y != 1 || z != 1 || threads_y != 1 || threads_z != 1 || shared != 0 || extra != nullptr)
    return kInvalidValue;
  const int kernel = int(reinterpret_cast<intptr_t>(function)) - 1;
  Launch made{kernel, x, int64_t(reinterpret_cast<intptr_t>(stream)), {}};
  const int count = parameter_count(kernel);
  for (int i = 0; i < count; ++i) {
    std::memcpy(&made.parameters[i], parameters[i], 8);
    if (!inside(made.parameters[i], 1) && made.parameters[i] > kLargest) return kIllegalAddress;
  }
  launches.push_back(made);
  if (emulate == nullptr) return 0;  // only the launches are of interest
  return emulate(kernel, x, int(threads), made.parameters) == 0 ? 0 : kInvalidValue;
}

int cuGetErrorName(int status, const char** name) {
  *name = status == kInvalidValue     ? "CUDA_ERROR_INVALID_VALUE"
          : status == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : status == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : nullptr;
  return 0;
}

}  // extern "C"
