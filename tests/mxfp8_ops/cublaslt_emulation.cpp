// cuBLASLt on the CPU: what libmxfp8_ops uses of it, for operands of MXFP8 and bfloat16. It checks each call and sums
// in double.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct Call {
  int64_t m, n, k, x_type, b_type, y_type, stream;
};
struct Object {
  std::map<int, int64_t> attributes;
  int type;
  uint64_t rows, columns;
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

constexpr int kSuccess = 0, kNotInitialized = 1, kInvalidValue = 7, kNotSupported = 15;
constexpr uint64_t kAlgorithm = 0xA1;
constexpr size_t kWorkspace = 1024;
constexpr int kBfloat16 = 14;

std::mutex mutex;
std::vector<Call> calls;
int live, questions;

double element(int type, const uint8_t* from, uint64_t index) {
  if (type == kBfloat16) {
    uint16_t half;
    std::memcpy(&half, from + 2 * index, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const uint8_t code = from[index];
  const int mantissa_bits = type == 28 ? 3 : 2, bias = type == 28 ? 7 : 15;
  const int exponent = (code & 127) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  if (type == 28 ? (code & 127) == 127 : exponent == 31) return mantissa == 0 && type == 29 ? INFINITY : NAN;
  const double whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  const double value = std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
  return (code & 128) != 0 ? -value : value;
}

// cuBLAS documentation, "1D Block Scaling Factors Layout".
double scale(const uint8_t* scales, uint64_t row, uint64_t block, uint64_t k) {
  if (scales == nullptr) return 1;
  const uint64_t across = (k / 32 + 3) / 4, tile = row / 128 * across + block / 4;
  const int code = scales[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4];
  return code == 255 ? NAN : std::ldexp(1.0, code - 127);
}

void store(void* to, uint64_t index, int type, double sum) {
  const float value = float(sum);
  if (type == 0) static_cast<float*>(to)[index] = value;
  if (type == 2) static_cast<_Float16*>(to)[index] = _Float16(value);
  if (type != kBfloat16) return;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (!std::isnan(value)) bits += 0x7FFF + (bits >> 16 & 1);  // to nearest even
  static_cast<uint16_t*>(to)[index] = uint16_t(bits >> 16);
}

int make(void** to) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++live;
  *to = new Object{};
  return kSuccess;
}
int destroy(void* object) {
  const std::lock_guard<std::mutex> lock(mutex);
  --live;
  delete static_cast<Object*>(object);
  return kSuccess;
}
int set(void* object, int attribute, const void* value, size_t size, size_t expected) {
  if (size != expected) return kInvalidValue;
  int64_t whole = 0;
  std::memcpy(&whole, value, size);
  static_cast<Object*>(object)->attributes[attribute] = whole;
  return kSuccess;
}

// Whether a description fits operands of these types.
bool describes(std::map<int, int64_t>& description, int b_type, int x_type) {
  const bool scaled = b_type != kBfloat16;
  if (scaled == (x_type == kBfloat16) || description[3] != 1) return false;
  for (const int mode : {31, 32}) {
    if (description[mode] != (scaled ? 2 : 0)) return false;
  }
  return (description[17] != 0) == scaled && (description[18] != 0) == scaled;
}

bool fits(std::map<int, int64_t>& description, const Object& b, const Object& x, const Object& d) {
  if (b.type != kBfloat16 && (b.columns % 16 != 0 || b.rows % 32 != 0)) return false;
  return x.rows == b.rows && d.rows == b.columns && d.columns == x.columns && describes(description, b.type, x.type);
}

}  // namespace

extern "C" {

int refusal[2];                           // of bfloat16, of FP8: 1: a status; 2: no algorithm
int failure;                              // status of products, unless it is 0
int failure_once[2];                      // the next status of cublasLtCreate, of the heuristic
size_t (*contexts)();                     // how many are pushed on this thread
int64_t alignments[3];                    // of b, x and y in the last question
void (*observe)(int b_type, int y_type);  // called for each product, unless it is null

size_t call_count() { return calls.size(); }
const Call* call(size_t i) { return &calls[i]; }
int live_objects() { return live; }
int question_count() { return questions; }
void start() {
  calls.clear();
  failure = questions = 0;
  for (int* each : {refusal, failure_once}) each[0] = each[1] = 0;
}

size_t cublasLtGetVersion() { return 130100; }
const char* cublasLtGetStatusName(int status) {
  switch (status) {
    case kNotInitialized:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case 3:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case kInvalidValue:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case 13:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case kNotSupported:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "another status";
  }
}
int cublasLtCreate(void** handle) {
  *handle = failure_once[0] == kSuccess ? &calls : nullptr;
  return std::exchange(failure_once[0], kSuccess);
}

int cublasLtMatmulDescCreate(void** to, int compute, int scale_type) {
  return compute == 68 && scale_type == 0 ? make(to) : kInvalidValue;
}
int cublasLtMatmulDescSetAttribute(void* object, int attribute, const void* value, size_t size) {
  return set(object, attribute, value, size, attribute == 17 || attribute == 18 ? 8 : 4);
}
int cublasLtMatmulDescDestroy(void* object) { return destroy(object); }

int cublasLtMatrixLayoutCreate(void** to, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  if (stride != int64_t(rows)) return kInvalidValue;
  make(to);
  **reinterpret_cast<Object**>(to) = {{}, type, rows, columns};
  return kSuccess;
}
int cublasLtMatrixLayoutDestroy(void* object) { return destroy(object); }

int cublasLtMatmulPreferenceCreate(void** to) { return make(to); }
int cublasLtMatmulPreferenceSetAttribute(void* object, int attribute, const void* value, size_t size) {
  return set(object, attribute, value, size, attribute == 1 ? 8 : 4);
}
int cublasLtMatmulPreferenceDestroy(void* object) { return destroy(object); }

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* product, void* b, void* x, void* c, void* d, void* preference,
                                   int most, Heuristic* found, int* count) {
  auto& wishes = static_cast<Object*>(preference)->attributes;
  auto& description = static_cast<Object*>(product)->attributes;
  ++questions;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // other threads ask meanwhile
  if (contexts() == 0) return kNotInitialized;
  if (const int status = std::exchange(failure_once[1], kSuccess)) return status;
  if (handle != &calls || c != d || most != 1 || b == nullptr || x == nullptr) return kInvalidValue;
  const auto &bl = *static_cast<Object*>(b), &xl = *static_cast<Object*>(x), &dl = *static_cast<Object*>(d);
  const bool scaled = bl.type != kBfloat16;
  if (wishes.size() != 6 || wishes[1] != 32 << 20 || wishes[3] != 2 || wishes[7] != wishes[8]) return kInvalidValue;
  if (!fits(description, bl, xl, dl)) return kInvalidValue;
  alignments[0] = wishes[5], alignments[1] = wishes[6], alignments[2] = wishes[7];
  const int64_t least = scaled ? 16 : 2, least_of_d = dl.type == 0 ? 4 : 2;
  if (wishes[5] < least || wishes[6] < least || wishes[8] < least_of_d) return kNotSupported;
  if (refusal[scaled] == 1) return kNotSupported;
  *count = refusal[scaled] == 2 ? 0 : 1;
  *found = {{kAlgorithm, uint64_t(wishes[5]), uint64_t(wishes[6]), uint64_t(wishes[8])}, kWorkspace, kSuccess, 1, {}};
  return kSuccess;
}

int cublasLtMatmul(void* handle, void* product, const float* one, const uint8_t* b, void* b_layout, const uint8_t* x,
                   void* x_layout, const float* zero, const void* c, void* c_layout, void* d, void* d_layout,
                   const uint64_t* algorithm, void* workspace, size_t bytes, void* stream) {
  const auto &bl = *static_cast<Object*>(b_layout), &xl = *static_cast<Object*>(x_layout);
  const auto& dl = *static_cast<Object*>(d_layout);
  auto& description = static_cast<Object*>(product)->attributes;
  const uint64_t n = bl.columns, m = xl.columns, k = bl.rows;
  if (handle != &calls || *one != 1 || *zero != 0 || c != d || c_layout != d_layout) return kInvalidValue;
  if (*algorithm != kAlgorithm || bytes != kWorkspace || workspace == nullptr) return kInvalidValue;
  if (contexts() == 0 || !fits(description, bl, xl, dl)) return kInvalidValue;
  const void* operands[] = {b, x, d};
  for (int i = 0; i < 3; ++i) {
    if (reinterpret_cast<uint64_t>(operands[i]) % algorithm[i + 1] != 0) return kInvalidValue;
  }
  const auto *b_scales = reinterpret_cast<const uint8_t*>(description[17]),
             *x_scales = reinterpret_cast<const uint8_t*>(description[18]);
  std::memset(workspace, 0x55, bytes);  // what else lay there is lost
  for (uint64_t i = 0; i < m; ++i) {
    for (uint64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (uint64_t t = 0; t < k; ++t) {
        sum += element(xl.type, x, i * k + t) * scale(x_scales, i, t / 32, k) * element(bl.type, b, j * k + t) *
               scale(b_scales, j, t / 32, k);
      }
      store(d, i * n + j, dl.type, sum);
    }
  }
  if (failure != 0) return failure;
  if (observe != nullptr) observe(bl.type, dl.type);
  const std::lock_guard<std::mutex> lock(mutex);
  calls.push_back({int64_t(m), int64_t(n), int64_t(k), xl.type, bl.type, dl.type, reinterpret_cast<int64_t>(stream)});
  return kSuccess;
}

}  // extern "C"
