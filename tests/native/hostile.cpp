// Hostile arguments to every function of the C ABI, built with sanitizers by `make sanitize`: NULL, misaligned and
// wrapping addresses, sizes and strides that are negative or overflow, codes of nothing. A model here, in 128 bits,
// says which calls must be refused; the others get heap buffers of exactly the size the header asks for. A refused call
// must leave its results alone and say why; an accepted one must leave the gaps between rows alone. Exits with 1 if the
// library disagrees with the model; a sanitizer exits with a code of its own.
//
//   mxfp8_hostile [--calls N] [--seconds S] [--seed X]      1,000,000 calls if neither is given
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "contract.h"
#include "cuda_host/mxfp8_cuda.h"
#include "cuda_host/mxfp8_cuda_plan.h"

namespace {

using Random = std::mt19937_64;
__extension__ typedef __int128 Wide;

constexpr Wide kMostBytes = Wide(1) << 48;
constexpr Wide kMostHere = 1 << 20;  // bytes that a call of this program may really touch
constexpr uint8_t kUntouched = 0xa5;
constexpr int kWorkers = 4;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "hostile: %s\n", what.c_str());
  std::_Exit(1);  // other threads are still at work on what std::exit would take away
}

bool chance(Random& random, int one_in) { return random() % uint64_t(one_in) == 0; }
template <class T, size_t N>
T one_of(Random& random, const T (&choices)[N]) {
  return choices[random() % N];
}

int64_t hostile_number(Random& random) {
  const int64_t numbers[] = {-1,
                             -32,
                             INT64_MIN,
                             INT64_MIN + 1,
                             INT64_MAX,
                             INT64_MAX - 1,
                             INT64_MAX - 31,
                             INT32_MAX,
                             int64_t(1) << 31,
                             int64_t(1) << 32,
                             INT32_MIN};
  if (chance(random, 3)) return one_of(random, numbers);
  const int64_t power = int64_t(1) << (33 + random() % 30);
  if (chance(random, 8)) return int64_t(random());
  return power + int64_t(random() % 3) - 1;
}
int64_t size(Random& random, int hostile) {
  const int64_t ordinary[] = {0, 1, 1, 2, 3, 5, 16, 17, 31, 32, 33, 63, 64, 65, 70, 96};
  return chance(random, hostile) ? hostile_number(random) : one_of(random, ordinary);
}
// A stride for rows of that many values; wraps, which makes it one to be refused.
int64_t above(Random& random, int64_t columns) { return int64_t(uint64_t(columns) + random() % 4); }
int code(Random& random, std::initializer_list<int> known, int hostile) {
  const int others[] = {0, 2, 18, 20, 99, -1, INT_MAX, INT_MIN, 3, 1, 10, 16, 17, 19};
  return chance(random, hostile) ? one_of(random, others) : known.begin()[random() % known.size()];
}
bool is_one_of(int64_t value, std::initializer_list<int> known) {
  for (const int each : known) {
    if (value == each) return true;
  }
  return false;
}
#define VALUES {MXFP8_FLOAT32, MXFP8_FLOAT16, MXFP8_BFLOAT16}
#define ACTIVATIONS {MXFP8_FLOAT32, MXFP8_BFLOAT16}
#define FORMATS {MXFP8_E4M3, MXFP8_E5M2, MXFP8_INT8}
#define INDICES {MXFP8_INT32, MXFP8_INT64}
#define ROUNDINGS {MXFP8_CEIL, MXFP8_FLOOR, MXFP8_EVEN}
#define EPILOGUES {MXFP8_NONE, MXFP8_RELU, MXFP8_GELU, MXFP8_GELU_TANH, MXFP8_SILU}

int64_t bytes_of(int64_t dtype) { return dtype == MXFP8_FLOAT32 ? 4 : is_one_of(dtype, VALUES) ? 2 : 1; }
Wide blocks(int64_t k) { return (Wide(k) + 31) / 32; }

// Bytes of a dense array; of rows `stride` values apart.
Wide dense(std::initializer_list<Wide> sizes, int64_t value_bytes) {
  Wide count = 1;
  for (const Wide each : sizes) {
    if (each == 0) return 0;
  }
  for (const Wide each : sizes) count = count > kMostBytes ? count : count * each;
  return count > kMostBytes ? kMostBytes + 1 : count * value_bytes;
}
Wide rows(Wide count, Wide columns, Wide stride, int64_t value_bytes) {
  if (count == 0 || columns == 0) return 0;
  const Wide values = (count - 1) * stride + columns;
  return values > kMostBytes ? kMostBytes + 1 : values * value_bytes;
}

// An argument that points to memory.
struct Array {
  Wide bytes = 0;
  int64_t alignment = 1;
  bool result = false;
  std::unique_ptr<uint8_t, decltype(&std::free)> memory{nullptr, std::free};
  uint8_t* at = nullptr;
};

