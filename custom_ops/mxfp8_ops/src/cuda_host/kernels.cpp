#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "../cpu/last_error.h"

namespace mxfp8::cuda {
namespace {

// Filled before main, by the constants of other files.
std::vector<const Kernel*>& all() {
  static std::vector<const Kernel*> kernels;
  return kernels;
}

}  // namespace

struct Catalog {
  std::vector<std::string> names;
  std::map<const Kernel*, int> first;  // number of each kernel's first instance

  Catalog() {
    std::vector<const Kernel*> kernels = all();
    // By name: in which order files make their constants is the linker's choice.
    std::sort(kernels.begin(), kernels.end(),
              [](const Kernel* a, const Kernel* b) { return std::strcmp(a->name_, b->name_) < 0; });
    for (const Kernel* kernel : kernels) {
      first[kernel] = int(names.size());
      std::vector<std::string> instances = {kernel->name_};
      for (const Axis& axis : kernel->axes_) {
        std::vector<std::string> longer;
        for (const std::string& name : instances) {
          for (const std::string& choice : axis)
            longer.push_back(name + (&axis == &kernel->axes_[0] ? "<" : ", ") + choice);
        }
        instances = longer;
      }
      for (const std::string& name : instances) names.push_back(kernel->axes_.empty() ? name : name + ">");
    }
  }
};

namespace {

bool multiplies(Kind x, Kind b) { return !is_element(x) || (x == kINT8) == (b == kINT8); }

const Catalog& catalog() {
  static const Catalog kernels;
  return kernels;
}

}  // namespace

Axis flag() { return {"false", "true"}; }

Axis kinds_from(Kind begin, Kind end) {
  Axis names;
  for (Kind kind = begin; kind < end; ++kind) names.push_back(row_of(kind).cuda);
  return names;
}

Axis products() {
  Axis names;
  for (Kind x = 0; x < kKinds; ++x) {
    for (Kind b = kValueKinds; b < kKinds; ++b) {
      if (multiplies(x, b)) names.push_back(std::string(row_of(x).cuda) + ", " + row_of(b).cuda);
    }
  }
  return names;
}

int product_choice(Kind x, Kind b) {
  if (!multiplies(x, b)) {
    throw Error(MXFP8_BAD_ARGUMENT, std::string(row_of(x).cuda) + " times " + row_of(b).cuda + " on CUDA",
                "INT8 with INT8, or with values", "quantize both to one format, or use the CPU kernels");
  }
  int choice = 0;
  for (Kind i = 0; i <= x; ++i) {
    for (Kind j = kValueKinds; j < (i < x ? kKinds : b); ++j) choice += multiplies(i, j);
  }
  return choice;
}

Kernel::Kernel(const char* name, std::vector<Axis> axes) : name_(name), axes_(std::move(axes)) {
  all().push_back(this);
}

int Kernel::operator()(std::initializer_list<int> choices) const {
  int index = 0;
  size_t axis = 0;
  for (const int choice : choices) {
    const int count = int(axes_[axis++].size());
    if (choice < 0 || choice >= count)
      throw Error(MXFP8_BAD_ARGUMENT, "a choice out of range", std::string("an instance of the kernel ") + name_, "");
    index = index * count + choice;
  }
  return catalog().first.at(this) + index;
}

void Kernel::append(std::vector<int>* to, const std::vector<int>& choices) const {
  std::vector<int> instances = {0};
  for (size_t axis = 0; axis < choices.size(); ++axis) {
    const int count = int(axes_[axis].size());
    std::vector<int> longer;
    for (const int index : instances) {
      for (int choice = 0; choice < count; ++choice) {
        if (choices[axis] == kAny || choices[axis] == choice) longer.push_back(index * count + choice);
      }
    }
    instances = longer;
  }
  for (const int index : instances) to->push_back(catalog().first.at(this) + index);
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
