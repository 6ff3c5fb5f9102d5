// Plans of an embedding.
#include "../cpu/indices.h"
#include "kernels.h"
#include "requests.h"
#include "steps.h"

namespace mxfp8::cuda {
namespace {

const Kernel kEmbedding("embedding", {values(), formats(), flag()});  // ragged

mxfp8_cuda_embedding checked(const mxfp8_cuda_embedding* request) {
  mxfp8_cuda_embedding e = not_null("embedding", request);
  check_index_dtype("index_dtype", e.index_dtype);
  check_element_format("b_format", e.b_format);
  check_value_dtype("y_dtype", e.y_dtype);
  check_sizes({{"count", e.count}, {"v", e.v}, {"d", e.d}});
  if (e.count == 0 || e.d == 0) {
    e.count = e.d = 0;
    return e;
  }
  check_array(at("indices", e.indices, index_bytes(int(e.index_dtype))), {e.count});
  if (e.v > 0) {
    check_array(at("b", e.b, 1), {e.v, e.d});
    check_scales("b_scales", e.b_scales, e.v, e.d, 1);
  }
  check_array(at("y", e.y, bytes_of(e.y_dtype)), {e.count, e.d});
  return e;
}

}  // namespace

template <>
Plan plan(const mxfp8_cuda_embedding& e) {
  const int64_t parts = volume({e.count, ceil_div(e.d, 16)});
  const bool ragged = e.d % 16 != 0 || unaligned({e.b, e.y});
  Steps steps;
  if (parts == 0) return steps.finished();
  const int instance = kEmbedding({value_kind(e.y_dtype), format_choice(element_kind(e.b_format)), ragged});
  steps.launch(instance, ceil_div(parts, kThreads),
               {e.indices, e.b, e.b_scales, e.y, e.count, e.v, e.d, e.index_dtype == MXFP8_INT64});
  return steps.finished();
}

template <>
std::vector<int> kernels<mxfp8_cuda_embedding>(int64_t b_format, int64_t y_dtype) {
  std::vector<int> numbers;
  kEmbedding.append(&numbers, {value_kind(y_dtype), format_choice(element_kind(b_format)), Kernel::kAny});
  return numbers;
}

}  // namespace mxfp8::cuda

MXFP8_CUDA_PLAN(embedding)
