// The indices of an embedding: both faces of the library look at them before a row is read.
#pragma once
#include <cstdint>
#include <string>

#include "../error.h"
#include "embedding.h"

namespace mxfp8 {

bool is_index_dtype(int64_t dtype);
int64_t index_bytes(int dtype);

// Where the first index is that names no row; -1 if each names one.
int64_t first_outside(const EmbeddingArgs&);

// The error for it: "index 7 at (1, 0)", "-7 to 6, for a table of 7 rows", "pass ids that the table has".
Error outside(const EmbeddingArgs&, int64_t position, const std::string& place);

}  // namespace mxfp8
