// MXFP8NormQuantize and MXFP8AddNormQuantize: rows of x + residual -> normalized -> elements and scales. Work is split
// over rows. About kNormValues values at a time are in L1, as float32, from the sum to their elements: x and the
// residual are read once, the results written once. Bytes moved per value of float32: 4 or 8 read, 1.03 written, and 4
// more for each of normalized and sum that is wanted.
//
// Means are of two passes: of the row, then of the squares of what is left of it, each in 4 * kLanes partial sums, so
// that an error of the mean counts squared. fused.norm_error_bound holds for them.
#include "../norm.h"

#include "../quantize.h"
#include "codec.h"
#include "simd.h"

namespace mxfp8::MXFP8_ISA {

void quantize_rows(const QuantizeArgs&, int64_t row_begin, int64_t row_end, Stats*);

namespace {

constexpr int kPartial = 4;  // vectors of partial sums

float lanes_of(const Vec (&sums)[kPartial]) {
  float totals[4];
  store_sums(sums, totals, false);
  return (totals[0] + totals[1]) + (totals[2] + totals[3]);
}

// The sum of f(x) over a row; f takes vectors and numbers.
template <class Function>
MXFP8_INLINE float sum_of(const float* x, int64_t count, const Function& f) {
  Vec sums[kPartial] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kPartial * kLanes <= count; i += kPartial * kLanes) {
    for (int j = 0; j < kPartial; ++j) sums[j] = sums[j] + f(load(x + i + j * kLanes));
  }
  float total = lanes_of(sums);
  for (; i < count; ++i) total += f(x[i]);
  return total;
}

template <class D>
void sum_row(const NormArgs& args, int64_t row, float* out) {
  using Storage = typename D::Storage;
  const auto* x = static_cast<const Storage*>(args.x) + row * args.k;
  if (args.residual == nullptr) {
    for (int64_t i = 0; i < args.k; ++i) out[i] = D::load(x[i]);
  } else {
    const auto* residual = static_cast<const Storage*>(args.residual) + row * args.k;
    for (int64_t i = 0; i < args.k; ++i) out[i] = D::load(D::store(D::load(x[i]) + D::load(residual[i])));
  }
  if (args.sum == nullptr) return;
  auto* sum = static_cast<Storage*>(args.sum) + row * args.k;
  for (int64_t i = 0; i < args.k; ++i) sum[i] = D::store(out[i]);
}

template <class D>
void normalize_row(const NormArgs& args, int64_t row, float* x) {
  const auto count = float(args.k);
  const float mean = args.norm == MXFP8_RMS ? 0.0f : sum_of(x, args.k, [](auto v) { return v; }) / count;
  const float squares = sum_of(x, args.k, [&](auto v) { return (v - mean) * (v - mean); });
  const float inverse = 1.0f / __builtin_sqrtf(squares / count + args.epsilon);
  if (args.bias == nullptr) {
    for (int64_t i = 0; i < args.k; ++i) x[i] = D::load(D::store((x[i] - mean) * inverse * args.scale[i]));
  } else {
    for (int64_t i = 0; i < args.k; ++i) {
      x[i] = D::load(D::store((x[i] - mean) * inverse * args.scale[i] + args.bias[i]));
    }
  }
  if (args.normalized == nullptr) return;
  auto* y = static_cast<typename D::Storage*>(args.normalized) + row * args.k;
  for (int64_t i = 0; i < args.k; ++i) y[i] = D::store(x[i]);
}

template <class D>
void rows(const NormArgs& args, int64_t row_begin, int64_t row_end, float* room) {
  const int64_t k = args.k, blocks = (k + kBlock - 1) / kBlock, most = norm_rows(k);
  for (int64_t row = row_begin; row < row_end; row += most) {
    const int64_t count = row_end - row < most ? row_end - row : most;
    for (int64_t i = 0; i < count; ++i) {
      sum_row<D>(args, row + i, room + i * k);
      normalize_row<D>(args, row + i, room + i * k);
    }
    const QuantizeArgs codes = {MXFP8_FLOAT32,
                                room,
                                count,
                                k,
                                1,
                                k,
                                args.format,
                                args.increment,
                                args.elements + row * k,
                                args.scales + row * blocks};
    quantize_rows(codes, 0, count, nullptr);
  }
}

}  // namespace

void norm_quantize(const NormArgs& args, int64_t row_begin, int64_t row_end, float* room) {
  with_dtype(args.dtype, [&](auto dtype) { rows<decltype(dtype)>(args, row_begin, row_end, room); });
}

}  // namespace mxfp8::MXFP8_ISA
