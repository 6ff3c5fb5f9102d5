// An error for the user, in fields: what is wrong, what is expected, what to do. Whoever knows the place - the function
// that was called, the node of a session - puts that before them.
#pragma once
#include <exception>
#include <string>
#include <utility>

namespace mxfp8 {

class Error : public std::exception {
 public:
  Error(int status, std::string problem, std::string expected, std::string advice)
      : status(status), problem(std::move(problem)), expected(std::move(expected)), advice(std::move(advice)) {
    text_ = this->problem + (this->expected.empty() ? "" : "; expected " + this->expected) +
            (this->advice.empty() ? "" : "; " + this->advice);
  }
  const char* what() const noexcept override { return text_.c_str(); }

  int status;  // of the C ABI
  std::string problem, expected, advice;

 private:
  std::string text_;
};

}  // namespace mxfp8
