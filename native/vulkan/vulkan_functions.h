// Vulkan's functions, found at run time: a machine without Vulkan gets a message, not a load error.
#ifndef EVERYCAST_VULKAN_FUNCTIONS_H_
#define EVERYCAST_VULKAN_FUNCTIONS_H_

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#define EVERYCAST_VK_GLOBAL(X)                                                       \
  X(CreateInstance) X(EnumerateInstanceVersion) X(EnumerateInstanceLayerProperties) \
  X(EnumerateInstanceExtensionProperties)

#define EVERYCAST_VK_INSTANCE(X)                                                    \
  X(EnumeratePhysicalDevices) X(GetPhysicalDeviceProperties2)                      \
  X(GetPhysicalDeviceFeatures2) X(GetPhysicalDeviceMemoryProperties2)              \
  X(GetPhysicalDeviceQueueFamilyProperties) X(EnumerateDeviceExtensionProperties) \
  X(CreateDevice) X(GetDeviceProcAddr)

#define EVERYCAST_VK_DEVICE(X)                                                              \
  X(GetDeviceQueue) X(QueueSubmit) X(AllocateMemory) X(FreeMemory) X(MapMemory)            \
  X(CreateBuffer) X(DestroyBuffer) X(GetBufferMemoryRequirements) X(BindBufferMemory)      \
  X(CreateShaderModule) X(DestroyShaderModule) X(CreateDescriptorSetLayout)                \
  X(DestroyDescriptorSetLayout) X(CreatePipelineLayout) X(DestroyPipelineLayout)           \
  X(CreateComputePipelines) X(DestroyPipeline) X(CreatePipelineCache) X(GetPipelineCacheData) \
  X(CreateDescriptorPool) X(ResetDescriptorPool) X(AllocateDescriptorSets)                 \
  X(UpdateDescriptorSets) X(CreateCommandPool) X(AllocateCommandBuffers)                   \
  X(BeginCommandBuffer) X(EndCommandBuffer) X(CmdBindPipeline) X(CmdBindDescriptorSets)    \
  X(CmdPushConstants) X(CmdDispatch) X(CmdCopyBuffer) X(CmdPipelineBarrier)                \
  X(CreateSemaphore) X(WaitSemaphores) X(GetSemaphoreCounterValue)

namespace everycast::vulkan {

struct GlobalFunctions {
#define EVERYCAST_VK_MEMBER(name) PFN_vk##name name = nullptr;
  EVERYCAST_VK_GLOBAL(EVERYCAST_VK_MEMBER)
  PFN_vkGetInstanceProcAddr GetInstanceProcAddr = nullptr;
};

struct InstanceFunctions {
  EVERYCAST_VK_INSTANCE(EVERYCAST_VK_MEMBER)
  PFN_vkCreateDebugUtilsMessengerEXT CreateDebugUtilsMessengerEXT = nullptr;
};

struct DeviceFunctions {
  EVERYCAST_VK_DEVICE(EVERYCAST_VK_MEMBER)
#undef EVERYCAST_VK_MEMBER
  // Null where the device has no push descriptors.
  PFN_vkCmdPushDescriptorSetKHR CmdPushDescriptorSetKHR = nullptr;
};

}  // namespace everycast::vulkan
#endif  // EVERYCAST_VULKAN_FUNCTIONS_H_
