// CUDA threads on the CPU: one fiber per thread, thread blocks one after the other, exact barriers and shuffles.
//
// A fiber runs until it reaches a barrier; a warp or a block goes on when all its live fibers have arrived. What never
// can is a deadlock and ends the process. It sees no races between barriers and no memory model: for that there is the
// device. bfloat16 and float16 conversions and the mma follow the PTX ISA.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define DEVICE static inline
#define DEVICE_MEMBER inline

struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

enum class Wait { none, warp, block };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done;
  Wait wait;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current;
inline const std::function<void()>* body;
inline unsigned block_index, grid_size;
constexpr size_t STACK = 1 << 16;

inline void wait(Wait what) {
  fibers[current].wait = what;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void fiber_main() {
  (*body)();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

// Wakes fibers first..last if all that are alive wait for `what`; returns whether it did.
inline bool release(int first, int last, Wait what) {
  bool any = false;
  for (int i = first; i < last; ++i) {
    if (fibers[i].done) continue;
    if (fibers[i].wait != what) return false;
    any = true;
  }
  for (int i = first; i < last; ++i) fibers[i].wait = Wait::none;
  return any;
}

inline void run_block(int threads) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.done = false;
    fiber.wait = Wait::none;
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].done || fibers[current].wait != Wait::none) continue;
      swapcontext(&scheduler, &fibers[current].context);
      progress = true;
    }
    for (int warp = 0; warp < threads; warp += 32) progress |= release(warp, std::min(warp + 32, threads), Wait::warp);
    progress |= release(0, threads, Wait::block);
  }
  for (const Fiber& fiber : fibers) {
    if (fiber.done) continue;
    std::fprintf(stderr, "cuda emulation: deadlock in block %u\n", block_index);
    std::abort();
  }
}

inline void launch(unsigned grid, int threads, const std::function<void()>& kernel) {
  body = &kernel;
  grid_size = grid;
  for (block_index = 0; block_index < grid; ++block_index) run_block(threads);
}

// Calls a kernel whose parameters each come as 8 bytes.
template <class... P, size_t... I>
void call(void (*kernel)(P...), const uint64_t* arguments, std::index_sequence<I...>) {
  kernel((P)arguments[I]...);
}

template <class... P>
void call(void (*kernel)(P...), const uint64_t* arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

template <class... P>
constexpr int parameters(void (*)(P...)) {
  return sizeof...(P);
}

// Every lane gives a value and sees those of its warp.
template <class T, class F>
auto exchange(T value, F&& read) {
  static T slots[32][32];
  T* warp = slots[current / 32];
  warp[current % 32] = value;
  wait(Wait::warp);
  const auto result = read(warp);
  wait(Wait::warp);
  return result;
}

}  // namespace emulation

#define threadIdx (dim3{static_cast<unsigned>(emulation::current), 0, 0})
#define blockIdx (dim3{emulation::block_index, 0, 0})
#define gridDim (dim3{emulation::grid_size, 1, 1})

static inline void __syncthreads() { emulation::wait(emulation::Wait::block); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = emulation::current % 32;
  return emulation::exchange(value, [&](const T* warp) { return warp[lane ^ mask]; });
}

static inline int __all_sync(unsigned, int predicate) {
  return emulation::exchange(predicate,
                             [](const int* warp) { return std::all_of(warp, warp + 32, [](int p) { return p; }); });
}

static inline unsigned __ballot_sync(unsigned, int predicate) {
  return emulation::exchange(predicate, [](const int* warp) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= unsigned(warp[lane] != 0) << lane;
    return votes;
  });
}

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

static inline int __any_sync(unsigned, int predicate) {
  return emulation::exchange(predicate,
                             [](const int* warp) { return std::any_of(warp, warp + 32, [](int p) { return p; }); });
}

// --- what device.cuh leaves to the host compiler ---------------------------------------------------------------------

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static inline u32 max(u32 a, u32 b) { return a > b ? a : b; }

static inline i64 opaque(i64 v) { return v; }
static inline const u8* opaque(const u8* p) { return p; }
static inline u32 load1(const u8* p) { return *p; }

static inline u32 bits_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline void require_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16 == 0) return;
  std::fprintf(stderr, "cuda emulation: 16-byte access to %p\n", p);
  std::abort();
}

static inline uint4 load16(const void* p) {
  require_aligned(p);
  return *static_cast<const uint4*>(p);
}

static inline uint4 load_once16(const void* p) { return load16(p); }

static inline uint4 load_shared16(const void* p) { return load16(p); }

static inline void store16(void* p, uint4 v) {
  require_aligned(p);
  *static_cast<uint4*>(p) = v;
}

static inline u32 pick_bytes(u32 a, u32 selector) {
  u32 y = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 byte = (selector >> (4 * i)) & 7;
    if (byte < 4) y |= ((a >> (8 * byte)) & 0xff) << (8 * i);
  }
  return y;
}

static inline float from_float16(u16 h) {
  const u32 exponent = (h >> 10) & 31, mantissa = h & 1023, sign = static_cast<u32>(h & 0x8000) << 16;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  const float a =
      exponent ? std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return float_of(bits_of(a) | sign);
}

static inline u16 to_float16(float f) {
  const u32 a = bits_of(f) & 0x7fffffffu;
  const u16 sign = static_cast<u16>((bits_of(f) >> 16) & 0x8000);
  if (a > 0x7f800000u) return 0x7fff;
  if (a >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more round to infinity
  if (a < 0x38800000u) return sign | static_cast<u16>(std::nearbyint(std::ldexp(float_of(a), 24)));
  const u32 rebased = a - (112u << 23);
  return sign | static_cast<u16>((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13);
}

static inline u16 to_bfloat16(float f) {
  const u32 a = bits_of(f);
  if ((a & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((a + 0x7fff + ((a >> 16) & 1)) >> 16);
}

static inline float low_half(u32 pair) { return float_of(pair << 16); }
static inline float high_half(u32 pair) { return float_of(pair & 0xffff0000u); }

static inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  const auto one = [](double x, double y, double z) -> u32 { return to_bfloat16(static_cast<float>(x * y + z)); };
  return one(low_half(a), low_half(b), low_half(c)) | one(high_half(a), high_half(b), high_half(c)) << 16;
}

inline uint64_t mma_calls;  // by single threads, since the last launch

static inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragment {
    u32 a[4], b[2];
  };
  ++mma_calls;
  const int lane = emulation::current % 32, g = lane / 4, t = lane % 4;
  const Fragment mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  struct Result {
    float d[4];
  };
  const Result result = emulation::exchange(mine, [&](const Fragment* warp) {
    Result r;
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
      double sum = d[i];
      for (int k = 0; k < 16; ++k) {
        const int owner = k % 8 / 2, upper = k >= 8;
        const u32 x = warp[row % 8 * 4 + owner].a[(row >= 8) + 2 * upper], y = warp[column * 4 + owner].b[upper];
        sum += static_cast<double>(k & 1 ? high_half(x) : low_half(x)) * (k & 1 ? high_half(y) : low_half(y));
      }
      r.d[i] = static_cast<float>(sum);
    }
    return r;
  });
  for (int i = 0; i < 4; ++i) d[i] = result.d[i];
}
