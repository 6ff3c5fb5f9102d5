// Measured times of kernel variants: variants.cpp takes the fastest. benchmarks/gpu_bench.py measures and writes this.
//
// Rows without a time say what there is to measure: no variant but the plain one runs for them. Cards of one compute
// capability and one number of multiprocessors share their rows. Included by variants.cpp, within its namespace.
#pragma once

constexpr int64_t kAny = INT64_MAX;

// clang-format off
constexpr mxfp8_cuda_measurement kMeasured[] = {
    // card, date, capability, processors, variant, dtype of x, M from and to, N from and to, measured at M, N, K, ns
    {"", "", 0, 0, number("quantize_columns", "plain"), 16, 1, kAny, 1, kAny, 16384, 8192, 0, 0},
    {"", "", 0, 0, number("quantize_columns", "bands"), 16, 1, kAny, 1, kAny, 16384, 8192, 0, 0},
    {"", "", 0, 0, number("quantize_both", "plain"), 16, 1, kAny, 1, kAny, 16384, 8192, 0, 0},
    {"", "", 0, 0, number("quantize_both", "bands"), 16, 1, kAny, 1, kAny, 16384, 8192, 0, 0},
    {"", "", 0, 0, number("gemm_skinny", "plain"), 16, 9, 16, 1, 3071, 16, 2048, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_warps"), 16, 9, 16, 1, 3071, 16, 2048, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "four_ahead"), 16, 9, 16, 1, 3071, 16, 2048, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_splits"), 16, 9, 16, 1, 3071, 16, 2048, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "plain"), 16, 9, 16, 3072, 6143, 16, 4096, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_warps"), 16, 9, 16, 3072, 6143, 16, 4096, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "four_ahead"), 16, 9, 16, 3072, 6143, 16, 4096, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_splits"), 16, 9, 16, 3072, 6143, 16, 4096, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "plain"), 16, 9, 16, 6144, 10239, 16, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_warps"), 16, 9, 16, 6144, 10239, 16, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "four_ahead"), 16, 9, 16, 6144, 10239, 16, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_splits"), 16, 9, 16, 6144, 10239, 16, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "plain"), 16, 9, 16, 10240, kAny, 16, 14336, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_warps"), 16, 9, 16, 10240, kAny, 16, 14336, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "four_ahead"), 16, 9, 16, 10240, kAny, 16, 14336, 8192, 0},
    {"", "", 0, 0, number("gemm_skinny", "two_splits"), 16, 9, 16, 10240, kAny, 16, 14336, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "plain"), 16, 65, 191, 1, kAny, 128, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "paired"), 16, 65, 191, 1, kAny, 128, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "two_blocks"), 16, 65, 191, 1, kAny, 128, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "plain"), 16, 192, 383, 1, kAny, 256, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "paired"), 16, 192, 383, 1, kAny, 256, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "two_blocks"), 16, 192, 383, 1, kAny, 256, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "plain"), 16, 384, 767, 1, kAny, 512, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "paired"), 16, 384, 767, 1, kAny, 512, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "two_blocks"), 16, 384, 767, 1, kAny, 512, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "plain"), 16, 768, 1535, 1, kAny, 1024, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "paired"), 16, 768, 1535, 1, kAny, 1024, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "two_blocks"), 16, 768, 1535, 1, kAny, 1024, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "plain"), 16, 1536, 2048, 1, kAny, 2048, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "paired"), 16, 1536, 2048, 1, kAny, 2048, 8192, 8192, 0},
    {"", "", 0, 0, number("gemm_fused", "two_blocks"), 16, 1536, 2048, 1, kAny, 2048, 8192, 8192, 0},
};
// clang-format on
