#include "kernels.h"

#include "../cpu/last_error.h"

namespace mxfp8::cuda {
namespace {

using Axis = std::vector<std::string>;

struct Family {
  const char* name;
  std::vector<Axis> axes;
};

// The names of the dtypes from `begin` on, as the templates spell them.
Axis kinds_from(Kind begin, Kind end = kKinds) {
  Axis names;
  for (Kind kind = begin; kind < end; ++kind) names.push_back(row_of(kind).cuda);
  return names;
}

// By Source.
const std::vector<Family>& families() {
  static_assert(kF32 == 0 && kF16 == 1 && kBF16 == 2,
                "kBfloat16Parts, kBfloat16Rounded and kTile count from kF32 and kBF16");
  static const Axis flag = {"false", "true"}, values = kinds_from(0, kValueKinds), formats = kinds_from(kValueKinds),
                    kinds = kinds_from(0), layouts = {"PLAIN", "SWIZZLED", "TRANSPOSED"},
                    // Tiles of 8 rows of x, and how many warps share them unless that is the template's default.
      tiles = {"1, 2", "1", "2", "2, 2", "4", "4, 2", "8", "8, 2", "2, 4, 4"};
  static const std::vector<Family> all = {
      {"fold", {}},
      {"swizzle_scales", {}},
      {"finish", {flag}},
      {"bfloat16_parts", {kinds_from(kF32, kBF16), flag}},
      {"bfloat16_rounded", {kinds_from(kF32, kBF16), flag}},
      {"tile", {kinds_from(kBF16), flag}},
      {"quantize_rows", {values, formats, flag, flag}},
      {"quantize_columns", {values, formats, flag, layouts, flag}},
      {"quantize_bands", {values, formats, flag}},
      {"dequantize", {values, formats, flag, flag}},
      {"embedding", {values, formats, flag}},
      {"gemm_float32", {kinds, formats}},
      {"gemm_fused", {formats, {"1", "2", "1, true", "2, true", "1, true, 2"}}},
      {"gemm_skinny", {kinds, formats, tiles}},
  };
  return all;
}

struct Catalog {
  std::vector<std::string> names;
  std::vector<int> first;  // number of each Source's first instance
};

Catalog make_catalog() {
  Catalog result;
  for (const Family& family : families()) {
    result.first.push_back(int(result.names.size()));
    std::vector<std::string> names = {family.name};
    for (const Axis& axis : family.axes) {
      std::vector<std::string> longer;
      for (const std::string& name : names) {
        for (const std::string& choice : axis)
          longer.push_back(name + (&axis == &family.axes[0] ? "<" : ", ") + choice);
      }
      names = longer;
    }
    for (const std::string& name : names) result.names.push_back(family.axes.empty() ? name : name + ">");
  }
  return result;
}

const Catalog& catalog() {
  static const Catalog kernels = make_catalog();
  return kernels;
}

constexpr int kAny = -1;

// Appends the numbers of all instances with these choices, one for each axis, of which some may be kAny.
void append(std::vector<int>* to, Source source, const std::vector<int>& choices) {
  std::vector<int> instances = {0};
  for (size_t axis = 0; axis < choices.size(); ++axis) {
    const int count = int(families()[size_t(source)].axes[axis].size());
    std::vector<int> longer;
    for (const int index : instances) {
      for (int choice = 0; choice < count; ++choice) {
        if (choices[axis] == kAny || choices[axis] == choice) longer.push_back(index * count + choice);
      }
    }
    instances = longer;
  }
  for (const int index : instances) to->push_back(catalog().first[size_t(source)] + index);
}

}  // namespace

int kernel(Source source, std::initializer_list<int> choices) {
  const Family& family = families()[size_t(source)];
  int index = 0;
  size_t axis = 0;
  for (const int choice : choices) {
    const int count = int(family.axes[axis++].size());
    if (choice < 0 || choice >= count)
      throw Error(MXFP8_BAD_ARGUMENT, "a choice out of range", std::string("an instance of the kernel ") + family.name,
                  "");
    index = index * count + choice;
  }
  return catalog().first[size_t(source)] + index;
}

std::vector<int> quantize_kernels(int64_t x_dtype, int64_t format) {
  const int x = value_kind(x_dtype), f = format_choice(element_kind(format));
  std::vector<int> numbers;
  append(&numbers, Source::kQuantizeRows, {x, f, false, kAny});
  append(&numbers, Source::kQuantizeColumns, {x, f, false, MXFP8_PLAIN, kAny});
  return numbers;
}

std::vector<int> dequantize_kernels(int64_t format, int64_t y_dtype) {
  std::vector<int> numbers;
  append(&numbers, Source::kDequantize, {value_kind(y_dtype), format_choice(element_kind(format)), kAny, kAny});
  return numbers;
}

std::vector<int> embedding_kernels(int64_t b_format, int64_t y_dtype) {
  std::vector<int> numbers;
  append(&numbers, Source::kEmbedding, {value_kind(y_dtype), format_choice(element_kind(b_format)), kAny});
  return numbers;
}

std::vector<int> gemm_kernels(int64_t x_kind, int64_t b_kind, bool cublas) {
  const Kind x = kind_of(x_kind), b = element_kind(b_kind);
  const int f = format_choice(b);
  std::vector<int> numbers;
  append(&numbers, Source::kFinish, {kAny});
  for (const Kind kind : {x, kBF16}) {
    if (kind != x && parts_of(x) == 1) continue;  // only float32 and float16 have parts
    append(&numbers, Source::kGemmFloat32, {kind, f});
    append(&numbers, Source::kGemmSkinny, {kind, f, kAny});
  }
  if (parts_of(x) > 1) {
    append(&numbers, Source::kBfloat16Parts, {x, kAny});
    append(&numbers, Source::kBfloat16Rounded, {x, kAny});
  }
  if (!cublas) return numbers;
  append(&numbers, Source::kDequantize, {kBF16, f, true, kAny});
  if (is_element(x) && x != b) append(&numbers, Source::kDequantize, {kBF16, format_choice(x), true, kAny});
  return numbers;
}

const std::vector<std::string>& kernel_names() { return catalog().names; }

}  // namespace mxfp8::cuda

extern "C" MXFP8_API const char* mxfp8_cuda_kernel(int number) {
  const char* name = nullptr;
  mxfp8::answer([&] {
    const auto& names = mxfp8::cuda::kernel_names();
    if (number >= 0 && size_t(number) < names.size()) name = names[size_t(number)].c_str();
  });
  return name;
}
