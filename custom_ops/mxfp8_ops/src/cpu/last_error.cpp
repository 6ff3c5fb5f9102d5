#include "last_error.h"

#include <cstring>

namespace mxfp8 {
namespace {

constexpr char kOwnName[] = "mxfp8: ";  // the planner's texts begin with it
thread_local char last_error[1024];

}  // namespace

int failed(int status, const char* text) noexcept {
  if (std::strncmp(text, kOwnName, sizeof kOwnName - 1) == 0) text += sizeof kOwnName - 1;
  std::strncpy(last_error, text, sizeof last_error - 1);  // the last byte stays 0
  return status;
}

}  // namespace mxfp8

extern "C" const char* mxfp8_last_error(void) { return mxfp8::last_error; }
