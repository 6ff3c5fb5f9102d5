// A grid of gemms through the C ABI on every instruction set of this machine, against sums in float64: ragged shapes,
// formats, constant weights, the ends of the range. Then quantize and dequantize, which have to give the bytes of the
// portable kernels. Prints a line for each set; exits with 1 if a result is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "mxfp8_ops.h"

namespace {

using Bytes = std::vector<uint8_t>;
struct Format {
  const char* name;
  int code, bytes, mantissa, exponent;  // bits of the fields; INT8 has no exponent
};
const Format kF32{"float32", MXFP8_FLOAT32, 4, 23, 8}, kF16{"float16", MXFP8_FLOAT16, 2, 10, 5},
    kBf16{"bfloat16", MXFP8_BFLOAT16, 2, 7, 8}, kE4M3{"e4m3", MXFP8_E4M3, 1, 3, 4}, kE5M2{"e5m2", MXFP8_E5M2, 1, 2, 5},
    kInt8{"int8", MXFP8_INT8, 1, 6, 0};
const Format* const kValues[] = {&kF32, &kF16, &kBf16};
const Format* const kElements[] = {&kE4M3, &kE5M2, &kInt8};
const Format* const kLeft[] = {&kE4M3, &kInt8, &kE5M2, &kE4M3, &kF32, &kF16, &kBf16, &kF32, &kF16, &kBf16, &kF32};
const Format* const kRight[] = {&kE4M3, &kInt8, &kE4M3, &kE5M2, &kInt8, &kInt8, &kInt8, &kE4M3, &kE4M3, &kE4M3, &kE5M2};
enum Kind { kPlain, kHeavyTailed, kEndsOfScales, kZeros, kNans, kLowest, kKinds };
constexpr int kGemms = int(kKinds * std::size(kLeft)) * 6, kQuantizes = 54;
int misses = 0;

void check(int status) {
  if (status != MXFP8_OK) ++misses, std::printf("WRONG: %s\n", mxfp8_last_error(MXFP8_MESSAGE));
}
int64_t blocks(int64_t k) { return (k + 31) / 32; }

double decode(const Format& f, uint32_t bits) {
  if (&f == &kInt8) return int8_t(bits) / 64.0;
  const uint32_t one = 1u << f.mantissa, top = (1u << f.exponent) - 1, exponent = bits >> f.mantissa & top;
  const uint32_t mantissa = bits % one, significand = mantissa + (exponent > 0 ? one : 0);
  const bool special = exponent == top && (&f != &kE4M3 || mantissa == 7);
  const double size = std::ldexp(significand, int(std::max(exponent, 1u)) - int(top / 2) - f.mantissa);
  return (bits >> (8 * f.bytes - 1) != 0 ? -1 : 1) * (!special ? size : mantissa == 0 ? INFINITY : NAN);
}
float to_bf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  if (!std::isnan(x)) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct Random : std::mt19937 {
  using mersenne_twister_engine::mersenne_twister_engine;
  int below(int limit) { return int((*this)() % unsigned(limit)); }
};
uint32_t element(Random& random, Kind kind, const Format& f, bool zero) {
  if (&f == &kInt8)
    return uint32_t(kind == kLowest ? 0x80 : kind != kZeros ? random.below(256) : zero ? 0 : random.below(3));
  const int one = 1 << f.mantissa, top = (1 << f.exponent) - 1;
  int exponent = top / 2 - random.below(3), mantissa = random.below(one);
  if (kind == kHeavyTailed) exponent = std::max(0, top / 2 + 5 - random.below(16));
  if (kind == kEndsOfScales) exponent = random.below(2) * (top - 1);
  if (kind == kZeros) exponent = 0, mantissa *= !zero;
  if (kind == kNans && random.below(512) == 0) exponent = top;
  if (kind == kLowest) exponent = top / 2, mantissa = one - 1;
  return uint32_t(kind == kLowest || random.below(2) == 1) << (8 * f.bytes - 1) | uint32_t(exponent * one + mantissa);
}

// Rows of elements with scales, or of values; `values` are what they stand for.
struct Operand {
  const Format& f;
  Bytes bytes, scales;
  std::vector<float> values;

