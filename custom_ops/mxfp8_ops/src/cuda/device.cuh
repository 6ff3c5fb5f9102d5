// Functions that the kernels need beyond C++: PTX instructions by name, and integer types (no header is on NVRTC's
// path).
//
// A host compiler that emulates CUDA threads brings its own versions of the functions below; the rest is plain C++.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDACC__

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

// The same number, of which the compiler knows nothing: what is computed from it is not moved out of a loop.
DEVICE i64 opaque(i64 v) {
  asm volatile("" : "+l"(v));
  return v;
}

// The same for an address: it is kept whole, and not as an offset that is added to a parameter at each use.
DEVICE const u8* opaque(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}

DEVICE u32 load1(const u8* p) { return __ldg(p); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// 16 bytes through the read-only path; `p` is aligned to 16.
DEVICE uint4 load16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }

// The same for what no other thread reads: it does not push anything out of the L1 cache.
DEVICE uint4 load_once16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// The same from shared memory.
DEVICE uint4 load_shared16(const void* p) { return *static_cast<const uint4*>(p); }

DEVICE void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

// Byte i of the result is byte (selector >> 4 i) & 7 of `a` (0..3) and zeros (4..7).
DEVICE u32 pick_bytes(u32 a, u32 selector) { return __byte_perm(a, 0u, selector); }

DEVICE float from_float16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

DEVICE u16 to_float16(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

DEVICE u16 to_bfloat16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// a * b + c for two bfloat16 each, rounded once, to nearest even; subnormals are kept.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// d += a b for the whole warp: a 16x16 row major, b 16x8 column major, both bfloat16; PTX ISA, "Matrix Fragments for
// mma.m16n8k16". With g = lane / 4 and t = lane % 4: a[0], a[1] are rows g, g + 8 at k = 2t, 2t+1; a[2], a[3] the same
// rows at k = 2t+8, 2t+9; b0, b1 are column g at those k; d[0], d[1] are row g at columns 2t, 2t+1; d[2], d[3] row g+8.
DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ >= 890
#define HAS_FP8_CONVERSION 1

// Two floats to two elements, nearest even, saturating, NaN -> 0x7f; `low` goes to the low byte.
DEVICE u32 to_e4m3x2(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}

DEVICE u32 to_e5m2x2(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}

#endif

#endif  // __CUDACC__
