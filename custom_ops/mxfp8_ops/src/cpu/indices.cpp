#include "indices.h"

#include <algorithm>

namespace mxfp8 {
namespace {

template <class Call>
auto with_indices(const EmbeddingArgs& args, const Call& call) {
  return args.index_dtype == MXFP8_INT32 ? call(static_cast<const int32_t*>(args.indices))
                                         : call(static_cast<const int64_t*>(args.indices));
}

}  // namespace

bool is_index_dtype(int64_t dtype) { return dtype == MXFP8_INT32 || dtype == MXFP8_INT64; }

int64_t index_bytes(int dtype) { return dtype == MXFP8_INT32 ? 4 : 8; }

int64_t first_outside(const EmbeddingArgs& args) {
  return with_indices(args, [&](const auto* indices) {
    const auto* end = indices + args.count;
    const auto* first = std::find_if(indices, end, [&](int64_t i) { return i < -args.v || i >= args.v; });
    return first == end ? -1 : int64_t(first - indices);
  });
}

Error outside(const EmbeddingArgs& args, int64_t position, const std::string& place) {
  const auto index = with_indices(args, [&](const auto* indices) { return int64_t(indices[position]); });
  const std::string rows = std::to_string(args.v);
  return {MXFP8_BAD_ARGUMENT, "index " + std::to_string(index) + " at " + place,
          args.v == 0 ? "none: the table has no rows"
                      : "-" + rows + " to " + std::to_string(args.v - 1) + ", for a table of " + rows + " rows",
          "pass ids that the table has"};
}

}  // namespace mxfp8
