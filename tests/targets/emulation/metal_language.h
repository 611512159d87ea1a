// Metal's language for a CPU: what kernels that TVM writes need of it. Included before them.
#pragma once

#include <type_traits>

#include "emulation.h"

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;

// ---- vectors, which are read and written at multiples of their size

namespace emulation {

template <class T, int N> struct Elements;
template <class T> struct Elements<T, 2> { T x, y; };
template <class T> struct Elements<T, 3> { T x, y, z; };
template <class T> struct Elements<T, 4> { T x, y, z, w; };

template <class T, int N> struct alignas((N == 3 ? 4 : N) * sizeof(T)) Vector : Elements<T, N> {
  Vector() = default;
  explicit Vector(T all) { for (int i = 0; i < N; ++i) (*this)[i] = all; }
  template <class... S, class = std::enable_if_t<sizeof...(S) == N && (N > 1)>> Vector(S... values) {
    const T given[N] = {T(values)...};
    for (int i = 0; i < N; ++i) (*this)[i] = given[i];
  }
  template <class S> explicit Vector(const Vector<S, N>& v) { for (int i = 0; i < N; ++i) (*this)[i] = T(v[i]); }
  Vector(const Vector& v) : Elements<T, N>(v) { check_alignment(&v, sizeof v); }
  Vector& operator=(const Vector& v) {
    check_alignment(this, sizeof v);
    Elements<T, N>::operator=(v);
    return *this;
  }
  T& operator[](int i) { return (&this->x)[i]; }
  const T& operator[](int i) const { return (&this->x)[i]; }
};

#define EMULATED_OPERATOR(op)                                                          \
  template <class T, int N>                                                            \
  Vector<T, N> operator op(const Vector<T, N>& a, const Vector<T, N>& b) {             \
    Vector<T, N> out;                                                                  \
    for (int i = 0; i < N; ++i) out[i] = T(a[i] op b[i]);                              \
    return out;                                                                        \
  }
EMULATED_OPERATOR(+)
EMULATED_OPERATOR(-)
EMULATED_OPERATOR(*)
EMULATED_OPERATOR(/)
EMULATED_OPERATOR(<<)
#undef EMULATED_OPERATOR

}  // namespace emulation

#define EMULATED_VECTORS(T)                \
  using T##2 = emulation::Vector<T, 2>;    \
  using T##3 = emulation::Vector<T, 3>;    \
  using T##4 = emulation::Vector<T, 4>;
EMULATED_VECTORS(float)
EMULATED_VECTORS(half)
EMULATED_VECTORS(int)
EMULATED_VECTORS(uint)
EMULATED_VECTORS(ushort)
EMULATED_VECTORS(uchar)

inline half operator""h(long double value) { return half(value); }

template <class T, class S> T as_type(const S& value) {
  static_assert(sizeof(T) == sizeof(S), "as_type of another size");
  T out;
  std::memcpy(static_cast<void*>(&out), &value, sizeof out);
  return out;
}

// ---- matrices of 8 x 8: two elements in each lane, as nobody but simdgroup functions may know

template <class T> struct Simdgroup8x8 {
  T own[2];
  Simdgroup8x8() { std::memset(static_cast<void*>(own), 0xff, sizeof own); }
};
using simdgroup_half8x8 = Simdgroup8x8<half>;
using simdgroup_float8x8 = Simdgroup8x8<float>;

template <class T, int columns, int rows> Simdgroup8x8<T> make_filled_simdgroup_matrix(T value) {
  static_assert(columns == 8 && rows == 8, "matrices of 8 x 8");
  Simdgroup8x8<T> out;
  out.own[0] = out.own[1] = value;
  return out;
}

namespace emulation {

template <class T, class P> struct Moved {  // between a matrix and memory
  Simdgroup8x8<T>* matrix;
  P* memory;
  int stride;
  bool is_transposed;

  // Where element v of a lane lies in memory.
  P* element(int lane, int v) const {
    int row = lane / 4, column = lane % 4 * 2 + v;
    return memory + (is_transposed ? column * stride + row : row * stride + column);
  }
};

template <class T, class P> const Moved<T, P>& moved_by(void* const* operands, int lane) {
  auto* own = static_cast<Moved<T, P>*>(operands[lane]);
  auto* first = static_cast<Moved<T, P>*>(operands[0]);
  if (own->memory != first->memory || own->stride != first->stride ||
      own->is_transposed != first->is_transposed)
    fail("lanes %d and 0 of a simdgroup move a matrix from or to different places", lane);
  return *own;
}

template <class T> void load_matrix(int site, Simdgroup8x8<T>& to, const T* from, int stride, bool is_transposed) {
  Moved<T, const T> operands{&to, from, stride, is_transposed};
  auto run = [](void* const* all) {
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto& own = moved_by<T, const T>(all, lane);
      for (int v = 0; v < 2; ++v) own.matrix->own[v] = *own.element(lane, v);
    }
  };
  warp(site, run, &operands);
}

