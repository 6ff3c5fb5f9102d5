// The table of one instruction set's kernels; compiled last into each of them.
#include "kernels.h"
#include "simd.h"

namespace mxfp8::MXFP8_ISA {

void quantize_rows(const QuantizeArgs&, int64_t, int64_t, Stats*);
void quantize_columns(const QuantizeArgs&, int64_t, int64_t);
void pack_columns(const QuantizeArgs&, int64_t, int64_t, Stats*);
void dequantize_rows(const DequantizeArgs&, int64_t, int64_t);
void dequantize_columns(const DequantizeArgs&, int64_t, int64_t);
int gemm_skinny_f32_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*);
void gemm_skinny_f32_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int);
int gemm_f32_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*);
void gemm_f32_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int);
#if defined(__AVX512BF16__)
int gemm_skinny_bf16_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*);
void gemm_skinny_bf16_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int);
int gemm_bf16_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*);
void gemm_bf16_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int);
int gemm_many_bf16_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*);
void gemm_many_bf16_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int);
#endif

#define MXFP8_STRING_OF(x) #x
#define MXFP8_STRING(x) MXFP8_STRING_OF(x)

extern const Kernels kernels;
const Kernels kernels = {
    MXFP8_STRING(MXFP8_ISA),
    quantize_rows,
    quantize_columns,
    pack_columns,
    dequantize_rows,
    dequantize_columns,
    {kSkinnyRows, sizeof(float), gemm_skinny_f32_pack, gemm_skinny_f32_multiply},
#if defined(__AVX512BF16__)
    {kSkinnyRows, sizeof(uint16_t), gemm_skinny_bf16_pack, gemm_skinny_bf16_multiply},
#else
    {0, 0, nullptr, nullptr},
#endif
    {kTileRows, sizeof(float), gemm_f32_pack, gemm_f32_multiply},
#if defined(__AVX512BF16__)
    {kTileRows, sizeof(uint16_t), gemm_bf16_pack, gemm_bf16_multiply},
    {kBf16Rows, sizeof(uint16_t), gemm_many_bf16_pack, gemm_many_bf16_multiply},
#else
    {0, 0, nullptr, nullptr},
    {0, 0, nullptr, nullptr},
#endif
};

}  // namespace mxfp8::MXFP8_ISA
