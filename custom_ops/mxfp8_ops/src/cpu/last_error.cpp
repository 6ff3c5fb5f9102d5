#include "last_error.h"

#include <cstdio>

namespace mxfp8 {
namespace {

// The message, then its fields, in the order of MXFP8_MESSAGE to MXFP8_ADVICE. Longer texts are cut.
thread_local char last_error[4][1024];

}  // namespace

int failed(int status, const char* problem, const char* expected, const char* advice) noexcept {
  const auto keep = [](int field, const char* format, auto... texts) {
    std::snprintf(last_error[field], sizeof last_error[field], format, texts...);
  };
  keep(MXFP8_PROBLEM, "%s", problem);
  keep(MXFP8_EXPECTED, "%s", expected);
  keep(MXFP8_ADVICE, "%s", advice);
  keep(MXFP8_MESSAGE, "%s%s%s%s%s", problem, *expected == 0 ? "" : "; expected ", expected, *advice == 0 ? "" : "; ",
       advice);
  return status;
}

}  // namespace mxfp8

extern "C" const char* mxfp8_last_error(int field) {
  return field < MXFP8_MESSAGE || field > MXFP8_ADVICE ? "" : mxfp8::last_error[field];
}
