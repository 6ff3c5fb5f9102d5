// The tile instructions of AMX-BF16 in plain C++, for processors with AVX512-BF16 and no AMX: where CMake's
// MXFP8_EMULATE_AMX is on, the kernels of amx_bf16 are compiled with this header before all others. After Intel's
// manual: TDPBF16PS takes subnormal operands and sums as zero. Shapes that do not match, a fault there, end the
// process.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_emulation {

struct Configuration {  // the operand of LDTILECFG
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static thread_local Configuration shape;
static thread_local uint32_t tiles[8][16][16];  // rows of words

inline int rows_of(int tile) {
  if (shape.rows[tile] == 0 || shape.row_bytes[tile] != 64) __builtin_trap();
  return shape.rows[tile];
}
inline void configure(const void* from) { std::memcpy(&shape, from, sizeof shape); }
inline void release() { shape = {}; }
inline void zero(int tile) { std::memset(tiles[tile], 0, size_t(rows_of(tile)) * 64); }
inline void load(int tile, const void* from, int64_t stride) {
  for (int i = 0; i < rows_of(tile); ++i) std::memcpy(tiles[tile][i], static_cast<const char*>(from) + i * stride, 64);
}
inline void store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < rows_of(tile); ++i) std::memcpy(static_cast<char*>(to) + i * stride, tiles[tile][i], 64);
}

inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? 0.0f : value; }
inline float number(uint32_t bits) { return flushed(__builtin_bit_cast(float, bits)); }

// c += a . b: the even products along K are added up, the odd ones apart from them, and then both to c.
inline void multiply(int c, int a, int b) {
  if (rows_of(a) != rows_of(c) || rows_of(b) != 16) __builtin_trap();
  for (int i = 0; i < rows_of(c); ++i) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const uint32_t* columns = tiles[b][k];
      const float first = number(tiles[a][i][k] << 16), second = number(tiles[a][i][k] & 0xffff0000);
      for (int j = 0; j < 16; ++j) {
        even[j] = flushed(std::fma(first, number(columns[j] << 16), even[j]));
        odd[j] = flushed(std::fma(second, number(columns[j] & 0xffff0000), odd[j]));
      }
    }
    for (int j = 0; j < 16; ++j) {
      const float sum = flushed(number(tiles[c][i][j]) + flushed(even[j] + odd[j]));
      tiles[c][i][j] = __builtin_bit_cast(uint32_t, sum);
    }
  }
}

}  // namespace amx_emulation

#undef _tile_zero  // compilers make some of these macros
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_emulation::configure
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stored amx_emulation::store
#define _tile_dpbf16ps amx_emulation::multiply
