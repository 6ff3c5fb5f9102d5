// The attributes of any node, with the defaults of the contract. Written by custom_ops/generate.py.
#pragma once
#include <cstdint>
#include <string>

namespace mxfp8::ort {

struct Attributes {
  int64_t axis = -1;
  int64_t block_size = 32;
  int64_t output_dtype = 0;
  std::string scale_rounding = "ceil";
  int64_t activation_dtype = 1;
  std::string epilogue = "none";
  int64_t q_num_heads = 1;
  int64_t kv_num_heads = 1;
  int64_t is_causal = 0;
  float scale = 0.0f;
  int64_t nan_guard = 0;
};

// Calls visit(name, address) for each.
template <class Visit>
void for_each_attribute(Attributes* a, const Visit& visit) {
  visit("axis", &a->axis);
  visit("block_size", &a->block_size);
  visit("output_dtype", &a->output_dtype);
  visit("scale_rounding", &a->scale_rounding);
  visit("activation_dtype", &a->activation_dtype);
  visit("epilogue", &a->epilogue);
  visit("q_num_heads", &a->q_num_heads);
  visit("kv_num_heads", &a->kv_num_heads);
  visit("is_causal", &a->is_causal);
  visit("scale", &a->scale);
  visit("nan_guard", &a->nan_guard);
}

}  // namespace mxfp8::ort
