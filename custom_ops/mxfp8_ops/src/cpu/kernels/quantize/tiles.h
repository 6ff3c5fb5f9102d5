// The loop over x [outer, K, inner] in tiles one block deep and kColumnTile columns wide, columns innermost. Tiles side
// by side are done together, row after row, so that whole pages are read and written in turn.
#pragma once
#include "../common/codec.h"

namespace mxfp8::MXFP8_ISA {

// Tiles side by side.
struct TileRun {
  int64_t depth, width;  // rows and columns
  int64_t start;         // index of its first value
  int64_t scale;         // index of its first scale
};

// Calls call(TileRun) for tiles tile_begin..tile_end-1, up to `most` at a time.
template <class Args, class Call>
MXFP8_INLINE void for_each_run(const Args& args, int64_t tile_begin, int64_t tile_end, int64_t most, const Call& call) {
  const auto less = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  const int64_t across = (args.inner + kColumnTile - 1) / kColumnTile;
  int64_t tiles = 0;
  for (int64_t tile = tile_begin; tile < tile_end; tile += tiles) {
    tiles = less(less(tile_end - tile, across - tile % across), most);
    const int64_t column = tile % across * kColumnTile;
    const int64_t block = tile / across % blocks, outer = tile / across / blocks;
    call(TileRun{less(kBlock, args.k - block * kBlock), less(args.inner - column, tiles * kColumnTile),
                 (outer * args.k + block * kBlock) * args.inner + column,
                 (outer * blocks + block) * args.inner + column});
  }
}

}  // namespace mxfp8::MXFP8_ISA
