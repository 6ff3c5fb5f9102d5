// Shared by the entry points of the C ABI: the checks of arguments, which come before any array is read or written, and
// the choice of kernels and threads. These functions throw Error, which names the argument.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "dtypes.h"
#include "isa.h"
#include "last_error.h"
#include "parallel.h"
#include "profile.h"

namespace mxfp8 {

// Runs the body of a call that computes, and returns its status. Such a call appears in the profile.
template <class Body>
int computed(const Body& body) {
  const ProfiledCall call(nullptr);
  return answer(body);
}

// The kernels of such a call. Throws Error if MXFP8_ISA names an instruction set that is not available.
const Kernels& kernels_in_use();

// At most `threads` of the library's own threads; 0 means one per processor.
Parallel checked_threads(int threads);

// The most bytes of an array: no process has room for more. This is so far below 2^63 that the tasks, the multiply-adds
// and the packed bytes of an array are int64_t too.
constexpr int64_t kMostBytes = int64_t(sizeof(void*) > 4 ? uint64_t(1) << 48 : uint64_t(1) << 31);

void check_value_dtype(const char* name, int64_t dtype);
// The dtype that values are rounded to before they are multiplied: MXFP8_FLOAT32 (no rounding) or MXFP8_BFLOAT16.
void check_activation_dtype(const char* name, int64_t dtype);
void check_element_format(const char* name, int64_t format);
void check_index_dtype(const char* name, int64_t dtype);
void check_rounding(const char* name, int64_t rounding);
void check_epilogue(const char* name, int64_t epilogue);

struct Size {
  const char* name;
  int64_t value;
};
// Throws Error for a size below 0.
void check_sizes(std::initializer_list<Size> sizes);

// Throws Error for a size outside of `least` .. `most`.
void check_range(Size size, int64_t least, int64_t most);

// Checks of a dense array with these sizes, none below 0, or of a matrix whose rows are `stride` values apart. If the
// array has values, its address is a multiple of the bytes of one value, it ends inside the address space, and it has
// at most kMostBytes.
struct Array {
  const char* name;
  uint64_t address;
  int64_t value_bytes;
};
inline Array array(const char* name, const void* data, int64_t value_bytes) {
  return {name, uint64_t(reinterpret_cast<uintptr_t>(data)), value_bytes};
}
void check_array(const Array& array, std::initializer_list<int64_t> sizes);
void check_rows(const Array& array, int64_t rows, int64_t columns, int64_t stride);

// Elements and scales [outer, k, inner], blocked along k.
void check_blocks(const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k, int64_t inner);

// The stride of a single row is never used, so it may have any value.
inline int64_t stride_of(int64_t rows, int64_t columns, int64_t stride) {
  return rows > 1 && columns > 0 ? stride : columns;
}

}  // namespace mxfp8
