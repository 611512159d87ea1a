// Memory that is freed all at once.
#ifndef TVM_SUPPORT_ARENA_H_
#define TVM_SUPPORT_ARENA_H_

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace tvm {
namespace support {

class Arena {
 public:
  // Room for `count` values, without a value yet.
  template <typename T>
  T* allocate_(int count) {
    static_assert(std::is_trivial_v<T>, "no constructor or destructor is called");
    size_t num_units = (sizeof(T) * count + sizeof(Unit) - 1) / sizeof(Unit);
    pieces_.emplace_back(new Unit[num_units]);
    return reinterpret_cast<T*>(pieces_.back().get());
  }

  void RecycleAll() { pieces_.clear(); }

 private:
  using Unit = std::max_align_t;
  std::vector<std::unique_ptr<Unit[]>> pieces_;
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_ARENA_H_
