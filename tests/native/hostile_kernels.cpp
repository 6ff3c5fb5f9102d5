// Hostile arguments to the functions that compute.
#include "hostile.h"

namespace hostile {
namespace {

// Fails if a second run, with one thread and maybe on another instruction set, gives other bytes.
template <class Run>
void check_same(const std::string& call, std::initializer_list<const Array*> results, const Run& run) {
  std::string before, after;
  const auto bytes = [&](std::string* to) {
    for (const Array* each : results) to->append(reinterpret_cast<const char*>(each->at), size_t(each->bytes));
  };
  bytes(&before);
  run();
  bytes(&after);
  if (before != after) fail(call + ": other bytes with one thread");
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
  const auto run = [&](int count) {
    return quantize ? mxfp8_quantize(dtype, values.at, outer, k, inner, format, rounding, elements.at, scales.at, count)
                    : mxfp8_dequantize(format, elements.at, scales.at, outer, k, inner, dtype, values.at, count);
  };
  judge(call, run(threads), refused, counts);
  if (refused) return check_untouched(call, {&values, &elements, &scales});
  if (quantize) check_same(call, {&elements, &scales}, [&] { run(1); });
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
  const auto run = [&](int count_of_threads) {
    return mxfp8_pack(dtype, w.at, stride, transposed, n, k, format, rounding, elements.at, scales.at,
                      reinterpret_cast<mxfp8_pack_stats*>(stats.at), count_of_threads);
  };
  judge(call, run(threads), refused, counts);
  if (refused) return check_untouched(call, {&elements, &scales, &stats});
  check_same(call, {&elements, &scales}, [&] { run(1); });
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
  int64_t weight = 0;
  if (chance(random, 4) && mxfp8_weight_new(&weight) != MXFP8_OK) fail("weight_new");
  if (chance(random, hostile)) {  // the gemm gets the number of a freed weight, or of none
    mxfp8_weight_free(weight);
    weight = weight == 0 ? -1 : weight;
    refused = true;
  }
  const std::string call =
      (fused ? "fused_" : "") + std::string(weight_only ? "weight_gemm" : "gemm") +
      list({x_kind, activation, b_format, y_dtype, m, n, k, x_stride, y_stride, biased, epilogue, factor_dtype, times});
  int status = 0;
  if (weight_only && fused) {
    status = mxfp8_fused_weight_gemm(x_kind, x.at, x_stride, activation, b_format, b.at, b_scales.at, bias_at, epilogue,
                                     factor_dtype, factor_at, m, n, k, y_dtype, y.at, y_stride, weight, threads);
  } else if (weight_only) {
    status = mxfp8_weight_gemm(x_kind, x.at, x_stride, activation, b_format, b.at, b_scales.at, bias_at, m, n, k,
                               y_dtype, y.at, y_stride, weight, threads);
  } else if (fused) {
    status = mxfp8_fused_gemm(x_kind, x.at, x_scales.at, b_format, b.at, b_scales.at, bias_at, epilogue, factor_dtype,
                              factor_at, m, n, k, y_dtype, y.at, y_stride, weight, threads);
  } else {
    status = mxfp8_gemm(x_kind, x.at, x_scales.at, b_format, b.at, b_scales.at, bias_at, m, n, k, y_dtype, y.at,
                        y_stride, weight, threads);
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

}  // namespace

void call_kernel(Random& random, Counts* counts) {
  const bool coin = chance(random, 2);
  switch (random() % 8) {
    case 0:
    case 1:
      return blockwise(random, counts, coin);
    case 2:
      return multiply(random, counts, false, coin);
    case 3:
      return multiply(random, counts, true, coin);
    case 4:
      return multiply_grouped(random, counts, coin);
    case 5:
      return pack(random, counts);
    case 6:
      return embed(random, counts);
    default:
      return attend(random, counts);
  }
}

}  // namespace hostile
