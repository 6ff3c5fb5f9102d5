// The launches of the nodes: which kernel, on how many thread blocks, with which arguments. What cuda_kernels.py does
// for PyTorch and CuPy, again in C++ because nothing here may wait for Python; the tests compare the two.
//
// Each class loads every kernel its node may need when it is made, and only launches them afterwards. Pointers in the
// arguments are addresses on the GPU. Routes of a product, the first that fits:
//
//   skinny   M <= 64 - 32 if A is float16, 21 if it is float32 - and K % 32 = 0: gemm_skinny; finish, if K is split
//            (cuda_skinny.py)
//   large    A bfloat16 or quantized, a cuBLAS handle at hand: dequantize to bfloat16, cuBLAS, finish; gemm_float32
//            repairs what bfloat16 could not hold
//   slices   A bfloat16 or quantized, K % 32 = 0: gemm_skinny on 64 rows at a time
//   parts    A float16 or float32, and one of the above for bfloat16: bfloat16_parts, that one, finish
//   float32  anything: gemm_float32
#pragma once
#include <memory>

#include "../cpu/kernels/kernels.h"
#include "cuda_driver.h"

namespace mxfp8::ort {

class CudaQuantize {
 public:
  CudaQuantize(const Gpu&, int dtype, int format);
  void operator()(const QuantizeArgs&, Stream) const;

 private:
  Gpu gpu_;
  CudaFunction rows_[2], columns_[2];  // [ragged]
};

class CudaDequantize {
 public:
  // `last_axis_only`: the caller has no other blocked axis.
  CudaDequantize(const Gpu&, int format, int dtype, bool last_axis_only = false);
  // `inexact`, unless null, becomes 1 if bfloat16 cannot hold every value.
  void operator()(const DequantizeArgs&, Stream, uint32_t* inexact = nullptr) const;

 private:
  Gpu gpu_;
  CudaFunction functions_[2][2] = {};  // [last axis][ragged]
};

// B [N, K] in bfloat16.
struct WideWeight {
  void* data;
  uint32_t* inexact;  // not 0 if bfloat16 cannot hold it
};

// ONNX Runtime's cuBLAS handle, or null; and memory of scratch_bytes, aligned to 256, or null if that is 0.
struct GemmResources {
  Stream stream;
  void* cublas;
  char* scratch;
  const WideWeight* wide = nullptr;  // B, if it is kept
};

class CudaGemm {
 public:
  CudaGemm(const Gpu&, int a_format, int b_format);
  size_t scratch_bytes(const GemmArgs&, bool cublas, bool wide = false) const;
  void operator()(const GemmArgs&, const GemmResources&) const;
  // Makes B [n, k] wide, over an `inexact` that is 0. Throws CudaError if no product would read it.
  void widen(const uint8_t* b, const uint8_t* b_scales, int64_t n, int64_t k, const WideWeight& to, Stream) const;

 private:
  enum class Route { kSkinny, kLarge, kSlices, kParts, kFloat32 };
  Route route(const GemmArgs&, bool cublas) const;
  // Of gemm_skinny: 8 << tiles rows of A or its parts, `few` warps share them, `blocks` across N times `splits` across
  // K.
  struct Cut {
    int tiles;
    bool few;
    int64_t blocks, splits;
  };
  Cut cut(const GemmArgs&) const;
  void skinny(const GemmArgs&, const GemmResources&) const;
  void slices(const GemmArgs&, Stream) const;
  void large(const GemmArgs&, const GemmResources&) const;
  void matmul_bf16(const GemmArgs&, const void* a, const void* b, void* y, int y_type, void* cublas) const;
  void parts(const GemmArgs&, const GemmResources&) const;
  // Sums are [count, M, N], part i counts 2^(-i shift), and `inexact`, unless null, becomes 1 if one is not finite.
  struct Parts {
    int64_t count = 1, shift = 0;
    uint32_t* inexact = nullptr;
  };
  void finish(const GemmArgs&, const void* sums, Stream, const Parts&) const;
  void float32(const GemmArgs&, Stream, const uint32_t* only_if = nullptr) const;

  Gpu gpu_;
  int b_format_;
  CudaFunction skinny_[4][2];         // for 8, 16, 32 and 64 rows; [few warps share A]
  CudaFunction float32_, finish_[2];  // [ragged]
  CudaFunction parts_[2];             // [ragged]
  std::unique_ptr<const CudaDequantize> widen_a_, widen_b_;
  std::unique_ptr<const CudaGemm> inner_;  // of the parts
};

}  // namespace mxfp8::ort
