// The answer of an entry point of the C ABI: a status, and a message for the user.
#pragma once
#include <new>
#include <stdexcept>
#include <string>

#include "mxfp8_ops.h"

namespace mxfp8 {

// "<what is>; expected <what>; <what to do>": the caller knows which function it called.
struct Refused : std::runtime_error {
  Refused(int status, const std::string& text) : std::runtime_error(text), status(status) {}
  int status;
};

// Keeps the text for mxfp8_last_error and returns the status. Allocates nothing.
int failed(int status, const char* text) noexcept;

// Runs the body of an entry point. Nothing that it throws leaves the library.
template <class Body>
int answer(const Body& body) noexcept {
  try {
    body();
    return MXFP8_OK;
  } catch (const Refused& error) {
    return failed(error.status, error.what());
  } catch (const std::bad_alloc&) {
    return failed(MXFP8_NO_MEMORY, "out of memory; expected memory for one packed operand; use a smaller batch");
  } catch (const std::invalid_argument& error) {
    return failed(MXFP8_BAD_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return failed(MXFP8_FAILED, error.what());
  } catch (...) {
    return failed(MXFP8_FAILED, "an exception of an unknown type; expected a std::exception; report this as a bug");
  }
}

}  // namespace mxfp8
