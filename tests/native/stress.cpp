// Stress of the C ABI, built with sanitizers by `make sanitize`: random shapes and bits on every instruction set, in
// buffers of exactly the size the header asks for, compared with the portable kernels; then many threads at once, each
// with a number of helpers of its own, while another switches instruction sets; then calls from forked children. Exits
// with 1 on a wrong result; a sanitizer exits with a code of its own.
//
//   mxfp8_stress [seconds per phase]
#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "contract.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

const int kValues[] = {MXFP8_FLOAT32, MXFP8_FLOAT16, MXFP8_BFLOAT16};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::_Exit(1);  // other threads are still at work on what std::exit would take away
}

void check(int status, const char* what) {
  if (status != MXFP8_OK) fail(std::string(what) + " returned " + std::to_string(status));
}

int64_t below(Random& random, int64_t limit) { return int64_t(random() % uint64_t(limit)); }
template <class T, size_t N>
T one_of(Random& random, const T (&choices)[N]) {
  return choices[random() % N];
}
size_t value_bytes(int dtype) { return dtype == MXFP8_FLOAT32 ? 4 : 2; }
int64_t blocks(int64_t k) { return (k + 31) / 32; }

// Any bits at all, or (mostly) ordinary values with a rare NaN, Inf, zero or subnormal.
Bytes values(Random& random, int dtype, int64_t count) {
  const size_t size = value_bytes(dtype);
  Bytes bytes(size_t(count) * size);
  const bool wild = random() % 4 == 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = uint32_t(random());
    if (!wild && random() % 500 != 0) {
      const float value = std::ldexp(float(int64_t(random() % 2001) - 1000), int(random() % 12) - 6);
      std::memcpy(&bits, &value, 4);
      // As a float16: the same sign and leading bits, an exponent near the middle.
      if (dtype == MXFP8_FLOAT16) bits = (bits & 0x80000000) | ((bits >> 3) & 0x0fff0000) | 0x30000000;
    }
    if (size == 2) bits >>= 16;
    std::memcpy(&bytes[size_t(i) * size], &bits, size);
  }
  return bytes;
}

Bytes noise(Random& random, int64_t count, int lowest = 0, int range = 256) {
  Bytes bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = uint8_t(lowest + int(random() % uint64_t(range)));
  return bytes;
}

// Elements as models have them: few are small. Of others gemm_int16 takes none.
Bytes ordinary(Random& random, int64_t count) {
  Bytes bytes = noise(random, count);
  for (auto& byte : bytes) {
    if (random() % 64 != 0) byte = uint8_t((byte & 0x80) | (48 + byte % 79));
  }
  return bytes;
}

bool is_nan(const Bytes& y, size_t at, int dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, &y[at], value_bytes(dtype));
  if (dtype == MXFP8_FLOAT32) return (bits & 0x7fffffff) > 0x7f800000;
  return (bits & 0x7fff) > (dtype == MXFP8_FLOAT16 ? 0x7c00u : 0x7f80u);
}

// A call: what it writes depends on nothing but its arguments, and (gemms apart) not on the instruction set.
struct Call {
  std::string name;
  bool exact = true;
  Bytes (*run)(const Call&, int threads) = nullptr;
  int dtype = 0, format = 0, b_format = 0, y_dtype = 0, rounding = 0, transposed = 0, activation = 0;
  int64_t m = 0, n = 0, k = 0, count = 0;
  Bytes x, x_scales, b, b_scales;
  std::vector<float> bias;
  std::vector<int64_t> indices;          // indices of rows, or of matrices among `count`
  std::vector<int32_t> narrow;           // the same, for the half of the calls that take these
  std::shared_ptr<mxfp8_weight> weight;  // b, if it is constant
};

