// TVM's view of Vulkan devices, and everycast's own functions beside it.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/device_api.h>

#include "device.h"

namespace everycast::vulkan {

void SetCurrentDevice(int id);

namespace {

namespace ffi = tvm::ffi;
using tvm::runtime::DeviceAttrKind;

// What TVM may ask of a device when it makes a target of it.
ffi::Any Property(int id, const std::string& name) {
  const PhysicalDevice& device = Instance::Get().devices.at(id);
  const VkPhysicalDeviceLimits& limits = device.properties.limits;
  if (name == "supports_float16") return device.features12.shaderFloat16 != 0;
  if (name == "supports_float32" || name == "supports_int32") return true;
  if (name == "supports_float64") return device.features.shaderFloat64 != 0;
  if (name == "supports_int8") return device.features12.shaderInt8 != 0;
  if (name == "supports_int16") return device.features.shaderInt16 != 0;
  if (name == "supports_int64") return device.features.shaderInt64 != 0;
  if (name == "supports_8bit_buffer") return device.features12.storageBuffer8BitAccess != 0;
  if (name == "supports_16bit_buffer") return device.features11.storageBuffer16BitAccess != 0;
  if (name == "supports_integer_dot_product") return device.has_integer_dot_product;
  if (name == "supports_storage_buffer_storage_class") return true;
  if (name == "supports_push_descriptor") {
    return device.Has(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME);
  }
  auto number = [](uint64_t value) { return ffi::Any(static_cast<int64_t>(value)); };
  if (name == "supported_subgroup_operations") return number(device.subgroup.supportedOperations);
  if (name == "thread_warp_size") return number(device.subgroup.subgroupSize);
  if (name == "min_subgroup_size") return number(device.subgroup_size.minSubgroupSize);
  if (name == "max_subgroup_size") return number(device.subgroup_size.maxSubgroupSize);
  if (name == "max_num_threads" || name == "max_threads_per_block") {
    return number(limits.maxComputeWorkGroupInvocations);
  }
  if (name == "max_block_size_x") return number(limits.maxComputeWorkGroupSize[0]);
  if (name == "max_block_size_y") return number(limits.maxComputeWorkGroupSize[1]);
  if (name == "max_block_size_z") return number(limits.maxComputeWorkGroupSize[2]);
  if (name == "max_shared_memory_per_block") return number(limits.maxComputeSharedMemorySize);
  if (name == "max_push_constants_size") return number(limits.maxPushConstantsSize);
  if (name == "max_storage_buffer_range") return number(limits.maxStorageBufferRange);
  if (name == "max_per_stage_descriptor_storage_buffer") {
    return number(limits.maxPerStageDescriptorStorageBuffers);
  }
  if (name == "max_memory_allocation_size") {
    return number(device.maintenance3.maxMemoryAllocationSize);
  }
  if (name == "is_unified") return device.IsUnified();
  if (name == "max_tensor_bytes") return number(device.MaxTensorBytes());
  if (name == "device_type") return ffi::String(device.TypeName());
  if (name == "device_name") return ffi::String(device.properties.deviceName);
  if (name == "driver_version") return number(device.properties.driverVersion);
  if (name == "driver") {
    return ffi::String(std::string(device.driver.driverName) + " " + device.driver.driverInfo);
  }
  if (name == "vulkan_api_version") return number(device.properties.apiVersion);
  return ffi::Any(nullptr);
}

class VulkanDeviceAPI final : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(tvm::Device dev) final { SetCurrentDevice(dev.device_id); }

  void GetAttr(tvm::Device dev, DeviceAttrKind kind, ffi::Any* rv) final {
    if (kind == tvm::runtime::kExist) {
      try {
        *rv = Device::Exists(dev.device_id);
      } catch (const ffi::Error&) {
        *rv = false;
      }
      return;
    }
    auto property = [&](const char* name) { *rv = Property(dev.device_id, name); };
    const VkPhysicalDeviceLimits& limits =
        Instance::Get().devices.at(dev.device_id).properties.limits;
    switch (kind) {
      case tvm::runtime::kMaxThreadsPerBlock:
        return property("max_threads_per_block");
      case tvm::runtime::kWarpSize:
        return property("thread_warp_size");
      case tvm::runtime::kMaxSharedMemoryPerBlock:
        return property("max_shared_memory_per_block");
      case tvm::runtime::kDeviceName:
        return property("device_name");
      case tvm::runtime::kApiVersion:
        return property("vulkan_api_version");
      case tvm::runtime::kDriverVersion:
        return property("driver_version");
      case tvm::runtime::kComputeVersion:
        *rv = ffi::String("1.2");
        return;
      case tvm::runtime::kMaxThreadDimensions:
        *rv = ffi::String("[" + std::to_string(limits.maxComputeWorkGroupSize[0]) + ", " +
                          std::to_string(limits.maxComputeWorkGroupSize[1]) + ", " +
                          std::to_string(limits.maxComputeWorkGroupSize[2]) + "]");
        return;
      case tvm::runtime::kTotalGlobalMemory:
        *rv = static_cast<int64_t>(Device::Get(dev.device_id).TotalMemory());
        return;
      case tvm::runtime::kAvailableGlobalMemory:
        *rv = static_cast<int64_t>(Device::Get(dev.device_id).FreeMemory());
        return;
      default:
        return;  // not known
    }
  }

