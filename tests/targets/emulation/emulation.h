// A GPU's threads on a CPU: one fiber for each, what they wait for, and what languages share.
//
// A block's threads take turns, each runs until it waits. Warp-wide operations wait until all 32
// lanes have come to the same one. Included by the languages' headers; driver.cc runs the threads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace emulation {

constexpr int kWarp = 32;

struct Index {
  unsigned x, y, z;
};

enum class State { ready, barrier, warp, done };

struct Thread {
  Index index;
  int number;
  State state;
  int site;         // of the barrier or warp operation that it waits at
  void* operands;   // of that operation
};

extern Thread* current;
extern Index block_index, block_size, grid_size;

[[noreturn]] void fail(const char* format, ...);

// Waits for all threads of the block; `site` tells barriers apart.
void barrier(int site);

// Waits for the other lanes, then `operation` runs once, with each lane's operands.
using WarpOperation = void (*)(void* const* operands);
void warp(int site, WarpOperation operation, void* operands);

// The shared array that a kernel declares at `site`; new, and full of NaNs, in each block.
void* shared_array(int site, size_t bytes);

// A copy or a store to shared memory that may happen from now on, until the thread waits for it.
void copy_later(void* to, const void* from, size_t bytes);
void store_later(void* to, uint32_t value);
void commit_copies();
void wait_for_copies(int pending_groups);

inline float float_of_half(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

// Vectors are read and written at multiples of their size.
inline void check_alignment(const void* address, size_t size) {
  // Through a volatile: the compiler believes what the type says.
  volatile uintptr_t at = reinterpret_cast<uintptr_t>(address);
  if (at % size) fail("a vector of %zu bytes at a misaligned address", size);
}

}  // namespace emulation

// Half precision: every operation rounds to float16, as the device's do.
struct half {
  _Float16 value;
  half() = default;
  template <typename T> half(T number) : value(static_cast<_Float16>(static_cast<float>(number))) {}
  operator float() const { return static_cast<float>(value); }
};

namespace emulation {

// One rounding: the product of two halves is exact in double, and so is its sum but for ties.
inline half fused(half a, half b, half c) {
  half out;
  out.value = static_cast<_Float16>(double(float(a)) * double(float(b)) + double(float(c)));
  return out;
}

struct Shuffled {
  uint32_t mine, result;
  int lane, width, kind;  // kind 0: from lane, 1: up, 2: down, 3: xor
};

inline void shuffle_lanes(void* const* operands) {
  for (int i = 0; i < kWarp; ++i) {
    auto* own = static_cast<Shuffled*>(operands[i]);
    int first = i / own->width * own->width, at = i - first;
    int from = own->kind == 0 ? own->lane % own->width
               : own->kind == 1 ? at - own->lane
               : own->kind == 2 ? at + own->lane
                                : at ^ own->lane;
    if (from < 0 || from >= own->width) from = at;
    own->result = static_cast<Shuffled*>(operands[first + from])->mine;
  }
}

template <typename T> inline T shuffle(int site, T value, int lane, int width, int kind) {
  static_assert(sizeof(T) == 4, "shuffles of 32 bits");
  Shuffled operands{0, 0, lane, width, kind};
  std::memcpy(&operands.mine, &value, 4);
  warp(site, shuffle_lanes, &operands);
  std::memcpy(&value, &operands.result, 4);
  return value;
}

union Argument {
  void* pointer;
  int64_t integer;
  double real;
};

struct Kernel {
  const char* name;
  void (*call)(const Argument*);
};

extern const Kernel kernels[];
extern const int num_kernels;

}  // namespace emulation
