// The instructions of Hopper (sm_90a) that gemm_fused.cu needs, by name: copies to shared memory and products that run
// beside the threads.
//
// wgmma is in no later architecture. A host compiler that emulates CUDA threads brings its own versions of these.
#pragma once
#include "device.cuh"

// Describes B of a wgmma: rows of 64 bfloat16, 128 bytes, in groups of eight that follow each other, in which 16-byte
// part c of row r is in place c ^ r. `at` is aligned to 1024, but for the 32 bytes by which 16 values of k differ. PTX
// ISA, "Matrix Descriptor Format": address / 16; at bit 16 the leading offset, unused with a swizzle; at bit 32 the
// offset of a group of eight rows, / 16; at bit 62 the swizzle, 1 for 128 bytes.
DEVICE u64 swizzled_rows(u32 at) {
  return ((at & 0x3ffffu) >> 4) | 1ull << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

#ifdef __CUDACC__

// The shared memory that the launch asks for, aligned to 1024: a 128-byte swizzle repeats after that many bytes.
DEVICE u8* launch_shared() {
  extern __shared__ __align__(1024) u8 launch_shared_bytes[];
  return launch_shared_bytes;
}

// An address for the functions below.
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Makes `count` barriers of 8 bytes each, for one thread to call. Whoever uses them waits for it at a __syncthreads.
DEVICE void make_barriers(u32 at, int count) {
  for (int i = 0; i < count; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at + 8 * i) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Begins to copy a multiple of 16 bytes from global to shared memory, for one thread to call; all aligned to 16. Each
// such copy ends a phase of its barrier. It writes as wgmma reads (by the async proxy), so no fence is between them.
DEVICE void copy_async(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Waits for the end of a phase of a barrier: an even one (0, 2, ...) or an odd one.
DEVICE void wait_barrier(u32 barrier, u32 odd) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(odd)
                 : "memory");
  } while (done == 0);
}

// Comes before the first wgmma, and before any that uses registers written since the one before.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last PENDING groups of this warpgroup's products run: then the registers of A and of the
// sums, and the shared memory, of the others are free.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from using sums before the wait above, of which it does not know that it concerns them.
template <int COUNT>
DEVICE void keep_behind(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// d += a b for the whole warpgroup, once it is committed and waited for: a 64x16, b 16x128 from shared memory, where
// its columns are rows; bfloat16. PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": warp w of four has rows
// 16w to 16w + 15, and of those a is as for mma_m16n8k16. With g = lane / 4, t = lane % 4: d[4j], d[4j+1] are row g at
// columns 8j + 2t, 8j + 2t + 1; d[4j+2], d[4j+3] are row g + 8.
DEVICE void wgmma_m64n128k16(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      " %16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      " %32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      " %48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif  // __CUDACC__
