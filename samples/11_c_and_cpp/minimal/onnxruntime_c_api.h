/* What run.c needs of ONNX Runtime's C API, declared by hand, for machines without its headers: use those of the
   release (onnxruntime-linux-*.tgz, the NuGet package) where you have them. The table only ever grows at its end, so a
   function's place is the same in every release; tests/mxfp8_graph/test_hosts_c.py compares places with the published
   header. Names and places: onnxruntime_c_api.h of 1.17, MIT license, Microsoft. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17

typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef OrtStatus* OrtStatusPtr;

typedef enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;
typedef enum OrtAllocatorType { OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum OrtMemType { OrtMemTypeDefault = 0 } OrtMemType;
typedef enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1 } ONNXTensorElementDataType;

typedef struct OrtApi {
  void* before_2[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatusPtr (*CreateEnv)(OrtLoggingLevel, const char*, OrtEnv**);
  void* before_7[3];
  OrtStatusPtr (*CreateSession)(const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**);
  void* before_9[1];
  OrtStatusPtr (*Run)(OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*, size_t,
                      const char* const*, size_t, OrtValue**);
  OrtStatusPtr (*CreateSessionOptions)(OrtSessionOptions**);
  void* before_29[18];
  OrtStatusPtr (*RegisterCustomOpsLibrary)(OrtSessionOptions*, const char*, void**);
  void* before_36[6];
  OrtStatusPtr (*SessionGetInputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  OrtStatusPtr (*SessionGetOutputName)(const OrtSession*, size_t, OrtAllocator*, char**);
  void* before_49[11];
  OrtStatusPtr (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t,
                                                 ONNXTensorElementDataType, OrtValue**);
  void* before_51[1];
  OrtStatusPtr (*GetTensorMutableData)(OrtValue*, void**);
  void* before_64[12];
  OrtStatusPtr (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatusPtr (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void* before_69[3];
  OrtStatusPtr (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* before_76[6];
  OrtStatusPtr (*AllocatorFree)(OrtAllocator*, void*);
  void* before_78[1];
  OrtStatusPtr (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* before_92[13];
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* before_99[2];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
  void* before_228[127];
  OrtStatusPtr (*RegisterCustomOpsLibrary_V2)(OrtSessionOptions*, const char*);
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

#ifdef __cplusplus
extern "C"
#endif
    const OrtApiBase* OrtGetApiBase(void);
