// One Vulkan device: its memory, its queue, and the commands that are being recorded for it.
#ifndef EVERYCAST_VULKAN_DEVICE_H_
#define EVERYCAST_VULKAN_DEVICE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "instance.h"

namespace everycast::vulkan {

// A piece of device memory that buffers are cut from.
struct Block {
  VkBuffer buffer = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  uint64_t size = 0;
  // Where its bytes are on the host; null if the host cannot see them.
  char* mapped = nullptr;
  // Tensors point at address + offset. Nothing is there: the addresses only name bytes of blocks,
  // so that a pointer into a tensor is a pointer too.
  uint64_t address = 0;
  // Bytes in use and free, by offset.
  std::map<uint64_t, uint64_t> used, free;
};

// Bytes of a block: what a kernel's argument or a copy refers to.
struct Region {
  Block* block = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;

  VkBuffer buffer() const { return block->buffer; }
  char* host() const { return block->mapped + offset; }
};

// A compiled kernel on one device.
struct Pipeline {
  VkPipeline handle = VK_NULL_HANDLE;
  VkPipelineLayout layout = VK_NULL_HANDLE;
  VkDescriptorSetLayout set_layout = VK_NULL_HANDLE;
  bool pushes_descriptors = false;
};

// What a kernel needs of its pipeline, and of the device.
struct PipelineNeeds {
  std::string name;  // for messages
  uint32_t num_buffers = 0, num_push_bytes = 0;
  bool has_uniform_buffer = false;
  uint32_t num_threads = 0, shared_bytes = 0;  // of a work group
  // The size of subgroups must be a multiple of this; 0 if any will do.
  uint32_t subgroup_width = 0;
};

// What one dispatch works on.
struct Dispatch {
  const Pipeline* pipeline = nullptr;
  std::vector<Region> buffers;
  std::vector<bool> is_read, is_written;
  // Push constants; or, if `in_uniform_buffer`, bound after the buffers.
  std::vector<char> scalars;
  bool in_uniform_buffer = false;
  std::array<uint32_t, 3> grid{1, 1, 1};
};

struct Counters {
  int64_t submissions = 0, dispatches = 0, barriers = 0, waits = 0, allocations = 0;
  int64_t bytes_allocated = 0, bytes_used = 0, pipelines = 0;
};

// All methods may be called from any thread.
class Device {
 public:
  // The device by number; throws if there is none such, or it cannot be opened.
  static Device& Get(int id);
  static bool Exists(int id);

  explicit Device(const PhysicalDevice& physical);

  const PhysicalDevice& physical() const { return physical_; }
  // Bytes of device memory: in all, and free now.
  uint64_t TotalMemory() const;
  uint64_t FreeMemory();

  void* Allocate(uint64_t num_bytes);
  void Free(void* pointer);

  void CopyToDevice(void* target, const void* source, uint64_t num_bytes);
  void CopyToHost(void* target, const void* source, uint64_t num_bytes);
  void CopyOnDevice(void* target, const void* source, uint64_t num_bytes);
  // Start what is recorded, and wait for all that was started.
  void Synchronize();

  // Throws for a kernel that needs what the device lacks. The size of subgroups that its pipeline
  // must ask for, or 0.
  uint32_t CheckNeeds(const PipelineNeeds& needs, const std::string& spirv) const;
  Pipeline MakePipeline(const PipelineNeeds& needs, const std::string& spirv);
  void DestroyPipeline(const Pipeline& pipeline);
  // The bytes from `pointer` to the end of its tensor.
  Region Find(const void* pointer);
  void Record(const Dispatch& dispatch);

  void SavePipelines();
  Counters counters();

 private:
  struct Batch {
    VkCommandBuffer commands = VK_NULL_HANDLE;
    std::vector<VkDescriptorPool> pools;
    uint64_t value = 0;         // of the timeline, when done
    uint64_t staging_end = 0;   // of the ring, when it was submitted
  };
  struct Access {
    Block* block;
    uint64_t begin, end;
  };

  void Open();
  void ChooseMemoryTypes();
  void OpenPipelineCache();
  std::string PipelineCacheFile() const;
  // Throws for a result that is an error.
  void Check(VkResult result, const char* what);

  // Memory.
  uint64_t FreeMemoryLocked() const;
  // `asked` is the size that a message names.
  Block* MakeBlock(uint64_t num_bytes, uint32_t memory_type, bool is_mapped, uint64_t asked);
  void DestroyBlock(Block* block);
  Region FindLocked(const void* pointer);

  // Commands.
  VkCommandBuffer Recording();
  void Submit();
  void WaitFor(uint64_t value);
  void Reclaim();
  void SynchronizeLocked();
  // A barrier, if what comes next reads or writes what earlier commands wrote, or writes what they
  // read; then takes note of it.
  void Order(const std::vector<Access>& reads, const std::vector<Access>& writes);
  void RecordCopy(const Region& target, const Region& source, uint64_t num_bytes);
  // Bytes of the staging ring, for commands that are recorded next.
  Region Stage(uint64_t num_bytes);
  VkDescriptorSet MakeDescriptorSet(const Pipeline& pipeline);

  const PhysicalDevice physical_;
  std::mutex mutex_;
  VkDevice device_ = VK_NULL_HANDLE;
  DeviceFunctions vk_;
  VkQueue queue_ = VK_NULL_HANDLE;
  std::string lost_;  // why the device is of no more use
  uint32_t max_push_descriptors_ = 0;

  uint32_t tensor_type_ = 0, staging_type_ = 0, readback_type_ = 0;
  uint64_t heap_bytes_ = 0;
  uint32_t heap_ = 0;
  bool has_budget_ = false;
  uint64_t block_bytes_ = 0, next_address_ = 0;
  std::map<uint64_t, std::unique_ptr<Block>> blocks_;  // of tensors, by address
  uint64_t alignment_ = 0;
  // Blocks that no later command uses, by the value of the timeline at which none does.
  std::deque<std::pair<uint64_t, Block*>> dead_blocks_;

  VkCommandPool command_pool_ = VK_NULL_HANDLE;
  VkSemaphore timeline_ = VK_NULL_HANDLE;
  uint64_t submitted_ = 0, completed_ = 0;  // values of the timeline
  Batch current_;
  bool is_recording_ = false;
  int num_recorded_ = 0;
  bool is_first_since_wait_ = true;
  std::deque<Batch> running_;
  std::vector<VkCommandBuffer> spare_commands_;
  std::vector<VkDescriptorPool> spare_pools_;
  std::vector<Access> reads_, writes_;  // since the last barrier

  Block* staging_ = nullptr;
  uint64_t staging_begin_ = 0, staging_end_ = 0;  // of the ring, ever growing
  Block* readback_ = nullptr;

  VkPipelineCache pipeline_cache_ = VK_NULL_HANDLE;
  int num_new_pipelines_ = 0;
  Counters counters_;
};

// The folder that pipeline caches are kept in; nothing is kept before this is called.
void SetCacheFolder(const std::string& folder);
// Write the pipeline cache of every device that has new ones.
void SaveAllPipelines();

}  // namespace everycast::vulkan
#endif  // EVERYCAST_VULKAN_DEVICE_H_
