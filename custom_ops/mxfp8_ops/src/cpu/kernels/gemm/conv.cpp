// The end of a convolution: float32 sums [pixels, channels] -> epilogue and residual -> y [channels, pixels]. Sums are
// turned a tile of registers at a time, so that y is written along its rows.
#include "../../conv.h"

#include "../common/transpose.h"
#include "epilogue.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kChannels = 16;  // turned at a time

template <class E>
struct Plain {
  MXFP8_INLINE_MEMBER float apply(float x) const { return E::apply(x); }
};
// A NaN is neither less nor greater: it stays.
struct Clip {
  float low, high;
  MXFP8_INLINE_MEMBER float apply(float x) const {
    const float raised = x < low ? low : x;
    return high < raised ? high : raised;
  }
};
struct LeakyRelu {
  float slope;
  MXFP8_INLINE_MEMBER float apply(float x) const { return x < 0.0f ? slope * x : x; }
};
struct HardSwish {
  float slope, offset;
  MXFP8_INLINE_MEMBER float apply(float x) const {
    const float gate = multiply_add(x, slope, offset);
    const float raised = gate < 0.0f ? 0.0f : gate;
    return x * (raised > 1.0f ? 1.0f : raised);
  }
};

// Calls f(epilogue) with the epilogue of a convolution; f.apply(x) applies it.
template <class Call>
MXFP8_INLINE void with_conv_epilogue(const ConvArgs& args, const Call& call) {
  switch (args.epilogue) {
    case MXFP8_CLIP:
      return call(Clip{args.alpha, args.beta});
    case MXFP8_LEAKY_RELU:
      return call(LeakyRelu{args.alpha});
    case MXFP8_HARD_SWISH:
      return call(HardSwish{args.alpha, args.beta});
    default:
      return with_epilogue(args.epilogue, [&](auto epilogue) { call(Plain<decltype(epilogue)>{}); });
  }
}

// One row of y: `count` pixels of a channel, in place of their sums.
template <class E>
MXFP8_INLINE void finish_row(const ConvArgs& args, const E& epilogue, float bias, int64_t at, int64_t count,
                             float* values) {
  if (args.residual != nullptr) {
    with_dtype(args.residual_dtype, [&](auto dtype) {
      using R = decltype(dtype);
      const auto* residual = static_cast<const typename R::Storage*>(args.residual) + at;
      if (args.residual_after) {
        for (int64_t i = 0; i < count; ++i) values[i] = epilogue.apply(values[i] + bias) + R::load(residual[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) values[i] = epilogue.apply(values[i] + bias + R::load(residual[i]));
      }
    });
  }
  with_dtype(args.y_dtype, [&](auto dtype) {
    using D = decltype(dtype);
    auto* y = static_cast<typename D::Storage*>(args.y) + at;
    if (args.residual == nullptr) {
      for (int64_t i = 0; i < count; ++i) y[i] = D::store(epilogue.apply(values[i] + bias));
    } else {
      for (int64_t i = 0; i < count; ++i) y[i] = D::store(values[i]);
    }
  });
}

// Turns sums of `rows` pixels and `width` <= kChannels channels, which are `stride` apart.
MXFP8_INLINE void turn_sums(const float* sums, int64_t stride, int64_t rows, int64_t width,
                            float (*turned)[kGemmRows]) {
  int64_t row = 0;
  if (width == kChannels) {
    for (; row + kLanes <= rows; row += kLanes) {
      for (int64_t j = 0; j < kChannels; j += kLanes) {
        transpose_tile(reinterpret_cast<const char*>(sums + row * stride + j), stride * int64_t(sizeof(float)),
                       reinterpret_cast<char*>(turned[j] + row), sizeof turned[0]);
      }
    }
  }
  for (; row < rows; ++row) {
    for (int64_t j = 0; j < width; ++j) turned[j][row] = sums[row * stride + j];
  }
}

}  // namespace

void conv_store(const void* to, const Finished& part) {
  alignas(64) float turned[kChannels][kGemmRows];
  const auto& place = *static_cast<const ConvPlace*>(to);
  const ConvArgs& args = place.args;
  const int64_t pixels = conv_pixels(args);
  for (int64_t j = 0; j < part.width; j += kChannels) {
    const int64_t width = part.width - j < kChannels ? part.width - j : kChannels;
    const int64_t first = place.channel + part.column + j;
    turn_sums(part.sums + j, part.stride, part.rows, width, turned);
    with_conv_epilogue(args, [&](const auto& epilogue) {
      for (int64_t i = 0; i < width; ++i) {
        const float bias = args.bias == nullptr ? -0.0f : args.bias[first + i];  // -0 changes no sum
        const int64_t row = place.image * args.o + first + i;
        finish_row(args, epilogue, bias, row * pixels + place.pixel + part.row, part.rows, turned[i]);
      }
    });
  }
}

}  // namespace mxfp8::MXFP8_ISA
