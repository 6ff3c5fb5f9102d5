// An error for the user, in fields: the problem, the expected value, the advice. The caller that knows the place (a
// function of the C ABI, a node of a session) writes it in front of them.
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

  int status;  // a code of mxfp8_ops.h
  std::string problem, expected, advice;

 private:
  std::string text_;
};

}  // namespace mxfp8
