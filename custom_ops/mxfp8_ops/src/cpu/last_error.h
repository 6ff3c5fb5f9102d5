// Turns exceptions of an entry point into the status of the C ABI and the fields of mxfp8_last_error.
#pragma once
#include <new>

#include "../error.h"
#include "../mxfp8_ops.h"

namespace mxfp8 {

// Stores the fields for mxfp8_last_error and returns the status. Allocates nothing, as memory may be exhausted.
int failed(int status, const char* problem, const char* expected, const char* advice) noexcept;

// Runs the body of an entry point and returns the status. No exception leaves the library.
template <class Body>
int answer(const Body& body) noexcept {
  try {
    body();
    return MXFP8_OK;
  } catch (const Error& error) {
    return failed(error.status, error.problem.c_str(), error.expected.c_str(), error.advice.c_str());
  } catch (const std::bad_alloc&) {
    return failed(MXFP8_NO_MEMORY, "out of memory", "memory for one packed operand", "use a smaller batch");
  } catch (const std::exception& error) {
    return failed(MXFP8_FAILED, error.what(), "", "");
  } catch (...) {
    return failed(MXFP8_FAILED, "an exception of an unknown type", "a std::exception", "report this as a bug");
  }
}

}  // namespace mxfp8
