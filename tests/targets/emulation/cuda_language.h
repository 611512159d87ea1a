// CUDA C for a CPU: what kernels that TVM writes need of the language. Included before them.
#pragma once

#include "emulation.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__
#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)
#define __syncthreads() emulation::barrier(__LINE__)
#define __syncwarp(...) emulation::warp(__LINE__, [](void* const*) {}, nullptr)

// ---- vectors, which are read and written at multiples of their size

#define EMULATED_VECTORS(T, name)                                                          \
  struct alignas(2 * sizeof(T)) name##2 {                                                  \
    T x, y;                                                                                \
    name##2() = default;                                                                   \
    name##2(T x, T y) : x(x), y(y) {}                                                      \
    name##2(const name##2& v) : name##2(v.x, v.y) { emulation::check_alignment(&v, sizeof v); } \
    name##2& operator=(const name##2& v) {                                                 \
      emulation::check_alignment(this, sizeof v);                                          \
      x = v.x, y = v.y;                                                                    \
      return *this;                                                                        \
    }                                                                                      \
  };                                                                                       \
  struct alignas(4 * sizeof(T)) name##4 {                                                  \
    T x, y, z, w;                                                                          \
    name##4() = default;                                                                   \
    name##4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}                                \
    name##4(const name##4& v) : name##4(v.x, v.y, v.z, v.w) {                              \
      emulation::check_alignment(&v, sizeof v);                                            \
    }                                                                                      \
    name##4& operator=(const name##4& v) {                                                 \
      emulation::check_alignment(this, sizeof v);                                          \
      x = v.x, y = v.y, z = v.z, w = v.w;                                                  \
      return *this;                                                                        \
    }                                                                                      \
  };                                                                                       \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_VECTORS(unsigned short, ushort)

// ---- half precision: every operation rounds to float16, as the device's do

using __half = half;
struct alignas(4) half2 { half x, y; };
using __half2 = half2;

inline half __float2half_rn(float v) { return half(v); }
inline half __float2half(float v) { return half(v); }
inline float __half2float(half v) { return v; }
inline bool __hgt(half a, half b) { return a.value > b.value; }
inline bool __hlt(half a, half b) { return a.value < b.value; }
inline half2 __half2half2(half v) { return {v, v}; }
inline half2 __floats2half2_rn(float a, float b) { return {half(a), half(b)}; }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 __hsub2(half2 a, half2 b) { return {float(a.x) - float(b.x), float(a.y) - float(b.y)}; }
inline half2 __hadd2(half2 a, half2 b) { return {float(a.x) + float(b.x), float(a.y) + float(b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {float(a.x) * float(b.x), float(a.y) * float(b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {emulation::fused(a.x, b.x, c.x), emulation::fused(a.y, b.y, c.y)}; }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t(b) << 32) | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
  return out;
}

inline float __uint_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
inline int __float_as_int(float v) { return int(__float_as_uint(v)); }
inline float __int_as_float(int v) { return __uint_as_float(unsigned(v)); }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float fdividef(float a, float b) { return a / b; }

template <typename T> inline T max(T a, T b) { return a > b ? a : b; }
template <typename T> inline T min(T a, T b) { return a < b ? a : b; }

// ---- warp-wide operations

namespace emulation {

struct Product {  // mma.m16n8k16: a row by row, b column by column, float16; c and d float32
  float* d[4];
  uint32_t a[4], b[2];
  float c[4];
};

inline void multiply_m16n8k16(void* const* operands) {
  // PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
  float a[16][16], b[16][8];
  auto lane_of = [&](int i) { return static_cast<Product*>(operands[i]); };
  for (int i = 0; i < kWarp; ++i) {
    int group = i / 4, pair = i % 4 * 2;
    for (int r = 0; r < 4; ++r)
      for (int v = 0; v < 2; ++v)
        a[group + r % 2 * 8][pair + v + r / 2 * 8] = float_of_half(uint16_t(lane_of(i)->a[r] >> 16 * v));
    for (int r = 0; r < 2; ++r)
      for (int v = 0; v < 2; ++v)
        b[pair + v + r * 8][group] = float_of_half(uint16_t(lane_of(i)->b[r] >> 16 * v));
  }
  for (int i = 0; i < kWarp; ++i)
    for (int r = 0; r < 4; ++r) {
      int row = i / 4 + r / 2 * 8, column = i % 4 * 2 + r % 2;
      float sum = lane_of(i)->c[r];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      *lane_of(i)->d[r] = sum;
    }
}

inline void ptx_mma_m16n8k16(int site, float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                             uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Product operands{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
  warp(site, multiply_m16n8k16, &operands);
}

struct Loaded {  // ldmatrix.x4: each lane gives the address of a row of eight halves
  uint32_t* out[4];
  const char* row;
};

inline void load_matrices(void* const* operands) {
  auto lane_of = [&](int i) { return static_cast<Loaded*>(operands[i]); };
  for (int i = 0; i < kWarp; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      const char* row = lane_of(matrix * 8 + i / 4)->row;
      if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix from an address that is not aligned");
      *lane_of(i)->out[matrix] = *reinterpret_cast<const uint32_t*>(row + i % 4 * 4);
    }
}

inline void ptx_ldmatrix_x4(int site, uint32_t& o0, uint32_t& o1, uint32_t& o2, uint32_t& o3,
                            const void* row) {
  Loaded operands{{&o0, &o1, &o2, &o3}, static_cast<const char*>(row)};
  warp(site, load_matrices, &operands);
}

template <int bytes> inline void ptx_cp_async(int, void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    fail("cp.async of %d bytes between addresses that are not aligned", bytes);
  copy_later(to, from, bytes);
}
inline void ptx_cp_async_commit(int) { commit_copies(); }
template <int pending> inline void ptx_cp_async_wait(int) { wait_for_copies(pending); }

}  // namespace emulation

// Shared addresses stay pointers here; they are only handed to instructions.
#define __cvta_generic_to_shared(pointer) (pointer)
#define __shfl_sync(mask, value, lane, width) emulation::shuffle(__LINE__, value, lane, width, 0)
#define __shfl_up_sync(mask, value, by, width) emulation::shuffle(__LINE__, value, by, width, 1)
#define __shfl_down_sync(mask, value, by, width) emulation::shuffle(__LINE__, value, by, width, 2)
#define __shfl_xor_sync(mask, value, by, width) emulation::shuffle(__LINE__, value, by, width, 3)
#define __activemask() 0xffffffffu
