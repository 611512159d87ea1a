// Bytes in, bytes out: what everything that is saved in a library passes through.
#ifndef TVM_SUPPORT_IO_H_
#define TVM_SUPPORT_IO_H_

#include <cstddef>

namespace tvm {
namespace support {

// How a type is written and read: see serializer.h.
template <typename T, typename Enable = void>
struct Serializer;

class Stream {
 public:
  virtual ~Stream() = default;

  // The number of bytes that were read or written, which is smaller than `size` at the end.
  virtual size_t Read(void* data, size_t size) = 0;
  virtual size_t Write(const void* data, size_t size) = 0;

  template <typename T>
  void Write(const T& value) {
    Serializer<T>::Write(this, value);
  }

  // Whether there was a whole value; `value` is undefined if not.
  template <typename T>
  bool Read(T* value) {
    return Serializer<T>::Read(this, value);
  }

  template <typename T>
  void WriteArray(const T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) Write(values[i]);
  }

  template <typename T>
  bool ReadArray(T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!Read(values + i)) return false;
    }
    return true;
  }
};

}  // namespace support
}  // namespace tvm

#include <tvm/support/serializer.h>

#endif  // TVM_SUPPORT_IO_H_
