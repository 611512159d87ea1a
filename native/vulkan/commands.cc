// Commands: recorded in order, submitted together, ordered by barriers where one needs another.
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>

#include "device.h"

namespace everycast::vulkan {
namespace {

// The device starts early, while the host still records; then submissions are few.
constexpr int kFirstSubmission = 32, kLaterSubmissions = 1024;
constexpr uint64_t kStagingBytes = 16 << 20, kStagingPart = kStagingBytes / 4;
constexpr size_t kMaxTracked = 64;
constexpr uint32_t kSetsPerPool = 256, kBuffersPerSet = 8;

}  // namespace

VkCommandBuffer Device::Recording() {
  if (!lost_.empty()) TVM_FFI_THROW(RuntimeError) << lost_;
  if (is_recording_) return current_.commands;
  Reclaim();
  if (spare_commands_.empty()) {
    VkCommandBufferAllocateInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO};
    info.commandPool = command_pool_;
    info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    info.commandBufferCount = 1;
    VkCommandBuffer commands;
    Check(vk_.AllocateCommandBuffers(device_, &info, &commands), "vkAllocateCommandBuffers");
    spare_commands_.push_back(commands);
  }
  current_ = Batch();
  current_.commands = spare_commands_.back();
  VkCommandBufferBeginInfo begin{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  Check(vk_.BeginCommandBuffer(current_.commands, &begin), "vkBeginCommandBuffer");
  spare_commands_.pop_back();
  is_recording_ = true;
  num_recorded_ = 0;
  return current_.commands;
}

void Device::Submit() {
  if (!is_recording_) return;
  // What the host reads after waiting.
  VkMemoryBarrier barrier{VK_STRUCTURE_TYPE_MEMORY_BARRIER};
  barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
  barrier.dstAccessMask = VK_ACCESS_HOST_READ_BIT;
  vk_.CmdPipelineBarrier(current_.commands,
                         VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                         VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier, 0, nullptr, 0, nullptr);
  Check(vk_.EndCommandBuffer(current_.commands), "vkEndCommandBuffer");
  uint64_t value = submitted_ + 1;
  VkTimelineSemaphoreSubmitInfo timeline{VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO};
  timeline.signalSemaphoreValueCount = 1;
  timeline.pSignalSemaphoreValues = &value;
  VkSubmitInfo info{VK_STRUCTURE_TYPE_SUBMIT_INFO};
  info.pNext = &timeline;
  info.commandBufferCount = 1;
  info.pCommandBuffers = &current_.commands;
  info.signalSemaphoreCount = 1;
  info.pSignalSemaphores = &timeline_;
  Check(vk_.QueueSubmit(queue_, 1, &info, VK_NULL_HANDLE), "vkQueueSubmit");
  submitted_ = current_.value = value;
  current_.staging_end = staging_end_;
  running_.push_back(std::move(current_));
  is_recording_ = false;
  is_first_since_wait_ = false;
  ++counters_.submissions;
}

void Device::WaitFor(uint64_t value) {
  if (value > completed_) {
    VkSemaphoreWaitInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO};
    info.semaphoreCount = 1;
    info.pSemaphores = &timeline_;
    info.pValues = &value;
    Check(vk_.WaitSemaphores(device_, &info, UINT64_MAX), "vkWaitSemaphores");
    ++counters_.waits;
  }
  Reclaim();
}

void Device::Reclaim() {
  if (completed_ < submitted_) {
    Check(vk_.GetSemaphoreCounterValue(device_, timeline_, &completed_),
          "vkGetSemaphoreCounterValue");
  }
  while (!running_.empty() && running_.front().value <= completed_) {
    Batch& batch = running_.front();
    for (VkDescriptorPool pool : batch.pools) {
      vk_.ResetDescriptorPool(device_, pool, 0);
      spare_pools_.push_back(pool);
    }
    spare_commands_.push_back(batch.commands);
    staging_begin_ = batch.staging_end;
    running_.pop_front();
  }
  while (!dead_blocks_.empty() && dead_blocks_.front().first <= completed_) {
    DestroyBlock(dead_blocks_.front().second);
    dead_blocks_.pop_front();
  }
}

void Device::SynchronizeLocked() {
  Submit();
  WaitFor(submitted_);
  is_first_since_wait_ = true;
}

