// Every kernel of src/cuda, by number: files and what their templates are made for.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "routes.h"

namespace mxfp8::cuda {

// What one parameter of a template may be, as C++ writes it.
using Axis = std::vector<std::string>;
Axis flag();                                     // false, true
Axis kinds_from(Kind begin, Kind end = kKinds);  // of contract.h
inline Axis values() { return kinds_from(0, kValueKinds); }
inline Axis formats() { return kinds_from(kValueKinds); }
Axis products();  // kinds of x and b that are multiplied, as two parameters

// Which of `products` it is. Throws Error for elements of INT8 with those of another format: no kernel is made for
// them.
int product_choice(Kind x, Kind b);

// A kernel: a constant of the file that plans its launches, which adds it to the catalogue.
class Kernel {
 public:
  // `axes` are what its instances differ in, in the order of the template.
  Kernel(const char* name, std::vector<Axis> axes);
  Kernel(const Kernel&) = delete;

  // The number of an instance; a format counts from 0. Throws Error if there is none.
  int operator()(std::initializer_list<int> choices) const;
  // Appends the numbers of all instances with these choices, of which some may be kAny.
  void append(std::vector<int>* to, const std::vector<int>& choices) const;

  static constexpr int kAny = -1;

 private:
  friend struct Catalog;
  const char* name_;
  std::vector<Axis> axes_;
};

inline int format_choice(Kind format) { return format - kValueKinds; }

// Names as C++ writes them, by number.
const std::vector<std::string>& kernel_names();

}  // namespace mxfp8::cuda
