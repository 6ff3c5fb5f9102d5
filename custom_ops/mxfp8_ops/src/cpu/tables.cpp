// The table of kernels of every instruction set. A set has the kernels that it makes faster, and takes all others from
// the set below it.
#include "isa.h"

// What every file of kernels/ that all sets could run declares.
#define MXFP8_DECLARE_KERNELS                                        \
  void quantize_rows(const QuantizeArgs&, int64_t, int64_t, Stats*); \
  void quantize_columns(const QuantizeArgs&, int64_t, int64_t);      \
  void pack_columns(const QuantizeArgs&, int64_t, int64_t, Stats*);  \
  void dequantize_rows(const DequantizeArgs&, int64_t, int64_t);     \
  void dequantize_columns(const DequantizeArgs&, int64_t, int64_t);  \
  void embedding(const EmbeddingArgs&, int64_t, int64_t);            \
  void norm_quantize(const NormArgs&, int64_t, int64_t, float*);     \
  MXFP8_DECLARE_ATTENTION                                            \
  extern const GemmKernel gemm_skinny_f32, gemm_f32;

#define MXFP8_DECLARE_ATTENTION                                                                    \
  int64_t attention_state(const AttentionArgs&, const AttentionTask&);                             \
  int64_t attention_scratch(const AttentionArgs&, const AttentionTask&);                           \
  void attention(const AttentionArgs&, const AttentionTask&, const AttentionTask*, void*, float*); \
  void attention_merge(const AttentionArgs&, const AttentionTask&, float*, int64_t);

// A table of the kernels of namespace SET.
#define MXFP8_KERNELS(SET)  \
  {#SET,                    \
   SET::quantize_rows,      \
   SET::quantize_columns,   \
   SET::pack_columns,       \
   SET::dequantize_rows,    \
   SET::dequantize_columns, \
   SET::embedding,          \
   SET::norm_quantize,      \
   SET::attention_state,    \
   SET::attention_scratch,  \
   SET::attention,          \
   SET::attention_merge,    \
   false,                   \
   kGemmRows,               \
   SET::gemms}

// Defines the table of SET, which is `table`. constexpr: code of a set must not run before the set is chosen.
#define MXFP8_TABLE(SET, TABLE)      \
  namespace SET {                    \
  extern const Kernels kernels;      \
  constexpr Kernels kernels = TABLE; \
  }

namespace mxfp8 {

// The table of a set that differs from `below` in its gemms.
constexpr Kernels with_gemms(Kernels below, const char* isa, const GemmRow* gemms, bool has_bf16 = false) {
  below.isa = isa;
  below.gemms = gemms;
  below.has_bf16 = has_bf16;
  return below;
}

namespace portable {
MXFP8_DECLARE_KERNELS
constexpr GemmRow gemms[] = {
    {Values::kOther, 1, kSkinnyRows, &gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
}  // namespace portable
constexpr Kernels kPortable = MXFP8_KERNELS(portable);
MXFP8_TABLE(portable, kPortable)

#if defined(MXFP8_X86)
namespace avx2 {
MXFP8_DECLARE_KERNELS
constexpr GemmRow gemms[] = {
    {Values::kOther, 1, kFewRowsAvx2, &gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
}  // namespace avx2
constexpr Kernels kAvx2 = MXFP8_KERNELS(avx2);
MXFP8_TABLE(avx2, kAvx2)

namespace avx2_vnni {
extern const GemmKernel gemm_int16, gemm_int8, gemm_skinny_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kFewRowsInt8, &gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kFewRowsAvx2, &avx2::gemm_skinny_f32},
    {Values::kE4M3, kFewRowsAvx2 + 1, kGemmRows, &gemm_int16},
    {Values::kAny, 1, kGemmRows, &avx2::gemm_f32},
};
}  // namespace avx2_vnni
MXFP8_TABLE(avx2_vnni, with_gemms(kAvx2, "avx2_vnni", gemms))

namespace avx512 {
MXFP8_DECLARE_KERNELS
constexpr GemmRow gemms[] = {
    {Values::kOther, 1, kFewRowsAvx512, &gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &gemm_f32},
};
}  // namespace avx512
constexpr Kernels kAvx512 = MXFP8_KERNELS(avx512);
MXFP8_TABLE(avx512, kAvx512)

namespace avx512_vnni {
extern const GemmKernel gemm_int16, gemm_int8, gemm_skinny_int8;
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kFewRowsInt8, &gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &gemm_int8},
    {Values::kOther, 1, kFewRowsAvx512, &avx512::gemm_skinny_f32},
    {Values::kE4M3, kFewRowsAvx512 + 1, kGemmRows, &gemm_int16},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
}  // namespace avx512_vnni
MXFP8_TABLE(avx512_vnni, with_gemms(kAvx512, "avx512_vnni", gemms))

namespace avx512_bf16 {
extern const GemmKernel gemm_skinny_bf16, gemm_bf16, gemm_many_bf16;
constexpr int64_t kManyRows = 192;  // beyond, turning B pays
constexpr GemmRow gemms[] = {
    {Values::kInt8, 1, kFewRowsInt8, &avx512_vnni::gemm_skinny_int8},
    {Values::kInt8, 1, kGemmRows, &avx512_vnni::gemm_int8},
    {Values::kBf16, 1, kSkinnyRows, &gemm_skinny_bf16}, {Values::kBf16, kManyRows + 1, kGemmRows, &gemm_many_bf16},
    {Values::kBf16, 1, kManyRows, &gemm_bf16},          {Values::kOther, 1, kSkinnyRows, &avx512::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
}  // namespace avx512_bf16
MXFP8_TABLE(avx512_bf16, with_gemms(kAvx512, "avx512_bf16", gemms, true))

namespace amx_bf16 {
MXFP8_DECLARE_ATTENTION
extern const GemmKernel gemm_amx, gemm_amx_parts;
constexpr int64_t kFewRows = 3;  // up to here turning B takes longer than multiplying it in registers
constexpr GemmRow gemms[] = {
    {Values::kBf16, 1, kFewRows, &avx512::gemm_skinny_f32},
    {Values::kOther, 1, kFewRows, &avx512::gemm_skinny_f32},
    {Values::kBf16, 1, kAmxStripRows, &gemm_amx},
    {Values::kOther, 1, kAmxStripRows, &gemm_amx_parts},
    {Values::kOther, 1, kSkinnyRows, &avx512::gemm_skinny_f32},
    {Values::kAny, 1, kGemmRows, &avx512::gemm_f32},
};
constexpr Kernels table() {
  Kernels all = with_gemms(kAvx512, "amx_bf16", gemms, true);
  all.attention_state = attention_state;
  all.attention_scratch = attention_scratch;
  all.attention = attention;
  all.attention_merge = attention_merge;
  all.strip_rows = kAmxStripRows;
  return all;
}
}  // namespace amx_bf16
MXFP8_TABLE(amx_bf16, table())
#endif

}  // namespace mxfp8
