#include "executor.h"

#include <map>
#include <memory>
#include <mutex>

#include "../cpu/profile.h"
#include "cublaslt.h"
#include "kernels.h"

namespace mxfp8::cuda {

Executor::Executor(const Gpu& gpu) : gpu_(gpu), loads_later_(true), functions_(kernel_names().size()) {}

Executor::Executor(const Gpu& gpu, const std::vector<int>& kernels) : Executor(gpu) {
  std::vector<const char*> names;
  for (const int number : kernels) names.push_back(kernel_names()[size_t(number)].c_str());
  const std::vector<CudaFunction> functions = gpu_.kernels(names);
  for (size_t i = 0; i < kernels.size(); ++i) functions_[size_t(kernels[i])] = functions[i];
  loads_later_ = false;
}

const Executor& Executor::for_gpu(int index) {
  using Key = std::pair<const Driver*, int>;
  static std::mutex mutex;
  static auto& all = *new std::map<Key, std::unique_ptr<const Executor>>;  // until the process ends
  const Key key = {connected_driver(), index};
  const auto find = [&](std::unique_ptr<const Executor> fresh) -> const Executor* {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = all.find(key);
    if (known != all.end()) return known->second.get();
    return fresh == nullptr ? nullptr : all.emplace(key, std::move(fresh)).first->second.get();
  };
  if (const Executor* known = find(nullptr)) return *known;
  // Made without the lock: the loader may run Python, and a thread that has Python's lock may wait for this one.
  return *find(std::unique_ptr<const Executor>(new Executor(Gpu("cuda", index))));
}

// Two threads may load a kernel at once: the loader gives both the same.
CudaFunction Executor::function(const mxfp8_cuda_step& step) const {
  std::atomic<CudaFunction>& slot = functions_[size_t(step.kernel)];
  CudaFunction function = slot.load(std::memory_order_acquire);
  if (function != nullptr) return function;
  const std::string& name = kernel_names()[size_t(step.kernel)];
  if (!loads_later_) {
    throw CudaError(gpu_.where() + ": " + name + "; expected a kernel that is loaded; report this as a bug");
  }
  function = gpu_.kernels({name.c_str()})[0];
  slot.store(function, std::memory_order_release);  // last: another thread may launch it as soon as it is here
  return function;
}

Ask Executor::ask(Warning* warning) const {
  return [this, warning](const LtProduct& product) {
    const Current current(gpu_);
    return CublasLt::of(gpu_).multiplies(gpu_, product, &warning->text);
  };
}

void Executor::run(const Plan& plan, const Resources& resources) const {
  const Driver& driver = gpu_.driver();
  ran_on_gpu(plan.route < 0 ? "" : mxfp8_cuda_route_at(plan.route)->name);
  for (mxfp8_cuda_step step : plan.steps) {
    void* parameters[MXFP8_MOST_ARGUMENTS];
    for (int i = 0; i < step.count; ++i) {
      if (step.in_scratch >> i & 1) step.arguments[i] += int64_t(resources.scratch);
      parameters[i] = &step.arguments[i];  // every parameter of a kernel has 8 bytes
    }
    if (step.step == MXFP8_LAUNCH) {
      gpu_.check(driver.launch(function(step), unsigned(step.grid), 1, 1, unsigned(step.block), 1, 1, 0,
                               resources.stream, parameters, nullptr),
                 "launch");
    } else if (step.step == MXFP8_CLEAR) {
      gpu_.check(driver.fill(uint64_t(step.arguments[0]), 0, size_t(step.arguments[1]), resources.stream),
                 "clear memory");
    } else {
      CublasLt::of(gpu_).multiply(gpu_, step.arguments, resources.stream);
    }
  }
}

}  // namespace mxfp8::cuda
