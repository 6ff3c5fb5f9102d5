#include "system.h"

#include <cstring>
#include <thread>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__linux__)
#include <fcntl.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace mxfp8 {

#if defined(__linux__)
namespace {

// Whether every page in memory is an unchanged page of a file, which can be dropped because the file still has its
// data. /proc/self/pagemap has 64 bits for each page.
bool are_of_files(uintptr_t first_page, uintptr_t last_page) {
  constexpr uint64_t present = uint64_t(1) << 63, of_file = uint64_t(1) << 61;
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return false;
  uint64_t entries[512];
  bool all = true;
  for (uintptr_t page = first_page; all && page < last_page;) {
    const size_t count = std::min<size_t>(512, last_page - page);
    all = pread(map, entries, count * sizeof *entries, off_t(page * sizeof *entries)) ==
              ssize_t(count * sizeof *entries) &&
          std::all_of(entries, entries + count,
                      [](uint64_t entry) { return entry == 0 || ((entry & present) != 0 && (entry & of_file) != 0); });
    page += count;
  }
  close(map);
  return all;
}

}  // namespace

void release_mapped_file(const void* data, int64_t bytes) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) / page, last = (begin + uintptr_t(bytes)) / page;
  if (first < last && are_of_files(first, last)) {
    madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_DONTNEED);
  }
}

void use_large_pages(void* data, int64_t bytes) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE)), first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / page;
  if (first < last) madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_HUGEPAGE);
}
int current_processor() { return sched_getcpu(); }

void leave_processor(int taken) {
  cpu_set_t allowed;
  if (taken < 0 || sched_getcpu() != taken || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(taken, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}
#else
void release_mapped_file(const void*, int64_t) {}
void use_large_pages(void*, int64_t) {}
int current_processor() { return -1; }
void leave_processor(int) {}
#endif

#if defined(__linux__) && defined(__x86_64__)
bool may_use_tiles() {
#if defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}
#else
bool may_use_tiles() { return false; }
#endif

#if defined(__aarch64__)
ArmFeatures arm_features() {
#if defined(__linux__)
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const auto has = [](unsigned long word, int bit) { return (word >> bit & 1) != 0; };
  return {has(first, 20), has(first, 23), has(second, 13) && has(second, 14)};  // ASIMDDP, ASIMDFHM, I8MM and BF16
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_FHM"),
          has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16")};
#elif defined(_WIN32)
  // PF_ARM_V82_DP_, V82_I8MM_ and V86_BF16_INSTRUCTIONS_AVAILABLE; FMLAL has no such constant.
  return {IsProcessorFeaturePresent(43) != 0, false,
          IsProcessorFeaturePresent(66) != 0 && IsProcessorFeaturePresent(68) != 0};
#else
  return {};
#endif
}
#endif

int processor_count() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#elif defined(_WIN32)
  DWORD_PTR usable = 0, all = 0;  // both stay 0 for a process in several groups of 64 processors
  if (GetProcessAffinityMask(GetCurrentProcess(), &usable, &all) && usable != 0) return __builtin_popcountll(usable);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : int(count);
}

#if defined(_WIN32)
void keep_loaded(void (*forget)()) {  // Windows has no fork
  HMODULE self = nullptr;
  GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                     reinterpret_cast<LPCWSTR>(forget), &self);
}

std::string load_functions(const char* library, std::initializer_list<std::pair<const char*, void*>> functions) {
  const HMODULE handle = LoadLibraryA(library);
  if (handle == nullptr) return std::string(library) + ": LoadLibrary error " + std::to_string(GetLastError());
  const auto find = [&](const char* name) { return GetProcAddress(handle, name); };
  const auto close = [&] { FreeLibrary(handle); };
#else
void keep_loaded(void (*forget)()) {
#if defined(__APPLE__)  // elsewhere the library is linked with -z nodelete
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(forget), &self) != 0) dlopen(self.dli_fname, RTLD_NOW | RTLD_NODELETE);
#endif
  pthread_atfork(nullptr, nullptr, forget);
}

std::string load_functions(const char* library, std::initializer_list<std::pair<const char*, void*>> functions) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return dlerror();
  const auto find = [&](const char* name) { return dlsym(handle, name); };
  const auto close = [&] { dlclose(handle); };
#endif
  for (const auto& [name, pointer] : functions) {
    const auto function = find(name);
    if (function == nullptr) {
      close();
      return std::string(library) + " has no " + name;
    }
    std::memcpy(pointer, &function, sizeof function);
  }
  return "";
}

}  // namespace mxfp8