// Gives arrays their memory, or something in its place. Returns whether that makes the call one to be refused.
bool furnish(Random& random, Array* array, bool refused_anyway, int hostile) {
  if (array->bytes > kMostHere || (refused_anyway && array->bytes < 0)) {  // an address without memory behind it
    array->at = refused_anyway && chance(random, 2) ? reinterpret_cast<uint8_t*>(uintptr_t(1) << 20) : nullptr;
    return true;
  }
  const auto bytes = size_t(array->bytes < 0 ? 0 : array->bytes);
  const int how = chance(random, hostile) ? int(random() % 3) : 3;
  if (how == 0) return bytes > 0;  // NULL
  if (how == 1) {                  // the end of the address space
    array->at = reinterpret_cast<uint8_t*>(uintptr_t(INT64_MAX) / 16 * 16 + (chance(random, 2) ? 0 : 1u << 31) * 0);
    if (bytes > 15) return true;
    array->at = nullptr;
    return bytes > 0;
  }
  const size_t shift = how == 2 ? 1 : 0;  // misaligned: malloc aligns to 16
  array->memory.reset(static_cast<uint8_t*>(std::malloc(bytes + shift)));
  array->at = array->memory.get() + shift;
  const bool ordinary = chance(random, 2);  // no small elements: gemm_int16 takes them
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t some = array->result ? 0x0101010101010101u * kUntouched : random();
    if (ordinary && !array->result) some = (some & 0xbfbfbfbfbfbfbfbfu) | 0x3030303030303030u;
    std::memcpy(array->at + i, &some, bytes - i < 8 ? bytes - i : 8);
  }
  return shift % size_t(array->alignment) != 0 && bytes > 0;
}

bool untouched(const Array& array, Wide begin, Wide end) {
  for (Wide i = begin; i < end; ++i) {
    if (array.at[size_t(i)] != kUntouched) return false;
  }
  return true;
}

struct Counts {
  long accepted = 0, refused = 0;
};

// Compares a status with what the model expects, and the text with its form.
void judge(const std::string& call, int status, bool refused, Counts* counts) {
  if (status != (refused ? MXFP8_BAD_ARGUMENT : MXFP8_OK)) {
    fail(call + ": status " + std::to_string(status) + " (" + mxfp8_last_error(MXFP8_MESSAGE) +
         "); expected that it is " + (refused ? "refused" : "done"));
  }
  const std::string text = mxfp8_last_error(MXFP8_MESSAGE);
  if (refused && text.find("; expected ") == std::string::npos) fail(call + ": says '" + text + "'");
  ++(refused ? counts->refused : counts->accepted);
}

int thread_count(Random& random, int hostile) {
  const int wild[] = {INT_MAX, 100000, -1, INT_MIN, 257};
  return chance(random, 4 * hostile) ? one_of(random, wild) : int(random() % 4);
}

std::string list(std::initializer_list<int64_t> numbers) {
  std::string text;
  for (const int64_t number : numbers) text += " " + std::to_string(number);
  return text;
}

// --- the kernels -----------------------------------------------------------------------------------------------------

// Gives all arrays memory and reports whether the call is to be refused. Arrays are not looked at where `read` is
// false.
bool furnish_all(Random& random, std::initializer_list<Array*> arrays, bool refused, bool read, int hostile) {
  for (Array* array : arrays) refused = refused || (read && array->bytes > kMostBytes);
  for (Array* array : arrays) {
    const bool bad = furnish(random, array, refused || !read, hostile);
    refused = refused || (bad && read);
  }
  return refused;
}

void check_untouched(const std::string& call, std::initializer_list<Array*> arrays) {
  for (const Array* array : arrays) {
    if (array->result && array->memory && !untouched(*array, 0, array->bytes)) fail(call + ": refused, yet it wrote");
  }
}

void blockwise(Random& random, Counts* counts, bool quantize) {
  const int hostile = chance(random, 3) ? 100000 : 12;
  const int dtype = code(random, VALUES, hostile), format = code(random, FORMATS, hostile);
  const int rounding = code(random, ROUNDINGS, hostile), threads = thread_count(random, hostile);
  const int64_t outer = chance(random, 3) ? size(random, hostile) : 1, k = size(random, hostile),
                inner = chance(random, 2) ? size(random, hostile) : 1;
  bool refused = !is_one_of(dtype, VALUES) || !is_one_of(format, FORMATS) || outer < 0 || k < 0 || inner < 0 ||
                 threads < 0 || (quantize && !is_one_of(rounding, ROUNDINGS));
  Array values, elements, scales;
  if (outer >= 0 && k >= 0 && inner >= 0) {
    elements.bytes = dense({outer, k, inner}, 1);
    scales.bytes = dense({outer, blocks(k), inner}, 1);
    values.bytes = dense({outer, k, inner}, bytes_of(dtype));
  }
  values.alignment = bytes_of(dtype);
  (quantize ? elements : values).result = (quantize ? scales : values).result = true;
  refused = furnish_all(random, {&values, &elements, &scales}, refused, true, hostile);
  const std::string call = (quantize ? "quantize" : "dequantize") + list({dtype, format, rounding, outer, k, inner});
  const int status =
      quantize ? mxfp8_quantize(dtype, values.at, outer, k, inner, format, rounding, elements.at, scales.at, threads)
               : mxfp8_dequantize(format, elements.at, scales.at, outer, k, inner, dtype, values.at, threads);
  judge(call, status, refused, counts);
  if (refused) check_untouched(call, {&values, &elements, &scales});
}

