// Device memory: blocks, and the tensors cut from them.
#include <tvm/ffi/error.h>

#include <algorithm>

#include "device.h"

namespace everycast::vulkan {
namespace {

constexpr uint64_t kMaxBlockBytes = 64 << 20;
constexpr uint64_t kFirstAddress = uint64_t{1} << 40;
// TVM wants tensors to start on such multiples.
constexpr uint64_t kTensorAlignment = 256;
constexpr VkBufferUsageFlags kUsage =
    VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT |
    VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
constexpr VkMemoryPropertyFlags kLocal = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags kShared =
    VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
constexpr VkMemoryPropertyFlags kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;

uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string Megabytes(uint64_t num_bytes) {
  return std::to_string((num_bytes + 999999) / 1000000) + " MB";
}

}  // namespace

void Device::ChooseMemoryTypes() {
  VkPhysicalDeviceMemoryProperties2 properties{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  Instance::Get().functions.GetPhysicalDeviceMemoryProperties2(physical_.handle, &properties);
  const VkPhysicalDeviceMemoryProperties& memory = properties.memoryProperties;
  // What every buffer of such usage may lie in does not depend on its size.
  VkBufferCreateInfo probe{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  probe.size = 256;
  probe.usage = kUsage;
  VkBuffer buffer;
  Check(vk_.CreateBuffer(device_, &probe, nullptr, &buffer), "vkCreateBuffer");
  VkMemoryRequirements needs;
  vk_.GetBufferMemoryRequirements(device_, buffer, &needs);
  vk_.DestroyBuffer(device_, buffer, nullptr);
  // Vulkan lists the faster of equal types first, and guarantees one that the host shares.
  auto find = [&](std::initializer_list<VkMemoryPropertyFlags> wishes) {
    for (VkMemoryPropertyFlags wish : wishes) {
      for (uint32_t i = 0; i < memory.memoryTypeCount; ++i) {
        bool is_allowed = (needs.memoryTypeBits >> i & 1) != 0;
        if (is_allowed && (memory.memoryTypes[i].propertyFlags & wish) == wish) return i;
      }
    }
    return 0u;
  };
  tensor_type_ = physical_.IsUnified()
                     ? find({kLocal | kShared | kCached, kLocal | kShared, kShared})
                     : find({kLocal, kShared});
  staging_type_ = find({kShared});
  readback_type_ = find({kShared | kCached, kShared});
  heap_ = memory.memoryTypes[tensor_type_].heapIndex;
  heap_bytes_ = memory.memoryHeaps[heap_].size;
  block_bytes_ = std::min(kMaxBlockBytes, RoundUp(heap_bytes_ / 16, 1 << 20));
  alignment_ = std::max<uint64_t>(
      kTensorAlignment, physical_.properties.limits.minStorageBufferOffsetAlignment);
  next_address_ = kFirstAddress;
}

uint64_t Device::TotalMemory() const { return heap_bytes_; }

uint64_t Device::FreeMemory() {
  std::lock_guard<std::mutex> lock(mutex_);
  return FreeMemoryLocked();
}

uint64_t Device::FreeMemoryLocked() const {
  uint64_t own = static_cast<uint64_t>(counters_.bytes_allocated);
  uint64_t left = heap_bytes_ > own ? heap_bytes_ - own : 0;
  if (!has_budget_) return left;
  VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
  VkPhysicalDeviceMemoryProperties2 properties{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  properties.pNext = &budget;
  Instance::Get().functions.GetPhysicalDeviceMemoryProperties2(physical_.handle, &properties);
  uint64_t usage = budget.heapUsage[heap_], allowed = budget.heapBudget[heap_];
  return std::min(left, allowed > usage ? allowed - usage : 0);
}

Block* Device::MakeBlock(uint64_t num_bytes, uint32_t memory_type, bool is_mapped, uint64_t asked) {
  auto refuse = [&](const char* why) {
    TVM_FFI_THROW(MemoryError) << "the Vulkan device " << physical_.properties.deviceName
                               << " has no memory for " << Megabytes(asked) << " (" << why << "): "
                               << Megabytes(FreeMemoryLocked()) << " of " << Megabytes(heap_bytes_)
                               << " are free";
  };
  if (num_bytes > physical_.maintenance3.maxMemoryAllocationSize) {
    refuse(("it takes at most " + Megabytes(physical_.maintenance3.maxMemoryAllocationSize) +
            " at a time")
               .c_str());
  }
  if (memory_type == tensor_type_ && num_bytes > FreeMemoryLocked()) refuse("all is in use");
  auto block = std::make_unique<Block>();
  block->size = num_bytes;
  VkBufferCreateInfo buffer{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  buffer.size = num_bytes;
  buffer.usage = kUsage;
  VkResult result = vk_.CreateBuffer(device_, &buffer, nullptr, &block->buffer);
  if (result == VK_SUCCESS) {
    VkMemoryRequirements needs;
    vk_.GetBufferMemoryRequirements(device_, block->buffer, &needs);
    VkMemoryAllocateInfo info{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO};
    info.allocationSize = needs.size;
    info.memoryTypeIndex = memory_type;
    result = vk_.AllocateMemory(device_, &info, nullptr, &block->memory);
  }
  if (result == VK_SUCCESS) {
    result = vk_.BindBufferMemory(device_, block->buffer, block->memory, 0);
  }
  if (result == VK_SUCCESS && is_mapped) {
    void* mapped = nullptr;
    result = vk_.MapMemory(device_, block->memory, 0, VK_WHOLE_SIZE, 0, &mapped);
    block->mapped = static_cast<char*>(mapped);
  }
  if (result != VK_SUCCESS) {
    vk_.DestroyBuffer(device_, block->buffer, nullptr);
    vk_.FreeMemory(device_, block->memory, nullptr);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY ||
        result == VK_ERROR_MEMORY_MAP_FAILED) {
      refuse("the driver grants no more");
    }
    Check(result, "allocating memory");
  }
  counters_.bytes_allocated += static_cast<int64_t>(num_bytes);
  return block.release();
}

void Device::DestroyBlock(Block* block) {
  vk_.DestroyBuffer(device_, block->buffer, nullptr);
  vk_.FreeMemory(device_, block->memory, nullptr);
  counters_.bytes_allocated -= static_cast<int64_t>(block->size);
  delete block;
}

void* Device::Allocate(uint64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!lost_.empty()) TVM_FFI_THROW(RuntimeError) << lost_;
  uint64_t size = RoundUp(std::max<uint64_t>(num_bytes, 1), alignment_);
  Block* best = nullptr;
  uint64_t best_size = UINT64_MAX;
  for (auto& [address, block] : blocks_) {
    for (auto [offset, free] : block->free) {
      if (free >= size && free < best_size) best = block.get(), best_size = free;
    }
  }
  if (best == nullptr) {
    // Large tensors have blocks of their own, so that their memory is given back with them.
    uint64_t block_size = size > block_bytes_ / 4 ? size : block_bytes_;
    // Some blocks may be free but for commands that used them.
    if (!dead_blocks_.empty() && block_size > FreeMemoryLocked()) SynchronizeLocked();
    best = MakeBlock(block_size, tensor_type_, physical_.IsUnified(), num_bytes);
    best->address = next_address_;
    // A gap after each block: a pointer past an end is no pointer into the next.
    next_address_ += RoundUp(block_size, 1 << 20) + (1 << 20);
    best->free[0] = block_size;
    blocks_[best->address].reset(best);
  }
  auto place = std::min_element(best->free.begin(), best->free.end(), [&](auto a, auto b) {
    return (a.second >= size ? a.second : UINT64_MAX) < (b.second >= size ? b.second : UINT64_MAX);
  });
  uint64_t offset = place->first, rest = place->second - size;
  best->free.erase(place);
  if (rest > 0) best->free[offset + size] = rest;
  best->used[offset] = size;
  ++counters_.allocations;
  counters_.bytes_used += static_cast<int64_t>(size);
  return reinterpret_cast<void*>(best->address + offset);
}

void Device::Free(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return;
  Block* block = (--it)->second.get();
  auto used = block->used.find(address - block->address);
  if (used == block->used.end()) return;
  uint64_t offset = used->first, size = used->second;
  block->used.erase(used);
  counters_.bytes_used -= static_cast<int64_t>(size);
  // Whoever gets these bytes next is ordered after the commands that still use them: `Order`
  // compares bytes, not tensors.
  auto next = block->free.lower_bound(offset);
  if (next != block->free.end() && offset + size == next->first) {
    size += next->second;
    next = block->free.erase(next);
  }
  if (next != block->free.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      block->free.erase(previous);
    }
  }
  block->free[offset] = size;
  if (!block->used.empty()) return;
  // One empty block of the usual size is kept: small tensors come and go.
  bool is_spare = block->size == block_bytes_ &&
                  std::none_of(blocks_.begin(), blocks_.end(), [&](const auto& other) {
                    return other.second.get() != block && other.second->used.empty();
                  });
  if (is_spare) return;
  dead_blocks_.emplace_back(submitted_ + is_recording_, it->second.release());
  blocks_.erase(it);
  Reclaim();
}

Region Device::Find(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  return FindLocked(pointer);
}

Region Device::FindLocked(const void* pointer) {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto it = blocks_.upper_bound(address);
  if (it != blocks_.begin()) {
    Block* block = std::prev(it)->second.get();
    uint64_t offset = address - block->address;
    auto used = block->used.upper_bound(offset);
    if (used != block->used.begin()) {
      auto [start, size] = *std::prev(used);
      if (offset < start + size) return {block, offset, start + size - offset};
    }
  }
  TVM_FFI_THROW(RuntimeError) << "a tensor is not, or no longer, on the Vulkan device "
                              << physical_.properties.deviceName;
  TVM_FFI_UNREACHABLE();
}

}  // namespace everycast::vulkan
