/* Calls one compiled kernel: arm64_main FILE.

   FILE holds the number of tensors, then for each its dtype (code, bits), rank, shape, number of
   bytes, all int64, and its bytes. The kernel gets all of them; their bytes are written back. Takes
   the place of TVM's runtime: errors end the program, parallel loops run on one thread. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

enum { MAX_TENSORS = 16, MAX_RANK = 4 };

typedef struct {
  void *sync_handle;
  int32_t num_task;
} ParallelEnv;
typedef int (*ParallelBody)(int task_id, ParallelEnv *env, void *closure);

extern int (*__TVMBackendParallelLaunch)(ParallelBody body, void *closure, int num_task);
extern int KERNEL(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result);

static int launch(ParallelBody body, void *closure, int num_task) {
  ParallelEnv env = {NULL, 1};
  return body(0, &env, closure);
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t num_parts) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < num_parts; ++i) fputs(parts[i] ? parts[i] : "", stderr);
  exit(3);
}

static void transfer(int is_read, void *data, size_t size, FILE *file) {
  size_t done = is_read ? fread(data, 1, size, file) : fwrite(data, 1, size, file);
  if (done != size) exit(4);
}

static int64_t read_number(FILE *file) {
  int64_t number;
  transfer(1, &number, sizeof number, file);
  return number;
}

int main(int argc, char **argv) {
  static int64_t shapes[MAX_TENSORS][MAX_RANK], num_bytes[MAX_TENSORS];
  static DLTensor tensors[MAX_TENSORS];
  static TVMFFIAny args[MAX_TENSORS];
  FILE *file = argc == 2 ? fopen(argv[1], "r+b") : NULL;
  if (file == NULL) return 2;
  int64_t count = read_number(file);
  for (int64_t i = 0; i < count; ++i) {
    DLTensor *tensor = &tensors[i];
    tensor->device = (DLDevice){kDLCPU, 0};
    tensor->dtype.code = read_number(file);
    tensor->dtype.bits = read_number(file);
    tensor->dtype.lanes = 1;
    tensor->ndim = read_number(file);
    tensor->shape = shapes[i];
    for (int d = 0; d < tensor->ndim; ++d) shapes[i][d] = read_number(file);
    num_bytes[i] = read_number(file);
    tensor->data = aligned_alloc(64, (num_bytes[i] + 63) / 64 * 64);
    transfer(1, tensor->data, num_bytes[i], file);
    args[i].type_index = kTVMFFIDLTensorPtr;
    args[i].v_ptr = tensor;
  }
  __TVMBackendParallelLaunch = launch;
  TVMFFIAny result = {0};
  if (KERNEL(NULL, args, count, &result) != 0) return 3;
  rewind(file);
  for (int64_t i = 0; i < count; ++i) transfer(0, tensors[i].data, num_bytes[i], file);
  return fclose(file);
}
