// The library's own pool: threads start when a call first needs them, and never end. Concurrent calls share them; a
// caller always works on its own tasks too, so a busy pool delays no caller. After fork() the child drops the parent's
// pool, whose threads do not exist there, and starts its own; it also drops an OpenMP runtime, which hangs there.
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "system.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mxfp8 {
namespace {

constexpr int kMostThreads = 256;  // a limit, because threads never end

struct Job {
  void (*task)(void*, size_t);
  void* argument;
  size_t count;
  int helpers;  // the number of threads that may still join; guarded by the pool's mutex
  int active;   // threads at work besides the caller; guarded by the pool's mutex
  int caller;   // processor the caller runs on
  std::atomic<size_t> next{0};
  std::condition_variable done;

  void work() {
    for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(argument, i);
  }
};

class Pool {
 public:
  void run(Job* job) {
    const bool one = job->helpers == 1;  // read now: once the job is in the queue, other threads change it
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_threads(job->helpers);
      jobs_.push_back(job);
    }
    if (one) {
      wake_.notify_one();
    } else {
      wake_.notify_all();
    }
    std::this_thread::yield();  // lets a helper that woke on this processor run, so that it moves to another
    job->work();
    std::unique_lock<std::mutex> lock(mutex_);
    remove(job);
    job->done.wait(lock, [job] { return job->active == 0; });
  }

 private:
  // If the machine refuses more threads, the call is only slower.
  void start_threads(int wanted) {
    try {
      for (; threads_ < wanted; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      Job* job = jobs_.front();
      ++job->active;
      if (--job->helpers == 0) jobs_.pop_front();
      lock.unlock();
      leave_processor(job->caller);
      job->work();
      lock.lock();
      remove(job);
      if (--job->active == 0) job->done.notify_one();
    }
  }

  void remove(Job* job) {
    for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
      if (*it == job) {
        jobs_.erase(it);
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;  // jobs that still need helpers
  int threads_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};
std::atomic<GompParallel> the_openmp{nullptr};

void after_fork() {
  the_pool.store(nullptr);
  the_openmp.store(nullptr);
}

// Registers after_fork. Call it before a pool or a runtime exists, so that no fork can copy either without it.
void prepare() {
  static std::once_flag once;
  std::call_once(once, keep_loaded, after_fork);
}

// Never destroyed: its threads outlive every static destructor.
Pool* pool() {
  Pool* current = the_pool.load(std::memory_order_acquire);
  if (current != nullptr) return current;
  prepare();
  auto* fresh = new Pool;
  if (the_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return current;
}

void run_on_pool(void* threads, void (*task)(void*, size_t), void* argument, size_t count) {
  const auto wanted = reinterpret_cast<intptr_t>(threads);
  Job job{task, argument, count, int(count < size_t(wanted) ? count : size_t(wanted)) - 1, 0, current_processor(),
          {},   {}};
  pool()->run(&job);
}

// Always asks for the whole team, even for few tasks: for a smaller team, the runtime would end the other threads.
void run_on_openmp(void* threads, void (*task)(void*, size_t), void* argument, size_t count) {
  const auto team = unsigned(reinterpret_cast<intptr_t>(threads));
  const GompParallel parallel = the_openmp.load(std::memory_order_acquire);
  Job job{task, argument, count, 0, 0, -1, {}, {}};
  if (parallel == nullptr) return job.work();  // another thread has just called use_openmp(null)
  parallel([](void* mine) { static_cast<Job*>(mine)->work(); }, &job, team, 0);
}

// Sets the default floating-point control word, and restores the old one at the end of the scope.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

}  // namespace

Parallel own_threads(int threads) {
  static const int processors = processor_count(), most = std::max(kMostThreads, processors);
  const int wanted = threads > 0 ? std::min(threads, most) : processors;
  if (threads > 0 && the_openmp.load(std::memory_order_acquire) != nullptr) {
    return {run_on_openmp, reinterpret_cast<void*>(intptr_t(wanted)), wanted};
  }
  return {run_on_pool, reinterpret_cast<void*>(intptr_t(wanted)), wanted};
}

void use_openmp(GompParallel parallel) {
  prepare();
  the_openmp.store(parallel, std::memory_order_release);
}

namespace detail {
void guarded(void (*task)(void*, size_t), void* argument, size_t index) {
  const DefaultFloatEnvironment environment;
  task(argument, index);
}
}  // namespace detail

}  // namespace mxfp8
