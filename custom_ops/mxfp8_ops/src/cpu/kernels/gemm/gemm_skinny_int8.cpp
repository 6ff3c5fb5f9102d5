// The gemm of INT8 elements for one or two rows, on dot products of 8-bit integers (VPDPBUSD): B is read once, as it
// lies.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 2. Work is split over N. Bytes moved: 1.03 N K + A + the result. A register
// of B takes 3 operations, and 4 more for each row of A: dot product, conversion, two multiplications.
//
// Packed A has A's elements plus 128, because the instruction takes them as unsigned bytes. A sum is too large by 128
// times the sum of B's elements, which one dot product computes for all rows. The two scales of a block are multiplied
// first, then the product with the sum. A row of B whose scale's products float32 cannot hold goes to exact_dot; such a
// row of A goes to another kernel.
//
// SDOT, on Arm, takes signed bytes, and a step is a block: two products, a subtraction of the start of the sum (see
// int8_tile_neon.h), and a multiply-add.
#include "gemm_skinny.h"
#include "int8.h"

namespace mxfp8::MXFP8_ISA {
namespace {

#if defined(__aarch64__)
constexpr int kStep = int(kBlock);
constexpr uint8_t kFlipped = 0;
constexpr int64_t kScaleLanes = kLanes;  // lanes of a scale of A, with which sums begin
#else
constexpr int kStep = kDecoded;
constexpr uint8_t kFlipped = 0x80;  // plus 128
constexpr int64_t kScaleLanes = 1;
#endif
constexpr int64_t kFarBytes = 16384;  // B is fetched into L2 this far ahead
constexpr int64_t kNearBytes = 1024;  // and from there into L1
constexpr int kTogether = 2;          // rows of B that are read together: more lines are on the way

// The scales of `count` blocks of a row of B, times 2^-6. False if one does not fit.
MXFP8_INLINE bool convert_scales(const uint8_t* codes, int64_t count, float* scales) {
  uint32_t all = 1;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i], fits = (code >= kLowestScale) & (code <= kHighestScale);
    scales[i] = float_of((code - kElementBits) << 23);
    all &= fits;
  }
  return all != 0;
}

