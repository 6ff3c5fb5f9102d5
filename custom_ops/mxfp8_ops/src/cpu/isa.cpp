// Chooses the kernels by what the processor and the operating system support: the fastest set, unless the environment
// variable MXFP8_ISA or mxfp8_isa_force names another.
#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(MXFP8_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mxfp8 {

namespace portable {
extern const Kernels kernels;
}
#if defined(MXFP8_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
namespace amx_bf16 {
extern const Kernels kernels;
}
#endif

namespace {

struct Isa {
  const Kernels* kernels;
  bool (*usable)();
};

#if defined(MXFP8_X86)
bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

// Linux saves the tiles only for processes that have asked for it, because they take 8 KB of a signal's stack.
bool has_amx_bf16() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}
#endif

// Best first. __builtin_cpu_supports asks cpuid, and XGETBV for what the operating system saves.
const Isa kIsas[] = {
#if defined(MXFP8_X86)
    {&amx_bf16::kernels, has_amx_bf16},
    {&avx512_bf16::kernels, has_avx512_bf16},
    {&avx512::kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {&avx2::kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#endif
    {&portable::kernels, [] { return true; }},
};

// Intel's processors multiply pairs of bfloat16 on one port and float32 on two, so that the products are no faster and
// only their decoding counts: on a Xeon of 2024 the set avx512 took 0.5 to 1.0 of the time (1.02 at 16 rows) of
// avx512_bf16, which is for AMD's then.
bool is_slower_than_the_next([[maybe_unused]] const Isa& isa) {
#if defined(MXFP8_X86)
  return isa.kernels == &avx512_bf16::kernels && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

const Kernels* find(const char* name) {
#if defined(MXFP8_X86)
  __builtin_cpu_init();
#endif
  for (const Isa& isa : kIsas) {
    const bool wanted = name == nullptr ? !is_slower_than_the_next(isa) : std::strcmp(name, isa.kernels->isa) == 0;
    if (wanted && isa.usable()) return isa.kernels;
  }
  return nullptr;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{find(std::getenv("MXFP8_ISA"))};
  return kernels;
}

}  // namespace

const Kernels* kernels() { return chosen().load(std::memory_order_relaxed); }

bool force_isa(const char* name) {
  const Kernels* found = name == nullptr ? nullptr : find(name);
  if (found != nullptr) chosen().store(found, std::memory_order_relaxed);
  return found != nullptr;
}

const char* available_isas() {
  struct Names {
    char list[64] = "";  // room for all
    Names() {
      for (const Isa& isa : kIsas) {
        if (find(isa.kernels->isa) == nullptr) continue;
        if (list[0] != 0) std::strcat(list, ",");
        std::strcat(list, isa.kernels->isa);
      }
    }
  };
  static const Names names;
  return names.list;
}

}  // namespace mxfp8
