// The CUDA runtime on the CPU, as far as ONNX Runtime's CUDA provider needs it to start and to run the nodes.
//
// Memory and copies work, kernels of ONNX Runtime itself do nothing. test_ort_provider.py adds stubs that return 0 for
// every other function the provider asks for, and builds this once per library: -DLIBCUDART, -DLIBCUBLAS.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef LIBCUDART

// Where cudaDeviceProp has what ONNX Runtime reads of it, from driver_types.h of CUDA 12 and 13, which differ in the
// number of multiprocessors; and its size, the smaller.
enum { TOTAL_MEMORY = 288, WARP = 308, MOST_THREADS = 320, MAJOR = 360, PROCESSORS = 384, SIZE = 1008 };

int allocations, copies, launches_of_others, forbidden, capturing, graphs;
void (*adopt)(uint64_t address, size_t bytes);  // tells the emulated driver what memory there is
void (*disown)(uint64_t address);

int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaSetDevice(int device) { return device == 0 ? 0 : 101; }
int cudaDriverGetVersion(int* version) { return *version = 13000, 0; }
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 3 : 1024, 0;
}

int cudaGetDeviceProperties(char* properties, int device) {
  memset(properties, 0, SIZE);
  strcpy(properties, "emulated");
  *(size_t*)(properties + TOTAL_MEMORY) = (size_t)8 << 30;
  *(int*)(properties + WARP) = 32;
  *(int*)(properties + MOST_THREADS) = 1024;
  *(int*)(properties + MAJOR) = 9;
  *(int*)(properties + PROCESSORS) = *(int*)(properties + PROCESSORS + 4) = 3;
  return 0;
}
int cudaGetDeviceProperties_v2(char* properties, int device) { return cudaGetDeviceProperties(properties, device); }

int cudaMalloc(void** address, size_t bytes) {
  *address = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(*address, 0xAA, bytes);
  ++allocations;
  forbidden += capturing;
  adopt((uint64_t)*address, bytes);
  return 0;
}
int cudaFree(void* address) { return disown((uint64_t)address), free(address), 0; }
int cudaHostAlloc(void** address, size_t bytes, unsigned flags) { return *address = malloc(bytes), 0; }
int cudaFreeHost(void* address) { return free(address), 0; }
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  ++copies;
  forbidden += capturing;
  memcpy(to, from, bytes);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  ++copies;
  memcpy(to, from, bytes);
  return 0;
}
int cudaMemset(void* to, int value, size_t bytes) { return memset(to, value, bytes), 0; }
int cudaMemGetInfo(size_t* available, size_t* total) { return *available = *total = (size_t)8 << 30, 0; }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return *stream = malloc(64), 0; }
int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return *event = malloc(64), 0; }
int cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
int cudaStreamSynchronize(void* stream) {
  forbidden += capturing;
  return 0;
}
int cudaStreamIsCapturing(void* stream, int* status) { return *status = capturing, 0; }
int cudaStreamBeginCapture(void* stream, int mode) { return capturing = 1, 0; }
int cudaStreamEndCapture(void* stream, void** graph) { return capturing = 0, *graph = malloc(8), 0; }
int cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  ++graphs;
  return *executable = malloc(8), 0;
}
void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  return &handle;
}
int cudaLaunchKernel(void) { return ++launches_of_others, 0; }
int __cudaLaunchKernel(void) { return ++launches_of_others, 0; }
const char* cudaGetErrorString(int status) { return "an error"; }
const char* cudaGetErrorName(int status) { return cudaGetErrorString(status); }

#endif

#ifdef LIBCUBLAS

void* stream_of_handle;

int cublasCreate_v2(void** handle) { return *handle = malloc(64), 0; }
int cublasSetStream_v2(void* handle, void* stream) { return stream_of_handle = stream, 0; }

#endif
