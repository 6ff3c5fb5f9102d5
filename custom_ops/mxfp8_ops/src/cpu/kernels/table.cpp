// The table of one instruction set's kernels.
#include "kernels.h"
#include "packed_integers.h"

namespace mxfp8::MXFP8_ISA {

void quantize_rows(const QuantizeArgs&, int64_t, int64_t, Stats*);
void quantize_columns(const QuantizeArgs&, int64_t, int64_t);
void pack_columns(const QuantizeArgs&, int64_t, int64_t, Stats*);
void dequantize_rows(const DequantizeArgs&, int64_t, int64_t);
void dequantize_columns(const DequantizeArgs&, int64_t, int64_t);
void embedding(const EmbeddingArgs&, int64_t, int64_t);
void norm_quantize(const NormArgs&, int64_t, int64_t, float*);
int64_t attention_state(const AttentionArgs&, const AttentionTask&);
int64_t attention_scratch(const AttentionArgs&, const AttentionTask&);
void attention(const AttentionArgs&, const AttentionTask&, const AttentionTask*, void*, float*);
void attention_merge(const AttentionArgs&, const AttentionTask&, float*, int64_t);

// One row of the gemms: for strips of `least` to `most` rows, in tiles of `tile` rows, packed as `Value`.
template <class Value>
constexpr GemmKernel gemm(Values values, int64_t least, int64_t most, int tile, const char* name,
                          decltype(GemmKernel::pack) pack, decltype(GemmKernel::multiply) multiply) {
  GemmKernel kernel{};
  kernel.name = name;
  kernel.values = values;
  kernel.least_rows = least;
  kernel.most_rows = most;
  kernel.tile_rows = tile;
  kernel.value_bytes = sizeof(Value);
  kernel.pack = pack;
  kernel.multiply = multiply;
  return kernel;
}

#define MXFP8_DECLARE(NAME)                                                    \
  int NAME##_pack(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, void*); \
  void NAME##_multiply(const GemmArgs&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int)
#define MXFP8_GEMM(NAME) #NAME, NAME##_pack, NAME##_multiply

MXFP8_DECLARE(gemm_skinny_f32);
MXFP8_DECLARE(gemm_f32);

// Up to here adding up sums across lanes takes less than turning B, as measured on AVX-512 and AVX2.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int64_t kSkinnyFloatRows = 8;
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kSkinnyFloatRows = 11;
#else
constexpr int64_t kSkinnyFloatRows = kSkinnyRows;
#endif
#if defined(__AMX_BF16__)
MXFP8_DECLARE(gemm_amx);
MXFP8_DECLARE(gemm_amx_parts);

constexpr int64_t kFewAmxRows = 3;  // up to here turning B takes longer than multiplying it in registers

struct ThreeParts {
  uint16_t parts[3];
};
#elif defined(__AVX512BF16__)
MXFP8_DECLARE(gemm_skinny_bf16);
MXFP8_DECLARE(gemm_bf16);
MXFP8_DECLARE(gemm_many_bf16);

constexpr int64_t kManyRows = 192;  // beyond, turning B pays
#endif
#if defined(MXFP8_DOTS_OF_INTEGERS)
MXFP8_DECLARE(gemm_int16);

struct IntegersAndMore {
  char bytes[kPackedBytes];
};
static_assert(enough_bytes(kSkinnyFloatRows + 1));
#endif

constexpr GemmKernel gemms[] = {
#if defined(__AMX_BF16__)
    gemm<float>(Values::kBf16, 1, kFewAmxRows, kSkinnyRows, MXFP8_GEMM(gemm_skinny_f32)),
    gemm<float>(Values::kOther, 1, kFewAmxRows, kSkinnyRows, MXFP8_GEMM(gemm_skinny_f32)),
    gemm<uint16_t>(Values::kBf16, 1, kAmxStripRows, 16, MXFP8_GEMM(gemm_amx)),
    gemm<ThreeParts>(Values::kOther, 1, kAmxStripRows, 16, MXFP8_GEMM(gemm_amx_parts)),
#elif defined(__AVX512BF16__)
    gemm<uint16_t>(Values::kBf16, 1, kSkinnyRows, kSkinnyRows, MXFP8_GEMM(gemm_skinny_bf16)),
    gemm<uint16_t>(Values::kBf16, kManyRows + 1, kGemmRows, kBf16Rows, MXFP8_GEMM(gemm_many_bf16)),
    gemm<uint16_t>(Values::kBf16, 1, kManyRows, kTileRows, MXFP8_GEMM(gemm_bf16)),
#endif
    gemm<float>(Values::kOther, 1, kSkinnyFloatRows, kSkinnyRows, MXFP8_GEMM(gemm_skinny_f32)),
#if defined(MXFP8_DOTS_OF_INTEGERS)
    gemm<IntegersAndMore>(Values::kE4M3, kSkinnyFloatRows + 1, kGemmRows, kFloatRows, MXFP8_GEMM(gemm_int16)),
#endif
    gemm<float>(Values::kAny, 1, kGemmRows, kFloatRows, MXFP8_GEMM(gemm_f32)),
};

#define MXFP8_STRING_OF(x) #x
#define MXFP8_STRING(x) MXFP8_STRING_OF(x)

// constexpr: code of this instruction set must not run before it is chosen.
constexpr Kernels table() {
  Kernels all{};
  all.isa = MXFP8_STRING(MXFP8_ISA);
  all.quantize_rows = quantize_rows;
  all.quantize_columns = quantize_columns;
  all.pack_columns = pack_columns;
  all.dequantize_rows = dequantize_rows;
  all.dequantize_columns = dequantize_columns;
  all.embedding = embedding;
  all.norm_quantize = norm_quantize;
  all.attention_state = attention_state;
  all.attention_scratch = attention_scratch;
  all.attention = attention;
  all.attention_merge = attention_merge;
  all.has_bf16 = gemms[0].values == Values::kBf16;
#if defined(__AMX_BF16__)
  all.strip_rows = kAmxStripRows;
#else
  all.strip_rows = kGemmRows;
#endif
  all.gemms = gemms;
  return all;
}

extern const Kernels kernels;
constexpr Kernels kernels = table();

}  // namespace mxfp8::MXFP8_ISA
