// What the entry points of the C ABI share: the checks, before one reads or writes a byte of an array, and what they
// run on. These functions throw Error, which names the argument.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "dtypes.h"
#include "isa.h"
#include "last_error.h"
#include "parallel.h"
#include "profile.h"

namespace mxfp8 {

// The answer to a call that computes something.
template <class Body>
int computed(const Body& body) {
  const ProfiledCall call(nullptr);
  return answer(body);
}

// The instruction set that such a call runs on. Throws Error.
const Kernels& kernels_in_use();

// The library's own threads, so many at most.
Parallel checked_threads(int threads);

// The most bytes of an array: no process has room for more. Far enough from 2^63 for everything that is counted about
// an array - its tasks, its multiply-adds, its packed form - to be an int64_t.
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
// None may be below 0.
void check_sizes(std::initializer_list<Size> sizes);

// `size` may be `least` .. `most`.
void check_range(Size size, int64_t least, int64_t most);

// A dense array with these sizes, none below 0; or a matrix of rows `stride` values apart. If it has values, it needs
// an address that is a multiple of what each takes, and must not end beyond the address space or have more than
// kMostBytes.
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
