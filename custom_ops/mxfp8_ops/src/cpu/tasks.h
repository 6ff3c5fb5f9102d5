// Splits an operation into tasks. A task is long enough to pay for starting it on another thread, so small calls stay
// on the caller's thread.
#pragma once
#include <algorithm>
#include <memory>
#include <new>

#include "parallel.h"

namespace mxfp8 {

constexpr int64_t kTaskValues = 1 << 18;   // values that one task quantizes, dequantizes or packs: 30 us
constexpr int64_t kLeastValues = 1 << 16;  // with fewer values, a second thread does not pay

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(begin, end) over 0..count-1 in ranges of about `per_task`.
template <class Body>
void for_ranges(const Parallel& parallel, int64_t count, int64_t per_task, const Body& body) {
  per_task = std::max<int64_t>(1, per_task);
  parallel_for(parallel, ceil_div(count, per_task),
               [&](int64_t task) { body(task, task * per_task, std::min(count, (task + 1) * per_task)); });
}

// The number of ranges for `count` items of `values_each` values: 1, or a multiple of the number of threads.
inline int64_t equal_ranges(const Parallel& parallel, int64_t count, int64_t values_each) {
  const int64_t values = count * values_each;
  return values < kLeastValues ? 1 : ceil_div(ceil_div(values, kTaskValues), parallel.threads) * parallel.threads;
}

// The same in ranges of nearly equal size, as many for each thread.
template <class Body>
void for_equal_ranges(const Parallel& parallel, int64_t count, int64_t values_each, const Body& body) {
  for_ranges(parallel, count, ceil_div(count, equal_ranges(parallel, count, values_each)), body);
}

struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};
// Scratch memory that starts at a cache line.
using Scratch = std::unique_ptr<void, FreeAligned>;
inline Scratch scratch_of(int64_t bytes) { return Scratch(::operator new(size_t(bytes), std::align_val_t{64})); }

}  // namespace mxfp8
