// The tiles of AMX: eight registers of up to 16 rows of 64 bytes, whose shapes are configured for each thread.
#pragma once
#include <immintrin.h>

#include "codec.h"

namespace mxfp8::MXFP8_ISA {

constexpr int kAmxRows = 16;                 // rows of a tile
constexpr int64_t kAmxRowBytes = 64;         // bytes of a row of a tile
constexpr int64_t kAmxTile = kAmxRows * 32;  // bfloat16 values of a full tile

// Tiles 0, 1 and 4 get `first` rows, tiles 2, 3 and 5 get `second`; tiles 6 and 7 are full. The destructor releases the
// tiles: a thread that holds them pays at every switch to another thread.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (first_ != 0) _tile_release();
  }

  MXFP8_INLINE_MEMBER void shape(int first, int second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    struct alignas(64) Configuration {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } configuration;
    for (int tile = 0; tile < 8; ++tile) {
      const bool full = tile >= 6, of_first = tile < 2 || tile == 4;
      configuration.row_bytes[tile] = kAmxRowBytes;
      configuration.rows[tile] = uint8_t(full ? kAmxRows : of_first ? first : second);
    }
    // For the optimizer of GCC 12, _tile_loadconfig reads 8 bytes only: without this line GCC removes the stores of the
    // other bytes.
    asm volatile("" ::"m"(configuration));
    _tile_loadconfig(&configuration);
  }

 private:
  int first_ = 0, second_ = 0;
};

}  // namespace mxfp8::MXFP8_ISA
