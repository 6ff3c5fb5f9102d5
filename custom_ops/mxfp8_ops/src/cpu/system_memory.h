// Advice to the operating system about memory.
#pragma once
#include <cstdint>

namespace mxfp8 {

// Says that these bytes are not needed soon, if they are of a mapped file: their pages leave memory, and are read again
// where they are used. Does nothing for other memory, or on other systems than Linux.
void release_mapped_file(const void* data, int64_t bytes);

// Asks for large pages of memory that is read front to back: prefetchers stop at the end of a page.
void use_large_pages(void* data, int64_t bytes);

}  // namespace mxfp8