// Other lanes see what a lane has stored after a barrier.
inline void store_matrix(int site, const Simdgroup8x8<float>& from, float* to, int stride, bool is_transposed) {
  Simdgroup8x8<float> copy = from;
  Moved<float, float> operands{&copy, to, stride, is_transposed};
  auto check = [](void* const* all) {
    for (int lane = 0; lane < kWarp; ++lane) moved_by<float, float>(all, lane);
  };
  warp(site, check, &operands);
  for (int v = 0; v < 2; ++v)
    store_later(operands.element(current->number % kWarp, v), as_type<uint32_t>(from.own[v]));
}

inline void finish_stores() {
  commit_copies();
  wait_for_copies(0);
}

inline void threadgroup_barrier(int site) {
  finish_stores();
  barrier(site);
}

inline void simdgroup_barrier(int site) {
  finish_stores();
  warp(site, [](void* const*) {}, nullptr);
}

template <class D, class A, class B> struct Multiplied {
  Simdgroup8x8<D>* d;
  const Simdgroup8x8<A>* a;
  const Simdgroup8x8<B>* b;
  Simdgroup8x8<D> c;
};

template <class D, class A, class B>
void multiply_matrices(int site, Simdgroup8x8<D>& d, const Simdgroup8x8<A>& a, const Simdgroup8x8<B>& b,
                       const Simdgroup8x8<D>& c) {
  using Operands = Multiplied<D, A, B>;
  Operands operands{&d, &a, &b, c};
  auto run = [](void* const* all) {
    float x[8][8], y[8][8];
    for (int lane = 0; lane < kWarp; ++lane)
      for (int v = 0; v < 2; ++v) {
        auto* own = static_cast<Operands*>(all[lane]);
        x[lane / 4][lane % 4 * 2 + v] = own->a->own[v];
        y[lane / 4][lane % 4 * 2 + v] = own->b->own[v];
      }
    for (int lane = 0; lane < kWarp; ++lane)
      for (int v = 0; v < 2; ++v) {
        auto* own = static_cast<Operands*>(all[lane]);
        float sum = own->c.own[v];
        for (int k = 0; k < 8; ++k) sum += x[lane / 4][k] * y[k][lane % 4 * 2 + v];
        own->d->own[v] = D(sum);
      }
  };
  warp(site, run, &operands);
}

// A lane beyond the last has nothing to give: what comes of it is undefined, here a NaN.
template <class T> T shuffle_down(int site, T value, int by) {
  T out = shuffle(site, value, by, kWarp, 2);
  if (current->number % kWarp + by >= kWarp) std::memset(&out, 0xff, sizeof out);
  return out;
}

// A kernel's index as it asks for it.
template <class T> T index(const Index& of) {
  if constexpr (std::is_same_v<T, uint>) return of.x;
  else if constexpr (std::is_same_v<T, uint2>) return uint2(of.x, of.y);
  else return uint3(of.x, of.y, of.z);
}

}  // namespace emulation

// ---- functions

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T select(T no, T yes, bool which) { return which ? yes : no; }
inline float exp2(float v) { return std::exp2(v); }
inline float sqrt(float v) { return std::sqrt(v); }
inline float floor(float v) { return std::floor(v); }
inline float fabs(float v) { return std::fabs(v); }
inline half2 fma(half2 a, half2 b, half2 c) {
  return half2(emulation::fused(a.x, b.x, c.x), emulation::fused(a.y, b.y, c.y));
}

}  // namespace metal

#define threadgroup_barrier(flags) emulation::threadgroup_barrier(__LINE__)
#define simdgroup_barrier(flags) emulation::simdgroup_barrier(__LINE__)
#define simd_shuffle_down(value, by) emulation::shuffle_down(__LINE__, value, by)
#define simdgroup_load(matrix, from, stride, origin, is_transposed) \
  emulation::load_matrix(__LINE__, matrix, from, stride, is_transposed)
#define simdgroup_store(matrix, to, stride, origin, is_transposed) \
  emulation::store_matrix(__LINE__, matrix, to, stride, is_transposed)
#define simdgroup_multiply_accumulate(d, a, b, c) emulation::multiply_matrices(__LINE__, d, a, b, c)

#define kernel static
#define device
#define constant const
#define threadgroup
#define thread
