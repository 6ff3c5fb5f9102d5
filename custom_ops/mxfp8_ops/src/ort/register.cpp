// Entry point: SessionOptions.register_custom_ops_library calls RegisterCustomOps, which adds the domain "mxfp8" with
// every overload of the four nodes. Contract: ../../contract.py.
#include <memory>

#include "../cpu/mxfp8_ops.h"
#include "nodes.h"

namespace mxfp8::ort {

const OrtApi* api = nullptr;

namespace {

const Overload& overload(const OrtCustomOp* op) { return *static_cast<const Overload*>(op); }

std::unique_ptr<Overload> make_overload(Op op, Device device, std::vector<int> inputs, std::vector<int> outputs) {
  auto made = std::make_unique<Overload>();
  static_cast<OrtCustomOp&>(*made) = OrtCustomOp{};
  made->op = op;
  made->device = device;
  made->inputs = std::move(inputs);
  made->outputs = std::move(outputs);
  made->version = kApiVersion;
  made->GetName = [](const OrtCustomOp* self) { return name_of(overload(self).op); };
  made->GetExecutionProviderType = [](const OrtCustomOp* self) -> const char* {
    return overload(self).device == Device::kCuda ? "CUDAExecutionProvider" : nullptr;  // null: the CPU's
  };
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

std::vector<std::unique_ptr<Overload>> make_overloads(Device device) {
  const int values[] = {MXFP8_FLOAT32, MXFP8_FLOAT16, MXFP8_BFLOAT16};
  const int elements[] = {MXFP8_E4M3, MXFP8_E5M2};
  std::vector<std::unique_ptr<Overload>> made;
  for (int value : values) {
    for (int element : elements) {
      made.push_back(make_overload(Op::kQuantize, device, {value}, {element, kUint8}));
    }
  }
  for (int y : values) {
    for (int b : elements) {
      made.push_back(make_overload(Op::kDequantize, device, {b, kUint8}, {y}));
      for (int a : elements)
        made.push_back(make_overload(Op::kGemm, device, {a, kUint8, b, kUint8, MXFP8_FLOAT32}, {y}));
      for (int x : values) made.push_back(make_overload(Op::kWeightGemm, device, {x, b, kUint8, MXFP8_FLOAT32}, {y}));
    }
  }
  return made;
}

// The nodes on the processor, and on a GPU beside them; or, with copies, in their place.
std::vector<const Overload*> overloads(Device device) {
  static const auto cpu = make_overloads(Device::kCpu), cuda = make_overloads(Device::kCuda),
                    copies = make_overloads(Device::kCudaCopies);
  std::vector<const Overload*> all;
  for (const auto* list : {&cpu, &cuda, &copies}) {
    const Device of = list->front()->device;
    if (of != device && !(of == Device::kCpu && device == Device::kCuda)) continue;
    for (const auto& each : *list) all.push_back(each.get());
  }
  return all;
}

// Made once each and never released: sessions refer to them for as long as they live.
OrtCustomOpDomain* domain(Device device) {
  const auto make = [](Device of) {
    OrtCustomOpDomain* fresh = nullptr;
    check(CreateCustomOpDomain("mxfp8", &fresh));
    for (const Overload* each : overloads(of)) check(CustomOpDomain_Add(fresh, each));
    return fresh;
  };
  static OrtCustomOpDomain *const cpu = make(Device::kCpu), *const cuda = make(Device::kCuda),
                                  *const copies = make(Device::kCudaCopies);
  return device == Device::kCpu ? cpu : device == Device::kCuda ? cuda : copies;
}

Device device_of(const OrtSessionOptions* options) {
  constexpr const char* key = "mxfp8.device";
  int given = 0;
  check(HasSessionConfigEntry(options, key, &given));
  if (given == 0) return Device::kCpu;
  size_t size = 0;
  check(GetSessionConfigEntry(options, key, nullptr, &size));
  std::vector<char> value(size);
  check(GetSessionConfigEntry(options, key, value.data(), &size));
  const std::string name = value.data();
  if (name == "cuda") return Device::kCuda;
  if (name == "cuda-copies") return Device::kCudaCopies;
  throw NodeError("session option " + std::string(key) + ": '" + name + "'; expected cuda or cuda-copies; correct it");
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
  return guarded([&] { check(AddCustomOpDomain(options, domain(device_of(options)))); });
}
