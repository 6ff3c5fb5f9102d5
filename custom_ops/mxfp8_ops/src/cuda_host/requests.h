// The checks of the planner's C ABI: shared by the files of its requests. These functions throw Error, which names the
// field. A request with an empty tensor goes on with all sizes 0: its other fields are not checked.
#pragma once
#include "../cpu/arguments.h"
#include "planner.h"
#include "routes.h"

namespace mxfp8::cuda {

// An array on a GPU; 0 is not a valid address there either.
inline Array at(const char* name, int64_t address, int64_t value_bytes) {
  return {name, uint64_t(address), value_bytes};
}
inline int64_t bytes_of(int64_t code) { return row_of(kind_of(code)).bytes; }

inline void check_scales(const char* name, int64_t address, int64_t outer, int64_t k, int64_t inner) {
  check_array(at(name, address, 1), {outer, k / kBlock + (k % kBlock != 0), inner});
}

template <class T>
const T& not_null(const char* name, const T* request) {
  if (request != nullptr) return *request;
  throw Error(MXFP8_BAD_ARGUMENT, std::string(name) + " is NULL", "the address of a struct", "pass one");
}

}  // namespace mxfp8::cuda

// Defines the function of the C ABI that plans a mxfp8_cuda_NAME, by `checked` and `plan`.
#define MXFP8_CUDA_PLAN(NAME)                                                                                      \
  extern "C" MXFP8_API int mxfp8_cuda_plan_##NAME(const mxfp8_cuda_##NAME* request, const mxfp8_cuda_queue* queue, \
                                                  mxfp8_cuda_plan* to) {                                           \
    using namespace mxfp8::cuda;                                                                                   \
    return answer_with(queue, to, [&] { return plan(checked(request)); });                                         \
  }
