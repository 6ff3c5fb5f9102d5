// The same as run.c with ONNX Runtime's C++ API: run MODEL LIBRARY SIZE... < input > output, raw float32.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

int main(int count, char** arguments) try {
  if (count < 4) {
    std::fputs("usage: run MODEL LIBRARY SIZE... < input > output\n", stderr);
    return 2;
  }
  std::vector<int64_t> sizes;
  for (int i = 3; i < count; ++i) sizes.push_back(std::atoll(arguments[i]));

  Ort::Env env;
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary(arguments[2]);
  Ort::Session session(env, arguments[1], options);

  std::vector<float> x(size_t(std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>())));
  if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) {
    std::fprintf(stderr, "expected %zu float32 values\n", x.size());
    return 2;
  }
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const Ort::Value input = Ort::Value::CreateTensor<float>(memory, x.data(), x.size(), sizes.data(), sizes.size());
  Ort::AllocatorWithDefaultOptions allocator;
  const auto input_name = session.GetInputNameAllocated(0, allocator);
  const auto output_name = session.GetOutputNameAllocated(0, allocator);
  const char *inputs[] = {input_name.get()}, *outputs[] = {output_name.get()};
  auto results = session.Run(Ort::RunOptions{nullptr}, inputs, &input, 1, outputs, 1);
  const size_t values = results[0].GetTensorTypeAndShapeInfo().GetElementCount();
  std::fwrite(results[0].GetTensorData<float>(), sizeof(float), values, stdout);
  return 0;
} catch (const Ort::Exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
