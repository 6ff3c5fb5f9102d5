// What every part of mxfp8_hostile shares: random arguments, the memory behind them, and the check of a call's status.
#pragma once
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>

#include "mxfp8_ops.h"

namespace hostile {

using Random = std::mt19937_64;
__extension__ typedef __int128 Wide;

constexpr Wide kMostBytes = Wide(1) << 48;
constexpr Wide kMostHere = 1 << 21;  // bytes that a call of this program may really touch
constexpr uint8_t kUntouched = 0xa5;

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "hostile: %s\n", what.c_str());
  std::_Exit(1);  // other threads are still at work on what std::exit would take away
}

inline bool chance(Random& random, int one_in) { return random() % uint64_t(one_in) == 0; }
template <class T, size_t N>
T one_of(Random& random, const T (&choices)[N]) {
  return choices[random() % N];
}

inline int64_t hostile_number(Random& random) {
  const int64_t numbers[] = {-1, -32, INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 31, INT32_MAX, INT32_MIN};
  if (chance(random, 3)) return one_of(random, numbers);
  const int64_t power = int64_t(1) << (33 + random() % 30);
  if (chance(random, 8)) return int64_t(random());
  return power + int64_t(random() % 3) - 1;
}
inline int64_t size(Random& random, int hostile) {
  const int64_t small[] = {0, 1, 1, 2, 3, 5, 16, 17, 31, 32, 33, 63, 64, 65, 70, 96}, large[] = {130, 300, 520};
  if (chance(random, hostile)) return hostile_number(random);
  return chance(random, 60) ? one_of(random, large) : one_of(random, small);
}
// A stride for rows of that many values; wraps, which makes it one to be refused.
inline int64_t above(Random& random, int64_t columns) { return int64_t(uint64_t(columns) + random() % 4); }
inline int code(Random& random, std::initializer_list<int> known, int hostile) {
  const int others[] = {0, 2, 18, 20, 99, -1, INT_MAX, INT_MIN, 3, 1, 10, 16, 17, 19};
  return chance(random, hostile) ? one_of(random, others) : known.begin()[random() % known.size()];
}
inline bool is_one_of(int64_t value, std::initializer_list<int> known) {
  for (const int each : known) {
    if (value == each) return true;
  }
  return false;
}
#define VALUES {MXFP8_FLOAT32, MXFP8_FLOAT16, MXFP8_BFLOAT16}
#define ACTIVATIONS {MXFP8_FLOAT32, MXFP8_BFLOAT16}
#define FORMATS {MXFP8_E4M3, MXFP8_E5M2, MXFP8_INT8}
#define INDICES {MXFP8_INT32, MXFP8_INT64}
#define ROUNDINGS {MXFP8_CEIL, MXFP8_FLOOR, MXFP8_EVEN}
#define EPILOGUES {MXFP8_NONE, MXFP8_RELU, MXFP8_GELU, MXFP8_GELU_TANH, MXFP8_SILU}

inline int64_t bytes_of(int64_t dtype) { return dtype == MXFP8_FLOAT32 ? 4 : is_one_of(dtype, VALUES) ? 2 : 1; }
inline Wide blocks(int64_t k) { return (Wide(k) + 31) / 32; }

// Bytes of a dense array; of rows `stride` values apart.
inline Wide dense(std::initializer_list<Wide> sizes, int64_t value_bytes) {
  Wide count = 1;
  for (const Wide each : sizes) {
    if (each == 0) return 0;
  }
  for (const Wide each : sizes) count = count > kMostBytes ? count : count * each;
  return count > kMostBytes ? kMostBytes + 1 : count * value_bytes;
}
inline Wide rows(Wide count, Wide columns, Wide stride, int64_t value_bytes) {
  if (count == 0 || columns == 0) return 0;
  const Wide values = (count - 1) * stride + columns;
  return values > kMostBytes ? kMostBytes + 1 : values * value_bytes;
}