void pack(Random& random, Counts* counts) {
  const int hostile = chance(random, 3) ? 100000 : 12;
  const int dtype = code(random, VALUES, hostile), format = code(random, FORMATS, hostile);
  const int rounding = code(random, ROUNDINGS, hostile), threads = thread_count(random, hostile);
  const int transposed = chance(random, 2) ? 0 : int(random());
  const int64_t n = size(random, hostile), k = size(random, hostile);
  const int64_t columns = transposed != 0 ? n : k, count = transposed != 0 ? k : n;
  const int64_t stride = chance(random, hostile) ? hostile_number(random) : above(random, columns);
  bool refused = !is_one_of(dtype, VALUES) || !is_one_of(format, FORMATS) || !is_one_of(rounding, ROUNDINGS) || n < 0 ||
                 k < 0 || stride < columns || threads < 0;
  Array w, elements, scales, stats;
  if (n >= 0 && k >= 0 && stride >= columns) {
    w.bytes = rows(count, columns, stride, bytes_of(dtype));
    elements.bytes = dense({n, k}, 1);
    scales.bytes = dense({n, blocks(k)}, 1);
  }
  w.alignment = bytes_of(dtype);
  stats.bytes = sizeof(mxfp8_pack_stats), stats.alignment = alignof(mxfp8_pack_stats);
  elements.result = scales.result = stats.result = true;
  refused = furnish_all(random, {&w, &elements, &scales, &stats}, refused, true, hostile);
  const std::string call = "pack" + list({dtype, format, rounding, transposed, n, k, stride});
  const int status = mxfp8_pack(dtype, w.at, stride, transposed, n, k, format, rounding, elements.at, scales.at,
                                reinterpret_cast<mxfp8_pack_stats*>(stats.at), threads);
  judge(call, status, refused, counts);
  if (refused) check_untouched(call, {&elements, &scales, &stats});
}

void multiply(Random& random, Counts* counts, bool weight_only, bool fused) {
  const int hostile = chance(random, 3) ? 100000 : 16;
  const int x_kind = weight_only ? code(random, VALUES, hostile) : code(random, FORMATS, hostile);
  const int b_format = code(random, FORMATS, hostile), y_dtype = code(random, VALUES, hostile);
  const int activation = weight_only ? code(random, ACTIVATIONS, hostile) : int(MXFP8_FLOAT32);
  const int epilogue = fused ? code(random, EPILOGUES, hostile) : int(MXFP8_NONE);
  const int factor_dtype = fused ? code(random, VALUES, hostile) : int(MXFP8_FLOAT32);
  const int threads = thread_count(random, hostile);
  const int64_t m = size(random, hostile), n = size(random, hostile), k = size(random, hostile);
  const int64_t y_stride = chance(random, hostile) ? hostile_number(random) : above(random, n);
  const int64_t x_stride = chance(random, hostile) ? hostile_number(random) : above(random, k);
  bool refused = !(weight_only ? is_one_of(x_kind, VALUES) : is_one_of(x_kind, FORMATS)) ||
                 !is_one_of(activation, ACTIVATIONS) || !is_one_of(b_format, FORMATS) || !is_one_of(y_dtype, VALUES) ||
                 !is_one_of(epilogue, EPILOGUES) || !is_one_of(factor_dtype, VALUES) || m < 0 || n < 0 || k < 0 ||
                 y_stride < n || (weight_only && x_stride < k) || threads < 0;
  const bool read = refused || (m > 0 && n > 0);
  Array x, x_scales, b, b_scales, bias, factor, y;
  if (!refused) {
    x.bytes = weight_only ? rows(m, k, x_stride, bytes_of(x_kind)) : dense({m, k}, 1);
    x_scales.bytes = weight_only ? 0 : dense({m, blocks(k)}, 1);
    b.bytes = dense({n, k}, 1);
    b_scales.bytes = dense({n, blocks(k)}, 1);
    y.bytes = rows(m, n, y_stride, bytes_of(y_dtype));
    bias.bytes = dense({n}, 4);
    factor.bytes = dense({m, n}, bytes_of(factor_dtype));
  }
  x.alignment = bytes_of(x_kind), y.alignment = bytes_of(y_dtype), bias.alignment = 4,
  factor.alignment = bytes_of(factor_dtype), y.result = true;
  const bool biased = chance(random, 2);
  refused = furnish_all(random, {&x, &x_scales, &b, &b_scales, &y}, refused, read, hostile);
  const bool small = bias.bytes <= kMostHere;
  if (biased && small && furnish(random, &bias, false, hostile) && bias.at != nullptr && read) refused = true;
  const bool times = fused && chance(random, 2) && factor.bytes <= kMostHere;
  if (times && furnish(random, &factor, false, hostile) && factor.at != nullptr && read) refused = true;
  const void* factor_at = times ? factor.at : nullptr;
  const auto* bias_at = reinterpret_cast<const float*>(biased ? bias.at : nullptr);
  const int prepack = chance(random, 4) ? int(random() % 5) - 1 : int(MXFP8_PREPACK_NEVER);
  mxfp8_weight* weight = nullptr;
  const bool known = prepack >= MXFP8_PREPACK_AUTO && prepack <= MXFP8_PREPACK_DECODED;
  if ((mxfp8_weight_new(prepack, &weight) == MXFP8_OK) != known) fail("weight_new" + list({prepack}));
  mxfp8_weight_use(weight);
  const std::string call =
      (fused ? "fused_" : "") + std::string(weight_only ? "weight_gemm" : "gemm") +
      list({x_kind, activation, b_format, y_dtype, m, n, k, x_stride, y_stride, biased, epilogue, factor_dtype, times});
  int status = 0;
  if (weight_only && fused) {
    status = mxfp8_fused_weight_gemm(x_kind, x.at, x_stride, activation, b_format, b.at, b_scales.at, bias_at, epilogue,
                                     factor_dtype, factor_at, m, n, k, y_dtype, y.at, y_stride, threads);
  } else if (weight_only) {
    status = mxfp8_weight_gemm(x_kind, x.at, x_stride, activation, b_format, b.at, b_scales.at, bias_at, m, n, k,
                               y_dtype, y.at, y_stride, threads);
  } else if (fused) {
    status = mxfp8_fused_gemm(x_kind, x.at, x_scales.at, b_format, b.at, b_scales.at, bias_at, epilogue, factor_dtype,
                              factor_at, m, n, k, y_dtype, y.at, y_stride, threads);
  } else {
    status = mxfp8_gemm(x_kind, x.at, x_scales.at, b_format, b.at, b_scales.at, bias_at, m, n, k, y_dtype, y.at,
                        y_stride, threads);
  }
  mxfp8_weight_free(weight);
  judge(call, status, refused, counts);
  if (refused || !read) return check_untouched(call, {&y});
  const Wide value = bytes_of(y_dtype);
  for (Wide row = 0; row + 1 < m; ++row) {
    if (!untouched(y, (row * y_stride + n) * value, (row + 1) * y_stride * value)) fail(call + ": wrote between rows");
  }
}

