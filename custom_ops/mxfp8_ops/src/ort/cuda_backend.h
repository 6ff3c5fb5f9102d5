// Shared by both backends on a GPU. cuda_host plans their launches.
#pragma once
#include "../cuda_host/executor.h"
#include "backend.h"

namespace mxfp8::ort {

// The kernels of a node, loaded.
cuda::Executor executor(const Overload&, const cuda::Gpu&);

void release(const cuda::Gpu&, const std::vector<uint64_t>& memory);

}  // namespace mxfp8::ort
