#include "instance.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace everycast::vulkan {
namespace {

constexpr const char* kValidationLayer = "VK_LAYER_KHRONOS_validation";
constexpr const char* kChoice = "EVERYCAST_VULKAN_DEVICE";
constexpr const char* kValidation = "EVERYCAST_VULKAN_VALIDATION";
// 0 treats a device that shares the host's memory like one that does not (for tests).
constexpr const char* kUnified = "EVERYCAST_VULKAN_UNIFIED";

PFN_vkGetInstanceProcAddr OpenLoader() {
#ifdef __APPLE__
  const char* names[] = {"libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"};
#else
  const char* names[] = {"libvulkan.so.1", "libvulkan.so"};
#endif
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
      return reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
    }
  }
  return nullptr;
}

VKAPI_ATTR VkBool32 VKAPI_CALL Report(VkDebugUtilsMessageSeverityFlagBitsEXT,
                                      VkDebugUtilsMessageTypeFlagsEXT,
                                      const VkDebugUtilsMessengerCallbackDataEXT* data, void*) {
  std::fprintf(stderr, "Vulkan validation: %s\n", data->pMessage);
  return VK_FALSE;
}

int Rank(VkPhysicalDeviceType type) {
  switch (type) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return 0;
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return 1;
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return 2;
    default:
      return 3;
  }
}

}  // namespace

bool IsWished(const char* variable, bool otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == '\0' ? otherwise : std::strcmp(value, "0") != 0;
}

bool PhysicalDevice::Has(const char* extension) const {
  return std::find(extensions.begin(), extensions.end(), extension) != extensions.end();
}

