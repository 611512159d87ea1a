// A queue of bytes.
#ifndef TVM_SUPPORT_RING_BUFFER_H_
#define TVM_SUPPORT_RING_BUFFER_H_

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace tvm {
namespace support {

// One vector: what was read is cut off at the next write.
class RingBuffer {
 public:
  size_t bytes_available() const { return bytes_.size() - num_read_; }

  void Reserve(size_t size) { bytes_.reserve(num_read_ + size); }

  void Read(void* data, size_t size) {
    TVM_FFI_ICHECK_GE(bytes_available(), size);
    if (size != 0) std::memcpy(data, bytes_.data() + num_read_, size);
    num_read_ += size;
  }

  void Write(const void* data, size_t size) {
    CutOffRead();
    const char* begin = static_cast<const char*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }

  // Hands at most `max_size` bytes to `send`, which says how many it took.
  template <typename Send>
  size_t ReadWithCallback(Send send, size_t max_size) {
    size_t size = send(bytes_.data() + num_read_, std::min(max_size, bytes_available()));
    num_read_ += size;
    return size;
  }

  // Lets `receive` fill at most `max_size` bytes; it says how many it filled.
  template <typename Receive>
  size_t WriteWithCallback(Receive receive, size_t max_size) {
    CutOffRead();
    size_t old_size = bytes_.size();
    bytes_.resize(old_size + max_size);
    size_t size = receive(bytes_.data() + old_size, max_size);
    bytes_.resize(old_size + size);
    return size;
  }

 private:
  void CutOffRead() {
    bytes_.erase(bytes_.begin(), bytes_.begin() + num_read_);
    num_read_ = 0;
  }

  std::vector<char> bytes_;
  size_t num_read_ = 0;
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_RING_BUFFER_H_
