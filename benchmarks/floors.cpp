// The limits of the machine, measured: read bandwidth and the rate of bf16 and fp32 multiply-adds.
// Compiled by floors.py for the machine it runs on.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Moves a fresh thread off its creator's processor, where it starts and may stay for longer than a reading lasts.
void move_away(std::thread& thread) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  if (CPU_COUNT(&allowed) > 1) CPU_CLR(sched_getcpu(), &allowed);
  pthread_setaffinity_np(thread.native_handle(), sizeof allowed, &allowed);
}

template <bool Apart = false, class Body>
void parallel(int threads, Body body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) {
    others.emplace_back(body, t);
    if (Apart) move_away(others.back());
  }
  body(0);
  for (auto& other : others) other.join();
}

volatile float sink;

}  // namespace

// Seconds to read `size` bytes once with `threads` threads.
extern "C" double read_seconds(const uint8_t* data, int64_t size, int threads) {
  const double start = now();
  parallel<true>(threads, [=](int t) {
    const int64_t begin = size / threads / 256 * t * 256, end = size / threads / 256 * (t + 1) * 256;
#if defined(__AVX512F__)
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (int64_t i = begin; i < end; i += 256) {
      a = _mm512_xor_si512(a, _mm512_loadu_si512(data + i));
      b = _mm512_xor_si512(b, _mm512_loadu_si512(data + i + 64));
      c = _mm512_xor_si512(c, _mm512_loadu_si512(data + i + 128));
      d = _mm512_xor_si512(d, _mm512_loadu_si512(data + i + 192));
    }
    sink =
        static_cast<float>(_mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
#else
    uint64_t sum[4] = {};
    for (int64_t i = begin; i + 32 <= end; i += 32)
      for (int j = 0; j < 4; j++) sum[j] ^= reinterpret_cast<const uint64_t*>(data + i)[j];
    sink = static_cast<float>(sum[0] ^ sum[1] ^ sum[2] ^ sum[3]);
#endif
  });
  return now() - start;
}

// Multiply-adds per second in registers. kind 0: fp32 FMA; 1: bf16 dot product; 0 where the machine has none.
extern "C" double fma_rate(int kind, int threads) {
#if defined(__AVX512F__)
  constexpr int64_t rounds = 4'000'000, chains = 16;
  const double start = now();
  parallel(threads, [=](int) {
    __m512 sum[chains];
    for (auto& s : sum) s = _mm512_set1_ps(1.0f);
    const __m512 x = _mm512_set1_ps(0.5f);
    if (kind == 0) {
      for (int64_t i = 0; i < rounds; i++)
        for (auto& s : sum) s = _mm512_fmadd_ps(s, x, x);
    } else {
#if defined(__AVX512BF16__)
      const __m512bh y = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f003f00));
      for (int64_t i = 0; i < rounds; i++)
        for (auto& s : sum) s = _mm512_dpbf16_ps(s, y, y);
#endif
    }
    __m512 total = sum[0];
    for (int i = 1; i < chains; i++) total = _mm512_add_ps(total, sum[i]);
    sink = _mm512_reduce_add_ps(total);
  });
#if !defined(__AVX512BF16__)
  if (kind == 1) return 0;
#endif
  return double(rounds) * chains * (kind == 0 ? 16 : 32) * threads / (now() - start);
#else
  return 0;
#endif
}

// Multiply-adds per second of bf16 tiles (AMX); 0 where the machine has none or the system does not allow them.
extern "C" double tile_rate(int threads) {
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl, as Linux's documentation of x86 has it
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData)) return 0;
  constexpr int64_t rounds = 1'000'000;
  const double start = now();
  parallel(threads, [=](int) {
    struct {
      uint8_t palette = 1, zeros[15] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    // Makes all tiles 0. Not _tile_loadconfig: GCC 12 thinks that it reads 8 bytes, and drops what the others hold.
    asm volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t i = 0; i < rounds; i++) {  // four chains hide the latency
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  });
  return double(rounds) * 4 * 16 * 16 * 32 * threads / (now() - start);
#else
  return 0;
#endif
}
