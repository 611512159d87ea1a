// Streams over bytes in memory.
#ifndef TVM_SUPPORT_BYTES_IO_H_
#define TVM_SUPPORT_BYTES_IO_H_

#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>
#include <tvm/support/io.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace tvm {
namespace support {

// Reads bytes that someone else keeps.
class BytesInStream : public Stream {
 public:
  explicit BytesInStream(const std::string& bytes) : next_(bytes.data()), left_(bytes.size()) {}
  explicit BytesInStream(const ffi::Bytes& bytes) : next_(bytes.data()), left_(bytes.size()) {}

  using Stream::Read;
  using Stream::Write;

  size_t Read(void* data, size_t size) final {
    size = std::min(size, left_);
    if (size != 0) std::memcpy(data, next_, size);
    next_ += size;
    left_ -= size;
    return size;
  }

  size_t Write(const void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "this stream is only read";
    TVM_FFI_UNREACHABLE();
  }

 private:
  const char* next_;
  size_t left_;
};

// Appends to a string.
class BytesOutStream : public Stream {
 public:
  explicit BytesOutStream(std::string* bytes) : bytes_(bytes) {}

  using Stream::Read;
  using Stream::Write;

  size_t Read(void*, size_t) final {
    TVM_FFI_THROW(InternalError) << "this stream is only written";
    TVM_FFI_UNREACHABLE();
  }

  size_t Write(const void* data, size_t size) final {
    bytes_->append(static_cast<const char*>(data), size);
    return size;
  }

 private:
  std::string* bytes_;
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_BYTES_IO_H_
