// MXFP8Conv: its arguments, and the kernel that stores its sums.
#pragma once
#include <memory>
#include <vector>

#include "gemm.h"

namespace mxfp8 {

// One spatial axis. A convolution of one axis has a first axis of size 1.
struct ConvAxis {
  int64_t in = 1, out = 1, kernel = 1, stride = 1, dilation = 1;
  int64_t pad = 0;  // zeros before the first pixel
};

// y [n, o, out...] = epilogue(convolution of x [n, c, in...] with b [o, kernel..., c / group]). A block of x is 32
// channels of one pixel. c / group is a multiple of 32 unless group is 1.
struct ConvArgs {
  int x_dtype = MXFP8_FLOAT32;
  const void* x = nullptr;
  int64_t n = 0, c = 0, o = 0, group = 1;
  ConvAxis axes[2] = {};
  int x_format = MXFP8_INT8;
  uint32_t increment = 0;  // formats.scale_increment, for x
  int b_format = MXFP8_INT8;
  const uint8_t* b = nullptr;
  const uint8_t* b_scales = nullptr;
  const float* bias = nullptr;  // [o], or null
  int residual_dtype = MXFP8_FLOAT32;
  const void* residual = nullptr;  // of the shape of y, or null
  bool residual_after = false;     // whether it is added after the epilogue
  int epilogue = MXFP8_NONE;
  float alpha = 0, beta = 0;  // constants of the epilogue
  int y_dtype = MXFP8_FLOAT32;
  void* y = nullptr;
  // If b never changes: the copy that conv_rows made, and a constant weight for each group; else null.
  const uint8_t* rows = nullptr;
  const std::vector<std::shared_ptr<ConstantWeight>>* weights = nullptr;
};

// A constant weight of a convolution in parts: the copy that conv_rows made, and a constant weight for each group.
struct ConvWeight {
  ConvArgs first;  // of the first call
  std::vector<uint8_t> rows;
  std::vector<std::shared_ptr<ConstantWeight>> groups;
};

// The place of a gemm in y: its first row is pixel `pixel` of one image, its first column is output channel `channel`.
struct ConvPlace {
  const ConvArgs& args;
  int64_t image, pixel, channel;
};

// Stores sums; `to` is a ConvPlace.
MXFP8_KERNEL(void, conv_store, const void* to, const Finished&)

inline int64_t conv_pixels(const ConvArgs& args) { return args.axes[0].out * args.axes[1].out; }

// b with zeros behind the channels of each tap, so that each begins a block: [o, taps, ceil(c / group / 32) * 32].
// Empty where b itself has that layout.
std::vector<uint8_t> conv_rows(const ConvArgs&);

void conv(const Kernels&, const Parallel&, const ConvArgs&);

}  // namespace mxfp8