// The bytes of indices of a table of `v` rows; some calls get one that names no row. Returns whether this one did.
bool write_indices(Random& random, const Array& indices, int64_t v, int hostile) {
  bool wrong = false;
  for (Wide at = 0; at < indices.bytes; at += indices.alignment) {
    const bool wide = indices.alignment == 8;
    int64_t index = v == 0 ? 0 : int64_t(random() % uint64_t(v)) - (chance(random, 2) ? v : 0);
    const int64_t outside[] = {v, -v - 1, wide ? INT64_MIN : INT32_MIN, wide ? INT64_MAX : INT32_MAX};
    if (chance(random, hostile)) index = one_of(random, outside);
    const auto narrow = int32_t(index);
    if (!wide) index = narrow;
    wrong = wrong || index < -v || index >= v;
    if (wide) {
      std::memcpy(indices.at + size_t(at), &index, sizeof index);
    } else {
      std::memcpy(indices.at + size_t(at), &narrow, sizeof narrow);
    }
  }
  return wrong;
}

void embed(Random& random, Counts* counts) {
  const int hostile = chance(random, 3) ? 100000 : 16;
  const int index_dtype = code(random, INDICES, hostile), format = code(random, FORMATS, hostile);
  const int y_dtype = code(random, VALUES, hostile), threads = thread_count(random, hostile);
  const int64_t count = size(random, hostile), v = size(random, hostile), d = size(random, hostile);
  bool refused = !is_one_of(index_dtype, INDICES) || !is_one_of(format, FORMATS) || !is_one_of(y_dtype, VALUES) ||
                 count < 0 || v < 0 || d < 0 || threads < 0;
  Array indices, b, b_scales, y;
  indices.alignment = index_dtype == MXFP8_INT32 ? 4 : 8;
  if (!refused) {
    const bool read = count > 0 && d > 0;
    indices.bytes = dense({count}, indices.alignment);
    b.bytes = read ? dense({v, d}, 1) : 0;
    b_scales.bytes = read ? dense({v, blocks(d)}, 1) : 0;
    y.bytes = dense({count, d}, bytes_of(y_dtype));
  }
  y.alignment = bytes_of(y_dtype), y.result = true;
  refused = furnish_all(random, {&indices, &b, &b_scales, &y}, refused, true, hostile);
  if (indices.memory && write_indices(random, indices, v, 8 * hostile)) refused = true;
  const std::string call = "embedding" + list({index_dtype, format, y_dtype, count, v, d});
  const int status =
      mxfp8_embedding(index_dtype, indices.at, count, format, b.at, b_scales.at, v, d, y_dtype, y.at, threads);
  judge(call, status, refused, counts);
  if (refused) check_untouched(call, {&y});
}

