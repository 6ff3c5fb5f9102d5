// The functions that each operating system implements in its own way and that the C++ library lacks. No other file asks
// which operating system this is.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

namespace mxfp8 {

// Releases the pages of these bytes if they are unchanged pages of a mapped file: a later use reads them from the file
// again. Does nothing for other memory, or on other systems than Linux.
void release_mapped_file(const void* data, int64_t bytes);

// Asks for large pages, for memory that is read front to back: hardware prefetchers stop at the end of a page.
void use_large_pages(void* data, int64_t bytes);

// The number of processors that this process may use.
int processor_count();

// The processor that the calling thread runs on; -1 where leave_processor does nothing.
int current_processor();

// Moves the calling thread off processor `taken`, if it runs there and may run elsewhere. Linux often wakes a thread on
// the processor of the thread that wakes it, and leaves it there for longer than a job lasts. The two threads would
// then share one processor while another idles.
void leave_processor(int taken);

// Keeps this library in memory until the process ends, because its threads never end, and makes a forked child, which
// does not have these threads, call `forget`.
void keep_loaded(void (*forget)());

// Whether this process may use the tiles of AMX, if the processor has them. Linux saves tiles only for processes that
// ask for it, because they take 8 KB of a signal's stack. On other systems this is untested, so it returns false.
bool may_use_tiles();

// Optional features of an AArch64 processor: dot products of bytes (SDOT), dot products of float16 (FMLAL), and
// products of matrices of bytes and of bfloat16 (SMMLA, BFMMLA).
struct ArmFeatures {
  bool dots, half_dots, matrices;
};
ArmFeatures arm_features();

// Loads a dynamic library and stores the address of each named function at the pointer beside the name. Returns the
// error, or "".
std::string load_functions(const char* library, std::initializer_list<std::pair<const char*, void*>> functions);

}  // namespace mxfp8
