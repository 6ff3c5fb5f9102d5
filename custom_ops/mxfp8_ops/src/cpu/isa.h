// The instruction set in use, and those that this machine supports.
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

// The kernels in use; null if MXFP8_ISA names a set that this machine lacks.
const Kernels* kernels();

// Changes the set in use. Returns false, and changes nothing, if the set is not available.
bool force_isa(const char* name);

// Names of the sets that this build has and this machine supports, best first, separated by commas.
const char* available_isas();

}  // namespace mxfp8
