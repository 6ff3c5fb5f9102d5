// What an AArch64 processor has beyond the architecture's first version.
#pragma once

namespace mxfp8 {

enum class ArmFeature {
  kDot,       // SDOT
  kMatrices,  // SMMLA, BFMMLA
  kHalf,      // FMLAL
};

// Whether the processor has it, as the operating system says.
bool arm_has(ArmFeature);

}  // namespace mxfp8