void attend(Random& random, Counts* counts) {
  const int hostile = chance(random, 3) ? 100000 : 16;
  mxfp8_attention_arguments a = {};
  a.dtype = code(random, VALUES, hostile), a.activation_dtype = code(random, ACTIVATIONS, hostile);
  a.mask_dtype = chance(random, 2) ? int(MXFP8_BOOL) : code(random, VALUES, hostile);
  a.causal = int(random() % 2), a.nan_guard = int(random() % 2), a.scale = chance(random, 2) ? 0.0f : -1.5f;
  a.batch = int64_t(random() % 3), a.rows = size(random, hostile), a.keys = size(random, hostile);
  a.past = chance(random, 2) ? 0 : size(random, hostile), a.d = size(random, hostile), a.dv = size(random, hostile);
  a.kv_heads = chance(random, hostile) ? hostile_number(random) : int64_t(1 + random() % 2);
  const int64_t shared = a.kv_heads > 0 && a.kv_heads < INT32_MAX ? a.kv_heads : 1;
  a.q_heads = chance(random, hostile) ? hostile_number(random) : shared * int64_t(1 + random() % 3);
  const int threads = thread_count(random, hostile);
  const bool masked = chance(random, 2);
  bool refused = !is_one_of(a.dtype, VALUES) || !is_one_of(a.activation_dtype, ACTIVATIONS) || a.rows < 0 ||
                 a.keys < 0 || a.past < 0 || a.keys > kMostBytes || a.past > kMostBytes || a.d < 0 || a.dv < 0 ||
                 a.kv_heads < 1 || a.q_heads < a.kv_heads || a.q_heads > INT32_MAX || a.q_heads % a.kv_heads != 0 ||
                 threads < 0 || (masked && a.mask_dtype != MXFP8_BOOL && !is_one_of(a.mask_dtype, VALUES));
  const int64_t full[] = {a.batch, a.q_heads, a.rows, refused ? 0 : a.past + a.keys};
  for (int i = 0; i < 4; ++i) a.mask_sizes[i] = chance(random, 2) ? 1 : full[i];
  const int64_t bytes = bytes_of(a.dtype);
  Array q, k, v, mask, past_key, past_value, y;
  for (Array* each : {&q, &k, &v, &past_key, &past_value, &y}) each->alignment = bytes;
  mask.alignment = a.mask_dtype == MXFP8_BOOL ? 1 : bytes_of(a.mask_dtype);
  if (!refused) {
    q.bytes = dense({a.batch, a.rows, a.q_heads, a.d}, bytes),
    k.bytes = dense({a.batch, a.keys, a.kv_heads, a.d}, bytes);
    v.bytes = dense({a.batch, a.keys, a.kv_heads, a.dv}, bytes);
    past_key.bytes = dense({a.batch, a.kv_heads, a.past, a.d}, bytes);
    past_value.bytes = dense({a.batch, a.kv_heads, a.past, a.dv}, bytes);
    y.bytes = dense({a.batch, a.rows, a.q_heads, a.dv}, bytes);
    const int64_t* m = a.mask_sizes;
    mask.bytes = masked ? dense({m[0], m[1], m[2], m[3]}, mask.alignment) : 0;
  }
  y.result = true;
  refused = furnish_all(random, {&q, &k, &v, &past_key, &past_value, &y}, refused, true, hostile);
  if (masked && mask.bytes <= kMostHere && furnish(random, &mask, false, 100000) && mask.at != nullptr) {
    refused = true;  // but NULL is not a mask
  }
  if (masked && mask.bytes > kMostHere) refused = true, mask.at = reinterpret_cast<uint8_t*>(uintptr_t(INT64_MAX));
  a.q = q.at, a.k = k.at, a.v = v.at, a.past_key = past_key.at, a.past_value = past_value.at, a.y = y.at;
  a.mask = masked ? mask.at : nullptr;
  const std::string call = "attention" + list({a.dtype, a.mask_dtype, a.activation_dtype, a.batch, a.rows, a.keys,
                                               a.past, a.q_heads, a.kv_heads, a.d, a.dv, masked});
  const bool none = chance(random, 10000);
  refused = refused || none;
  judge(call, mxfp8_attention(none ? nullptr : &a, threads), refused, counts);
  if (refused) check_untouched(call, {&y});
}

// Indices of experts in the memory of `array`, now and then one too many. Returns whether all are good.
bool fill_experts(Random& random, const Array& array, int64_t m, int64_t count, int hostile) {
  auto* experts = reinterpret_cast<int64_t*>(array.at);
  const int64_t most = count < 5 ? count : 5;
  bool good = true;
  for (int64_t i = 0; i < m; ++i) {
    int64_t expert = int64_t(random() % uint64_t(2 * most + 1)) - most;
    if (chance(random, 4 * hostile)) expert = hostile_number(random);
    good = good && expert >= -count && expert <= count;
    std::memcpy(experts + i, &expert, sizeof expert);
  }
  return good;
}

void multiply_grouped(Random& random, Counts* counts, bool weight_only) {
  const int hostile = chance(random, 3) ? 100000 : 16;
  const int x_kind = weight_only ? code(random, VALUES, hostile) : code(random, FORMATS, hostile);
  const int b_format = code(random, FORMATS, hostile), y_dtype = code(random, VALUES, hostile);
  const int rounded = code(random, {MXFP8_FLOAT32, MXFP8_BFLOAT16}, hostile);
  const int threads = thread_count(random, hostile);
  const int64_t m = size(random, hostile), n = size(random, hostile), k = size(random, hostile);
  const int64_t count = chance(random, hostile) ? hostile_number(random) : int64_t(random() % 6);
  bool refused = !(weight_only ? is_one_of(x_kind, VALUES) : is_one_of(x_kind, FORMATS)) ||
                 (weight_only && !is_one_of(rounded, {MXFP8_FLOAT32, MXFP8_BFLOAT16})) ||
                 !is_one_of(b_format, FORMATS) || !is_one_of(y_dtype, VALUES) || m < 0 || n < 0 || k < 0 || count < 0 ||
                 threads < 0;
  const bool read = refused || (m > 0 && n > 0);
  Array x, x_scales, b, b_scales, experts, y;
  if (!refused) {
    x.bytes = dense({m, k}, weight_only ? bytes_of(x_kind) : 1);
    x_scales.bytes = weight_only ? 0 : dense({m, blocks(k)}, 1);
    b.bytes = dense({count, n, k}, 1);
    b_scales.bytes = dense({count, n, blocks(k)}, 1);
    experts.bytes = dense({m}, 8);
    y.bytes = dense({m, n}, bytes_of(y_dtype));
  }
  x.alignment = bytes_of(x_kind), y.alignment = bytes_of(y_dtype), experts.alignment = 8, y.result = true;
  refused = furnish_all(random, {&x, &x_scales, &b, &b_scales, &experts, &y}, refused, read, hostile);
  if (!refused && read) refused = !fill_experts(random, experts, m, count, hostile);
  const auto* experts_at = reinterpret_cast<const int64_t*>(experts.at);
  const std::string call = (weight_only ? "grouped_weight_gemm" : "grouped_gemm") +
                           list({x_kind, rounded, b_format, y_dtype, count, m, n, k});
  const int status = weight_only ? mxfp8_grouped_weight_gemm(x_kind, x.at, rounded, b_format, b.at, b_scales.at,
                                                             experts_at, count, m, n, k, y_dtype, y.at, threads)
                                 : mxfp8_grouped_gemm(x_kind, x.at, x_scales.at, b_format, b.at, b_scales.at,
                                                      experts_at, count, m, n, k, y_dtype, y.at, threads);
  judge(call, status, refused, counts);
  if (refused || !read) check_untouched(call, {&y});
}

