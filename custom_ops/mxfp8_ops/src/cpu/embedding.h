// MXFP8Embedding: its arguments and its kernel.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

// y [count, d]: the rows of b [v, d] that indices [count] name. An index is within -v..v-1.
struct EmbeddingArgs {
  int index_dtype;
  const void* indices;
  int64_t count;
  int b_format;
  const uint8_t* b;
  const uint8_t* b_scales;
  int64_t v, d;
  int y_dtype;
  void* y;
};

MXFP8_KERNEL(void, embedding, const EmbeddingArgs&, int64_t begin, int64_t end)

void embedding(const Kernels&, const Parallel&, const EmbeddingArgs&);  // the caller has checked the indices: indices.h

}  // namespace mxfp8
