// In place of CUDA's: bfloat16 as kernels use it, a number that is stored and has its bits read.
#pragma once

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) {  // rounds to the nearest even
    unsigned whole = __float_as_uint(value);
    bits = uint16_t((whole + 0x7fff + ((whole >> 16) & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
using __nv_bfloat16 = nv_bfloat16;
struct alignas(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
using __nv_bfloat162 = nv_bfloat162;
inline float __bfloat162float(nv_bfloat16 v) { return v; }
inline nv_bfloat16 __float2bfloat16(float v) { return v; }
inline bool __hgt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) > float(b); }
inline bool __hlt(nv_bfloat16 a, nv_bfloat16 b) { return float(a) < float(b); }
