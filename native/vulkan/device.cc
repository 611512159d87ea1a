// Opening a device, and its pipelines.
#include "device.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

namespace everycast::vulkan {
namespace {

std::string& CacheFolder() {
  static std::string folder;
  return folder;
}

// The part of a device's features that kernels may use, by SPIR-V's number of the capability.
struct Capability {
  uint32_t number;
  const char* what;
  bool is_there;
};

std::vector<Capability> Capabilities(const PhysicalDevice& d) {
  VkSubgroupFeatureFlags groups = d.subgroup.supportedOperations;
  bool in_compute = (d.subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0;
  auto subgroup = [&](VkSubgroupFeatureFlagBits bit) { return in_compute && (groups & bit) != 0; };
  return {
      {9, "16-bit floats", d.features12.shaderFloat16 != 0},
      {10, "64-bit floats", d.features.shaderFloat64 != 0},
      {11, "64-bit integers", d.features.shaderInt64 != 0},
      {22, "16-bit integers", d.features.shaderInt16 != 0},
      {39, "8-bit integers", d.features12.shaderInt8 != 0},
      {61, "subgroups", subgroup(VK_SUBGROUP_FEATURE_BASIC_BIT)},
      {62, "subgroup votes", subgroup(VK_SUBGROUP_FEATURE_VOTE_BIT)},
      {63, "subgroup arithmetic", subgroup(VK_SUBGROUP_FEATURE_ARITHMETIC_BIT)},
      {64, "subgroup ballots", subgroup(VK_SUBGROUP_FEATURE_BALLOT_BIT)},
      {65, "subgroup shuffles", subgroup(VK_SUBGROUP_FEATURE_SHUFFLE_BIT)},
      {4433, "buffers of 16-bit values", d.features11.storageBuffer16BitAccess != 0},
      {4434, "uniform buffers of 16-bit values",
       d.features11.uniformAndStorageBuffer16BitAccess != 0},
      {4448, "buffers of 8-bit values", d.features12.storageBuffer8BitAccess != 0},
      {4449, "uniform buffers of 8-bit values",
       d.features12.uniformAndStorageBuffer8BitAccess != 0},
  };
}

// Calls `visit` with each capability that a module declares: they come first in it
// (SPIR-V specification, 2.3 and 2.4).
template <typename Visit>
void VisitCapabilities(const std::string& spirv, Visit visit) {
  constexpr size_t kHeaderWords = 5;
  constexpr uint32_t kOpCapability = 17;
  std::vector<uint32_t> words(spirv.size() / 4);
  std::memcpy(words.data(), spirv.data(), words.size() * 4);
  for (size_t i = kHeaderWords; i + 1 < words.size() && (words[i] & 0xffff) == kOpCapability;
       i += 2) {
    visit(words[i + 1]);
  }
}

std::mutex& OpenMutex() {
  static std::mutex mutex;
  return mutex;
}

// Never destroyed: tensors may outlive every static object.
std::map<int, Device*>& OpenDevices() {
  static auto* devices = new std::map<int, Device*>();
  return *devices;
}

}  // namespace

void SetCacheFolder(const std::string& folder) { CacheFolder() = folder; }

bool Device::Exists(int id) {
  return id >= 0 && static_cast<size_t>(id) < Instance::Get().devices.size();
}

void SaveAllPipelines() {
  std::lock_guard<std::mutex> lock(OpenMutex());
  for (auto& [id, device] : OpenDevices()) {
    if (device != nullptr) device->SavePipelines();
  }
}

Device& Device::Get(int id) {
  std::lock_guard<std::mutex> lock(OpenMutex());
  Device*& device = OpenDevices()[id];
  if (device == nullptr) {
    if (!Exists(id)) {
      size_t count = Instance::Get().devices.size();
      TVM_FFI_THROW(RuntimeError) << "there is no Vulkan device " << id << "; this machine has "
                                  << count << " with Vulkan 1.2 and a compute queue"
                                  << (count ? "" : "; install the driver of the GPU, or on Debian: "
                                                   "apt install mesa-vulkan-drivers");
    }
    device = new Device(Instance::Get().devices[id]);
  }
  return *device;
}

Device::Device(const PhysicalDevice& physical) : physical_(physical) {
  Open();
  ChooseMemoryTypes();
  OpenPipelineCache();
}

void Device::Check(VkResult result, const char* what) {
  if (result >= 0) return;
  const char* name = physical_.properties.deviceName;
  if (result == VK_ERROR_DEVICE_LOST) {
    lost_ = std::string("the Vulkan device ") + name +
            " was lost (reset by its driver, often because one kernel ran too long); start the "
            "program again";
  }
  if (!lost_.empty()) TVM_FFI_THROW(RuntimeError) << lost_;
  TVM_FFI_THROW(RuntimeError) << what << " gives " << result << " on the Vulkan device " << name
                              << (result == VK_ERROR_OUT_OF_HOST_MEMORY
                                      ? ": the host has no memory left"
                                      : "");
}

void Device::Open() {
  const InstanceFunctions& instance = Instance::Get().functions;
  VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  features.features.shaderFloat64 = physical_.features.shaderFloat64;
  features.features.shaderInt64 = physical_.features.shaderInt64;
  features.features.shaderInt16 = physical_.features.shaderInt16;
  VkPhysicalDeviceVulkan11Features features11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  features11.storageBuffer16BitAccess = physical_.features11.storageBuffer16BitAccess;
  features11.uniformAndStorageBuffer16BitAccess =
      physical_.features11.uniformAndStorageBuffer16BitAccess;
  VkPhysicalDeviceVulkan12Features features12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  features12.storageBuffer8BitAccess = physical_.features12.storageBuffer8BitAccess;
  features12.uniformAndStorageBuffer8BitAccess =
      physical_.features12.uniformAndStorageBuffer8BitAccess;
  features12.shaderFloat16 = physical_.features12.shaderFloat16;
  features12.shaderInt8 = physical_.features12.shaderInt8;
  features12.shaderSubgroupExtendedTypes = physical_.features12.shaderSubgroupExtendedTypes;
  features12.timelineSemaphore = VK_TRUE;
  features.pNext = &features11;
  features11.pNext = &features12;
  VkPhysicalDeviceSubgroupSizeControlFeatures sizes{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES};
  std::vector<const char*> extensions;
  auto enable = [&](const char* name) {
    if (physical_.Has(name)) extensions.push_back(name);
    return physical_.Has(name);
  };
  if (physical_.can_choose_subgroup_size) {
    enable(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME);
    sizes.subgroupSizeControl = VK_TRUE;
    features12.pNext = &sizes;
  }
  bool has_push = enable(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME);
  has_budget_ = enable(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
  enable("VK_KHR_portability_subset");  // a device that has it wants it enabled
  float priority = 1.0f;
  VkDeviceQueueCreateInfo queue{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
  queue.queueFamilyIndex = physical_.queue_family;
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  VkDeviceCreateInfo info{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO};
  info.pNext = &features;
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue;
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  Check(instance.CreateDevice(physical_.handle, &info, nullptr, &device_), "vkCreateDevice");
#define EVERYCAST_VK_LOAD(name) \
  vk_.name = reinterpret_cast<PFN_vk##name>(instance.GetDeviceProcAddr(device_, "vk" #name));
  EVERYCAST_VK_DEVICE(EVERYCAST_VK_LOAD)
  if (has_push && IsWished("EVERYCAST_VULKAN_PUSH_DESCRIPTORS", true)) {
    EVERYCAST_VK_LOAD(CmdPushDescriptorSetKHR)
    VkPhysicalDevicePushDescriptorPropertiesKHR push{
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PUSH_DESCRIPTOR_PROPERTIES_KHR};
    VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
    properties.pNext = &push;
    instance.GetPhysicalDeviceProperties2(physical_.handle, &properties);
    max_push_descriptors_ = push.maxPushDescriptors;
  }
#undef EVERYCAST_VK_LOAD
  vk_.GetDeviceQueue(device_, physical_.queue_family, 0, &queue_);
  VkCommandPoolCreateInfo pool{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
  pool.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
  pool.queueFamilyIndex = physical_.queue_family;
  Check(vk_.CreateCommandPool(device_, &pool, nullptr, &command_pool_), "vkCreateCommandPool");
  VkSemaphoreTypeCreateInfo type{VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO};
  type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  VkSemaphoreCreateInfo semaphore{VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO};
  semaphore.pNext = &type;
  Check(vk_.CreateSemaphore(device_, &semaphore, nullptr, &timeline_), "vkCreateSemaphore");
}

uint32_t Device::CheckNeeds(const PipelineNeeds& needs, const std::string& spirv) const {
  const char* device = physical_.properties.deviceName;
  std::vector<Capability> known = Capabilities(physical_);
  VisitCapabilities(spirv, [&](uint32_t number) {
    for (const Capability& capability : known) {
      if (capability.number == number && !capability.is_there) {
        TVM_FFI_THROW(RuntimeError) << "kernel '" << needs.name << "' needs " << capability.what
                                    << ", which the Vulkan device " << device << " lacks";
      }
    }
  });
  const VkPhysicalDeviceLimits& limits = physical_.properties.limits;
  auto check = [&](uint32_t wanted, uint32_t limit, const char* what) {
    if (wanted <= limit) return;
    TVM_FFI_THROW(RuntimeError) << "kernel '" << needs.name << "' wants " << wanted << " " << what
                                << ", but the Vulkan device " << device << " has " << limit;
  };
  check(needs.num_buffers, limits.maxPerStageDescriptorStorageBuffers, "buffers");
  check(needs.num_threads, limits.maxComputeWorkGroupInvocations, "threads in a work group");
  check(needs.shared_bytes, limits.maxComputeSharedMemorySize, "bytes of shared memory");
  if (needs.subgroup_width <= 1) return 0;
  // A multiple will do: lanes exchange values in groups of the kernel's width.
  const auto& sizes = physical_.subgroup_size;
  uint32_t wanted = std::max(needs.subgroup_width, sizes.minSubgroupSize);
  if (physical_.can_choose_subgroup_size && wanted <= sizes.maxSubgroupSize) return wanted;
  if (physical_.subgroup.subgroupSize % needs.subgroup_width != 0) {
    TVM_FFI_THROW(RuntimeError)
        << "kernel '" << needs.name << "' exchanges values among " << needs.subgroup_width
        << " threads, but a subgroup of the Vulkan device " << device << " has "
        << physical_.subgroup.subgroupSize << "; compile the model for this device";
  }
  return 0;
}

Pipeline Device::MakePipeline(const PipelineNeeds& needs, const std::string& spirv) {
  std::lock_guard<std::mutex> lock(mutex_);
  VkPipelineShaderStageRequiredSubgroupSizeCreateInfo size{
      VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO};
  size.requiredSubgroupSize = CheckNeeds(needs, spirv);
  Pipeline pipeline;
  std::vector<VkDescriptorSetLayoutBinding> bindings;
  for (uint32_t i = 0; i < needs.num_buffers + needs.has_uniform_buffer; ++i) {
    VkDescriptorType type = i < needs.num_buffers ? VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
                                            : VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER;
    bindings.push_back({i, type, 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr});
  }
  VkDescriptorSetLayoutCreateInfo set{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO};
  pipeline.pushes_descriptors = bindings.size() <= max_push_descriptors_;
  if (pipeline.pushes_descriptors) {
    set.flags = VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR;
  }
  set.bindingCount = static_cast<uint32_t>(bindings.size());
  set.pBindings = bindings.data();
  Check(vk_.CreateDescriptorSetLayout(device_, &set, nullptr, &pipeline.set_layout),
        "vkCreateDescriptorSetLayout");
  VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, needs.num_push_bytes};
  VkPipelineLayoutCreateInfo layout{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
  layout.setLayoutCount = 1;
  layout.pSetLayouts = &pipeline.set_layout;
  layout.pushConstantRangeCount = needs.num_push_bytes > 0;
  layout.pPushConstantRanges = &range;
  Check(vk_.CreatePipelineLayout(device_, &layout, nullptr, &pipeline.layout),
        "vkCreatePipelineLayout");

  std::vector<uint32_t> words(spirv.size() / 4);
  std::memcpy(words.data(), spirv.data(), words.size() * 4);
  VkShaderModuleCreateInfo code{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
  code.codeSize = words.size() * 4;
  code.pCode = words.data();
  VkShaderModule shader;
  Check(vk_.CreateShaderModule(device_, &code, nullptr, &shader), "vkCreateShaderModule");
  VkComputePipelineCreateInfo info{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
  info.layout = pipeline.layout;
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = shader;
  info.stage.pName = "main";
  if (size.requiredSubgroupSize != 0) info.stage.pNext = &size;
  VkResult result =
      vk_.CreateComputePipelines(device_, pipeline_cache_, 1, &info, nullptr, &pipeline.handle);
  vk_.DestroyShaderModule(device_, shader, nullptr);
  Check(result, ("making a pipeline of kernel '" + needs.name + "'").c_str());
  ++counters_.pipelines;
  ++num_new_pipelines_;
  return pipeline;
}

void Device::DestroyPipeline(const Pipeline& pipeline) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!lost_.empty()) return;
  SynchronizeLocked();
  vk_.DestroyPipeline(device_, pipeline.handle, nullptr);
  vk_.DestroyPipelineLayout(device_, pipeline.layout, nullptr);
  vk_.DestroyDescriptorSetLayout(device_, pipeline.set_layout, nullptr);
}

std::string Device::PipelineCacheFile() const {
  if (CacheFolder().empty()) return "";
  const VkPhysicalDeviceProperties& properties = physical_.properties;
  char name[2 * VK_UUID_SIZE + 1];
  for (size_t i = 0; i < VK_UUID_SIZE; ++i) {
    std::snprintf(name + 2 * i, 3, "%02x", properties.pipelineCacheUUID[i]);
  }
  return CacheFolder() + "/" + std::to_string(properties.vendorID) + "-" +
         std::to_string(properties.deviceID) + "-" + std::to_string(properties.driverVersion) +
         "-" + name + ".bin";
}

void Device::OpenPipelineCache() {
  std::string data;
  if (std::string file = PipelineCacheFile(); !file.empty()) {
    std::ifstream stream(file, std::ios::binary);
    data.assign(std::istreambuf_iterator<char>(stream), {});
  }
  VkPipelineCacheCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO};
  info.initialDataSize = data.size();
  info.pInitialData = data.data();
  // Drivers check the data, and start anew if it is not theirs.
  Check(vk_.CreatePipelineCache(device_, &info, nullptr, &pipeline_cache_), "vkCreatePipelineCache");
}

void Device::SavePipelines() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string file = PipelineCacheFile();
  if (file.empty() || num_new_pipelines_ == 0 || !lost_.empty()) return;
  num_new_pipelines_ = 0;
  size_t size = 0;
  if (vk_.GetPipelineCacheData(device_, pipeline_cache_, &size, nullptr) != VK_SUCCESS) return;
  std::string data(size, '\0');
  if (vk_.GetPipelineCacheData(device_, pipeline_cache_, &size, data.data()) != VK_SUCCESS) return;
  // Another process may write the same file: each writes its own, and renames it.
  char process[32];
  std::snprintf(process, sizeof process, ".%p.tmp", static_cast<void*>(this));
  std::string temporary = file + process;
  bool is_written = false;
  {
    std::ofstream stream(temporary, std::ios::binary);
    stream.write(data.data(), static_cast<std::streamsize>(size));
    is_written = stream.good();
  }
  // A cache that is not kept is made again.
  if (!is_written || std::rename(temporary.c_str(), file.c_str()) != 0) {
    std::remove(temporary.c_str());
  }
}

Counters Device::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

}  // namespace everycast::vulkan