Bytes run_quantize(const Call& c, int threads) {
  Bytes elements(size_t(c.m * c.k * c.n)), scales(size_t(c.m * blocks(c.k) * c.n));
  check(
      mxfp8_quantize(c.dtype, c.x.data(), c.m, c.k, c.n, c.format, c.rounding, elements.data(), scales.data(), threads),
      "quantize");
  elements.insert(elements.end(), scales.begin(), scales.end());
  return elements;
}
// A NaN may have any payload.
void level_nans(Bytes& y, int dtype) {
  for (size_t i = 0; i < y.size(); i += value_bytes(dtype)) {
    if (is_nan(y, i, dtype)) std::memset(&y[i], 0xff, value_bytes(dtype));
  }
}
Bytes run_dequantize(const Call& c, int threads) {
  Bytes y(size_t(c.m * c.k * c.n) * value_bytes(c.dtype));
  check(mxfp8_dequantize(c.format, c.x.data(), c.x_scales.data(), c.m, c.k, c.n, c.dtype, y.data(), threads),
        "dequantize");
  level_nans(y, c.dtype);
  return y;
}
Bytes run_embedding(const Call& c, int threads) {
  Bytes y(size_t(c.m * c.k) * value_bytes(c.y_dtype));
  const bool narrow = !c.narrow.empty();
  const void* indices = narrow ? static_cast<const void*>(c.narrow.data()) : c.indices.data();
  check(mxfp8_embedding(narrow ? MXFP8_INT32 : MXFP8_INT64, indices, c.m, c.b_format, c.b.data(), c.b_scales.data(),
                        c.count, c.k, c.y_dtype, y.data(), threads),
        "embedding");
  level_nans(y, c.y_dtype);
  return y;
}
Bytes run_grouped(const Call& c, int threads) {
  Bytes y(size_t(c.m * c.n) * value_bytes(c.y_dtype));
  if (c.dtype != 0) {
    check(mxfp8_grouped_weight_gemm(c.dtype, c.x.data(), c.activation, c.b_format, c.b.data(), c.b_scales.data(),
                                    c.indices.data(), c.count, c.m, c.n, c.k, c.y_dtype, y.data(), threads),
          "grouped_weight_gemm");
  } else {
    check(mxfp8_grouped_gemm(c.format, c.x.data(), c.x_scales.data(), c.b_format, c.b.data(), c.b_scales.data(),
                             c.indices.data(), c.count, c.m, c.n, c.k, c.y_dtype, y.data(), threads),
          "grouped_gemm");
  }
  return y;
}
Bytes run_pack(const Call& c, int threads) {
  Bytes elements(size_t(c.n * c.k)), scales(size_t(c.n * blocks(c.k)));
  mxfp8_pack_stats stats;
  check(mxfp8_pack(c.dtype, c.x.data(), c.transposed ? c.n : c.k, c.transposed, c.n, c.k, c.format, c.rounding,
                   elements.data(), scales.data(), &stats, threads),
        "pack");
  elements.insert(elements.end(), scales.begin(), scales.end());
  return elements;
}
Bytes run_gemm(const Call& c, int threads) {
  Bytes y(size_t(c.m * c.n) * value_bytes(c.y_dtype));
  const float* bias = c.bias.empty() ? nullptr : c.bias.data();
  mxfp8_weight_use(c.weight.get());
  if (c.x_scales.empty() && c.dtype != 0) {
    check(mxfp8_weight_gemm(c.dtype, c.x.data(), c.k, c.activation, c.b_format, c.b.data(), c.b_scales.data(), bias,
                            c.m, c.n, c.k, c.y_dtype, y.data(), c.n, threads),
          "weight_gemm");
  } else {
    check(mxfp8_gemm(c.format, c.x.data(), c.x_scales.data(), c.b_format, c.b.data(), c.b_scales.data(), bias, c.m, c.n,
                     c.k, c.y_dtype, y.data(), c.n, threads),
          "gemm");
  }
  return y;
}

// Gives each of the m rows an index of -count to `last`.
void choose(Call& c, Random& random, int64_t last) {
  for (int64_t i = 0; i < c.m; ++i) c.indices.push_back(below(random, c.count + last + 1) - c.count);
}

