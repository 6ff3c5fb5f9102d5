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

namespace mxfp8 {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int64_t kBlockBytes = 4096;  // with its key, a quarter of the first cache
constexpr int kLevels = 6;  // each reduces 4096 bytes to 16: six are enough for 2^48 bytes, more than an array has
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

// The digests of one level, until there is a block of them.
struct Level {
  Digest digests[kBlockBytes / kDigestBytes];
  int64_t count = 0;
};

// Hashes are added block by block, so the tree takes no memory but one block for each level.
class Tree {
 public:
  void add(int level, Digest digest) {
    Level& full = levels_[level];
    full.digests[full.count++] = digest;
    if (full.count * kDigestBytes == kBlockBytes) close(level);
  }
  // The digest of all: closes each level, from the lowest up, until one digest is left.
  Digest root() {
    for (int level = 0; level < kLevels - 1; ++level) {
      bool is_top = true;
      for (int above = level + 1; above < kLevels; ++above) is_top = is_top && levels_[above].count == 0;
      if (is_top && levels_[level].count == 1) return levels_[level].digests[0];
      if (levels_[level].count > 0) close(level);
    }
    return levels_[kLevels - 1].digests[0];
  }

 private:
  void close(int level) {
    if (level + 1 == kLevels) return;  // no array has so many bytes
    Level& full = levels_[level];
    const Digest digest = hash_block(keys()[size_t(level + 1)], reinterpret_cast<const uint8_t*>(full.digests),
                                     full.count * kDigestBytes);
    full.count = 0;
    add(level + 1, digest);
  }

  Level levels_[kLevels];
};

}  // namespace

Digest content_hash(const void* data, int64_t bytes) {
  Tree tree;
  const auto* from = static_cast<const uint8_t*>(data);
  for (; bytes >= kBlockBytes; from += kBlockBytes, bytes -= kBlockBytes) {
    tree.add(0, hash_block(keys()[0], from, kBlockBytes));
  }
  // The end is padded with zeros. All arrays that are compared have the same size, and so the same padding.
  alignas(8) uint8_t last[kBlockBytes] = {};
  if (bytes > 0) std::memcpy(last, from, size_t(bytes));
  tree.add(0, hash_block(keys()[0], last, (bytes + kDigestBytes - 1) / kDigestBytes * kDigestBytes));
  return tree.root();
}

}  // namespace mxfp8
