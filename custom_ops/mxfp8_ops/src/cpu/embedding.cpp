// The split of an embedding into tasks, and its entry point.
#include "embedding.h"

#include "arguments.h"
#include "indices.h"
#include "tasks.h"

namespace mxfp8 {

void embedding(const Kernels& kernels, const Parallel& parallel, const EmbeddingArgs& args) {
  if (args.count == 0 || args.d == 0) return;
  for_equal_ranges(parallel, args.count, args.d,
                   [&](int64_t, int64_t begin, int64_t end) { embedding_kernels[kernels.column](args, begin, end); });
}

}  // namespace mxfp8

using namespace mxfp8;

extern "C" {

int mxfp8_embedding(int index_dtype, const void* indices, int64_t count, int b_format, const uint8_t* b,
                    const uint8_t* b_scales, int64_t v, int64_t d, int y_dtype, void* y, int threads) {
  return computed([&] {
    check_index_dtype("index_dtype", index_dtype);
    check_element_format("b_format", b_format);
    check_value_dtype("y_dtype", y_dtype);
    check_sizes({{"count", count}, {"v", v}, {"d", d}});
    const Parallel parallel = checked_threads(threads);
    check_array(array("indices", indices, index_bytes(index_dtype)), {count});
    if (count > 0 && d > 0) {
      check_array(array("b", b, 1), {v, d});
      check_array(array("b_scales", b_scales, 1), {v, scale_count(d)});
      check_array(array("y", y, value_bytes(y_dtype)), {count, d});
    }
    const EmbeddingArgs e = {index_dtype, indices, count, b_format, b, b_scales, v, d, y_dtype, y};
    const int64_t wrong = first_outside(e);
    if (wrong >= 0) throw outside(e, wrong, std::to_string(wrong));
    embedding(kernels_in_use(), parallel, e);
  });
}

}  // extern "C"
