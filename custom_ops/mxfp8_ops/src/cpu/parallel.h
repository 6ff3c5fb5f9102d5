// Runs the tasks of a kernel: on the caller's thread, on the library's own threads, on ONNX Runtime's threads, or on
// the threads of an OpenMP runtime that the process already has.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mxfp8 {

// Where tasks run. `run` calls task(argument, i) for every i in 0..count-1, in any order, and returns when all are
// done.
struct Parallel {
  void (*run)(void* pool, void (*task)(void*, size_t), void* argument, size_t count);
  void* pool;
  int threads;  // the most tasks that run at once
};

// The library's own threads. `threads` <= 0 means one per processor; a number above both 256 and the number of
// processors counts as the larger of these. Threads start with the first call that needs them.
Parallel own_threads(int threads);

// Makes own_threads(threads), threads > 0, return teams of the OpenMP runtime that has this GOMP_parallel; null ends
// that. Idle threads of such a runtime spin, and would keep the library's own threads from running.
using GompParallel = void (*)(void (*team)(void*), void* argument, unsigned threads, unsigned flags);
void use_openmp(GompParallel parallel);

namespace detail {
// Runs one task with round to nearest and with subnormal numbers, as the kernels expect, even if the caller's thread or
// the pool has another setting (torch.set_flush_denormal, session.set_denormal_as_zero).
void guarded(void (*task)(void*, size_t), void* argument, size_t index);
}  // namespace detail

// Calls body(i) for i in 0..count-1. `body` must not throw.
template <class Body>
void parallel_for(const Parallel& parallel, int64_t count, const Body& body) {
  struct Call {
    static void task(void* argument, size_t index) { (*static_cast<const Body*>(argument))(int64_t(index)); }
    static void run(void* argument, size_t index) { detail::guarded(task, argument, index); }
  };
  void* argument = const_cast<void*>(static_cast<const void*>(&body));
  if (count <= 1 || parallel.threads <= 1) {
    for (int64_t i = 0; i < count; ++i) Call::run(argument, size_t(i));
  } else {
    parallel.run(parallel.pool, Call::run, argument, size_t(count));
  }
}

}  // namespace mxfp8
