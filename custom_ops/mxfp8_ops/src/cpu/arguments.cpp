#include "arguments.h"

#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <string>

#include "../contract.h"
#include "indices.h"

namespace mxfp8 {
namespace {

[[noreturn]] void refuse(const std::string& problem, const std::string& expected, const std::string& advice) {
  throw Error(MXFP8_BAD_ARGUMENT, problem, expected, advice);
}

std::string is(const char* name, int64_t value) { return std::string(name) + " is " + std::to_string(value); }

template <size_t N>
void check_code(const char* name, int64_t code, const Dtype (&rows)[N]) {
  std::string choices;
  for (const Dtype& row : rows) {
    if (row.code == code) return;
    choices += (choices.empty() ? "" : ", ") + std::to_string(row.code) + " (" + row.name + ")";
  }
  refuse(is(name, code), "one of " + choices, "pass a code of mxfp8_ops.h");
}

// Checks an array of `count` values; `overflows` says that the count is no int64_t.
void check_bytes(const Array& a, bool overflows, int64_t count) {
  int64_t bytes = 0;
  if (overflows || __builtin_mul_overflow(count, a.value_bytes, &bytes) || bytes > kMostBytes) {
    refuse(std::string(a.name) + " would have more than " + std::to_string(kMostBytes) + " bytes",
           "an array that fits in memory", "correct the sizes");
  }
  if (bytes == 0) return;
  if (a.address == 0) {
    refuse(std::string(a.name) + " is NULL", "the address of " + std::to_string(bytes) + " bytes", "pass an array");
  }
  char address[32];
  std::snprintf(address, sizeof address, "0x%" PRIx64, a.address);
  if (a.address % uint64_t(a.value_bytes) != 0) {
    refuse(std::string(a.name) + " is at " + address, "a multiple of " + std::to_string(a.value_bytes),
           "copy the array to aligned memory");
  }
  constexpr uint64_t end = uint64_t(sizeof(void*) > 4 ? INT64_MAX : UINT32_MAX);
  if (a.address > end - uint64_t(bytes)) {
    refuse(std::string(a.name) + " is at " + address + " and has " + std::to_string(bytes) + " bytes",
           "an array that ends inside the address space", "correct the address or the sizes");
  }
}

}  // namespace

void check_value_dtype(const char* name, int64_t dtype) { check_code(name, dtype, kValueDtypes); }
void check_activation_dtype(const char* name, int64_t dtype) { check_code(name, dtype, kActivationDtypes); }
void check_element_format(const char* name, int64_t format) { check_code(name, format, kElementFormats); }
void check_index_dtype(const char* name, int64_t dtype) {
  if (is_index_dtype(dtype)) return;
  refuse(is(name, dtype), "one of 6 (int32), 7 (int64)", "pass a code of mxfp8_ops.h");
}
void check_rounding(const char* name, int64_t rounding) {
  check_range({name, rounding}, 0, int64_t(std::size(kScaleRoundings)) - 1);
}
void check_epilogue(const char* name, int64_t epilogue) {
  check_range({name, epilogue}, 0, int64_t(std::size(kEpilogues)) - 1);
}

void check_sizes(std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    if (size.value < 0) refuse(is(size.name, size.value), "0 or more", "pass the size of an array");
  }
}

void check_range(Size size, int64_t least, int64_t most) {
  if (size.value >= least && size.value <= most) return;
  refuse(is(size.name, size.value),
         std::to_string(least) + (most == INT64_MAX ? " or more" : " to " + std::to_string(most)), "correct it");
}

void check_array(const Array& array, std::initializer_list<int64_t> sizes) {
  int64_t count = 1;
  bool overflows = false;
  for (const int64_t size : sizes) {
    if (size == 0) return;
    overflows = overflows || __builtin_mul_overflow(count, size, &count);
  }
  check_bytes(array, overflows, count);
}

void check_rows(const Array& array, int64_t rows, int64_t columns, int64_t stride) {
  if (rows == 0 || columns == 0) return;
  int64_t count = 0;
  const bool overflows =
      __builtin_mul_overflow(rows - 1, stride, &count) || __builtin_add_overflow(count, columns, &count);
  check_bytes(array, overflows, count);
}

void check_blocks(const uint8_t* elements, const uint8_t* scales, int64_t outer, int64_t k, int64_t inner) {
  check_array(array("elements", elements, 1), {outer, k, inner});
  check_array(array("scales", scales, 1), {outer, scale_count(k), inner});
}

const Kernels& kernels_in_use() {
  const Kernels* table = kernels();
  if (table == nullptr) {
    throw Error(MXFP8_NO_SUCH_ISA, "MXFP8_ISA names an instruction set that this machine lacks",
                "one of " + std::string(available_isas()), "correct the environment variable");
  }
  runs_on(*table);
  return *table;
}

Parallel checked_threads(int threads) {
  check_range({"threads", threads}, 0, INT64_MAX);
  return own_threads(threads);
}

}  // namespace mxfp8
