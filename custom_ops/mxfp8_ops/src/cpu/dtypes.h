// Looks up the dtypes and element formats of contract.h by their codes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../contract.h"

namespace mxfp8 {

// The number of blocks, and so of scales, in k values. k + 31 could overflow here: sizes are not checked yet.
inline int64_t scale_count(int64_t k) { return k / kBlock + (k % kBlock != 0); }

bool is_value_dtype(int dtype);
bool is_element_format(int format);

// Bytes of one value, and formats.scale_increment: the number that is added to the bits of amax before its exponent is
// read. An unknown code ends the process: entry points check codes first.
int64_t value_bytes(int dtype);
uint32_t scale_increment(int format, int scale_rounding);

}  // namespace mxfp8
