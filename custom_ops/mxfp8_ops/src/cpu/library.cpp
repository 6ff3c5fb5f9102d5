// Entry points for the version of the library, its instruction set and its threads.
#include "arguments.h"
#include "isa.h"
#include "parallel.h"

using namespace mxfp8;

extern "C" {

int mxfp8_contract_version(void) { return MXFP8_CONTRACT_VERSION; }

const char* mxfp8_isa_available(void) { return available_isas(); }

const char* mxfp8_isa(void) {
  const Kernels* table = kernels();
  return table == nullptr ? nullptr : table->isa;
}

int mxfp8_isa_force(const char* name) {
  return answer([&] {
    if (force_isa(name)) return;
    throw Error(MXFP8_NO_SUCH_ISA,
                "instruction set " + (name == nullptr ? std::string("NULL") : "'" + std::string(name) + "'"),
                std::string("one of ") + available_isas(), "name an instruction set of this machine");
  });
}

void mxfp8_use_openmp(void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned)) { use_openmp(gomp_parallel); }

}  // extern "C"
