// MXFP8Embedding: numerics.embedding, bit for bit. It decodes the rows of b [V, D] that indices name, to y [count, D];
// a task does a range of the rows of y. Bytes moved per value: 1.03 read, 4 or 2 written. Rows are read whole. The
// kernel prefetches the first lines of each row while it decodes the row before, because the hardware cannot know where
// it lies.
#include "../../embedding.h"

#include "../common/codec.h"
#include "decode_row.h"

namespace mxfp8::MXFP8_ISA {
namespace {

constexpr int64_t kLine = 64;    // bytes of a cache line
constexpr int64_t kAhead = 512;  // bytes of a row to prefetch: from there on the hardware follows the stream

template <class I, class F, class D>
void rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  const auto* indices = static_cast<const I*>(args.indices);
  const int64_t blocks = (args.d + kBlock - 1) / kBlock;
  const auto row_of = [&](int64_t i) { return int64_t(indices[i]) + (indices[i] < 0 ? args.v : 0); };
  auto* y = static_cast<typename D::Storage*>(args.y);
  for (int64_t i = begin; i < end; ++i) {
    if (i + 1 < end) {
      const int64_t next = row_of(i + 1);
      __builtin_prefetch(args.b_scales + next * blocks);
      for (int64_t at = 0; at < args.d && at < kAhead; at += kLine) __builtin_prefetch(args.b + next * args.d + at);
    }
    const int64_t row = row_of(i);
    decode_row<F, D>(args.b + row * args.d, args.b_scales + row * blocks, args.d, y + i * args.d);
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  with_format(args.b_format, [&](auto format) {
    with_dtype(args.y_dtype, [&](auto dtype) {
      const auto run = args.index_dtype == MXFP8_INT32 ? rows<int32_t, decltype(format), decltype(dtype)>
                                                       : rows<int64_t, decltype(format), decltype(dtype)>;
      run(args, begin, end);
    });
  });
}

}  // namespace mxfp8::MXFP8_ISA