Call random_call(Random& random) {
  Call c;
  c.dtype = one_of(random, kValues);
  c.format = one_of(random, mxfp8::kElementFormats).code;
  c.b_format = one_of(random, mxfp8::kElementFormats).code;
  c.y_dtype = one_of(random, kValues);
  c.rounding = int(random() % 3);
  c.activation = random() % 2 == 0 ? MXFP8_FLOAT32 : MXFP8_BFLOAT16;
  const int64_t sizes[] = {1, 2, 31, 32, 33, 63, 64, 65, 100, 512, 600, 1030};
  const int kind = int(random() % 8);
  std::ostringstream name;
  if (kind < 2) {
    c.m = 1 + below(random, 4);
    c.k = one_of(random, sizes);
    c.n = random() % 2 == 0 ? 1 : one_of(random, sizes);
    if (c.n == 1) c.m = one_of(random, sizes);
    if (kind == 0) {
      c.x = values(random, c.dtype, c.m * c.k * c.n);
      c.run = run_quantize;
    } else {
      c.x = noise(random, c.m * c.k * c.n);
      c.x_scales =
          random() % 2 == 0 ? noise(random, c.m * blocks(c.k) * c.n) : noise(random, c.m * blocks(c.k) * c.n, 100, 50);
      c.run = run_dequantize;
    }
  } else if (kind == 2) {
    c.n = one_of(random, sizes);
    c.k = one_of(random, sizes);
    c.transposed = int(random() % 2);
    c.x = values(random, c.dtype, c.n * c.k);
    c.run = run_pack;
  } else if (kind == 3) {
    c.m = below(random, 70);
    c.count = one_of(random, sizes);
    c.k = one_of(random, sizes);
    c.b = noise(random, c.count * c.k);
    c.b_scales = noise(random, c.count * blocks(c.k));
    choose(c, random, c.count - 1);
    if (random() % 2 == 0) c.narrow.assign(c.indices.begin(), c.indices.end());
    c.run = run_embedding;
  } else {
    const int64_t rows[] = {1, 2, 3, 5, 16, 17, 33, 65, 130, 300};
    c.exact = false;
    c.m = one_of(random, rows);
    c.n = one_of(random, sizes);
    c.k = one_of(random, sizes);
    if (random() % 10 == 0) c.k = 0;
    const int lowest = random() % 8 == 0 ? 0 : 100, range = lowest == 0 ? 256 : 40;
    if (kind < 6) {
      c.x = random() % 2 == 0 ? noise(random, c.m * c.k) : ordinary(random, c.m * c.k);
      c.x_scales = noise(random, c.m * blocks(c.k) + 1, lowest, range);
      c.x_scales.resize(c.x_scales.size() - 1);
      if (c.x_scales.empty()) c.x_scales.reserve(1);
      c.dtype = 0;
    } else {
      c.x = values(random, c.dtype, c.m * c.k);
    }
    const bool grouped = kind % 2 == 1;
    c.count = grouped ? 1 + below(random, 5) : 1;
    c.b = random() % 2 == 0 ? noise(random, c.count * c.n * c.k) : ordinary(random, c.count * c.n * c.k);
    c.b_scales = noise(random, c.count * c.n * blocks(c.k), lowest, range);
    if (grouped) choose(c, random, c.count);
    if (!grouped && random() % 2 == 0) c.bias.assign(size_t(c.n), 0.5f);
    c.run = grouped ? run_grouped : run_gemm;
    if (!grouped && random() % 2 == 0) {
      mxfp8_weight* weight = nullptr;
      check(mxfp8_weight_new(int(random() % 3), &weight), "weight_new");
      c.weight.reset(weight, mxfp8_weight_free);
    }
  }
  name << "kind " << kind << ", dtype " << c.dtype << ", activation " << c.activation << ", formats " << c.format << " "
       << c.b_format << ", y " << c.y_dtype << ", rounding " << c.rounding << ", transposed " << c.transposed
       << ", sizes " << c.m << " " << c.n << " " << c.k << ", count " << c.count;
  c.name = name.str();
  return c;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  std::stringstream list(mxfp8_isa_available());
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

void compare(const Call& call, const Bytes& actual, const Bytes& expected, const std::string& where) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] != expected[i]) fail(call.name + ": byte " + std::to_string(i) + " differs, " + where);
  }
}

template <class Body>
long repeat(double seconds, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  long count = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) body(count++);
  return count;
}

void every_isa(double seconds) {
  const auto names = isas();
  Random random(1);
  const long count = repeat(seconds, [&](long) {
    const Call call = random_call(random);
    check(mxfp8_isa_force("portable"), "isa_force");
    const Bytes expected = call.run(call, 1);
    for (const auto& name : names) {
      check(mxfp8_isa_force(name.c_str()), "isa_force");
      const Bytes one = call.run(call, 1), several = call.run(call, 3);
      if (call.exact) compare(call, one, expected, name);
      if (call.exact) compare(call, several, one, name + " with 3 threads");
    }
  });
  std::printf("every instruction set: %ld random calls\n", count);
}

void many_threads(double seconds) {
  const auto names = isas();
  std::vector<Call> calls;
  std::vector<Bytes> expected;
  Random random(2);
  while (calls.size() < 40) {
    Call call = random_call(random);
    if (!call.exact && calls.size() % 2 == 0) continue;
    expected.push_back(call.run(call, 1));
    calls.push_back(std::move(call));
  }
  std::atomic<bool> done{false};
  std::atomic<long> count{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Random mine(t);
      while (!done) {
        const size_t i = mine() % calls.size();
        const Bytes actual = calls[i].run(calls[i], int(mine() % 6));
        if (calls[i].exact) compare(calls[i], actual, expected[i], "among 8 threads");
        ++count;
      }
    });
  }
  repeat(seconds, [&](long i) {
    mxfp8_isa_force(names[size_t(i) % names.size()].c_str());
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  });
  done = true;
  for (auto& thread : threads) thread.join();
  std::printf("8 threads at once: %ld calls\n", count.load());
}

// ThreadSanitizer does not follow a fork of a process that has threads; Windows has none.
#if defined(__SANITIZE_THREAD__) || defined(_WIN32)
void forked_children(double) {}
#else
void forked_children(double seconds) {
  Random random(3);
  Call call = random_call(random);
  while (call.run != run_quantize || call.m * call.n * call.k < 100000) call = random_call(random);
  const Bytes expected = call.run(call, 4);
  const long count = repeat(seconds, [&](long) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs is an error too
      compare(call, call.run(call, 4), expected, "in a forked child");
      std::_Exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) fail("a forked child did not finish well");
    compare(call, call.run(call, 4), expected, "after a fork");
  });
  std::printf("forked children: %ld\n", count);
}
#endif

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 20;
  every_isa(seconds);
  many_threads(seconds);
  forked_children(seconds / 4);
  std::printf("stress: no errors\n");
}
