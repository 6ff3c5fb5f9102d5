// A tree of NH, the hash of UMAC (RFC 4418) and VMAC: a block of words x and a key of as many words k have the hash
//
//   sum over i of (x[2i] + k[2i] mod 2^64) * (x[2i+1] + k[2i+1] mod 2^64), mod 2^128
//
// Two different blocks have the same with a probability of at most 2^-64, over all keys (Black et al., "UMAC: Fast and
// Secure Message Authentication", 1999). The hashes of all blocks are hashed again, with another key, until one is
// left. 16 bytes take one multiplication, so the hash reads memory as fast as one core can.
#include "content_hash.h"

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "tasks.h"

namespace mxfp8 {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int64_t kBlockBytes = 4096;   // with its key, a quarter of the first cache
constexpr int64_t kBlocksOfTask = 256;  // 1 MiB: 50 us
constexpr int kLevels = 6;              // each reduces 4096 bytes to 16: six are enough for 2^60 bytes
constexpr int64_t kDigestBytes = int64_t(sizeof(Digest));
using Key = std::array<uint64_t, kBlockBytes / sizeof(uint64_t)>;

const std::array<Key, kLevels>& keys() {
  static const auto keys = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device(), device(), device(), device(), device()};
    std::mt19937_64 random(seed);
    std::array<Key, kLevels> made;
    for (Key& key : made) {
      for (uint64_t& word : key) word = random();
    }
    return made;
  }();
  return keys;
}

// The hash of up to kBlockBytes, a multiple of kDigestBytes.
Digest hash_block(const Key& key, const uint8_t* data, int64_t bytes) {
  constexpr int64_t chains = 4;  // sums that do not wait for each other: an addition of 128 bits takes two cycles
  Wide sums[chains] = {};
  const auto add = [&](int64_t at, Wide* sum) {
    uint64_t words[2];
    std::memcpy(words, data + at, sizeof words);
    const uint64_t* k = &key[size_t(at) / sizeof(uint64_t)];
    *sum += Wide(words[0] + k[0]) * (words[1] + k[1]);
  };
  int64_t at = 0;
  for (; at + chains * kDigestBytes <= bytes; at += chains * kDigestBytes) {
    for (int64_t i = 0; i < chains; ++i) add(at + i * kDigestBytes, sums + i);
  }
  for (; at < bytes; at += kDigestBytes) add(at, sums);
  const Wide sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return {uint64_t(sum >> 64), uint64_t(sum)};
}

Digest hash_level(const Parallel& parallel, int level, const uint8_t* data, int64_t bytes) {
  const Key& key = keys()[size_t(level)];
  std::vector<Digest> digests(size_t(std::max<int64_t>(1, ceil_div(bytes, kBlockBytes))));
  for_ranges(parallel, int64_t(digests.size()), kBlocksOfTask, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t left = std::min(kBlockBytes, bytes - block * kBlockBytes),
                    whole = left / kDigestBytes * kDigestBytes;
      const uint8_t* from = data + block * kBlockBytes;
      digests[size_t(block)] = hash_block(key, from, whole);
      if (whole == left) continue;
      // The end is padded with zeros. All arrays that are compared have the same size, and so the same padding.
      alignas(8) uint8_t last[kBlockBytes] = {};
      std::memcpy(last, from, size_t(left));
      digests[size_t(block)] = hash_block(key, last, whole + kDigestBytes);
    }
  });
  if (digests.size() == 1) return digests[0];
  return hash_level(parallel, level + 1, reinterpret_cast<const uint8_t*>(digests.data()),
                    int64_t(digests.size()) * kDigestBytes);
}

}  // namespace

Digest content_hash(const Parallel& parallel, const void* data, int64_t bytes) {
  return hash_level(parallel, 0, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace mxfp8
