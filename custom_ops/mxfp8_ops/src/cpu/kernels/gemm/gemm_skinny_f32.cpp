// The gemms for few rows in float32, on every instruction set: B is decoded in registers.
//
// y [M, N] = A [M, K] . B [N, K]^T, M <= 16. Work is split over N. Bytes moved: 1.03 N K + 4 M K + the result.
//
// Elements become float32 by shifts, see shift_decode.h; A is packed in the same order. The missing 2^bias_gap is put
// into the scale, which multiplies each block's sum. So that small products stay normal, A is packed times 2^t, which
// puts its largest value at 2^100; the scale takes 2^-t back. The result is exact if A spans less than 2^97; otherwise
// pack refuses. A row of B with NaN or Inf codes, or with scales that do not fit, goes to exact_dot.
//
// A step that has subnormal elements is multiplied by 2^kLift, which makes all of them normal, and its scale by
// 2^-kLift. So every sum is larger by that power of two, and the number that is added to y is the same, bit for bit.
// The kernel checks single steps only in groups of kPlainGroup elements that are not all plain, which means normal
// numbers.
#include "gemm_skinny.h"
#include "shift_decode.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int kStep = kDecoded;
constexpr int kPlainGroup = 256;  // elements that one check for plain ones covers
constexpr int kSteps = kPlainGroup / kStep;
constexpr int kUnrolled = kLanes == 8 ? 8 : 4;  // steps: the fastest, as measured
constexpr int kLargestExponent = 100;           // greatest exponent of packed A, where it is scaled
constexpr int kSmallestExponent = 3;

// B is fetched twice: far ahead into L2, which has room for more requests to memory, and from there into L1. With this,
// one row of A takes 8% less time than with one distance of 4096.
constexpr int64_t kFarBytes = 16384;
constexpr int64_t kNearBytes = 2 * kPlainGroup;

typedef uint8_t Codes __attribute__((vector_size(16)));
constexpr int64_t kCodes = sizeof(Codes);

// Scales of `blocks` blocks, each with `offset` added to its exponent. False if a result is not a normal float.
// `readable` >= blocks: the codes from `codes` to the end of the array.
MXFP8_INLINE bool convert_scales(const uint8_t* codes, int64_t blocks, int64_t readable, int offset, float* scales) {
  const int lowest = 1 - offset, highest = min_of(254 - offset, kScaleNan - 1);
  if (lowest > 255 || highest < 0) return false;
  const Codes low = Codes{} + uint8_t(lowest < 0 ? 0 : lowest), high = Codes{} + uint8_t(highest);
  constexpr Codes order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Codes below = low, above = high;
  for (int64_t i = 0; i < blocks; i += kCodes) {
    Codes some = low;  // absent blocks get a code that fits
    if (__builtin_expect(readable - i >= kCodes, 1)) {
      std::memcpy(&some, codes + i, sizeof some);
      if (blocks - i < kCodes) some = order < uint8_t(blocks - i) ? some : low;
    } else {  // the end of the array: a load of bytes stored one by one takes long
      for (int64_t j = 0; j < blocks - i; ++j) some[j] = codes[i + j];
    }
    below = some < below ? some : below;
    above = some > above ? some : above;
    for (int j = 0; j < kCodes; ++j) scales[i + j] = float_of(uint32_t(some[j] + offset) << 23);
  }
  uint64_t wrong[2];
  const auto differs = (below != low) | (above != high);
  std::memcpy(wrong, &differs, sizeof wrong);
  return (wrong[0] | wrong[1]) == 0;
}

template <bool Value>
struct Plain {
  static constexpr bool value = Value;
};

template <class F, int R>
MXFP8_INLINE bool dot(const float* a, const Pass& pass, int offset, float* out) {
  alignas(64) float scales[kGroupBytes / int64_t(sizeof(float)) / kBlock + kCodes];
  if (!convert_scales(pass.scales, blocks_of(pass.count), pass.readable_scales, offset, scales)) return false;
  for (int64_t i = 0; i < blocks_of(pass.count); i += 64) __builtin_prefetch(pass.scales + pass.ahead_scales + i);
  Vec sums[R];
  for (int r = 0; r < R; ++r) sums[r] = zero();
  Bytes specials = {};
  const auto step = [&](auto plain, const uint8_t* elements, Vec scale, const float* rows) MXFP8_INLINE_LAMBDA {
    Vec weights[4];
    const Bytes codes = load_bytes(elements);
    decode_step<F>(codes, weights);
    if (!decltype(plain)::value && look_at<F>(codes, &specials)) {
      lift(weights);
      scale *= 1.0f / (1 << kLift);
    }
    for (int r = 0; r < R; ++r) {
      Vec sum = weights[0] * load(rows + r * kStep);
      for (int i = 1; i < 4; ++i) sum = multiply_add(weights[i], load(rows + r * kStep + i * kLanes), sum);
      sums[r] = multiply_add(sum, scale, sums[r]);
    }
  };
  const auto steps = [&](auto plain, int64_t begin, int64_t end) MXFP8_INLINE_LAMBDA {
#pragma GCC unroll kUnrolled
    for (int64_t k = begin; k + kStep <= end; k += kStep) {
      step(plain, pass.elements + k, spread_scales(scales, k), a + k * R);
    }
  };
  int64_t k = 0;
  for (; k + kPlainGroup <= pass.count; k += kPlainGroup) {
    const int64_t soon = k + kNearBytes < pass.count ? kNearBytes : pass.next_elements + kNearBytes - pass.count;
    for (int i = 0; i < kPlainGroup; i += 64) {
      __builtin_prefetch(pass.elements + k + i + pass.ahead, 0, 2);
      __builtin_prefetch(pass.elements + k + i + soon);
    }
    const auto codes = [&](int i) MXFP8_INLINE_LAMBDA { return load_bytes(pass.elements + k + i * kStep); };
    if (__builtin_expect(all_plain<F, kSteps>(codes), 1) || all_plain_or_zero<F, kSteps>(codes)) {
      steps(Plain<true>{}, k, k + kPlainGroup);
    } else {
      steps(Plain<false>{}, k, k + kPlainGroup);
    }
  }
  steps(Plain<false>{}, k, pass.count);
  k = pass.count / kStep * kStep;
  if (k < pass.count) {
    alignas(64) uint8_t padded[kStep] = {};
    std::memcpy(padded, pass.elements + k, size_t(pass.count - k));
    step(Plain<false>{}, padded, spread_scales(scales, k), a + k * R);
  }
  if (any_special<F>(specials)) return false;
  add_lanes<R>(sums, out);
  return true;
}

