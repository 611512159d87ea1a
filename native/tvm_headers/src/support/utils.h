#ifndef TVM_SUPPORT_UTILS_H_
#define TVM_SUPPORT_UTILS_H_

#include <string>

namespace tvm {
namespace support {

inline bool StartsWith(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_UTILS_H_
