// The dtypes and element formats of contract.h by their codes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../contract.h"

namespace mxfp8 {

// Blocks of k values.
inline int64_t scale_count(int64_t k) { return k / kBlock + (k % kBlock != 0); }

bool is_value_dtype(int dtype);
bool is_element_format(int format);

// Bytes of one value, and formats.scale_increment: what to add to the bits of amax before its exponent is read. Codes
// that are unknown end the process.
int64_t value_bytes(int dtype);
uint32_t scale_increment(int format, int scale_rounding);

}  // namespace mxfp8
