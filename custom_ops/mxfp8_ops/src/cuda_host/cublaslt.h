// cuBLASLt, opened at run time: the products of the rows `block_scaled` and `large` of the dispatch table.
#pragma once
#include <map>
#include <mutex>
#include <set>

#include "cuda_driver.h"
#include "planner.h"

namespace mxfp8::cuda {

class CublasLt {
 public:
  // The one of a GPU, which is current; until the process ends.
  static CublasLt& of(const Gpu&);

  // Whether the library can do a product. It is asked at the first product of a shape. The first refusal of the dtypes
  // is a warning; so is a library that cannot be used, once.
  bool multiplies(const Gpu&, const LtProduct&);

  // Queues a product: the arguments of MXFP8_MATMUL. Throws CudaError.
  void multiply(const Gpu&, const int64_t (&arguments)[MXFP8_MOST_ARGUMENTS], Stream);

 private:
  // cublasLtMatmulHeuristicResult_t
  struct Choice {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
  };
  struct Answer {
    std::string refusal;  // why the library cannot do a product, or ""
    Choice choice;
  };
  struct Description;

  explicit CublasLt(const std::string& file);  // its file, or ""
  Answer answer(const LtProduct&);
  Answer ask(const LtProduct&) const;

  struct Functions {
    size_t (*version)();
    const char* (*status_name)(int);
    int (*create)(void**);
    int (*create_description)(void**, int compute, int scale);
    int (*describe)(void*, int attribute, const void*, size_t);
    int (*destroy_description)(void*);
    int (*create_layout)(void**, int type, uint64_t rows, uint64_t columns, int64_t stride);
    int (*destroy_layout)(void*);
    int (*create_preference)(void**);
    int (*prefer)(void*, int attribute, const void*, size_t);
    int (*destroy_preference)(void*);
    int (*choose)(void*, void* description, void* a, void* b, void* c, void* d, void* preference, int most, Choice*,
                  int* count);
    int (*multiply)(void*, void* description, const void* one, const void* a, void* a_layout, const void* b,
                    void* b_layout, const void* zero, const void* c, void* c_layout, void* d, void* d_layout,
                    const void* algorithm, void* workspace, size_t bytes, Stream);
  };

  Functions lt_ = {};
  std::string unusable_;  // why the library cannot be used at all, or ""
  void* handle_ = nullptr;
  std::mutex mutex_;  // of the next two
  std::map<LtProduct, Answer> answers_;
  std::set<std::array<int64_t, 3>> warned_;  // dtypes, or zeros if the library cannot be used
};

}  // namespace mxfp8::cuda
