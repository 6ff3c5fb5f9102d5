#include "system_memory.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace mxfp8 {

#if defined(__linux__)
namespace {

// Whether every page is one of a file, which the process has not written to: such a page can be dropped, and comes back
// from the file. /proc/self/pagemap has 64 bits for each page.
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
#else
void release_mapped_file(const void*, int64_t) {}
void use_large_pages(void*, int64_t) {}
#endif

}  // namespace mxfp8
