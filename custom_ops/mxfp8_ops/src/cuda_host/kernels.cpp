#include "kernels.h"

#include <stdexcept>

namespace mxfp8::cuda {
namespace {

using Axis = std::vector<const char*>;

struct Family {
  const char* name;
  std::vector<Axis> axes;
};

// By Source.
const std::vector<Family>& families() {
  static const Axis flag = {"false", "true"}, values = {"F32", "F16", "BF16"}, formats = {"E4M3", "E5M2"},
                    kinds = {"F32", "F16", "BF16", "E4M3", "E5M2"}, layouts = {"PLAIN", "SWIZZLED", "TRANSPOSED"},
                    // Tiles of 8 rows of x, and how many warps share them unless that is the template's default.
      tiles = {"1, 2", "1", "2", "2, 2", "4", "4, 2", "8", "8, 2"};
  static const std::vector<Family> all = {
      {"fold", {}},
      {"swizzle_scales", {}},
      {"finish", {flag}},
      {"bfloat16_parts", {{"F32", "F16"}, flag}},
      {"tile", {{"BF16", "E4M3", "E5M2"}}},
      {"quantize_rows", {values, formats, flag, flag}},
      {"quantize_columns", {values, formats, flag, layouts, flag}},
      {"dequantize", {values, formats, flag, flag}},
      {"gemm_float32", {kinds, formats}},
      {"gemm_fused", {formats, {"1", "2"}}},
      {"gemm_skinny", {kinds, formats, tiles}},
  };
  return all;
}

struct Catalog {
  std::vector<std::string> names;
  std::vector<int> first;                 // number of each Source's first instance
  std::vector<std::vector<int>> choices;  // by number
};

Catalog make_catalog() {
  Catalog made;
  for (const Family& family : families()) {
    made.first.push_back(int(made.names.size()));
    size_t count = 1;
    for (const Axis& axis : family.axes) count *= axis.size();
    for (size_t i = 0; i < count; ++i) {
      std::vector<int> choices(family.axes.size());
      size_t rest = i;
      for (size_t a = family.axes.size(); a-- > 0; rest /= family.axes[a].size()) {
        choices[a] = int(rest % family.axes[a].size());
      }
      std::string name = family.name;
      for (size_t a = 0; a < choices.size(); ++a)
        name += (a == 0 ? "<" : ", ") + std::string(family.axes[a][size_t(choices[a])]);
      made.names.push_back(choices.empty() ? name : name + ">");
      made.choices.push_back(choices);
    }
  }
  made.first.push_back(int(made.names.size()));
  return made;
}

const Catalog& catalog() {
  static const Catalog made = make_catalog();
  return made;
}

}  // namespace

int kernel(Source source, std::initializer_list<int> choices) {
  const Family& family = families()[size_t(source)];
  int index = 0;
  size_t axis = 0;
  for (const int choice : choices) {
    const int count = int(family.axes[axis++].size());
    if (choice < 0 || choice >= count)
      throw std::invalid_argument(std::string("mxfp8: no such instance of ") + family.name);
    index = index * count + choice;
  }
  return catalog().first[size_t(source)] + index;
}

std::vector<int> kernels_like(Source source, const std::vector<int>& choices) {
  const Catalog& all = catalog();
  std::vector<int> found;
  for (int number = all.first[size_t(source)]; number < all.first[size_t(source) + 1]; ++number) {
    bool like = true;
    for (size_t i = 0; i < choices.size(); ++i) {
      like = like && (choices[i] == kAny || choices[i] == all.choices[size_t(number)][i]);
    }
    if (like) found.push_back(number);
  }
  return found;
}

const std::vector<std::string>& kernel_names() { return catalog().names; }

}  // namespace mxfp8::cuda

extern "C" MXFP8_API const char* mxfp8_cuda_kernel(int number) {
  const auto& names = mxfp8::cuda::kernel_names();
  return number >= 0 && size_t(number) < names.size() ? names[size_t(number)].c_str() : nullptr;
}
