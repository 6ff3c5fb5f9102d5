#include "cuda_driver.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "../cpu/last_error.h"
#include "../cpu/system.h"

namespace mxfp8::cuda {
namespace {

// Replaced as a whole by mxfp8_cuda_open, and never released: nodes point to the driver they were made with.
struct Connection {
  Driver driver;
  mxfp8_cuda_loader loader;
};
std::mutex mutex;
const Connection* connection = nullptr;

constexpr size_t kMessage = 1024;

// Returns what is wrong, or "".
std::string open_driver(const char* file, Driver* driver) {
  return load_functions(file, {{"cuCtxPushCurrent_v2", &driver->push_context},
                               {"cuCtxPopCurrent_v2", &driver->pop_context},
                               {"cuLaunchKernel", &driver->launch},
                               {"cuMemAlloc_v2", &driver->allocate},
                               {"cuMemFree_v2", &driver->free},
                               {"cuMemcpyHtoDAsync_v2", &driver->copy_in},
                               {"cuMemcpyDtoHAsync_v2", &driver->copy_out},
                               {"cuMemsetD32Async", &driver->fill},
                               {"cuStreamSynchronize", &driver->wait},
                               {"cuGetErrorName", &driver->error_name}});
}

const Connection* current_connection() {
  const std::lock_guard<std::mutex> lock(mutex);
  return connection;
}

}  // namespace

const Driver* connected_driver() {
  const Connection* current = current_connection();
  return current == nullptr ? nullptr : &current->driver;
}

Gpu::Gpu(const std::string& where, int index) : where_(where), index_(index), properties_{} {
  const Connection* current = current_connection();
  if (current == nullptr) {
    throw CudaError(
        where + ": the CUDA driver is not open; expected a call of mxfp8_cuda_open before; use ort.session, or omit " +
        "the session option mxfp8.device");
  }
  driver_ = &current->driver;
  loader_ = current->loader;
  char message[kMessage] = "";
  if (loader_.gpu(index, &properties_, message, sizeof message) != 0) throw CudaError(where + ": " + message);
  if (properties_.cublaslt != nullptr) cublaslt_ = properties_.cublaslt;
  properties_.cublaslt = nullptr;  // the loader may free the text
}

mxfp8_cuda_place Gpu::place() const {
  mxfp8_cuda_place place = {};
  place.capability = properties_.capability;
  place.processors = properties_.processors;
  place.cublaslt = MXFP8_BFLOAT16_PRODUCTS | MXFP8_BLOCK_SCALED_PRODUCTS;
  return place;
}

std::vector<CudaFunction> Gpu::kernels(const std::vector<const char*>& names) const {
  char message[kMessage] = "";
  std::vector<CudaFunction> functions(names.size());
  if (loader_.kernels(index_, int(names.size()), names.data(), functions.data(), message, sizeof message) != 0) {
    throw CudaError(where_ + ": " + message);
  }
  return functions;
}

void Gpu::fail(const char* doing, int status) const {
  const char* name = nullptr;
  driver_->error_name(status, &name);
  throw CudaError(where_ + ": GPU " + std::to_string(index_) + ": cannot " + doing + ": CUDA error " +
                  (name == nullptr ? std::to_string(status) : name) +
                  "; expected success; run with CUDA_LAUNCH_BLOCKING=1 to see which kernel fails");
}

}  // namespace mxfp8::cuda

extern "C" MXFP8_API int mxfp8_cuda_open(const char* driver, const mxfp8_cuda_loader* loader, char* message,
                                         size_t size) {
  using namespace mxfp8::cuda;
  const int status = mxfp8::answer([&] {
    const auto refuse = [](const char* problem, const char* expected, const char* advice) {
      throw mxfp8::Error(MXFP8_BAD_ARGUMENT, problem, expected, advice);
    };
    if (driver == nullptr) refuse("driver is NULL", "a file name", "pass \"libcuda.so.1\"");
    if (loader == nullptr || loader->gpu == nullptr || loader->kernels == nullptr) {
      refuse("loader or one of its functions is NULL", "a loader with the functions gpu and kernels", "pass both");
    }
    auto fresh = std::make_unique<Connection>();
    fresh->loader = *loader;
    const std::string wrong = open_driver(driver, &fresh->driver);
    if (!wrong.empty()) refuse(wrong.c_str(), "", "");
    const std::lock_guard<std::mutex> lock(mutex);
    connection = fresh.release();
  });
  if (status != MXFP8_OK && message != nullptr && size > 0) {
    const char* all = mxfp8_last_error(MXFP8_MESSAGE);
    const size_t length = std::min(size - 1, std::strlen(all));
    std::memcpy(message, all, length);
    message[length] = 0;
  }
  return status;
}
