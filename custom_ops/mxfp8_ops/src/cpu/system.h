// What operating systems differ in, besides what the C++ library hides. No other file asks which one this is.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

namespace mxfp8 {

// Says that these bytes are not needed soon, if they are of a mapped file: their pages leave memory, and are read again
// where they are used. Does nothing for other memory, or on other systems than Linux.
void release_mapped_file(const void* data, int64_t bytes);

// Asks for large pages of memory that is read front to back: prefetchers stop at the end of a page.
void use_large_pages(void* data, int64_t bytes);

// One per processor this process may use.
int processor_count();

// The processor that the calling thread runs on; -1 where step_aside does nothing.
int current_processor();

// Moves the calling thread off processor `taken`, if it runs there and may run elsewhere. Linux tends to wake a
// sleeping thread on the processor of the thread that wakes it, and to leave it there for longer than a job lasts: the
// two would take turns while the next processor idles.
void step_aside(int taken);

// For a library with threads that never end: it stays in memory until the process ends, and a forked child, where the
// threads do not exist, calls `forget`.
void keep_loaded(void (*forget)());

// Whether this process may use the tiles of AMX, if the processor has them. Linux saves them only for processes that
// have asked for it, because they take 8 KB of a signal's stack; for other systems this is untried, and false.
bool may_use_tiles();

// Finds functions of a dynamic library, each for the pointer at the address beside its name. Returns what is wrong,
// or "".
std::string load_functions(const char* library, std::initializer_list<std::pair<const char*, void*>> functions);

}  // namespace mxfp8