// Multiplies R rows of A with C rows of B.
template <int R, int C>
MXFP8_INLINE bool dot(const uint8_t* a, const float* a_scales, int64_t a_stride, const Pass& pass, float* out) {
  alignas(64) float scales[C][kGroupBytes / kBlock + kLanes];
  const int64_t blocks = blocks_of(pass.count);
  for (int c = 0; c < C; ++c) {
    const uint8_t* codes = pass.scales + c * pass.next_scales;
    if (!convert_scales(codes, blocks, scales[c])) return false;
    for (int64_t i = 0; i < blocks; i += 64) __builtin_prefetch(codes + pass.ahead_scales + i);
  }
  Vec sums[C][R] = {};
#if defined(__aarch64__)
  const auto step = [&](const uint8_t* elements, int64_t next, int64_t k) MXFP8_INLINE_LAMBDA {
    int8x16_t b[C][2];
    for (int c = 0; c < C; ++c) {
      for (int half = 0; half < 2; ++half) b[c][half] = vreinterpretq_s8_u8(vld1q_u8(elements + c * next + 16 * half));
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      const auto* row = reinterpret_cast<const int8_t*>(a) + k * R + r * kStep;
      const int8x16_t first = vld1q_s8(row), second = vld1q_s8(row + 16);
      const float32x4_t start = vld1q_f32(a_scales + (r * a_stride + k / kBlock) * kScaleLanes);
      for (int c = 0; c < C; ++c) {
        const int32x4_t sum = vdotq_s32(vdotq_s32(vreinterpretq_s32_f32(start), first, b[c][0]), second, b[c][1]);
        const float32x4_t scaled = vsubq_f32(vreinterpretq_f32_s32(sum), start);
        sums[c][r] = vfmaq_n_f32(sums[c][r], scaled, scales[c][k / kBlock]);
      }
    }
  };
#else
  const Ints offset = Ints{} + int(0x80808080);
  const auto step = [&](const uint8_t* elements, int64_t next, int64_t k) MXFP8_INLINE_LAMBDA {
    Ints b[C], corrections[C];
    Vec b_scales[C];
    for (int c = 0; c < C; ++c) {
      b[c] = reinterpret_cast<Ints>(load_bytes(elements + c * next));
      corrections[c] = Ints{};
      add_dots(offset, b[c], &corrections[c]);
      corrections[c] = -corrections[c];
      b_scales[c] = spread_scales(scales[c], k);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Ints row = reinterpret_cast<Ints>(load_bytes(a + k * R + r * kStep));
      const Vec a_scale = spread_scales(a_scales + r * a_stride, k);
      for (int c = 0; c < C; ++c) {
        Ints sum = corrections[c];
        add_dots(row, b[c], &sum);
        sums[c][r] = multiply_add(__builtin_convertvector(sum, Vec), b_scales[c] * a_scale, sums[c][r]);
      }
    }
  };
#endif
  int64_t k = 0;
  for (; k + 4 * kStep <= pass.count; k += 4 * kStep) {
    for (int c = 0; c < C; ++c) {
      for (int i = 0; i < 4 * kStep; i += 64) {
        const uint8_t* line = pass.elements + c * pass.next_elements + k + i;
        __builtin_prefetch(line + pass.ahead, 0, 2);
        __builtin_prefetch(line + kNearBytes);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step(pass.elements + k + i * kStep, pass.next_elements, k + i * kStep);
  }
  for (; k + kStep <= pass.count; k += kStep) step(pass.elements + k, pass.next_elements, k);
  if (k < pass.count) {
    alignas(64) uint8_t padded[C][kStep] = {};
    for (int c = 0; c < C; ++c) {
      std::memcpy(padded[c], pass.elements + c * pass.next_elements + k, size_t(pass.count - k));
      for (int64_t i = blocks; i < (k + kStep) / kBlock; ++i) scales[c][i] = 0;
    }
    step(padded[0], kStep, k);
  }
  for (int c = 0; c < C; ++c) add_lanes<R>(sums[c], out + c * kSumRows);
  return true;
}

// Where packed A lies: elements [group, step, row, kStep], then scales [row, block, kScaleLanes].
MXFP8_INLINE float* scales_of(void* packed, int64_t rows, int64_t padded) {
  return reinterpret_cast<float*>(static_cast<char*>(packed) + rows * padded);
}
MXFP8_INLINE void store_scale(float scale, float* to) {
#if defined(__aarch64__)
  scale = scale == scale ? float_of((bits_of(scale) + (kSumBits << 23)) | kHalf) : scale;
#endif
  for (int64_t i = 0; i < kScaleLanes; ++i) to[i] = scale;
}
constexpr int64_t padded_depth(int64_t k) { return (k + kStep - 1) / kStep * kStep; }

}  // namespace

int gemm_skinny_int8_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  const int64_t padded = padded_depth(args.k), blocks = padded / kBlock;
  auto* out = static_cast<uint8_t*>(packed);
  float* scales = scales_of(packed, rows, padded);
  const Groups groups(rows, kRowsAsTheyLie);
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t group_rows = groups.rows(group), first = groups.first(group);
    for (int64_t r = 0; r < group_rows; ++r) {
      const auto [elements, codes] = row_of_a(args, row + first + r);
      for (int64_t k = 0; k < padded; k += kStep) {
        uint8_t* to = out + first * padded + k * group_rows + r * kStep;
        alignas(64) uint8_t padded_step[kStep] = {};
        const bool whole = args.k - k >= kStep;
        if (!whole) std::memcpy(padded_step, elements + k, size_t(args.k - k));
        for (int i = 0; i < kStep; i += kDecoded) {
          const Bytes moved = load_bytes((whole ? elements + k : padded_step) + i) ^ kFlipped;
          std::memcpy(to + i, &moved, sizeof moved);
        }
      }
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t k = block * kBlock;
        const Int8Scale scale = k < args.k ? int8_scale(codes[block], elements + k, args.k - k) : Int8Scale{0, true};
        if (!scale.fits) return kNotExact;
        store_scale(scale.value, scales + ((first + r) * blocks + block) * kScaleLanes);
      }
    }
  }
  return 0;
}

void gemm_skinny_int8_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                               int64_t column_end, const void* packed, int) {
  const int64_t padded = padded_depth(args.k), blocks = padded / kBlock;
  const float* scales = scales_of(const_cast<void*>(packed), rows, padded);
  for_each_group<uint8_t, kStep, 1, kRowsAsTheyLie, kGroupBytes, kFarBytes>(
      args, row, rows, column_begin, column_end, static_cast<const uint8_t*>(packed),
      [&](auto r, const Work<uint8_t>& work) {
        constexpr int R = decltype(r)::value;
        const float* of_group = scales + (work.row - row) * blocks * kScaleLanes + work.k / kBlock * kScaleLanes;
        for_each_column<INT8, R, kTogether>(work, [&](auto c, const Pass& pass, float* sums) MXFP8_INLINE_LAMBDA {
          return dot<R, decltype(c)::value>(work.a, of_group, blocks, pass, sums);
        });
      });
}

MXFP8_GEMM_KERNEL(gemm_skinny_int8, int(kRowsAsTheyLie), kPackedBytes);

}  // namespace mxfp8::MXFP8_ISA
