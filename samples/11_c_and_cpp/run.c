/* Runs a rewritten model of one float32 input and output: run MODEL LIBRARY SIZE... < input > output, raw float32.

   With OLD_CALL the library is registered by the call that Triton Inference Server's ONNX Runtime backend makes. */
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>

static const OrtApi* api;

static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", api->GetErrorMessage(status));
  exit(1);
}

int main(int count, char** arguments) {
  if (count < 4 || count > 11) {
    fprintf(stderr, "usage: run MODEL LIBRARY SIZE... < input > output\n");
    return 2;
  }
  const char *model = arguments[1], *library = arguments[2];
  int64_t sizes[8];
  size_t rank = (size_t)count - 3, values = 1;
  for (size_t i = 0; i < rank; ++i) values *= (size_t)(sizes[i] = atoll(arguments[i + 3]));

  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (api == NULL) {
    fprintf(stderr, "ONNX Runtime %s is older than this program\n", OrtGetApiBase()->GetVersionString());
    return 1;
  }
  OrtEnv* env;
  OrtSessionOptions* options;
  OrtSession* session;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "run", &env));
  check(api->CreateSessionOptions(&options));
#ifdef OLD_CALL
  void* handle;
  check(api->RegisterCustomOpsLibrary(options, library, &handle));
#else
  check(api->RegisterCustomOpsLibrary_V2(options, library));
#endif
  check(api->CreateSession(env, model, options, &session));

  OrtAllocator* allocator;
  char *input_name, *output_name;
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  check(api->SessionGetInputName(session, 0, allocator, &input_name));
  check(api->SessionGetOutputName(session, 0, allocator, &output_name));

  float* x = malloc(values * sizeof *x);
  if (x == NULL || fread(x, sizeof *x, values, stdin) != values) {
    fprintf(stderr, "expected %zu float32 values\n", values);
    return 2;
  }
  OrtMemoryInfo* memory;
  OrtValue *input, *output = NULL;
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  check(api->CreateTensorWithDataAsOrtValue(memory, x, values * sizeof *x, sizes, rank,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input));
  check(api->Run(session, NULL, (const char* const*)&input_name, (const OrtValue* const*)&input, 1,
                 (const char* const*)&output_name, 1, &output));

  OrtTensorTypeAndShapeInfo* shape;
  size_t results;
  void* y;
  check(api->GetTensorTypeAndShape(output, &shape));
  check(api->GetTensorShapeElementCount(shape, &results));
  check(api->GetTensorMutableData(output, &y));
  fwrite(y, sizeof(float), results, stdout);

  api->ReleaseTensorTypeAndShapeInfo(shape);
  api->ReleaseValue(output);
  api->ReleaseValue(input);
  api->ReleaseMemoryInfo(memory);
  free(x);
  check(api->AllocatorFree(allocator, input_name));
  check(api->AllocatorFree(allocator, output_name));
  api->ReleaseSession(session);
  api->ReleaseSessionOptions(options);
  api->ReleaseEnv(env);
  return 0;
}
