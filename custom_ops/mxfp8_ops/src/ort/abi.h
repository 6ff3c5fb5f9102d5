// The part of ONNX Runtime's C ABI that this binding uses, declared by hand: no ONNX Runtime wheel ships its headers.
//
// OrtApi is a table of function pointers that ONNX Runtime only ever appends to, so an entry is its index; the same
// holds for OrtCustomOp below its `version`. Version 17 (ONNX Runtime 1.17) is the first with shape inference, and the
// one that the library asks for, so one binary serves every later release. Indices from onnxruntime_c_api.h.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtAllocator;
struct OrtMemoryInfo;

struct OrtApi {
  void* functions[300];
};
struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  // Version 18 adds these; zero here.
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // extern "C"

namespace mxfp8::ort {

constexpr uint32_t kApiVersion = 17;

enum ErrorCode { kFail = 1, kInvalidArgument = 2 };
enum Characteristic { kRequired = 0, kOptional = 1 };
enum AttributeType { kInt = 1 };

// The table, set when the library is registered.
extern const OrtApi* api;

// One entry of the table: its index and signature.
template <size_t Index, class Signature>
struct Function;
template <size_t Index, class Result, class... Arguments>
struct Function<Index, Result(Arguments...)> {
  Result operator()(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(api->functions[Index])(arguments...);
  }
};

using Shape = OrtTensorTypeAndShapeInfo;
using Task = void(void*, size_t);
constexpr Function<0, OrtStatus*(int, const char*)> CreateStatus;
constexpr Function<26, OrtStatus*(const char*, OrtCustomOpDomain**)> CreateCustomOpDomain;
constexpr Function<27, OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)> CustomOpDomain_Add;
constexpr Function<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)> AddCustomOpDomain;
constexpr Function<51, OrtStatus*(OrtValue*, void**)> GetTensorMutableData;
constexpr Function<57, OrtStatus*(Shape**)> CreateTensorTypeAndShapeInfo;
constexpr Function<58, OrtStatus*(Shape*, int)> SetTensorElementType;
constexpr Function<59, OrtStatus*(Shape*, const int64_t*, size_t)> SetDimensions;
constexpr Function<60, OrtStatus*(const Shape*, int*)> GetTensorElementType;
constexpr Function<61, OrtStatus*(const Shape*, size_t*)> GetDimensionsCount;
constexpr Function<62, OrtStatus*(const Shape*, int64_t*, size_t)> GetDimensions;
constexpr Function<63, OrtStatus*(const Shape*, const char**, size_t)> GetSymbolicDimensions;
constexpr Function<65, OrtStatus*(const OrtValue*, Shape**)> GetTensorTypeAndShape;
constexpr Function<72, OrtStatus*(const OrtMemoryInfo*, int*)> MemoryInfoGetId;
constexpr Function<75, OrtStatus*(OrtAllocator*, size_t, void**)> AllocatorAlloc;
constexpr Function<76, OrtStatus*(OrtAllocator*, void*)> AllocatorFree;
constexpr Function<77, OrtStatus*(const OrtAllocator*, const OrtMemoryInfo**)> AllocatorGetInfo;
constexpr Function<85, OrtStatus*(const OrtKernelInfo*, const char*, float*)> KernelInfoGetAttribute_float;
constexpr Function<86, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)> KernelInfoGetAttribute_int64;
constexpr Function<87, OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)> KernelInfoGetAttribute_string;
constexpr Function<88, OrtStatus*(const OrtKernelContext*, size_t*)> KernelContext_GetInputCount;
constexpr Function<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)> KernelContext_GetInput;
constexpr Function<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>
    KernelContext_GetOutput;
constexpr Function<93, void(OrtStatus*)> ReleaseStatus;
constexpr Function<99, void(Shape*)> ReleaseTensorTypeAndShapeInfo;
constexpr Function<132, void(OrtAllocator*)> ReleaseAllocator;
constexpr Function<163, OrtStatus*(const OrtKernelInfo*, const char*, int64_t*, size_t*)>
    KernelInfoGetAttributeArray_int64;
constexpr Function<193, OrtStatus*(const OrtKernelContext*, void**)> KernelContext_GetGPUComputeStream;
constexpr Function<230, OrtStatus*(const OrtKernelInfo*, size_t*)> KernelInfo_GetInputCount;
constexpr Function<237, OrtStatus*(const OrtSessionOptions*, const char*, int*)> HasSessionConfigEntry;
constexpr Function<238, OrtStatus*(const OrtSessionOptions*, const char*, char*, size_t*)> GetSessionConfigEntry;
constexpr Function<244, OrtStatus*(const OrtKernelInfo*, char*, size_t*)> KernelInfo_GetNodeName;
constexpr Function<249, OrtStatus*(const OrtKernelInfo*, size_t, int*, const OrtValue**)>
    KernelInfoGetConstantInput_tensor;
constexpr Function<268, OrtStatus*(const OrtShapeInferContext*, size_t, Shape**)> ShapeInferContext_GetInputTypeShape;
constexpr Function<269, OrtStatus*(const OrtShapeInferContext*, const char*, const OrtOpAttr**)>
    ShapeInferContext_GetAttribute;
constexpr Function<270, OrtStatus*(const OrtShapeInferContext*, size_t, const Shape*)>
    ShapeInferContext_SetOutputTypeShape;
constexpr Function<271, OrtStatus*(Shape*, const char**, size_t)> SetSymbolicDimensions;
constexpr Function<272, OrtStatus*(const OrtOpAttr*, int, void*, size_t, size_t*)> ReadOpAttr;
constexpr Function<274, OrtStatus*(const OrtKernelContext*, Task*, size_t, size_t, void*)> KernelContext_ParallelFor;
constexpr Function<277, OrtStatus*(const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**)>
    KernelContext_GetScratchBuffer;
constexpr Function<278, OrtStatus*(const OrtKernelInfo*, int, OrtAllocator**)> KernelInfoGetAllocator;

}  // namespace mxfp8::ort