// An argument that points to memory.
struct Array {
  Wide bytes = 0;
  int64_t alignment = 1;
  bool result = false;
  std::unique_ptr<uint8_t, decltype(&std::free)> memory{nullptr, std::free};
  uint8_t* at = nullptr;
};

// Gives arrays their memory, or something in its place. Returns whether that makes the call one to be refused.
inline bool furnish(Random& random, Array* array, bool refused_anyway, int hostile) {
  if (array->bytes > kMostHere || (refused_anyway && array->bytes < 0)) {  // an address without memory behind it
    array->at = refused_anyway && chance(random, 2) ? reinterpret_cast<uint8_t*>(uintptr_t(1) << 20) : nullptr;
    return true;
  }
  const auto bytes = size_t(array->bytes < 0 ? 0 : array->bytes);
  const int how = chance(random, hostile) ? int(random() % 3) : 3;
  if (how == 0) return bytes > 0;  // NULL
  if (how == 1) {                  // the end of the address space
    array->at = reinterpret_cast<uint8_t*>(uintptr_t(INT64_MAX) / 16 * 16);
    if (bytes > 15) return true;
    array->at = nullptr;
    return bytes > 0;
  }
  const size_t shift = how == 2 ? 1 : 0;  // misaligned: malloc aligns to 16
  array->memory.reset(static_cast<uint8_t*>(std::malloc(bytes + shift)));
  array->at = array->memory.get() + shift;
  const bool ordinary = chance(random, 2);  // no small elements: gemm_int16 takes them
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t some = array->result ? 0x0101010101010101u * kUntouched : random();
    if (ordinary && !array->result) some = (some & 0xbfbfbfbfbfbfbfbfu) | 0x3030303030303030u;
    std::memcpy(array->at + i, &some, bytes - i < 8 ? bytes - i : 8);
  }
  return shift % size_t(array->alignment) != 0 && bytes > 0;
}

inline bool untouched(const Array& array, Wide begin, Wide end) {
  for (Wide i = begin; i < end; ++i) {
    if (array.at[size_t(i)] != kUntouched) return false;
  }
  return true;
}

struct Counts {
  long accepted = 0, refused = 0;
};

// Compares a status with what the model expects, and the text with its form.
inline void judge(const std::string& call, int status, bool refused, Counts* counts) {
  if (status != (refused ? MXFP8_BAD_ARGUMENT : MXFP8_OK)) {
    fail(call + ": status " + std::to_string(status) + " (" + mxfp8_last_error(MXFP8_MESSAGE) +
         "); expected that it is " + (refused ? "refused" : "done"));
  }
  const std::string text = mxfp8_last_error(MXFP8_MESSAGE);
  if (refused && text.find("; expected ") == std::string::npos) fail(call + ": says '" + text + "'");
  ++(refused ? counts->refused : counts->accepted);
}

inline int thread_count(Random& random, int hostile) {
  const int wild[] = {INT_MAX, 100000, -1, INT_MIN, 257};
  return chance(random, 4 * hostile) ? one_of(random, wild) : int(random() % 4);
}

inline std::string list(std::initializer_list<int64_t> numbers) {
  std::string text;
  for (const int64_t number : numbers) text += " " + std::to_string(number);
  return text;
}

// Gives all arrays memory and reports whether the call is to be refused. Arrays are not looked at where `read` is
// false.
inline bool furnish_all(Random& random, std::initializer_list<Array*> arrays, bool refused, bool read, int hostile) {
  for (Array* array : arrays) refused = refused || (read && array->bytes > kMostBytes);
  for (Array* array : arrays) {
    const bool bad = furnish(random, array, refused || !read, hostile);
    refused = refused || (bad && read);
  }
  return refused;
}

inline void check_untouched(const std::string& call, std::initializer_list<Array*> arrays) {
  for (const Array* array : arrays) {
    if (array->result && array->memory && !untouched(*array, 0, array->bytes)) fail(call + ": refused, yet it wrote");
  }
}

void call_kernel(Random& random, Counts* counts);
void call_planner(Random& random, Counts* counts);

}  // namespace hostile
