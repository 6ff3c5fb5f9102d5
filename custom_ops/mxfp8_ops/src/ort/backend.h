// Backends do the arithmetic of the nodes: on this processor, or on a GPU. Arguments are checked before they come here.
#pragma once
#include <memory>
#include <string>

#include "../cpu/kernels/kernels.h"
#include "../cpu/parallel.h"
#include "../cuda_host/planner.h"
#include "nodes.h"

namespace mxfp8::ort {

inline int64_t address(const void* data) { return reinterpret_cast<int64_t>(data); }

// What a GPU keeps of a constant B [N, K]; each may be null.
struct KeptWeight {
  void* wide;         // it in bfloat16
  uint32_t* inexact;  // not 0 if that cannot hold it
  void* swizzled;     // its scales in cuBLASLt's layout
};

// Goes through the operands of a job, and may put them elsewhere.
class Operands {
 public:
  template <class T>
  void in(const T** data, int64_t bytes) {
    *data = static_cast<const T*>(input(*data, bytes));
  }
  template <class T>
  void out(T** data, int64_t bytes) {
    *data = static_cast<T*>(output(*data, bytes));
  }

 protected:
  ~Operands() = default;

 private:
  virtual const void* input(const void* data, int64_t) { return data; }  // null if the node has none
  virtual void* output(void* data, int64_t bytes) = 0;                   // null if the graph does not use it
};

// One operation over arguments like those of ops.h, for any backend. Its pointers are what ONNX Runtime gave: memory of
// the device that the overload is registered for.
class Job {
 public:
  virtual void visit(Operands*) = 0;
  virtual void run(const Kernels&, const Parallel&) const = 0;
  // The launches on a GPU, for a node with Implementation::cuda_kernels.
  virtual cuda::Plan plan(const mxfp8_cuda_place&, const KeptWeight&, const cuda::Ask&) const {
    throw std::logic_error("mxfp8: no plan for a GPU");
  }

 protected:
  ~Job() = default;
};

// Assigns memory to outputs that the graph does not use: a kernel writes all of its outputs.
class Unclaimed final : public Operands {
 public:
  explicit Unclaimed(Job* job) : job_(job) { job->visit(this); }
  int64_t bytes() const { return bytes_; }
  void give(void* memory) {
    next_ = static_cast<char*>(memory);
    if (bytes_ != 0) job_->visit(this);
  }

 private:
  void* output(void* data, int64_t bytes) override {
    if (data != nullptr) return data;
    const int64_t rounded = (bytes + 255) / 256 * 256;
    if (next_ == nullptr) {
      bytes_ += rounded;
      return nullptr;
    }
    next_ += rounded;
    return next_ - rounded;
  }

  Job* job_;
  int64_t bytes_ = 0;
  char* next_ = nullptr;
};

// Any number of threads may call one backend at once.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void run(OrtKernelContext*, Job*) const = 0;
  // Whether operands are in memory that this processor reads.
  virtual bool on_host() const { return true; }
};

// Throws NodeError, which begins with `where`, if MXFP8_ISA names an instruction set that this machine lacks.
std::unique_ptr<const Backend> cpu_backend(const std::string& where);

// On the GPU that ONNX Runtime made the node for, or, with copies, on GPU 0. Both throw CudaError, which begins with
// `where`, if there is no such GPU or no kernels for it.
std::unique_ptr<const Backend> cuda_backend(const std::string& where, const Overload&, const OrtKernelInfo*);
std::unique_ptr<const Backend> cuda_copies_backend(const std::string& where, const Overload&, const OrtKernelInfo*);

}  // namespace mxfp8::ort
