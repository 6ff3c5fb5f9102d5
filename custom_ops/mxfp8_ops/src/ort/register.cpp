// Entry point: SessionOptions.register_custom_ops_library calls RegisterCustomOps, which adds the domain "mxfp8" with
// every overload of the four nodes. Contract: ../../contract.py.
#include <memory>

#include "../cpu/mxfp8_ops.h"
#include "nodes.h"

namespace mxfp8::ort {

const OrtApi* api = nullptr;

namespace {

const Overload& overload(const OrtCustomOp* op) { return *static_cast<const Overload*>(op); }

std::unique_ptr<Overload> make_overload(Op op, std::vector<int> inputs, std::vector<int> outputs) {
  auto made = std::make_unique<Overload>();
  static_cast<OrtCustomOp&>(*made) = OrtCustomOp{};
  made->op = op;
  made->inputs = std::move(inputs);
  made->outputs = std::move(outputs);
  made->version = kApiVersion;
  made->GetName = [](const OrtCustomOp* self) { return name_of(overload(self).op); };
  made->GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // CPU
  made->GetInputType = [](const OrtCustomOp* self, size_t i) { return overload(self).inputs[i]; };
  made->GetInputTypeCount = [](const OrtCustomOp* self) { return overload(self).inputs.size(); };
  made->GetOutputType = [](const OrtCustomOp* self, size_t i) { return overload(self).outputs[i]; };
  made->GetOutputTypeCount = [](const OrtCustomOp* self) { return overload(self).outputs.size(); };
  made->GetInputCharacteristic = [](const OrtCustomOp* self, size_t i) -> int {
    const bool gemm = overload(self).op == Op::kGemm || overload(self).op == Op::kWeightGemm;
    return gemm && i + 1 == overload(self).inputs.size() ? kOptional : kRequired;  // the bias
  };
  made->GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  made->GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  const auto one = [](const OrtCustomOp*) { return 1; };
  made->GetVariadicInputMinArity = one;
  made->GetVariadicInputHomogeneity = one;
  made->GetVariadicOutputMinArity = one;
  made->GetVariadicOutputHomogeneity = one;
  made->CreateKernelV2 = create_kernel;
  made->KernelComputeV2 = compute;
  made->KernelDestroy = destroy_kernel;
  made->InferOutputShapeFn = infer_shapes;
  made->GetStartVersion = [](const OrtCustomOp*) { return MXFP8_CONTRACT_VERSION; };
  made->GetEndVersion = [](const OrtCustomOp*) { return MXFP8_CONTRACT_VERSION; };
  return made;
}

std::vector<std::unique_ptr<Overload>> make_overloads() {
  const int values[] = {MXFP8_FLOAT32, MXFP8_FLOAT16, MXFP8_BFLOAT16};
  const int elements[] = {MXFP8_E4M3, MXFP8_E5M2};
  std::vector<std::unique_ptr<Overload>> made;
  for (int value : values) {
    for (int element : elements) {
      made.push_back(make_overload(Op::kQuantize, {value}, {element, kUint8}));
    }
  }
  for (int y : values) {
    for (int b : elements) {
      made.push_back(make_overload(Op::kDequantize, {b, kUint8}, {y}));
      for (int a : elements) made.push_back(make_overload(Op::kGemm, {a, kUint8, b, kUint8, MXFP8_FLOAT32}, {y}));
      for (int x : values) made.push_back(make_overload(Op::kWeightGemm, {x, b, kUint8, MXFP8_FLOAT32}, {y}));
    }
  }
  return made;
}

// Made once and never released: sessions refer to it for as long as they live.
OrtCustomOpDomain* domain() {
  static OrtCustomOpDomain* made = [] {
    static const auto overloads = make_overloads();
    OrtCustomOpDomain* fresh = nullptr;
    check(CreateCustomOpDomain("mxfp8", &fresh));
    for (const auto& each : overloads) check(CustomOpDomain_Add(fresh, each.get()));
    return fresh;
  }();
  return made;
}

}  // namespace
}  // namespace mxfp8::ort

extern "C" MXFP8_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace mxfp8::ort;
  api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // A status can only be made through a table. Version 1 is in every release, and CreateStatus is in version 1.
    api = base->GetApi(1);
    const std::string message = std::string("mxfp8: ONNX Runtime ") + base->GetVersionString() +
                                " is too old; expected 1.20 or later; upgrade onnxruntime";
    return CreateStatus(kFail, message.c_str());
  }
  return guarded([&] { check(AddCustomOpDomain(options, domain())); });
}