// --- the planner -----------------------------------------------------------------------------------------------------

// An address on a GPU for an array of that many bytes. Sets `refused` if it is not one.
int64_t address(Random& random, Wide bytes, int64_t alignment, int hostile, bool* refused) {
  if (bytes > kMostBytes) *refused = true;
  if (!chance(random, hostile)) return int64_t(1) << 32;
  const int64_t wild[] = {0, (int64_t(1) << 32) + 1, INT64_MAX - 15, -16, INT64_MIN};
  const int64_t at = one_of(random, wild);
  if (bytes > 0 && (at <= 0 || at % alignment != 0 || Wide(at) + bytes > INT64_MAX)) *refused = true;
  return at;
}

void judge_plan(const std::string& call, int status, bool refused, bool small, const mxfp8_cuda_plan& plan,
                Counts* counts) {
  const bool may = status == MXFP8_OK || status == MXFP8_NO_ROUTE || (!small && status == MXFP8_BAD_ARGUMENT);
  if (refused ? status != MXFP8_BAD_ARGUMENT : !may) {
    fail(call + ": status " + std::to_string(status) + " (" + mxfp8_last_error(MXFP8_MESSAGE) + ")");
  }
  ++(status == MXFP8_OK ? counts->accepted : counts->refused);
  if (status != MXFP8_OK) {
    if (plan.steps != nullptr || plan.count != 0) fail(call + ": refused, yet there is a plan");
    return;
  }
  for (int64_t i = 0; i < plan.count; ++i) {
    const mxfp8_cuda_step& step = plan.steps[i];
    if (step.count < 0 || step.count > MXFP8_MOST_ARGUMENTS) fail(call + ": arguments of a step");
    if (step.step == MXFP8_LAUNCH && (step.grid < 1 || mxfp8_cuda_kernel(step.kernel) == nullptr)) {
      fail(call + ": a launch of nothing");
    }
    for (int j = 0; j < step.count; ++j) {
      if ((step.in_scratch >> j & 1) && (step.arguments[j] < 0 || step.arguments[j] >= plan.scratch_bytes)) {
        fail(call + ": beyond the scratch memory");
      }
    }
  }
}

mxfp8_cuda_place some_place(Random& random, int hostile, bool* refused) {
  const int64_t capabilities[] = {0, 70, 80, 86, 89, 90, 100, 103, 120};
  mxfp8_cuda_place place = {one_of(random, capabilities),
                            int64_t(1 + random() % 200),
                            int64_t(random() % 8),
                            chance(random, 3) ? int64_t(random() % 7) : 0,
                            0,
                            0,
                            0};
  if (chance(random, 4)) {
    place.splits = int64_t(random() % 9), place.warps = int64_t(random() % 9);
    place.parts_bytes = int64_t(random() % 4096);
  }
  if (chance(random, hostile)) {
    int64_t fields[sizeof place / sizeof(int64_t)];
    std::memcpy(fields, &place, sizeof place);
    const auto at = random() % 7;
    fields[at] = hostile_number(random);
    const int64_t most[] = {1 << 20, 1 << 20, 7, 6, 1024, 8, int64_t(1) << 48};
    if (fields[at] < (at == 1 ? 1 : 0) || fields[at] > most[at]) *refused = true;
    std::memcpy(&place, fields, sizeof place);
  }
  return place;
}

