// Bytes as base64 text in another stream: a tensor in JSON.
#ifndef TVM_SUPPORT_BASE64_H_
#define TVM_SUPPORT_BASE64_H_

#include <tvm/ffi/extra/base64.h>
#include <tvm/ffi/string.h>
#include <tvm/support/io.h>

#include <string>

#include "bytes_io.h"

namespace tvm {
namespace support {

// What is written becomes text at `Finish`.
class Base64OutStream : public Stream {
 public:
  explicit Base64OutStream(Stream* text) : text_(text) {}

  using Stream::Read;
  using Stream::Write;

  size_t Read(void* data, size_t size) final { return stream_.Read(data, size); }
  size_t Write(const void* data, size_t size) final { return stream_.Write(data, size); }

  void Finish() {
    ffi::String text = ffi::Base64Encode(TVMFFIByteArray{bytes_.data(), bytes_.size()});
    text_->Write(static_cast<const void*>(text.data()), text.size());
  }

 private:
  Stream* text_;
  std::string bytes_;
  BytesOutStream stream_{&bytes_};
};

// `InitPosition` takes the whole text, which is read as bytes from then on.
class Base64InStream : public Stream {
 public:
  explicit Base64InStream(Stream* text) : text_(text) {}

  using Stream::Read;
  using Stream::Write;

  void InitPosition() {
    std::string text;
    char piece[1024];
    while (size_t size = text_->Read(static_cast<void*>(piece), sizeof(piece))) {
      text.append(piece, size);
    }
    bytes_ = ffi::Base64Decode(TVMFFIByteArray{text.data(), text.size()});
    stream_ = BytesInStream(bytes_);
  }

  size_t Read(void* data, size_t size) final { return stream_.Read(data, size); }
  size_t Write(const void* data, size_t size) final { return stream_.Write(data, size); }

 private:
  Stream* text_;
  ffi::Bytes bytes_;
  BytesInStream stream_{bytes_};
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_BASE64_H_