void Device::Synchronize() {
  std::lock_guard<std::mutex> lock(mutex_);
  SynchronizeLocked();
}

void Device::Order(const std::vector<Access>& reads, const std::vector<Access>& writes) {
  auto overlap = [](const std::vector<Access>& a, const std::vector<Access>& b) {
    for (const Access& x : a) {
      for (const Access& y : b) {
        if (x.block == y.block && x.begin < y.end && y.begin < x.end) return true;
      }
    }
    return false;
  };
  if (overlap(reads, writes_) || overlap(writes, writes_) || overlap(writes, reads_) ||
      reads_.size() + writes_.size() > kMaxTracked) {
    VkMemoryBarrier barrier{VK_STRUCTURE_TYPE_MEMORY_BARRIER};
    barrier.srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    barrier.dstAccessMask = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT |
                            VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
    VkPipelineStageFlags stages =
        VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
    vk_.CmdPipelineBarrier(Recording(), stages, stages, 0, 1, &barrier, 0, nullptr, 0, nullptr);
    reads_.clear();
    writes_.clear();
    ++counters_.barriers;
  }
  reads_.insert(reads_.end(), reads.begin(), reads.end());
  writes_.insert(writes_.end(), writes.begin(), writes.end());
}

void Device::RecordCopy(const Region& target, const Region& source, uint64_t num_bytes) {
  VkCommandBuffer commands = Recording();
  Order({{source.block, source.offset, source.offset + num_bytes}},
        {{target.block, target.offset, target.offset + num_bytes}});
  VkBufferCopy copy{source.offset, target.offset, num_bytes};
  vk_.CmdCopyBuffer(commands, source.buffer(), target.buffer(), 1, &copy);
}

Region Device::Stage(uint64_t num_bytes) {
  if (staging_ == nullptr) staging_ = MakeBlock(kStagingBytes, staging_type_, true, kStagingBytes);
  uint64_t begin = (staging_end_ + alignment_ - 1) / alignment_ * alignment_;
  // A part lies in one piece: what is left at the ring's end is skipped.
  if (begin % kStagingBytes + num_bytes > kStagingBytes) {
    begin = (begin / kStagingBytes + 1) * kStagingBytes;
  }
  while (begin + num_bytes - staging_begin_ > kStagingBytes) {
    // Bytes are in use by commands that run, or are recorded only.
    if (running_.empty()) Submit();
    if (running_.empty()) {
      staging_begin_ = begin;
    } else {
      WaitFor(running_.front().value);
    }
  }
  staging_end_ = begin + num_bytes;
  return {staging_, begin % kStagingBytes, num_bytes};
}

void Device::CopyToDevice(void* target, const void* source, uint64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_bytes == 0) return;
  Region region = FindLocked(target);
  Reclaim();
  bool is_idle = !is_recording_ && completed_ == submitted_;
  if (region.block->mapped != nullptr && is_idle) {
    std::memcpy(region.host(), source, num_bytes);
    return;
  }
  for (uint64_t done = 0; done < num_bytes; done += kStagingPart) {
    uint64_t count = std::min(kStagingPart, num_bytes - done);
    Region part = Stage(count);
    std::memcpy(part.host(), static_cast<const char*>(source) + done, count);
    RecordCopy({region.block, region.offset + done, count}, part, count);
    // The device copies one part while the host fills the next.
    if (count == kStagingPart) Submit();
  }
}

void Device::CopyToHost(void* target, const void* source, uint64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_bytes == 0) return;
  Region region = FindLocked(source);
  if (region.block->mapped != nullptr) {
    SynchronizeLocked();
    std::memcpy(target, region.host(), num_bytes);
    return;
  }
  if (readback_ == nullptr) {
    readback_ = MakeBlock(kStagingBytes, readback_type_, true, kStagingBytes);
  }
  for (uint64_t done = 0; done < num_bytes; done += kStagingBytes) {
    uint64_t count = std::min(kStagingBytes, num_bytes - done);
    RecordCopy({readback_, 0, count}, {region.block, region.offset + done, count}, count);
    SynchronizeLocked();
    std::memcpy(static_cast<char*>(target) + done, readback_->mapped, count);
  }
}

