// Chooses the instruction set: the fastest that the processor and the operating system support, unless the environment
// variable MXFP8_ISA or mxfp8_isa_force names another.
#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "system.h"

#if defined(MXFP8_X86)
#include <cpuid.h>
#endif

namespace mxfp8 {

#define MXFP8_DECLARE_ISA(NAME) \
  namespace NAME {              \
  extern const Kernels kernels; \
  }
MXFP8_DECLARE_ISA(portable)
#if defined(MXFP8_X86)
MXFP8_DECLARE_ISA(avx2)
MXFP8_DECLARE_ISA(avx2_vnni)
MXFP8_DECLARE_ISA(avx512)
MXFP8_DECLARE_ISA(avx512_vnni)
MXFP8_DECLARE_ISA(avx512_bf16)
MXFP8_DECLARE_ISA(amx_bf16)
#elif defined(MXFP8_ARM)
MXFP8_DECLARE_ISA(neon_dot)
MXFP8_DECLARE_ISA(neon_mm)
#endif

namespace {

struct Isa {
  const Kernels* kernels;
  bool (*usable)();
};

#if defined(MXFP8_X86)
// The features of the processor (cpuid) and the registers that the operating system saves (XGETBV). This does not use
// __builtin_cpu_supports, which needs a part of the compiler's library that some compilers lack.
class Processor {
 public:
  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) != 0) intel_ = b == 0x756e6547 && d == 0x49656e69 && c == 0x6c65746e;
    if (__get_cpuid(1, &a, &b, &c, &d) != 0) basic_ = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) more_b_ = b, more_c_ = c, more_d_ = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) newer_ = a;
    if (has(basic_, 27)) {
      unsigned low = 0, high = 0;
      __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      saved_ = low;
    }
  }
  bool avx2() const {
    return saves(kYmm) && has(basic_, 28) && has(basic_, 12) && has(basic_, 29) && has(more_b_, 5);  // AVX, FMA, F16C
  }
  bool avx2_vnni() const {
#if defined(MXFP8_EMULATE_VNNI)
    return avx2();
#else
    return avx2() && has(newer_, 4);
#endif
  }
  bool avx512() const {  // F, DQ, BW, VL
    return avx2() && saves(kZmm) && has(more_b_, 16) && has(more_b_, 17) && has(more_b_, 30) && has(more_b_, 31);
  }
  bool avx512_vbmi() const { return avx512() && has(more_c_, 1); }
  bool avx512_vnni() const { return avx512_vbmi() && has(more_c_, 11); }
  bool avx512_bf16() const { return avx512_vbmi() && has(newer_, 5); }
  bool amx_bf16() const { return avx512_bf16() && saves(kTiles) && has(more_d_, 22) && has(more_d_, 24); }
  bool intel() const { return intel_; }

 private:
  static constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;  // bits of XCR0
  static bool has(unsigned word, int bit) { return (word >> bit & 1) != 0; }
  bool saves(unsigned mask) const { return (saved_ & mask) == mask; }

  bool intel_ = false;
  unsigned basic_ = 0, more_b_ = 0, more_c_ = 0, more_d_ = 0, newer_ = 0, saved_ = 0;
};

const Processor& processor() {
  static const Processor features;
  return features;
}

bool has_amx_bf16() {
#if defined(MXFP8_EMULATE_AMX)
  return processor().avx512_bf16();
#else
  return processor().amx_bf16() && may_use_tiles();
#endif
}
#endif

// Best first.
const Isa kIsas[] = {
#if defined(MXFP8_ARM)
    {&neon_mm::kernels,
     [] {
       const ArmFeatures has = arm_features();
       return has.dots && has.half_dots && has.matrices;
     }},
    {&neon_dot::kernels, [] { return arm_features().dots; }},
#endif
#if defined(MXFP8_X86)
    {&amx_bf16::kernels, has_amx_bf16},
    {&avx512_bf16::kernels, [] { return processor().avx512_bf16(); }},
    {&avx512_vnni::kernels, [] { return processor().avx512_vnni(); }},
    {&avx512::kernels, [] { return processor().avx512(); }},
    {&avx2_vnni::kernels, [] { return processor().avx2_vnni(); }},
    {&avx2::kernels, [] { return processor().avx2(); }},
#endif
    {&portable::kernels, [] { return true; }},
};

// Whether the set is slower than the next one on this processor. Intel's processors multiply pairs of bfloat16 on one
// port, but float32 and pairs of 16-bit integers on two: on a Xeon of 2024 the sets avx512 and avx512_vnni took 0.5 to
// 1.0 of the time of avx512_bf16 (1.02 at 16 rows). So by default only AMD's processors use avx512_bf16.
bool is_slower_than_the_next([[maybe_unused]] const Isa& isa) {
#if defined(MXFP8_X86)
  return isa.kernels == &avx512_bf16::kernels && processor().intel();
#else
  return false;
#endif
}

const Kernels* find(const char* name) {
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
  const Kernels* table = name == nullptr ? nullptr : find(name);
  if (table != nullptr) chosen().store(table, std::memory_order_relaxed);
  return table != nullptr;
}

const char* available_isas() {
  struct Names {
    char list[96] = "";  // room for all names
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
