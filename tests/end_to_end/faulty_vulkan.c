/* A Vulkan loader before the real one, which lets devices lack or do what real ones may.

Compiled as libvulkan.so.1 by `test_vulkan_faults.py`. FAULTY_VULKAN_REAL is the path of the real
loader; FAULTY_VULKAN lists faults by commas:

    gpu            the device calls itself a discrete GPU
    twice          each device is there twice
    none           there is no device
    half=0         no 16-bit floats, neither computed nor stored
    threads=N      most threads of a work group
    shared=N       most bytes of shared memory
    allocation=N   most bytes of an allocation
    heap=N         bytes of memory
    memory=N       the driver refuses to allocate more than N bytes
    submit=N       the Nth submission loses the device
    wait=N         the Nth wait loses the device
*/
#define VK_NO_PROTOTYPES
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

/* The number after `name=`, 1 for a name alone, or -1. */
static long long Fault(const char* name) {
  const char* text = getenv("FAULTY_VULKAN");
  size_t length = strlen(name);
  while (text != NULL && *text != '\0') {
    const char* end = strchr(text, ',');
    if (strncmp(text, name, length) == 0) {
      char next = text[length];
      if (next == '=') return atoll(text + length + 1);
      if (next == '\0' || next == ',') return 1;
    }
    text = end == NULL ? NULL : end + 1;
  }
  return -1;
}
static void Cap(uint32_t* value, const char* fault) {
  if (Fault(fault) >= 0) *value = (uint32_t)Fault(fault);
}

static PFN_vkGetInstanceProcAddr GetReal(void) {
  static void* library;
  if (library == NULL) library = dlopen(getenv("FAULTY_VULKAN_REAL"), RTLD_NOW | RTLD_LOCAL);
  return (PFN_vkGetInstanceProcAddr)dlsym(library, "vkGetInstanceProcAddr");
}

static PFN_vkEnumeratePhysicalDevices enumerate;
static VKAPI_ATTR VkResult VKAPI_CALL Enumerate(VkInstance instance, uint32_t* count,
                                                VkPhysicalDevice* devices) {
  if (Fault("none") > 0) return *count = 0, VK_SUCCESS;
  uint32_t times = Fault("twice") > 0 ? 2 : 1, real = *count / times;
  VkResult result = enumerate(instance, &real, devices);
  if (times == 2 && devices != NULL) memcpy(devices + real, devices, real * sizeof *devices);
  *count = real * times;
  return result;
}

static PFN_vkGetPhysicalDeviceProperties2 properties;
static VKAPI_ATTR void VKAPI_CALL Properties(VkPhysicalDevice device,
                                             VkPhysicalDeviceProperties2* all) {
  properties(device, all);
  if (Fault("gpu") > 0) all->properties.deviceType = VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
  Cap(&all->properties.limits.maxComputeWorkGroupInvocations, "threads");
  Cap(&all->properties.limits.maxComputeSharedMemorySize, "shared");
  for (VkBaseOutStructure* item = all->pNext; item != NULL; item = item->pNext) {
    if (item->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES &&
        Fault("allocation") >= 0) {
      ((VkPhysicalDeviceMaintenance3Properties*)item)->maxMemoryAllocationSize =
          (VkDeviceSize)Fault("allocation");
    }
  }
}

static PFN_vkGetPhysicalDeviceFeatures2 features;
static VKAPI_ATTR void VKAPI_CALL Features(VkPhysicalDevice device,
                                           VkPhysicalDeviceFeatures2* all) {
  features(device, all);
  for (VkBaseOutStructure* item = all->pNext; item != NULL; item = item->pNext) {
    if (item->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES) {
      Cap(&((VkPhysicalDeviceVulkan12Features*)item)->shaderFloat16, "half");
    }
    if (item->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES) {
      Cap(&((VkPhysicalDeviceVulkan11Features*)item)->storageBuffer16BitAccess, "half");
    }
  }
}

static PFN_vkGetPhysicalDeviceMemoryProperties2 memory;
static VKAPI_ATTR void VKAPI_CALL Memory(VkPhysicalDevice device,
                                         VkPhysicalDeviceMemoryProperties2* all) {
  memory(device, all);
  for (uint32_t i = 0; i < all->memoryProperties.memoryHeapCount; ++i) {
    if (Fault("heap") >= 0) all->memoryProperties.memoryHeaps[i].size = (VkDeviceSize)Fault("heap");
  }
}

static PFN_vkAllocateMemory allocate;
static VKAPI_ATTR VkResult VKAPI_CALL Allocate(VkDevice device, const VkMemoryAllocateInfo* info,
                                               const VkAllocationCallbacks* callbacks,
                                               VkDeviceMemory* block) {
  static VkDeviceSize used;
  if (Fault("memory") >= 0 && used + info->allocationSize > (VkDeviceSize)Fault("memory")) {
    return VK_ERROR_OUT_OF_DEVICE_MEMORY;
  }
  used += info->allocationSize;
  return allocate(device, info, callbacks, block);
}

static PFN_vkQueueSubmit submit;
static VKAPI_ATTR VkResult VKAPI_CALL Submit(VkQueue queue, uint32_t count,
                                             const VkSubmitInfo* infos, VkFence fence) {
  static long long number;
  if (++number == Fault("submit")) return VK_ERROR_DEVICE_LOST;
  return submit(queue, count, infos, fence);
}

static PFN_vkWaitSemaphores wait;
static VKAPI_ATTR VkResult VKAPI_CALL Wait(VkDevice device, const VkSemaphoreWaitInfo* info,
                                           uint64_t timeout) {
  static long long number;
  if (++number == Fault("wait")) return VK_ERROR_DEVICE_LOST;
  return wait(device, info, timeout);
}

#define INSTEAD(function, type, real, ours)                \
  if (strcmp(name, #function) == 0 && found != NULL) {     \
    real = (type)found;                                    \
    return (PFN_vkVoidFunction)ours;                       \
  }

static PFN_vkGetDeviceProcAddr get_of_device;
static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetOfDevice(VkDevice device, const char* name) {
  PFN_vkVoidFunction found = get_of_device(device, name);
  INSTEAD(vkAllocateMemory, PFN_vkAllocateMemory, allocate, Allocate)
  INSTEAD(vkQueueSubmit, PFN_vkQueueSubmit, submit, Submit)
  INSTEAD(vkWaitSemaphores, PFN_vkWaitSemaphores, wait, Wait)
  return found;
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance,
                                                               const char* name) {
  PFN_vkVoidFunction found = GetReal()(instance, name);
  INSTEAD(vkGetDeviceProcAddr, PFN_vkGetDeviceProcAddr, get_of_device, GetOfDevice)
  INSTEAD(vkEnumeratePhysicalDevices, PFN_vkEnumeratePhysicalDevices, enumerate, Enumerate)
  INSTEAD(vkGetPhysicalDeviceProperties2, PFN_vkGetPhysicalDeviceProperties2, properties,
          Properties)
  INSTEAD(vkGetPhysicalDeviceFeatures2, PFN_vkGetPhysicalDeviceFeatures2, features, Features)
  INSTEAD(vkGetPhysicalDeviceMemoryProperties2, PFN_vkGetPhysicalDeviceMemoryProperties2, memory,
          Memory)
  return found;
}