void Device::CopyOnDevice(void* target, const void* source, uint64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_bytes == 0 || target == source) return;
  RecordCopy(FindLocked(target), FindLocked(source), num_bytes);
}

VkDescriptorSet Device::MakeDescriptorSet(const Pipeline& pipeline) {
  for (int attempt = 0;; ++attempt) {
    if (attempt > 0 || current_.pools.empty()) {
      if (spare_pools_.empty()) {
        VkDescriptorPoolSize sizes[] = {
            {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, kSetsPerPool * kBuffersPerSet},
            {VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER, kSetsPerPool}};
        VkDescriptorPoolCreateInfo info{VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO};
        info.maxSets = kSetsPerPool;
        info.poolSizeCount = 2;
        info.pPoolSizes = sizes;
        VkDescriptorPool pool;
        Check(vk_.CreateDescriptorPool(device_, &info, nullptr, &pool), "vkCreateDescriptorPool");
        spare_pools_.push_back(pool);
      }
      current_.pools.push_back(spare_pools_.back());
      spare_pools_.pop_back();
    }
    VkDescriptorSetAllocateInfo info{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO};
    info.descriptorPool = current_.pools.back();
    info.descriptorSetCount = 1;
    info.pSetLayouts = &pipeline.set_layout;
    VkDescriptorSet set;
    VkResult result = vk_.AllocateDescriptorSets(device_, &info, &set);
    bool is_full = result == VK_ERROR_OUT_OF_POOL_MEMORY || result == VK_ERROR_FRAGMENTED_POOL;
    if (is_full && attempt == 0) continue;
    Check(result, "vkAllocateDescriptorSets");
    return set;
  }
}

void Device::Record(const Dispatch& dispatch) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Pipeline& pipeline = *dispatch.pipeline;
  std::vector<Region> buffers = dispatch.buffers;
  if (dispatch.in_uniform_buffer) {
    buffers.push_back(Stage(dispatch.scalars.size()));
    std::memcpy(buffers.back().host(), dispatch.scalars.data(), dispatch.scalars.size());
  }
  VkCommandBuffer commands = Recording();
  std::vector<Access> reads, writes;
  for (size_t i = 0; i < dispatch.buffers.size(); ++i) {
    const Region& region = buffers[i];
    Access access{region.block, region.offset, region.offset + region.size};
    if (dispatch.is_read[i]) reads.push_back(access);
    if (dispatch.is_written[i]) writes.push_back(access);
  }
  Order(reads, writes);
  vk_.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  std::vector<VkDescriptorBufferInfo> infos(buffers.size());
  std::vector<VkWriteDescriptorSet> updates(buffers.size(),
                                            {VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET});
  VkDescriptorSet set = VK_NULL_HANDLE;
  if (!pipeline.pushes_descriptors) set = MakeDescriptorSet(pipeline);
  for (size_t i = 0; i < buffers.size(); ++i) {
    infos[i] = {buffers[i].buffer(), buffers[i].offset, buffers[i].size};
    updates[i].dstSet = set;
    updates[i].dstBinding = static_cast<uint32_t>(i);
    updates[i].descriptorCount = 1;
    updates[i].descriptorType = i < dispatch.buffers.size() ? VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
                                                            : VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER;
    updates[i].pBufferInfo = &infos[i];
  }
  uint32_t count = static_cast<uint32_t>(updates.size());
  if (pipeline.pushes_descriptors) {
    vk_.CmdPushDescriptorSetKHR(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, count,
                                updates.data());
  } else {
    vk_.UpdateDescriptorSets(device_, count, updates.data(), 0, nullptr);
    vk_.CmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.layout, 0, 1, &set,
                              0, nullptr);
  }
  if (!dispatch.in_uniform_buffer && !dispatch.scalars.empty()) {
    vk_.CmdPushConstants(commands, pipeline.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                         static_cast<uint32_t>(dispatch.scalars.size()), dispatch.scalars.data());
  }
  vk_.CmdDispatch(commands, dispatch.grid[0], dispatch.grid[1], dispatch.grid[2]);
  ++counters_.dispatches;
  if (++num_recorded_ >= (is_first_since_wait_ ? kFirstSubmission : kLaterSubmissions)) Submit();
}

}  // namespace everycast::vulkan
