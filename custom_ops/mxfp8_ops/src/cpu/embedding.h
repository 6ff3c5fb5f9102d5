// MXFP8Embedding.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

// Rows of b [v, d] that indices [count] name, each within -v..v-1.
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

void embedding(const Kernels&, const Parallel&, const EmbeddingArgs&);  // indices are checked before: indices.h

}  // namespace mxfp8