template <class F, int R>
MXFP8_NOINLINE void multiply(const Work<float>& work, int offset) {
  for_each_column<F, R, 1>(work, [&](auto, const Pass& pass, float* sums)
                                     MXFP8_INLINE_LAMBDA { return dot<F, R>(work.a, pass, offset, sums); });
}

// Smallest and largest bits of the finite, nonzero magnitudes of packed A, for each position in a piece.
constexpr int64_t kPiece = kStep < kBlock ? kBlock : kStep;
struct Magnitudes {
  uint32_t smallest[kPiece], largest[kPiece];
  Magnitudes() {
    for (int i = 0; i < kPiece; ++i) smallest[i] = kInfinity, largest[i] = 0;
  }
  void add(const float* values) {
    for (int i = 0; i < kPiece; ++i) {
      const uint32_t bits = bits_of(values[i]) & kMagnitude;
      const uint32_t from = bits == 0 ? kInfinity : bits, to = bits >= kInfinity ? 0 : bits;
      smallest[i] = from < smallest[i] ? from : smallest[i];
      largest[i] = to > largest[i] ? to : largest[i];
    }
  }
};

MXFP8_INLINE void pack_step(const float* values, float* out) {
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) out[i * kLanes + lane] = values[4 * lane + i];
  }
}

// Multiplies packed A by the power of two that the kernel needs, and returns its exponent.
int scale_packed(float* packed, int64_t count, const Magnitudes& magnitudes) {
  uint32_t lowest = kInfinity, highest = 0;
  for (int i = 0; i < kPiece; ++i) {
    lowest = magnitudes.smallest[i] < lowest ? magnitudes.smallest[i] : lowest;
    highest = magnitudes.largest[i] > highest ? magnitudes.largest[i] : highest;
  }
  if (highest == 0) return kLargestExponent;
  const int largest = int(highest >> 23) - 127, smallest = int(lowest >> 23) - 127;
  const int wanted = kLargestExponent - largest;
  const int t = wanted > 119 ? 119 : wanted;
  if (smallest + t < kSmallestExponent) return kNotExact;
  const float factor = float_of(uint32_t(t + 127) << 23);
  for (int64_t i = 0; i < count; ++i) packed[i] *= factor;
  return t;
}

}  // namespace

int gemm_skinny_f32_pack(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, void* packed) {
  auto* out = static_cast<float*>(packed);
  const int64_t padded = (args.k + kPiece - 1) / kPiece * kPiece;
  const Groups groups(rows, kSkinnyGroup);
  Magnitudes magnitudes;
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t group_rows = groups.rows(group), first = groups.first(group);
    for (int64_t r = 0; r < group_rows; ++r) {
      float* to = out + first * padded + r * kStep;
      for (int64_t k = 0; k < padded; k += kPiece) {
        alignas(64) float piece[kPiece] = {};
        for (int64_t i = 0; i < kPiece && k + i < args.k; i += kBlock) {
          load_a_block(args, row + first + r, (k + i) / kBlock, piece + i);
        }
        magnitudes.add(piece);
        for (int64_t i = 0; i < kPiece; i += kStep) pack_step(piece + i, to + (k + i) * group_rows);
      }
    }
  }
  return scale_packed(out, rows * padded, magnitudes);
}

void gemm_skinny_f32_multiply(const GemmArgs& args, int64_t row, int64_t rows, int64_t, int64_t, int64_t column_begin,
                              int64_t column_end, const void* packed, int exponent) {
  with_format(args.b_format, [&](auto format) {
    using F = decltype(format);
    const int offset = Shift<F>::bias_gap - exponent;
    for_each_group<float, int(kPiece), 1, kSkinnyGroup, kGroupBytes, kFarBytes>(
        args, row, rows, column_begin, column_end, static_cast<const float*>(packed),
        [&](auto r, const Work<float>& work) { multiply<F, decltype(r)::value>(work, offset); });
  });
}

MXFP8_GEMM_KERNEL(gemm_skinny_f32, int(kSkinnyRows), sizeof(float));

}  // namespace mxfp8::MXFP8_ISA
