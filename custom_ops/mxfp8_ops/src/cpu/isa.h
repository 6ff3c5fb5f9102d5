// Which instruction set's kernels run.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

// The kernels in use, or null if MXFP8_ISA names a set this machine does not have.
const Kernels* kernels();

// Makes the named set the one in use; false if it is not available.
bool force_isa(const char* name);

// Names of the sets compiled in and usable here, best first, comma-separated.
const char* available_isas();

}  // namespace mxfp8