void plan_gemm(Random& random, Counts* counts) {
  const int hostile = chance(random, 3) ? 100000 : 20;
  bool refused = false;
  const mxfp8_cuda_place place = some_place(random, hostile, &refused);
  mxfp8_cuda_gemm g = {};
  g.x_kind = code(random, {1, 10, 16, 17, 19, 3}, hostile), g.b_kind = code(random, FORMATS, hostile);
  g.y_dtype = code(random, VALUES, hostile);
  g.m = size(random, hostile), g.n = size(random, hostile), g.k = size(random, hostile);
  g.activation_dtype = chance(random, 2) ? 0 : code(random, ACTIVATIONS, hostile);
  const bool quantized = is_one_of(g.x_kind, FORMATS);
  refused = refused || !(quantized || is_one_of(g.x_kind, VALUES)) ||
            (g.activation_dtype != 0 && !is_one_of(g.activation_dtype, ACTIVATIONS)) || !is_one_of(g.b_kind, FORMATS) ||
            !is_one_of(g.y_dtype, VALUES) || g.m < 0 || g.n < 0 || g.k < 0;
  // Routes that widen both operands multiply INT8 with another format; the other ones refuse it.
  const bool mixed = quantized && (g.x_kind == MXFP8_INT8) != (g.b_kind == MXFP8_INT8);
  bool unread = false;
  bool* bad = refused || g.m == 0 || g.n == 0 ? &unread : &refused;
  const int64_t x_bytes = bytes_of(g.x_kind), y_bytes = bytes_of(g.y_dtype);
  const Wide m = g.m, n = g.n, k = g.k;
  const bool sized = !refused;
  g.x = address(random, sized ? dense({m, k}, x_bytes) : 0, x_bytes, hostile, bad);
  if (quantized) g.x_scales = address(random, sized ? dense({m, blocks(g.k)}, 1) : 0, 1, hostile, bad);
  g.b = address(random, sized ? dense({n, k}, 1) : 0, 1, hostile, bad);
  g.b_scales = address(random, sized ? dense({n, blocks(g.k)}, 1) : 0, 1, hostile, bad);
  g.y = address(random, sized ? dense({m, n}, y_bytes) : 0, y_bytes, hostile, bad);
  if (chance(random, 2)) {
    bool wrong = false;
    g.bias = address(random, sized ? dense({n}, 4) : 0, 4, hostile, &wrong);
    if (wrong && g.bias != 0) *bad = true;
  }
  mxfp8_cuda_plan plan;
  std::memset(&plan, kUntouched, sizeof plan);
  const bool no_place = chance(random, 50 * hostile), no_gemm = chance(random, 50 * hostile);
  const int status = mxfp8_cuda_plan_gemm(no_place ? nullptr : &place, no_gemm ? nullptr : &g, nullptr, &plan);
  judge_plan("plan gemm" + list({g.x_kind, g.b_kind, g.y_dtype, g.m, g.n, g.k, place.capability, place.forced}), status,
             refused || no_place || no_gemm, m < 100 && n < 100 && k < 100 && place.forced == 0 && !mixed, plan,
             counts);
}

void plan_blockwise(Random& random, Counts* counts, bool quantize) {
  const int hostile = chance(random, 3) ? 100000 : 12;
  const int64_t outer = size(random, hostile), k = size(random, hostile),
                inner = chance(random, 2) ? size(random, hostile) : 1;
  const int dtype = code(random, VALUES, hostile), format = code(random, FORMATS, hostile);
  bool refused = !is_one_of(dtype, VALUES) || !is_one_of(format, FORMATS) || outer < 0 || k < 0 || inner < 0;
  const bool sized = !refused;
  const Wide values = sized ? dense({outer, k, inner}, bytes_of(dtype)) : 0;
  const Wide elements = sized ? dense({outer, k, inner}, 1) : 0,
             scales = sized ? dense({outer, blocks(k), inner}, 1) : 0;
  const int64_t values_at = address(random, values, bytes_of(dtype), hostile, &refused),
                elements_at = address(random, elements, 1, hostile, &refused),
                scales_at = address(random, scales, 1, hostile, &refused);
  const bool small = outer < 100 && k < 100 && inner < 100;
  mxfp8_cuda_plan plan;
  std::memset(&plan, kUntouched, sizeof plan);
  const std::string sizes = list({dtype, format, outer, k, inner});
  if (quantize) {
    const mxfp8_cuda_quantize q = {dtype, format, 0,           MXFP8_PLAIN, values_at, outer,
                                   k,     inner,  elements_at, scales_at,   0,         0};
    judge_plan("plan quantize" + sizes, mxfp8_cuda_plan_quantize(&q, nullptr, &plan), refused, small, plan, counts);
  } else {
    const mxfp8_cuda_dequantize d = {format, dtype, elements_at, scales_at, outer, k, inner, values_at, 0};
    judge_plan("plan dequantize" + sizes, mxfp8_cuda_plan_dequantize(&d, nullptr, &plan), refused, small, plan, counts);
  }
}

// Any bits at all in every field: nothing is known about the outcome but that it is one.
void plan_noise(Random& random, Counts* counts) {
  int64_t fields[24];
  for (auto& field : fields) field = chance(random, 2) ? size(random, 4) : int64_t(random() % 20);
  for (const size_t at : {4, 8, 9, 10, 11}) {
    if (chance(random, 2)) fields[at] = int64_t(1) << 32;
  }
  if (chance(random, 2)) fields[0] = 1, fields[1] = 17, fields[3] = int64_t(random() % 4);
  mxfp8_cuda_plan plan;
  mxfp8_cuda_plan* to = chance(random, 50) ? nullptr : &plan;
  const bool nothing = chance(random, 50);
  const auto request = [&](auto noise) {
    static_assert(sizeof noise <= sizeof fields, "noise for every field");
    std::memcpy(&noise, fields, sizeof noise);
    return noise;
  };
  const auto planned = [&](auto plan_of, const auto& noise) {
    return plan_of(nothing ? nullptr : &noise, nullptr, to);
  };
  const int kind = int(random() % 4);
  const int status = kind == 0   ? planned(mxfp8_cuda_plan_quantize, request(mxfp8_cuda_quantize()))
                     : kind == 1 ? planned(mxfp8_cuda_plan_dequantize, request(mxfp8_cuda_dequantize()))
                     : kind == 2 ? planned(mxfp8_cuda_plan_embedding, request(mxfp8_cuda_embedding()))
                                 : planned(mxfp8_cuda_plan_grouped, request(mxfp8_cuda_grouped()));
  if (status != MXFP8_OK && status != MXFP8_BAD_ARGUMENT) fail("plan: status " + std::to_string(status));
  if (status == MXFP8_OK && to == nullptr) fail("a plan was accepted without a place for its result");
  ++(status == MXFP8_OK ? counts->accepted : counts->refused);
}

