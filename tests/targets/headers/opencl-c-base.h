// The types that clang's own header would declare, where only clang itself is installed.
#define cl_khr_fp16 1
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#define VECTOR(T, N) typedef T T##N __attribute__((ext_vector_type(N)));
#define VECTORS(T) VECTOR(T, 2) VECTOR(T, 3) VECTOR(T, 4) VECTOR(T, 8) VECTOR(T, 16)
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint)
VECTORS(long) VECTORS(ulong) VECTORS(float) VECTORS(half)
typedef uint cl_mem_fence_flags;
typedef enum memory_scope { memory_scope_work_item } memory_scope;
typedef enum memory_order { memory_order_relaxed } memory_order;
#define CLK_LOCAL_MEM_FENCE 1
#define as_float(x) __builtin_astype((x), float)
#define as_half(x) __builtin_astype((x), half)
#define as_int(x) __builtin_astype((x), int)
#define as_uint(x) __builtin_astype((x), uint)
#define as_ushort(x) __builtin_astype((x), ushort)