bool PhysicalDevice::IsUnified() const {
  if (!IsWished(kUnified, true)) return false;
  return properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU ||
         properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

const char* PhysicalDevice::TypeName() const {
  const char* names[] = {"discrete", "integrated", "virtual", "cpu"};
  return names[Rank(properties.deviceType)];
}

uint64_t PhysicalDevice::MaxTensorBytes() const {
  uint64_t allocation = maintenance3.maxMemoryAllocationSize;
  // Mesa's llvmpipe reports a limit of its OpenGL side, 128 MB, and heeds it nowhere. The validation
  // layer does.
  bool is_cpu = properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
  if (is_cpu && !IsWished(kValidation, false)) return allocation;
  return std::min<uint64_t>(allocation, properties.limits.maxStorageBufferRange);
}

Instance& Instance::Get() {
  // Never destroyed: tensors may outlive every static object.
  static Instance* instance = new Instance();
  return *instance;
}

Instance::Instance() {
  Load();
  FindDevices();
  PutChosenFirst();
}

void Instance::Load() {
  global.GetInstanceProcAddr = OpenLoader();
  if (global.GetInstanceProcAddr == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "this machine has no Vulkan loader (libvulkan.so.1); install the driver of the GPU, or "
           "on Debian: apt install libvulkan1 mesa-vulkan-drivers";
  }
#define EVERYCAST_VK_LOAD(name) \
  global.name =                 \
      reinterpret_cast<PFN_vk##name>(global.GetInstanceProcAddr(nullptr, "vk" #name));
  EVERYCAST_VK_GLOBAL(EVERYCAST_VK_LOAD)
#undef EVERYCAST_VK_LOAD
  VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
  application.pApplicationName = "everycast";
  application.apiVersion = VK_API_VERSION_1_2;
  std::vector<const char*> layers, extensions;
  bool validates = IsWished(kValidation, false);
  if (validates) {
    layers.push_back(kValidationLayer);
    extensions.push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
  }
  VkInstanceCreateInfo info{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
  info.pApplicationInfo = &application;
#ifdef __APPLE__
  // Devices that lack a part of Vulkan, as all of macOS do, are listed on request only.
  extensions.push_back(VK_KHR_PORTABILITY_ENUMERATION_EXTENSION_NAME);
  info.flags = VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
#endif
  info.enabledLayerCount = static_cast<uint32_t>(layers.size());
  info.ppEnabledLayerNames = layers.data();
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  VkResult result = global.CreateInstance(&info, nullptr, &handle);
  if (result == VK_ERROR_LAYER_NOT_PRESENT) {
    TVM_FFI_THROW(RuntimeError) << kValidation << " is set, but " << kValidationLayer
                                << " is not installed; on Debian: apt install "
                                   "vulkan-validationlayers";
  }
  if (result != VK_SUCCESS) {
    TVM_FFI_THROW(RuntimeError) << "Vulkan does not start (vkCreateInstance gives " << result
                                << "); no driver may be installed; on Debian: apt install "
                                   "mesa-vulkan-drivers";
  }
#define EVERYCAST_VK_LOAD(name) \
  functions.name = reinterpret_cast<PFN_vk##name>(global.GetInstanceProcAddr(handle, "vk" #name));
  EVERYCAST_VK_INSTANCE(EVERYCAST_VK_LOAD)
  if (validates) {
    EVERYCAST_VK_LOAD(CreateDebugUtilsMessengerEXT)
    VkDebugUtilsMessengerCreateInfoEXT messenger{
        VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT};
    messenger.messageSeverity = VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT |
                                VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT;
    messenger.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
    messenger.pfnUserCallback = Report;
    VkDebugUtilsMessengerEXT ignored;
    functions.CreateDebugUtilsMessengerEXT(handle, &messenger, nullptr, &ignored);
  }
#undef EVERYCAST_VK_LOAD
}

void Instance::FindDevices() {
  uint32_t count = 0;
  functions.EnumeratePhysicalDevices(handle, &count, nullptr);
  std::vector<VkPhysicalDevice> handles(count);
  functions.EnumeratePhysicalDevices(handle, &count, handles.data());
  for (VkPhysicalDevice physical : handles) {
    PhysicalDevice device;
    device.handle = physical;
    uint32_t num_extensions = 0;
    functions.EnumerateDeviceExtensionProperties(physical, nullptr, &num_extensions, nullptr);
    std::vector<VkExtensionProperties> extensions(num_extensions);
    functions.EnumerateDeviceExtensionProperties(physical, nullptr, &num_extensions,
                                                 extensions.data());
    for (const VkExtensionProperties& extension : extensions) {
      device.extensions.emplace_back(extension.extensionName);
    }
    device.subgroup.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES;
    device.maintenance3.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES;
    device.subgroup_size.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES;
    device.driver.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES;
    VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
    properties.pNext = &device.driver;
    device.driver.pNext = &device.subgroup;
    device.subgroup.pNext = &device.maintenance3;
    if (device.Has(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME)) {
      device.maintenance3.pNext = &device.subgroup_size;
    }
    functions.GetPhysicalDeviceProperties2(physical, &properties);
    device.properties = properties.properties;
    if (device.properties.apiVersion < VK_API_VERSION_1_2) continue;
    device.features11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES;
    device.features12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
    features.pNext = &device.features11;
    device.features11.pNext = &device.features12;
    VkPhysicalDeviceSubgroupSizeControlFeatures sizes{
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES};
    VkPhysicalDeviceShaderIntegerDotProductFeatures dots{
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES};
    if (device.Has(VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME)) {
      device.features12.pNext = &dots;
    }
    if (device.Has(VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME)) {
      sizes.pNext = device.features12.pNext;
      device.features12.pNext = &sizes;
    }
    functions.GetPhysicalDeviceFeatures2(physical, &features);
    device.has_integer_dot_product = dots.shaderIntegerDotProduct != 0;
    device.can_choose_subgroup_size =
        sizes.subgroupSizeControl != 0 && (device.subgroup_size.requiredSubgroupSizeStages &
                                           VK_SHADER_STAGE_COMPUTE_BIT) != 0;
    device.features = features.features;
    // These chains were for the queries only.
    device.driver.pNext = device.subgroup.pNext = device.maintenance3.pNext = nullptr;
    device.features11.pNext = device.features12.pNext = nullptr;
    uint32_t num_families = 0;
    functions.GetPhysicalDeviceQueueFamilyProperties(physical, &num_families, nullptr);
    std::vector<VkQueueFamilyProperties> families(num_families);
    functions.GetPhysicalDeviceQueueFamilyProperties(physical, &num_families, families.data());
    // A family for compute alone does not compete with what the screen shows.
    int best = -1;
    for (uint32_t i = 0; i < num_families; ++i) {
      if ((families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) == 0) continue;
      bool is_alone = (families[i].queueFlags & VK_QUEUE_GRAPHICS_BIT) == 0;
      if (best < 0 || is_alone) best = static_cast<int>(i);
      if (is_alone) break;
    }
    if (best < 0 || !device.features12.timelineSemaphore) continue;
    device.queue_family = static_cast<uint32_t>(best);
    devices.push_back(std::move(device));
  }
  std::stable_sort(devices.begin(), devices.end(), [](const auto& a, const auto& b) {
    return Rank(a.properties.deviceType) < Rank(b.properties.deviceType);
  });
}

void Instance::PutChosenFirst() {
  const char* wish = std::getenv(kChoice);
  if (wish == nullptr || *wish == '\0') return;
  char* end = nullptr;
  unsigned long number = std::strtoul(wish, &end, 10);
  std::string names;
  for (size_t i = 0; i < devices.size(); ++i) {
    const char* name = devices[i].properties.deviceName;
    names += (i ? ", " : "") + std::to_string(i) + " (" + name + ")";
    if (*end == '\0' ? i == number : std::strstr(name, wish) != nullptr) {
      std::rotate(devices.begin(), devices.begin() + i, devices.begin() + i + 1);
      return;
    }
  }
  TVM_FFI_THROW(ValueError) << kChoice << " is '" << wish << "', but the devices are: "
                            << (names.empty() ? "none" : names);
}

}  // namespace everycast::vulkan
