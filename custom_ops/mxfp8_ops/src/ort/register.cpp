// Entry point: SessionOptions.register_custom_ops_library calls RegisterCustomOps, which adds the domain "mxfp8" with
// every overload of the nodes of contract.h.
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "node_kernel.h"

namespace mxfp8::ort {

const OrtApi* api = nullptr;

namespace {

const Overload& overload(const OrtCustomOp* op) { return *static_cast<const Overload*>(op); }

// `dtypes` are those of the inputs, then of the outputs.
std::unique_ptr<Overload> make_overload(Op op, Place place, const std::vector<int>& dtypes, size_t inputs) {
  auto entry = std::make_unique<Overload>();
  static_cast<OrtCustomOp&>(*entry) = OrtCustomOp{};
  entry->op = op;
  entry->place = place;
  entry->inputs.assign(dtypes.begin(), dtypes.begin() + ptrdiff_t(inputs));
  entry->outputs.assign(dtypes.begin() + ptrdiff_t(inputs), dtypes.end());
  entry->version = kApiVersion;
  entry->GetName = [](const OrtCustomOp* self) { return row_of(overload(self).op).name; };
  entry->GetExecutionProviderType = [](const OrtCustomOp* self) -> const char* {
    return overload(self).place.device == Device::kCuda ? "CUDAExecutionProvider" : nullptr;  // null: the CPU's
  };
  entry->GetInputType = [](const OrtCustomOp* self, size_t i) { return overload(self).inputs[i]; };
  entry->GetInputTypeCount = [](const OrtCustomOp* self) { return overload(self).inputs.size(); };
  entry->GetOutputType = [](const OrtCustomOp* self, size_t i) { return overload(self).outputs[i]; };
  entry->GetOutputTypeCount = [](const OrtCustomOp* self) { return overload(self).outputs.size(); };
  entry->GetInputCharacteristic = [](const OrtCustomOp* self, size_t i) -> int {
    return row_of(overload(self).op).inputs[i].optional ? kOptional : kRequired;
  };
  entry->GetOutputCharacteristic = [](const OrtCustomOp* self, size_t i) -> int {
    return row_of(overload(self).op).outputs[i].optional ? kOptional : kRequired;
  };
  entry->GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  const auto one = [](const OrtCustomOp*) { return 1; };
  entry->GetVariadicInputMinArity = one;
  entry->GetVariadicInputHomogeneity = one;
  entry->GetVariadicOutputMinArity = one;
  entry->GetVariadicOutputHomogeneity = one;
  entry->CreateKernelV2 = create_kernel;
  entry->KernelComputeV2 = compute;
  entry->KernelDestroy = destroy_kernel;
  entry->InferOutputShapeFn = infer_shapes;
  entry->GetStartVersion = [](const OrtCustomOp*) { return MXFP8_CONTRACT_VERSION; };
  entry->GetEndVersion = [](const OrtCustomOp*) { return MXFP8_CONTRACT_VERSION; };
  return entry;
}

// Appends every dtype that `port` accepts to every row of `dtypes`: one, if it is like an input's.
std::vector<std::vector<int>> combined(const std::vector<std::vector<int>>& dtypes, const Port& port) {
  std::vector<std::vector<int>> longer;
  for (const std::vector<int>& row : dtypes) {
    if (port.like >= 0) {
      longer.push_back(row);
      longer.back().push_back(row[size_t(port.like)]);
      continue;
    }
    for (const int* dtype = port.dtypes; *dtype != 0; ++dtype) {
      longer.push_back(row);
      longer.back().push_back(*dtype);
    }
  }
  return longer;
}

// Each node that has a kernel for the place, once per combination of the dtypes its ports accept. `with_fused`: also
// those that ONNX Runtime would otherwise take apart.
std::vector<std::unique_ptr<Overload>> make_overloads(Place place, bool with_fused) {
  std::vector<std::unique_ptr<Overload>> overloads;
  for (size_t op = 0; op < std::size(kNodes); ++op) {
    const Implementation* node = implementation(Op(op));
    if (node == nullptr || (node->fused && !with_fused)) continue;
    const bool on_gpu = node->cuda_kernels != nullptr;
    if (place.device == Device::kCuda && !on_gpu) continue;
    const Place there = on_gpu ? place : Place{Device::kCpu, false, place.prepack};
    std::vector<std::vector<int>> dtypes = {{}};
    size_t inputs = 0;
    for (const Port* port = kNodes[op].inputs; port->name != nullptr; ++port, ++inputs) {
      dtypes = combined(dtypes, *port);
    }
    for (const Port* port = kNodes[op].outputs; port->name != nullptr; ++port) dtypes = combined(dtypes, *port);
    for (const std::vector<int>& row : dtypes) overloads.push_back(make_overload(Op(op), there, row, inputs));
  }
  return overloads;
}

// Made once and never released: sessions refer to it for as long as they live. On a GPU the nodes are those of the
// processor too, for what ONNX Runtime leaves there; with copies they take their place. Fused nodes are then left to
// their bodies, which are made of nodes that a GPU has kernels for.
OrtCustomOpDomain* make_domain(Place place) {
  OrtCustomOpDomain* domain = nullptr;
  check(CreateCustomOpDomain(kDomain, &domain));
  std::vector<Place> places = {place};
  if (place.device == Device::kCuda) places.insert(places.begin(), {Device::kCpu, false, place.prepack});
  for (const Place& each : places) {
    for (auto& overload : make_overloads(each, place.device == Device::kCpu))
      check(CustomOpDomain_Add(domain, overload.release()));
  }
  return domain;
}

OrtCustomOpDomain* domain(Place place) {
  static std::mutex mutex;
  static std::map<std::tuple<Device, bool, bool>, OrtCustomOpDomain*> domains;
  const std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& made = domains[{place.device, place.keep_wide, place.prepack}];
  if (made == nullptr) made = make_domain(place);
  return made;
}

// The session option, or "".
std::string option(const OrtSessionOptions* options, const char* key) {
  int is_set = 0;
  check(HasSessionConfigEntry(options, key, &is_set));
  if (is_set == 0) return "";
  size_t size = 0;
  check(GetSessionConfigEntry(options, key, nullptr, &size));
  std::vector<char> value(size);
  check(GetSessionConfigEntry(options, key, value.data(), &size));
  return value.data();
}

Place place_of(const OrtSessionOptions* options) {
  const std::string device = option(options, "mxfp8.device"), keep = option(options, "mxfp8.keep_wide");
  if (device != "" && device != "cuda" && device != "cuda-copies") {
    throw NodeError("session option mxfp8.device: '" + device + "'; expected cuda or cuda-copies; correct it");
  }
  if (keep != "" && (keep != "1" || device != "cuda")) {
    throw NodeError("session option mxfp8.keep_wide: '" + keep + "' with mxfp8.device '" + device +
                    "'; expected 1 with cuda; correct it or leave it out");
  }
  const std::string prepack = option(options, "mxfp8.prepack");
  if (prepack != "" && prepack != "auto" && prepack != "never") {
    throw NodeError("session option mxfp8.prepack: '" + prepack +
                    "'; expected auto or never; correct it or leave it out");
  }
  return {device == ""       ? Device::kCpu
          : device == "cuda" ? Device::kCuda
                             : Device::kCudaCopies,
          keep == "1", prepack != "never"};
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
  return guarded([&] { check(AddCustomOpDomain(options, domain(place_of(options)))); });
}