  Operand(Random& random, Kind kind, const Format& format, int64_t rows, int64_t k)
      : f(format), bytes(size_t(rows * k * f.bytes)), scales(size_t(rows * blocks(k))), values(size_t(rows * k)) {
    int lowest = 120;
    for (int64_t i = 0; i < rows * k; ++i) {
      uint8_t& scale = scales[size_t(i / k * blocks(k) + i % k / 32)];
      if (i % k == 0 && kind == kEndsOfScales) lowest = random.below(3) * 126;  // 0 .. 2, 126 .. 128, 252 .. 254
      if (i % k % 32 == 0) {
        scale = uint8_t(lowest + random.below(kind == kHeavyTailed ? 12 : 3));
        if ((kind == kEndsOfScales || kind == kNans) && random.below(60) == 0) scale = 255;
      }
      const uint32_t bits = element(random, kind, f, scale % 2 == 0);
      std::memcpy(&bytes[size_t(i * f.bytes)], &bits, size_t(f.bytes));  // of a little-endian machine
      const double factor = f.bytes > 1 ? 1 : scale == 255 ? NAN : std::ldexp(1.0, scale - 127);
      values[size_t(i)] = float(decode(f, bits) * factor);
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
  double error(float y, int64_t k) const {
    if (!nan && std::isfinite(y)) return std::abs(y - exact) / (double(k + 2) * (magnitude * 0x1p-24 + 0x1p-150));
    const bool high = above > 0x1.fffffep127, low = below < -0x1.fffffep127;
    const bool infinite = y > 0 ? high && !std::isinf(below) : low && !std::isinf(above);
    return (std::isnan(y) ? nan || (high && low) : !nan && infinite) ? 0 : INFINITY;
  }
};

struct Case {
  int number;
  Random random{unsigned(number)};
  Kind kind = Kind(number % kKinds);
  int64_t m = 1 + random.below(random.below(2) == 0 ? 4 : 70), n = 1 + random.below(80),
          unit = number % 4 / 2 * 96 + 32;
  int64_t k = number % 2 == 0 ? unit * (1 + random.below(5)) : 1 + random.below(random.below(4) == 0 ? 31 : 700);
  Operand a{random, kind, *kLeft[size_t(number / kKinds) % std::size(kLeft)], m, k};
  Operand b{random, kind, *kRight[size_t(number / kKinds) % std::size(kLeft)], n, k};
  std::vector<float> bias = std::vector<float>(size_t(random.below(2) * n), 0.75f);
  bool rounds = a.f.bytes > 1 && random.below(2) == 0;
  std::vector<Sum> sums = std::vector<Sum>(size_t(m * (n + 1)));  // a row of y has a value more, which stays 0

  explicit Case(int i) : number(i) {
    for (int64_t at = 0; at < m * (n + 1); ++at) {
      const int64_t row = at / (n + 1) * k, column = at % (n + 1) * k;
      if (column == n * k) continue;
      if (!bias.empty()) sums[size_t(at)].add(bias[0]);
      for (int64_t j = 0; j < k; ++j) {
        const float x = a.values[size_t(row + j)];
        sums[size_t(at)].add(double(rounds ? to_bf16(x) : x) * double(b.values[size_t(column + j)]));
      }
    }
  }
  std::vector<float> run(const Format& y_format, mxfp8_weight* weight) const {
    std::vector<float> y(sums.size());
    const float* add = bias.empty() ? nullptr : bias.data();
    const int activation = rounds ? MXFP8_BFLOAT16 : MXFP8_FLOAT32, threads = 1 + number % 2;
    const uint8_t *x = a.bytes.data(), *w = b.bytes.data(), *w_scales = b.scales.data();
    mxfp8_weight_use(weight);
    check(a.f.bytes > 1 ? mxfp8_weight_gemm(a.f.code, x, k, activation, b.f.code, w, w_scales, add, m, n, k,
                                            y_format.code, y.data(), n + 1, threads)
                        : mxfp8_gemm(a.f.code, x, a.scales.data(), b.f.code, w, w_scales, add, m, n, k, y_format.code,
                                     y.data(), n + 1, threads));
    for (size_t i = y.size(); i-- > 0 && &y_format == &kBf16;) {  // from the end: each in the place of two
      uint16_t bits = 0;
      std::memcpy(&bits, reinterpret_cast<uint8_t*>(y.data()) + 2 * i, 2);
      y[i] = float(decode(kBf16, bits));
    }
    return y;
  }
  // Returns the largest error as a share of the bound. The second call reads the panels that the first has made.
  double try_on(const char* isa) const {
    mxfp8_weight* weight = nullptr;
    if (number % 3 > 0) check(mxfp8_weight_new(number % 3 == 1 ? MXFP8_PREPACK_AUTO : MXFP8_PREPACK_DECODED, &weight));
    const auto first = run(kF32, weight), y = run(kF32, weight), narrow = run(kBf16, weight);
    mxfp8_weight_free(weight);
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const bool same = narrow[i] == to_bf16(y[i]) || (std::isnan(narrow[i]) && std::isnan(y[i]));
      const double error = same ? std::max(sums[i].error(first[i], k), sums[i].error(y[i], k)) : INFINITY;
      worst = std::max(worst, error);
      if (error <= 1 || ++misses > 5) continue;
      std::printf("WRONG: %s, gemm %d, kind %d: %s x %s, M %d, N %d, K %d", isa, number, kind, a.f.name, b.f.name,
                  int(m), int(n), int(k));
      std::printf(" at (%d, %d): %g, then %g, in bfloat16 %g; expected %g, error / bound %g\n", int(i) / int(n + 1),
                  int(i) % int(n + 1), first[i], y[i], narrow[i], sums[i].exact, error);
    }
    return worst;
  }
};

// Elements and scales of random values, and values of random elements and scales without NaN, whose bits may differ.
Bytes quantize(int number) {
  Random random{unsigned(number)};
  const Format &from = *kValues[number % 3], &to = *kElements[number / 3 % 3];
  const int64_t outer = 1 + random.below(5), k = 1 + random.below(200),
                inner = number % 2 == 0 ? 1 : 1 + random.below(70);
  const size_t size = size_t(outer * k * inner), scale_count = size_t(outer * blocks(k) * inner);
  const Operand x(random, Kind(random.below(kKinds)), from, outer, k * inner);
  Bytes noise(size + scale_count), y(size * size_t(from.bytes)), out(size + scale_count);
  for (auto& byte : noise) byte = uint8_t(random.below(256) & 0xfb);
  check(mxfp8_quantize(from.code, x.bytes.data(), outer, k, inner, to.code, number / 9 % 3, out.data(), &out[size], 1));
  check(mxfp8_dequantize(to.code, noise.data(), &noise[size], outer, k, inner, from.code, y.data(), 1));
  out.insert(out.end(), y.begin(), y.end());
  return out;
}

}  // namespace

int main() {
  std::map<std::string, std::map<std::string, int>> kernels;
  std::map<std::string, double> worst;
  std::vector<std::string> sets;
  std::stringstream list(mxfp8_isa_available());
  for (std::string name; std::getline(list, name, ',');) sets.push_back(name);
  check(mxfp8_profile(1));
  for (int i = 0; i < kGemms; ++i) {
    const Case gemm(i);
    for (const auto& isa : sets) {
      check(mxfp8_isa_force(isa.c_str()));
      worst[isa] = std::max(worst[isa], gemm.try_on(isa.c_str()));
    }
  }
  std::stringstream lines(mxfp8_profile_text());
  for (std::string word, isa; std::getline(lines, word, '\t'); std::getline(lines, word)) {
    std::getline(std::getline(lines, isa, '\t'), word, '\t');
    ++kernels[isa][word];
  }
  check(mxfp8_profile(0));
  for (int i = 0; i < kQuantizes; ++i) {
    check(mxfp8_isa_force("portable"));
    const Bytes expected = quantize(i);
    for (const auto& isa : sets) {
      check(mxfp8_isa_force(isa.c_str()));
      if (quantize(i) != expected) ++misses, std::printf("WRONG: %s, quantize or dequantize %d\n", isa.c_str(), i);
    }
  }
  for (const auto& isa : sets) {
    std::printf("%s: %d gemms, largest error / bound %.3f;", isa.c_str(), kGemms, worst[isa]);
    for (const auto& [name, count] : kernels[isa]) std::printf(" %s %d", name.c_str(), count);
    std::printf("; %d quantize, dequantize\n", kQuantizes);
  }
  std::printf("%d results are wrong\n", misses);
  return misses > 0 ? 1 : 0;
}
