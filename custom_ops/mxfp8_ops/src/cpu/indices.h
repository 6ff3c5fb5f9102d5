// Checks the indices of an embedding. The C ABI and the ONNX Runtime node call this before they read a row.
#pragma once
#include <cstdint>
#include <string>

#include "../error.h"
#include "embedding.h"

namespace mxfp8 {

bool is_index_dtype(int64_t dtype);
int64_t index_bytes(int dtype);

// The position of the first index that names no row; -1 if every index names one.
int64_t first_outside(const EmbeddingArgs&);

// The error for the index at `position`: "index 7 at (1, 0)", "-7 to 6, for a table of 7 rows", "pass ids that the
// table has".
Error outside(const EmbeddingArgs&, int64_t position, const std::string& place);

}  // namespace mxfp8
