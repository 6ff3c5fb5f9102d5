#include "dtypes.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace mxfp8 {
namespace {

// The row of a code, or null.
template <size_t N>
const Dtype* find(const Dtype (&rows)[N], int code) {
  const Dtype* row = std::find_if(rows, rows + N, [code](const Dtype& each) { return each.code == code; });
  return row == rows + N ? nullptr : row;
}

template <size_t N>
const Dtype& row_with_code(const Dtype (&rows)[N], int code) {
  const Dtype* row = find(rows, code);
  if (row == nullptr) std::abort();
  return *row;
}

}  // namespace

bool is_value_dtype(int dtype) { return find(kValueDtypes, dtype) != nullptr; }
bool is_element_format(int format) { return find(kElementFormats, format) != nullptr; }
int64_t value_bytes(int dtype) { return row_with_code(kValueDtypes, dtype).bytes; }
uint32_t scale_increment(int format, int scale_rounding) {
  if (scale_rounding < 0 || scale_rounding >= int(std::size(kScaleRoundings))) std::abort();
  return row_with_code(kElementFormats, format).increments[scale_rounding];
}

}  // namespace mxfp8
