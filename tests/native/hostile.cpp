// Hostile arguments to every function of the C ABI, built with sanitizers by `make sanitize`: NULL, misaligned and
// wrapping addresses, sizes and strides that are negative or overflow, unknown codes. A model here, in 128 bits, says
// which calls must be refused; the others get heap buffers of exactly the size the header asks for. A refused call must
// leave its results alone and give an error; an accepted one must leave the gaps between rows alone. Four threads call
// at once, and switch instruction sets meanwhile. Exits with 1 if the library disagrees with the model; a sanitizer
// exits with a code of its own.
//
//   mxfp8_hostile [--calls N] [--seed X]      1,000,000 calls if N is absent
#include "hostile.h"

#include <thread>
#include <vector>

namespace {

using hostile::Counts;
using hostile::Random;

constexpr int kWorkers = 4;

void switch_instruction_set(Random& random, Counts* counts) {
  const char* names[] = {nullptr,       "",         "avx",      "portable", "avx2",      "avx512",
                         "avx512_bf16", "amx_bf16", "\xff\xfe", "avx2 ",    "avx2_vnni", "avx512_vnni"};
  const std::string available = "," + std::string(mxfp8_isa_available()) + ",";
  const char* name = hostile::one_of(random, names);
  const bool there =
      name != nullptr && *name != 0 && available.find("," + std::string(name) + ",") != std::string::npos;
  if (mxfp8_isa_force(name) != (there ? MXFP8_OK : MXFP8_NO_SUCH_ISA)) hostile::fail("isa_force");
  if (mxfp8_isa() == nullptr) hostile::fail("isa");
  ++(there ? counts->accepted : counts->refused);
}

Counts work(uint64_t seed, long calls) {
  Random random(seed);
  Counts counts;
  for (long i = 0; i < calls; ++i) {
    const auto which = random() % 20;
    (which == 0 ? switch_instruction_set : which < 5 ? hostile::call_planner : hostile::call_kernel)(random, &counts);
  }
  return counts;
}

}  // namespace

int main(int count, char** arguments) {
  long calls = 1000000, seed = 1;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    if (i + 1 == count || (name != "--calls" && name != "--seed")) hostile::fail("expected --calls N or --seed X");
    (name == "--calls" ? calls : seed) = std::atol(arguments[i + 1]);
  }
  std::vector<std::thread> workers;
  Counts counts[kWorkers];
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([&, i] { counts[i] = work(uint64_t(seed) * 1000 + uint64_t(i), calls / kWorkers); });
  }
  for (auto& worker : workers) worker.join();
  for (int i = 1; i < kWorkers; ++i) counts[0].accepted += counts[i].accepted, counts[0].refused += counts[i].refused;
  std::printf("hostile: %ld calls from %d threads, %ld done and %ld refused, as they should be\n",
              counts[0].accepted + counts[0].refused, kWorkers, counts[0].accepted, counts[0].refused);
}
