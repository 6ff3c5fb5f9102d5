// How a gemm ends: float32 sums -> bias, epilogue, factor -> the dtype of the result. Every gemm kernel stores its rows
// through `finish`.
//
// The epilogues are scalar code without branches, which the compiler vectorizes. FUNCTIONS in nodes/fused_gemm.py has
// the bound of each one's error, in units of 2^-24 |x|; test_fused.py tests it. NaN stays NaN. The product of an
// infinite sum and 0 is NaN too: gelu(-inf) is NaN, as in the formula 0.5 x (1 + erf).
#pragma once
#include "../../gemm.h"
#include "../common/codec.h"

namespace mxfp8::MXFP8_ISA {

// a * b + c, rounded once where the processor can.
MXFP8_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial's coefficients from I on. This is a recursion: a loop here stops the vectorization of the loop around
// it.
template <size_t I = 0, size_t N>
MXFP8_INLINE float polynomial(const float (&coefficients)[N], float x) {
  if constexpr (I + 1 == N) {
    return coefficients[I];
  } else {
    return multiply_add(polynomial<I + 1>(coefficients, x), x, coefficients[I]);
  }
}

// e^x, within 2 units of 2^-24 of itself; infinity above 88.4, about 2^-126 below -87. The result for NaN is any
// number.
MXFP8_INLINE float exponential(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to a whole number, and leaves it in the low bits; the
  // first part of ln 2 has few bits, so that its product with n is exact. e^r = 1 + r + r^2 P(r).
  constexpr float round = 12582912.0f;
  constexpr float p[] = {0.49999994f, 0.166665196f, 0.0416683927f, 0.00836878084f, 0.00138144672f};
  x = x < 89.0f ? x : 89.0f;
  x = x > -87.0f ? x : -87.0f;
  const float shifted = multiply_add(x, 1.44269504f, round), n = shifted - round;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
  const float y = multiply_add(r * r, polynomial(p, r), r) + 1.0f;
  const uint32_t exponent = bits_of(shifted) - bits_of(round) + 127;  // 1..255
  return y * float_of(exponent << 23);
}

struct NoEpilogue {
  MXFP8_INLINE float apply(float x) { return x; }
};
struct Relu {
  MXFP8_INLINE float apply(float x) { return x < 0.0f ? 0.0f : x; }
};
// x Phi(x), Phi being the normal distribution: (1 + erf(x / sqrt 2)) / 2. (Phi(x) - 1/2) / x is even, and a polynomial
// in 2 (x / end)^2 - 1, which is -1..1, has small coefficients. Beyond +-end Phi is within 1.3 * 2^-24 of 0 or 1.
struct Gelu {
  MXFP8_INLINE float apply(float x) {
    constexpr float end = 5.25f;
    constexpr float p[] = {0.134659365f,   -0.0671266541f,  0.0496438965f,  -0.0397686325f,  0.0320642628f,
                           -0.0249949321f, 0.0183259957f,   -0.0129543832f, 0.0090703778f,   -0.00511998823f,
                           0.00186944206f, -0.00132634235f, 0.00145661342f, -0.000560955959f};
    float square = x * x;
    square = square < end * end ? square : end * end;
    float phi = multiply_add(x, polynomial(p, multiply_add(square, 2 / (end * end), -1.0f)), 0.5f);
    phi = x > end ? 1.0f : phi;
    phi = x < -end ? 0.0f : phi;
    return x * phi;
  }
};
struct Silu {
  MXFP8_INLINE float apply(float x) { return x / (1.0f + exponential(-x)); }
};
// x (1 + tanh z) / 2 = x / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3): this form has no cancellation.
struct GeluTanh {
  MXFP8_INLINE float apply(float x) {
    const float inner = multiply_add(x * x, -0.0713548163f, -1.59576912f);  // 0.044715 c, c; c = -2 sqrt(2 / pi)
    return x / (1.0f + exponential(x * inner));
  }
};

// Calls f(T{}) with the type that stands for an epilogue. The callers check the codes (cpu/arguments.cpp for the C
// ABI).
template <class Call>
MXFP8_INLINE void with_epilogue(int epilogue, const Call& call) {
  switch (epilogue) {
    case MXFP8_NONE:
      return call(NoEpilogue{});
    case MXFP8_RELU:
      return call(Relu{});
    case MXFP8_GELU:
      return call(Gelu{});
    case MXFP8_GELU_TANH:
      return call(GeluTanh{});
    case MXFP8_SILU:
      return call(Silu{});
    default:
      __builtin_trap();
  }
}

// Stores sums + bias.
template <class D>
MXFP8_INLINE void store_plain(const GemmArgs& args, const Finished& part) {
  for (int64_t i = 0; i < part.rows; ++i) {
    auto* y = static_cast<typename D::Storage*>(args.y) + (part.row + i) * args.y_stride + part.column;
    const float* sums = part.sums + i * part.stride;
    if (args.bias != nullptr) {
      for (int64_t j = 0; j < part.width; ++j) y[j] = D::store(sums[j] + args.bias[part.column + j]);
    } else {
      for (int64_t j = 0; j < part.width; ++j) y[j] = D::store(sums[j]);
    }
  }
}

// The bias of some columns; without a bias, a number that changes no sum.
struct Bias {
  alignas(64) float values[kGemmColumns];
  Bias(const GemmArgs& args, const Finished& part) {
    for (float& value : values) value = -0.0f;
    if (args.bias != nullptr) std::memcpy(values, args.bias + part.column, size_t(part.width) * sizeof(float));
  }
};

// The same for results with an epilogue or a factor, up to kGemmColumns columns, in float32. It does many rows at once:
// an epilogue has as many constants as there are registers.
template <class E>
MXFP8_NOINLINE void store_fused(const GemmArgs& args, const Finished& part) {
  alignas(64) float values[kGemmColumns];
  const Bias bias(args, part);
  for (int64_t i = 0; i < part.rows; ++i) {
    const float* sums = part.sums + i * part.stride;
    for (int64_t j = 0; j < part.width; ++j) values[j] = E::apply(sums[j] + bias.values[j]);
    if (args.factor != nullptr) {
      with_dtype(args.factor_dtype, [&](auto dtype) {
        using D = decltype(dtype);
        const auto* factor =
            static_cast<const typename D::Storage*>(args.factor) + (part.row + i) * args.n + part.column;
        for (int64_t j = 0; j < part.width; ++j) values[j] *= D::load(factor[j]);
      });
    }
    with_dtype(args.y_dtype, [&](auto dtype) {
      using D = decltype(dtype);
      auto* y = static_cast<typename D::Storage*>(args.y) + (part.row + i) * args.y_stride + part.column;
      for (int64_t j = 0; j < part.width; ++j) y[j] = D::store(values[j]);
    });
  }
}

// Finishes up to kGemmColumns columns of some rows of the result.
MXFP8_INLINE void finish(const GemmArgs& args, const Finished& part) {
  if (args.store != nullptr) {
    args.store(args.to, part);
  } else if (args.epilogue == MXFP8_NONE && args.factor == nullptr) {
    with_dtype(args.y_dtype, [&](auto dtype) { store_plain<decltype(dtype)>(args, part); });
  } else {
    with_epilogue(args.epilogue, [&](auto epilogue) { store_fused<decltype(epilogue)>(args, part); });
  }
}

}  // namespace mxfp8::MXFP8_ISA
