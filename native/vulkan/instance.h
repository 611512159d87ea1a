// The Vulkan loader of this machine and the devices behind it, best first.
#ifndef EVERYCAST_VULKAN_INSTANCE_H_
#define EVERYCAST_VULKAN_INSTANCE_H_

#include <string>
#include <vector>

#include "vulkan_functions.h"

namespace everycast::vulkan {

// Whether an environment variable says yes; `otherwise` where it is not set.
bool IsWished(const char* variable, bool otherwise);

// What is known of a device before it is opened.
struct PhysicalDevice {
  VkPhysicalDevice handle = VK_NULL_HANDLE;
  VkPhysicalDeviceProperties properties{};
  VkPhysicalDeviceDriverProperties driver{};
  VkPhysicalDeviceSubgroupProperties subgroup{};
  VkPhysicalDeviceMaintenance3Properties maintenance3{};
  // Sizes that a pipeline may ask for, if it may.
  VkPhysicalDeviceSubgroupSizeControlProperties subgroup_size{};
  bool can_choose_subgroup_size = false;
  bool has_integer_dot_product = false;
  VkPhysicalDeviceFeatures features{};
  VkPhysicalDeviceVulkan11Features features11{};
  VkPhysicalDeviceVulkan12Features features12{};
  std::vector<std::string> extensions;
  uint32_t queue_family = 0;

  bool Has(const char* extension) const;
  // Host and device share their memory.
  bool IsUnified() const;
  const char* TypeName() const;
  // Of one binding of a kernel.
  uint64_t MaxTensorBytes() const;
};

class Instance {
 public:
  // Throws, with one line that says what to install, where there is no Vulkan.
  static Instance& Get();

  VkInstance handle = VK_NULL_HANDLE;
  GlobalFunctions global;
  InstanceFunctions functions;
  // Devices that can run kernels: discrete GPUs first, then integrated ones, then the rest;
  // EVERYCAST_VULKAN_DEVICE (a number in this order, or part of a name) puts one in front.
  std::vector<PhysicalDevice> devices;

 private:
  Instance();
  void Load();
  void FindDevices();
  void PutChosenFirst();
};

}  // namespace everycast::vulkan
#endif  // EVERYCAST_VULKAN_INSTANCE_H_
