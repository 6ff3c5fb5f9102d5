// The gemm table of every instruction set: the first row that takes the operands and the number of rows wins. A set
// defines only the kernels that it makes faster, and takes the others from the sets before it.
#include "gemm.h"
#include "isa.h"

// Defines the instruction set of this namespace. constexpr: code of a set must not run before the set is chosen.
#define MXFP8_ISA_TABLE(...)    \
  extern const Kernels kernels; \
  constexpr Kernels kernels = {__VA_ARGS__};

namespace mxfp8 {

namespace portable {
extern const GemmKernel gemm_skinny_f32, gemm_f32;
constexpr GemmRow gemms[] = {
    {Values::kOther, 1, kSkinnyRows, &gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
MXFP8_ISA_TABLE("portable", 0, gemms, false, kGemmRows)
}  // namespace portable

#if defined(MXFP8_X86)
namespace avx2 {
extern const GemmKernel gemm_skinny_f32, gemm_f32, gemm_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, kRowsAsTheyLie + 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kFewRowsAvx2, &gemm_skinny_f32, kShortRowsAvx2},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
MXFP8_ISA_TABLE("avx2", 1, gemms, false, kGemmRows)
}  // namespace avx2

namespace avx2_vnni {
extern const GemmKernel gemm_int16, gemm_int8, gemm_skinny_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kRowsAsTheyLie, &gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kFewRowsAvx2, &avx2::gemm_skinny_f32, kShortRowsAvx2},
    {Values::kE4M3, kFewRowsAvx2 + 1, kGemmRows, &gemm_int16},
    {Values::kAny, 1, kGemmRows, &avx2::gemm_f32},
};
MXFP8_ISA_TABLE("avx2_vnni", 1, gemms, false, kGemmRows)
}  // namespace avx2_vnni

namespace avx512 {
extern const GemmKernel gemm_skinny_f32, gemm_f32;
constexpr GemmRow gemms[] = {
    {Values::kOther, 1, kFewRowsAvx512, &gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
MXFP8_ISA_TABLE("avx512", 2, gemms, false, kGemmRows)
}  // namespace avx512

namespace avx512_vnni {
extern const GemmKernel gemm_int16, gemm_int8, gemm_skinny_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kRowsAsTheyLie, &gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kFewRowsAvx512, &avx512::gemm_skinny_f32},
    {Values::kE4M3, kFewRowsAvx512 + 1, kGemmRows, &gemm_int16},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
MXFP8_ISA_TABLE("avx512_vnni", 2, gemms, false, kGemmRows)
}  // namespace avx512_vnni

namespace avx512_bf16 {
extern const GemmKernel gemm_skinny_bf16, gemm_bf16, gemm_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kRowsAsTheyLie, &avx512_vnni::gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kBf16, 1, kRowsAsTheyLie, &gemm_skinny_bf16},
    {Values::kBf16, 1, kGemmRows, &gemm_bf16},
    {Values::kOther, 1, kSkinnyRows, &avx512::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
MXFP8_ISA_TABLE("avx512_bf16", 3, gemms, true, kGemmRows)
}  // namespace avx512_bf16

namespace amx_bf16 {
extern const GemmKernel gemm_amx, gemm_amx_parts;
constexpr int64_t kFewRows = 3;  // up to this number of rows, turning B takes longer than multiplying it in registers
constexpr GemmRow gemms[] = {
    {Values::kBf16, 1, kFewRows, &avx512::gemm_skinny_f32},
    {Values::kOther, 1, kFewRows, &avx512::gemm_skinny_f32},
    {Values::kBf16, 1, kAmxStripRows, &gemm_amx},
    {Values::kOther, 1, kAmxStripRows, &gemm_amx_parts},
    {Values::kOther, 1, kSkinnyRows, &avx512::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
MXFP8_ISA_TABLE("amx_bf16", 4, gemms, true, kAmxStripRows, kFewRows + 1)
}  // namespace amx_bf16

#elif defined(MXFP8_ARM)
namespace neon_dot {
extern const GemmKernel gemm_int8, gemm_skinny_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kRowsAsTheyLie, &gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kSkinnyRows, &portable::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &portable::gemm_f32},
};
MXFP8_ISA_TABLE("neon_dot", 0, gemms, false, kGemmRows)
}  // namespace neon_dot

namespace neon_mm {
extern const GemmKernel gemm_bf16, gemm_skinny_half;
#if defined(__APPLE__)
using neon_dot::gemm_int8;  // two projects report that SMMLA takes 10 to 25% longer on an M3
#else
extern const GemmKernel gemm_int8;
#endif
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kRowsAsTheyLie, &neon_dot::gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kE4M3, 1, kFewRowsNeon, &gemm_skinny_half},
    {Values::kBf16, 1, kFewRowsNeon, &portable::gemm_skinny_f32},
    {Values::kBf16, 1, kGemmRows, &gemm_bf16},
    {Values::kOther, 1, kSkinnyRows, &portable::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &portable::gemm_f32},
};
MXFP8_ISA_TABLE("neon_mm", 0, gemms, true, kGemmRows, kFewRowsNeon + 1)
}  // namespace neon_mm
#endif

}  // namespace mxfp8
