// A grid of gemms through the C ABI on every instruction set of this machine, against sums in float64: ragged shapes,
// formats, constant weights, the ends of the range. Then quantize and dequantize, which have to give the bytes of the
// portable kernels. Prints a line for each set; exits with 1 if a result is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "mxfp8_ops.h"

namespace {

using Bytes = std::vector<uint8_t>;
struct Format {
  int code, bytes, mantissa, exponent;  // bits of the fields; INT8 has no exponent
};
const Format kF32{MXFP8_FLOAT32, 4, 23, 8}, kF16{MXFP8_FLOAT16, 2, 10, 5}, kBf16{MXFP8_BFLOAT16, 2, 7, 8},
    kE4M3{MXFP8_E4M3, 1, 3, 4}, kE5M2{MXFP8_E5M2, 1, 2, 5}, kInt8{MXFP8_INT8, 1, 6, 0};
const Format *const kValues[] = {&kF32, &kF16, &kBf16}, *const kElements[] = {&kE4M3, &kE5M2, &kInt8};
const Format* const kLeft[] = {&kE4M3, &kInt8, &kE5M2, &kE4M3, &kF32, &kF16, &kBf16, &kF32, &kF16, &kBf16, &kF32};
const Format* const kRight[] = {&kE4M3, &kInt8, &kE4M3, &kE5M2, &kInt8, &kInt8, &kInt8, &kE4M3, &kE4M3, &kE4M3, &kE5M2};
enum Kind { kPlain, kHeavyTailed, kEnds, kZeros, kNans, kLowest, kKinds };  // kEnds: of scales
constexpr int kPairs = std::size(kLeft), kGemms = kKinds * kPairs * 6, kQuantizes = 54;
int misses = 0;

void check(int status) {
  if (status != MXFP8_OK) ++misses, std::printf("WRONG: %s\n", mxfp8_last_error(MXFP8_MESSAGE));
}
int blocks(int k) { return (k + 31) / 32; }

double decode(const Format& f, uint32_t bits) {
  if (&f == &kInt8) return int8_t(bits) / 64.0;
  const int one = 1 << f.mantissa, top = (1 << f.exponent) - 1, exponent = bits >> f.mantissa & top;
  const int mantissa = bits & (one - 1), significand = mantissa + (exponent > 0 ? one : 0);
  const bool special = exponent == top && (&f != &kE4M3 || mantissa == 7);
  const double size = std::ldexp(significand, std::max(exponent, 1) - top / 2 - f.mantissa);
  return (bits >> (8 * f.bytes - 1) != 0 ? -1 : 1) * (!special ? size : mantissa == 0 ? INFINITY : NAN);
}
float to_bf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  return std::isnan(x) ? x : float(decode(kBf16, (bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

using Random = std::mt19937;
int below(Random& random, int limit) { return int(random() % unsigned(limit)); }

uint32_t element(Random& random, Kind kind, const Format& f, bool zero) {
  if (&f == &kInt8) return kind == kLowest ? 128 : below(random, kind != kZeros ? 256 : zero ? 1 : 3);
  const int one = 1 << f.mantissa, top = (1 << f.exponent) - 1;
  int exponent = top / 2 - below(random, 3), mantissa = below(random, one);
  if (kind == kHeavyTailed) exponent = std::max(0, top / 2 + 5 - below(random, 16));
  if (kind == kEnds) exponent = below(random, 2) * (top - 1);
  if (kind == kZeros) exponent = 0, mantissa *= !zero;
  if (kind == kNans && below(random, 512) == 0) exponent = top;
  if (kind == kLowest) exponent = top / 2, mantissa = one - 1;
  return uint32_t(kind == kLowest || below(random, 2) == 1) << (8 * f.bytes - 1) | uint32_t(exponent * one + mantissa);
}

// Rows of elements with scales, or of values; `values` are what they stand for.
struct Operand {
  const Format& f;
  Bytes bytes, scales;
  std::vector<float> values;

  Operand(Random& random, Kind kind, const Format& format, int rows, int k, bool rounds = false)
      : f(format), bytes(rows * k * f.bytes), scales(rows * blocks(k)) {
    int lowest = 120;
    for (int i = 0; i < rows * k; ++i) {
      uint8_t& scale = scales[i / k * blocks(k) + i % k / 32];
      if (i % k == 0 && kind == kEnds) lowest = below(random, 3) * 126;  // 0 .. 2, 126 .. 128, 252 .. 254
      if (i % k % 32 == 0) scale = uint8_t(lowest + below(random, kind == kHeavyTailed ? 12 : 3));
      if (i % k % 32 == 0 && (kind == kEnds || kind == kNans) && below(random, 60) == 0) scale = 255;
      const uint32_t bits = element(random, kind, f, scale % 2 == 0);
      std::memcpy(&bytes[i * f.bytes], &bits, size_t(f.bytes));  // of a little-endian machine
      const double factor = f.bytes > 1 ? 1 : scale == 255 ? NAN : std::ldexp(1.0, scale - 127);
      values.push_back(float(decode(f, bits) * factor));
      if (rounds) values.back() = to_bf16(values.back());
    }
  }
};

// What an output may be: the bound of numerics.ErrorBound, and infinite or NaN as test_gemm_overflow.py says.
struct Sum {
  double exact = 0, magnitude = 0, above = 0, below = 0;
  bool nan = false;

  void add(double product) {
    exact += product, magnitude += std::abs(product), nan = nan || std::isnan(product);
    (product > 0 ? above : below) += float(product);
  }
  // The error as a share of the bound; infinite where y may not be infinite or NaN. A finite y may be right though a
  // product is infinite in float32: a multiply-add adds the exact one.
  double error(float y, int k) const {
    if (!nan && std::isfinite(y)) return std::abs(y - exact) / ((k + 2) * (magnitude * 0x1p-24 + 0x1p-150));
    const bool high = above > 0x1.fffffep127, low = below < -0x1.fffffep127;
    const bool infinite = y > 0 ? high && !std::isinf(below) : low && !std::isinf(above);
    return (std::isnan(y) ? nan || (high && low) : !nan && infinite) ? 0 : INFINITY;
  }
};

struct Case {
  int number;
  Random random{unsigned(number)};
  Kind kind = Kind(number % kKinds);
  int pair = number / kKinds % kPairs, constant = number / kKinds / kPairs % 2;  // each with few and with many rows
  int m = 1 + below(random, number < kGemms / 2 ? 4 : 70), n = 1 + below(random, 80), unit = below(random, 2) * 96 + 32;
  int k = below(random, 2) == 0 ? unit * (1 + below(random, 5)) : 1 + below(random, below(random, 4) == 0 ? 31 : 700);
  bool rounds = kLeft[pair]->bytes > 1 && below(random, 2) == 0;
  Operand a{random, kind, *kLeft[pair], m, k, rounds}, b{random, kind, *kRight[pair], n, k};
  std::vector<float> bias = std::vector<float>(below(random, 2) * n, 0.75f);
  std::vector<Sum> sums = std::vector<Sum>(m * (n + 1));  // a row of y has a value more, which stays 0

  explicit Case(int i) : number(i) {
    for (int at = 0; at < m * (n + 1); ++at) {
      const int row = at / (n + 1), column = at % (n + 1);
      if (column < n && !bias.empty()) sums[at].add(bias[0]);
      for (int j = 0; j < k && column < n; ++j) sums[at].add(double(a.values[row * k + j]) * b.values[column * k + j]);
    }
  }
  std::vector<float> run(const Format& f, int64_t weight) const {
    Bytes y(sums.size() * f.bytes);
    const float* add = bias.empty() ? nullptr : bias.data();
    const int activation = rounds ? MXFP8_BFLOAT16 : MXFP8_FLOAT32, threads = 1 + number % 2;
    const uint8_t *x = a.bytes.data(), *x_scales = a.scales.data(), *w = b.bytes.data(), *w_scales = b.scales.data();
    check(a.f.bytes > 1 ? mxfp8_weight_gemm(a.f.code, x, k, activation, b.f.code, w, w_scales, add, m, n, k, f.code,
                                            y.data(), n + 1, weight, threads)
                        : mxfp8_gemm(a.f.code, x, x_scales, b.f.code, w, w_scales, add, m, n, k, f.code, y.data(),
                                     n + 1, weight, threads));
    std::vector<float> values;
    for (size_t i = 0; i < y.size(); i += f.bytes) {
      uint32_t bits = 0;
      std::memcpy(&bits, &y[i], size_t(f.bytes));
      values.push_back(float(decode(f, bits)));
    }
    return values;
  }
  // Returns the largest error as a share of the bound. The second call reads the panels that the first has made.
  double try_on(const char* isa) const {
    int64_t weight = 0;
    if (constant) check(mxfp8_weight_new(&weight));
    const auto first = run(kF32, weight), y = run(kF32, weight), narrow = run(kBf16, weight);
    mxfp8_weight_free(weight);
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const bool same = narrow[i] == to_bf16(y[i]) || (std::isnan(narrow[i]) && std::isnan(y[i]));
      const double error = same ? std::max(sums[i].error(first[i], k), sums[i].error(y[i], k)) : INFINITY;
      worst = std::max(worst, error);
      if (error <= 1 || ++misses > 5) continue;
      std::printf("WRONG: %s, gemm %d, kind %d: formats %d x %d, M %d, N %d, K %d", isa, number, kind, a.f.code,
                  b.f.code, m, n, k);
      std::printf(" at (%d, %d): %g, then %g, in bfloat16 %g; expected %g, error / bound %g\n", int(i) / (n + 1),
                  int(i) % (n + 1), first[i], y[i], narrow[i], sums[i].exact, error);
    }
    return worst;
  }
};

// Elements and scales of random values, and values of random elements and scales without NaN, whose bits may differ.
Bytes quantize(int number) {
  Random random{unsigned(number)};
  const Format &from = *kValues[number % 3], &to = *kElements[number / 3 % 3];
  const int outer = 1 + below(random, 5), k = 1 + below(random, 200),
            inner = number % 2 == 0 ? 1 : 1 + below(random, 70);
  const int size = outer * k * inner, scale_count = outer * blocks(k) * inner;
  const Operand x(random, Kind(below(random, kKinds)), from, outer, k * inner);
  Bytes noise(size + scale_count), y(size * from.bytes), out(size + scale_count);
  for (auto& byte : noise) byte = uint8_t(below(random, 256) & 0xfb);
  check(mxfp8_quantize(from.code, x.bytes.data(), outer, k, inner, to.code, number / 9 % 3, out.data(), &out[size], 1));
  check(mxfp8_dequantize(to.code, noise.data(), &noise[size], outer, k, inner, from.code, y.data(), 1));
  out.insert(out.end(), y.begin(), y.end());
  return out;
}

}  // namespace

int main() {
  std::vector<Case> gemms;
  for (int i = 0; i < kGemms; ++i) gemms.emplace_back(i);
  check(mxfp8_isa_force("portable"));
  std::vector<Bytes> expected;
  for (int i = 0; i < kQuantizes; ++i) expected.push_back(quantize(i));
  std::stringstream sets(mxfp8_isa_available());
  for (std::string isa; std::getline(sets, isa, ',');) {
    check(mxfp8_isa_force(isa.c_str()));
    check(mxfp8_profile(1));
    double worst = 0;
    for (const Case& gemm : gemms) worst = std::max(worst, gemm.try_on(isa.c_str()));
    std::map<std::string, int> kernels;
    std::stringstream calls(mxfp8_profile_text());
    for (std::string word; std::getline(calls, word, '\t'); std::getline(calls, word)) {
      std::getline(std::getline(calls, word, '\t'), word, '\t');  // time and set are before it
      ++kernels[word];
    }
    std::printf("%s: %d gemms, largest error / bound %.3f;", isa.c_str(), kGemms, worst);
    for (const auto& [name, count] : kernels) std::printf(" %s %d", name.c_str(), count);
    std::printf("; %d quantize, dequantize\n", kQuantizes);
    for (int i = 0; i < kQuantizes; ++i) {
      if (quantize(i) != expected[i]) ++misses, std::printf("WRONG: %s, quantize %d\n", isa.c_str(), i);
    }
  }
  std::printf("%d results are wrong\n", misses);
  return misses > 0 ? 1 : 0;
}
