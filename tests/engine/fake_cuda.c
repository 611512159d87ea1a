/* NVIDIA's driver and CUDA's runtime as far as TVM's runtime calls them, over the host's memory.

Kernels are "launched" without doing anything. Compiled twice by `test_devices_cuda.py`, as
libcuda.so.1 and as libcudart.so.13. The environment says what is there:

    FAKE_CUDA_DEVICES  number of devices (1)
    FAKE_CUDA_BYTES    memory of each (1 GiB)
    FAKE_CUDA_ARCH     compute capability times ten (90)
    FAKE_CUDA_COUNT    result of counting the devices (0, or an error such as 35)
    FAKE_CUDA_LOAD     result of loading a module (0, or an error such as 209)
*/
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kOutOfMemory = 2, kInvalidDevice = 101, kNotFound = 500 };

static long Setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}
static size_t used;
static int current, last_error;
static int Give(int error) { return last_error = error, error; }

/* The driver. */
int cuGetErrorName(int error, const char** text) {
  *text = error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
int cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, (size_t)size, "Fake GPU %d", device);
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuModuleLoadData(void** module, const void* image) {
  /* First word of a fat binary. */
  if (*(const uint32_t*)image != 0xBA55ED50) return 200;
  *module = (void*)image;
  return (int)Setting("FAKE_CUDA_LOAD", 0);
}
int cuModuleUnload(void* module) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
  return 0;
}
int cuTensorMapEncodeTiled(void) { return kNotFound; }

/* The runtime. */
int cudaGetDeviceCount(int* count) {
  int error = (int)Setting("FAKE_CUDA_COUNT", 0);
  *count = error ? 0 : (int)Setting("FAKE_CUDA_DEVICES", 1);
  return Give(error);
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= Setting("FAKE_CUDA_DEVICES", 1)) return Give(kInvalidDevice);
  current = device;
  return 0;
}
int cudaGetDevice(int* device) { return *device = current, 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  long arch = Setting("FAKE_CUDA_ARCH", 90);
  switch (attribute) { /* cudaDeviceAttr of driver_types.h */
    case 1: *value = 1024; break;              /* threads in a block */
    case 8: *value = 48 << 10; break;          /* shared memory of a block */
    case 10: *value = 32; break;               /* warp */
    case 75: *value = (int)(arch / 10); break; /* compute capability */
    case 76: *value = (int)(arch % 10); break;
    default: *value = 1;
  }
  return 0;
}
int cudaGetDeviceProperties(char* properties, int device) {
  memset(properties, 0, 512);
  cuDeviceGetName(properties, 256, device);
  *(size_t*)(properties + 288) = (size_t)Setting("FAKE_CUDA_BYTES", 1 << 30);
  return 0;
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = (size_t)Setting("FAKE_CUDA_BYTES", 1 << 30);
  *free_bytes = *total - used;
  return 0;
}
int cudaMalloc(void** pointer, size_t size) {
  if (used + size > (size_t)Setting("FAKE_CUDA_BYTES", 1 << 30)) return Give(kOutOfMemory);
  size_t num_bytes = (size + 511) / 256 * 256;
  size_t* block = aligned_alloc(256, num_bytes);
  memset(block, 0, num_bytes);  // kernels write nothing: what is read back is a token's id
  *block = size;
  used += size;
  *pointer = (char*)block + 256;
  return 0;
}
int cudaFree(void* pointer) {
  if (pointer == NULL) return 0;
  size_t* block = (size_t*)((char*)pointer - 256);
  used -= *block;
  free(block);
  return 0;
}
int cudaMallocHost(void** pointer, size_t size) { return *pointer = malloc(size), 0; }
int cudaFreeHost(void* pointer) { return free(pointer), 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return memcpy(to, from, size), 0;
}
int cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t size, void* stream) {
  return memcpy(to, from, size), 0;
}
const char* cudaGetErrorName(int error) {
  return error == kOutOfMemory ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
const char* cudaGetErrorString(int error) {
  return error == kOutOfMemory ? "out of memory" : "unknown error";
}
int cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaStreamSynchronize(void* stream) { return 0; }
#define NOTHING(name) \
  int name(void) { return 0; }
NOTHING(cudaEventCreate)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventRecord)
NOTHING(cudaEventSynchronize)
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
NOTHING(cudaGraphInstantiate)
NOTHING(cudaGraphLaunch)
NOTHING(cudaStreamBeginCapture)
NOTHING(cudaStreamCreate)
NOTHING(cudaStreamCreateWithFlags)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamEndCapture)
NOTHING(cudaStreamWaitEvent)
