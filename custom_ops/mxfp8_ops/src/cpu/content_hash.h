// A 128-bit hash of memory, by which weights are known: an address says nothing once its memory is freed.
#pragma once
#include <cstdint>
#include <tuple>

namespace mxfp8 {

struct Digest {
  uint64_t high, low;
  bool operator<(const Digest& other) const { return std::tie(high, low) < std::tie(other.high, other.low); }
};

// Two different arrays of equal size have the same digest with a probability below 2^-61. That holds for arrays that an
// attacker chooses, too: each process has a random key.
Digest content_hash(const void* data, int64_t bytes);

}  // namespace mxfp8