  void GetTargetProperty(tvm::Device dev, const std::string& name, ffi::Any* rv) final {
    *rv = Property(dev.device_id, name);
  }

  void* AllocDataSpace(tvm::Device dev, size_t num_bytes, size_t, DLDataType) final {
    return Device::Get(dev.device_id).Allocate(num_bytes);
  }

  void FreeDataSpace(tvm::Device dev, void* pointer) final {
    try {
      Device::Get(dev.device_id).Free(pointer);
    } catch (const ffi::Error&) {
      // Of a device that was lost, which the next call says: destructors must not throw.
    }
  }

  void StreamSync(tvm::Device dev, TVMStreamHandle) final {
    Device::Get(dev.device_id).Synchronize();
  }

  // The addresses are made for it.
  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

  static VulkanDeviceAPI* Global() {
    static auto* api = new VulkanDeviceAPI();
    return api;
  }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset,
                      size_t num_bytes, tvm::Device from_device, tvm::Device to_device, DLDataType,
                      TVMStreamHandle) final {
    const char* source = static_cast<const char*>(from) + from_offset;
    char* target = static_cast<char*>(to) + to_offset;
    bool from_vulkan = from_device.device_type == kDLVulkan;
    bool to_vulkan = to_device.device_type == kDLVulkan;
    if (from_vulkan && to_vulkan && from_device.device_id == to_device.device_id) {
      Device::Get(to_device.device_id).CopyOnDevice(target, source, num_bytes);
    } else if (from_vulkan && to_vulkan) {
      std::string bytes(num_bytes, '\0');
      Device::Get(from_device.device_id).CopyToHost(bytes.data(), source, num_bytes);
      Device::Get(to_device.device_id).CopyToDevice(target, bytes.data(), num_bytes);
    } else if (to_vulkan) {
      Device::Get(to_device.device_id).CopyToDevice(target, source, num_bytes);
    } else {
      Device::Get(from_device.device_id).CopyToHost(target, source, num_bytes);
    }
  }
};

ffi::Map<ffi::String, int64_t> CountersOf(int id) {
  Counters counters = Device::Get(id).counters();
  return {{"submissions", counters.submissions}, {"dispatches", counters.dispatches},
          {"barriers", counters.barriers},       {"waits", counters.waits},
          {"allocations", counters.allocations}, {"bytes_allocated", counters.bytes_allocated},
          {"bytes_used", counters.bytes_used},   {"pipelines", counters.pipelines}};
}

ffi::Array<ffi::String> DeviceNames() {
  ffi::Array<ffi::String> names;
  for (const PhysicalDevice& device : Instance::Get().devices) {
    names.push_back(std::string(device.properties.deviceName) + " (" + device.TypeName() + ")");
  }
  return names;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("device_api.vulkan",
                  [](ffi::PackedArgs, ffi::Any* rv) {
                    tvm::runtime::DeviceAPI* api = VulkanDeviceAPI::Global();
                    *rv = static_cast<void*>(api);
                  })
      .def("device_api.vulkan.get_target_property",
           [](DLDevice dev, const ffi::String& name) { return Property(dev.device_id, name); })
      .def("everycast.vulkan.device_names", DeviceNames)
      .def("everycast.vulkan.counters", CountersOf);
}

}  // namespace
}  // namespace everycast::vulkan

// For the loader of this library (native/vulkan_runtime.py).
extern "C" {
__attribute__((visibility("default"))) void everycast_vulkan_set_cache_folder(const char* folder) {
  everycast::vulkan::SetCacheFolder(folder);
}
__attribute__((visibility("default"))) void everycast_vulkan_save_pipelines() {
  everycast::vulkan::SaveAllPipelines();
}
}