// --- the rest --------------------------------------------------------------------------------------------------------

void questions(Random& random, Counts* counts) {
  const int number = chance(random, 2) ? int(random()) : int(random() % 400);
  if (number < 0 && mxfp8_cuda_kernel(number) != nullptr) fail("a kernel of a number below 0");
  mxfp8_cuda_kernel(number);
  if ((mxfp8_cuda_route_at(number) != nullptr) != (number >= 0 && number < 6)) fail("routes");
  const int64_t sides[] = {size(random, 3), size(random, 3)};
  const bool sized = sides[0] >= 0 && sides[1] >= 0 && dense({sides[0], blocks(sides[1])}, 1) <= kMostBytes;
  const int64_t bytes = mxfp8_cuda_swizzled_bytes(sides[0], sides[1]);
  if (sized ? Wide(bytes) < dense({sides[0], blocks(sides[1])}, 1) : bytes != MXFP8_BAD_ARGUMENT) {
    fail("swizzled_bytes" + list({sides[0], sides[1], bytes}));
  }
  const char* names[] = {nullptr,       "",         "avx",      "portable", "avx2",      "avx512",
                         "avx512_bf16", "amx_bf16", "\xff\xfe", "avx2 ",    "avx2_vnni", "avx512_vnni"};
  const std::string available = "," + std::string(mxfp8_isa_available()) + ",";
  const char* name = one_of(random, names);
  const bool there =
      name != nullptr && *name != 0 && available.find("," + std::string(name) + ",") != std::string::npos;
  if (mxfp8_isa_force(name) != (there ? MXFP8_OK : MXFP8_NO_SUCH_ISA)) fail("isa_force");
  if (mxfp8_isa() == nullptr) fail("isa");
  ++(there ? counts->accepted : counts->refused);
}

void open_driver(Random& random, Counts* counts) {
  const mxfp8_cuda_loader loaders[] = {{nullptr, nullptr},
                                       {[](int, mxfp8_cuda_gpu*, char*, size_t) { return 1; }, nullptr},
                                       {[](int, mxfp8_cuda_gpu*, char*, size_t) { return 1; },
                                        [](int, int, const char* const*, void**, char*, size_t) { return 1; }}};
  const char* drivers[] = {nullptr, "", "no such library.so", "/", "libc.so.6"};
  const size_t sizes[] = {0, 1, 2, 7, 1000};
  const size_t room = one_of(random, sizes);
  const std::unique_ptr<char, decltype(&std::free)> message(static_cast<char*>(std::malloc(room)), std::free);
  const mxfp8_cuda_loader* loader = chance(random, 4) ? nullptr : &loaders[random() % 3];
  if (mxfp8_cuda_open(one_of(random, drivers), loader, chance(random, 4) ? nullptr : message.get(), room) !=
      MXFP8_BAD_ARGUMENT) {
    fail("a driver that is none was opened");
  }
  ++counts->refused;
}

Counts work(uint64_t seed, long calls, double seconds) {
  Random random(seed);
  Counts counts;
  const auto start = std::chrono::steady_clock::now();
  const auto running = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds;
  };
  for (long i = 0; i < calls && running(); ++i) {
    switch (random() % 20) {
      case 0:
      case 1:
        blockwise(random, &counts, true);
        break;
      case 2:
      case 3:
        blockwise(random, &counts, false);
        break;
      case 4:
      case 5:
        multiply(random, &counts, false, chance(random, 2));
        break;
      case 6:
      case 7:
      case 8:
        multiply(random, &counts, true, chance(random, 2));
        break;
      case 9:
      case 10:
        pack(random, &counts);
        break;
      case 11:
        plan_gemm(random, &counts);
        break;
      case 12:
        plan_blockwise(random, &counts, chance(random, 2));
        break;
      case 13:
        plan_noise(random, &counts);
        break;
      case 14:
      case 15:
        embed(random, &counts);
        break;
      case 16:
      case 17:
        multiply_grouped(random, &counts, chance(random, 2));
        break;
      case 18:
        attend(random, &counts);
        break;
      default:
        chance(random, 100) ? open_driver(random, &counts) : questions(random, &counts);
    }
  }
  return counts;
}

}  // namespace

int main(int count, char** arguments) {
  long calls = 1000000, seed = 1;
  double seconds = 1e9;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--calls")
      calls = std::atol(arguments[i + 1]);
    else if (name == "--seconds")
      seconds = std::atof(arguments[i + 1]), calls = LONG_MAX;
    else if (name == "--seed")
      seed = std::atol(arguments[i + 1]);
    else
      fail("unknown option " + name);
  }
  std::vector<std::thread> workers;
  Counts counts[kWorkers];
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&, i] { counts[i] = work(uint64_t(seed) * 1000 + uint64_t(i), calls / kWorkers, seconds); });
  }
  for (auto& worker : workers) worker.join();
  for (int i = 1; i < kWorkers; ++i) counts[0].accepted += counts[i].accepted, counts[0].refused += counts[i].refused;
  std::printf("hostile: %ld calls from %d threads, %ld done and %ld refused, as they should be\n",
              counts[0].accepted + counts[0].refused, kWorkers, counts[0].accepted, counts[0].refused);
}
