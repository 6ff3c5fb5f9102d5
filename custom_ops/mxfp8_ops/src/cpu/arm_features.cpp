#include "arm_features.h"

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

namespace mxfp8 {
namespace {

#if defined(__linux__)
bool has_dot() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }   // HWCAP_ASIMDDP
bool has_half() { return (getauxval(AT_HWCAP) >> 23 & 1) != 0; }  // HWCAP_ASIMDFHM
bool has_int8_matrices() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }  // HWCAP2_I8MM
bool has_bf16_matrices() { return (getauxval(AT_HWCAP2) >> 14 & 1) != 0; }  // HWCAP2_BF16
#elif defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_half() { return has("hw.optional.arm.FEAT_FHM"); }
bool has_int8_matrices() { return has("hw.optional.arm.FEAT_I8MM"); }
bool has_bf16_matrices() { return has("hw.optional.arm.FEAT_BF16"); }
#elif defined(_WIN32)
bool has_dot() { return IsProcessorFeaturePresent(43); }            // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool has_half() { return false; }                                   // Windows does not say
bool has_int8_matrices() { return IsProcessorFeaturePresent(66); }  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
bool has_bf16_matrices() { return IsProcessorFeaturePresent(68); }  // PF_ARM_V86_BF16_INSTRUCTIONS_AVAILABLE
#else
bool has_dot() { return false; }
bool has_half() { return false; }
bool has_int8_matrices() { return false; }
bool has_bf16_matrices() { return false; }
#endif

}  // namespace

bool arm_has(ArmFeature feature) {
  switch (feature) {
    case ArmFeature::kDot:
      return has_dot();
    case ArmFeature::kMatrices:
      return has_int8_matrices() && has_bf16_matrices();
    default:
      return has_half();
  }
}

}  // namespace mxfp8
#endif
