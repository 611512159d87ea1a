// The module of Vulkan kernels in a library. Its bytes are, for each kernel, three strings:
// name, SPIR-V, and a description in JSON (targets/vulkan/kernel.py, `Kernel`).
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "device.h"

namespace everycast::vulkan {
namespace {

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

constexpr uint32_t kPushConstantBytes = 128;

enum class Stored { kInt32, kUInt32, kInt64, kUInt64, kFloat32, kFloat64 };

// One argument of a kernel: a buffer, or a scalar stored at `offset`.
struct Argument {
  bool is_buffer = false, is_read = false, is_written = false;
  Stored stored = Stored::kInt32;
  uint32_t offset = 0;
};

Stored StoredFromName(const std::string& name) {
  if (name == "int32") return Stored::kInt32;
  if (name == "uint32") return Stored::kUInt32;
  if (name == "int64") return Stored::kInt64;
  if (name == "uint64") return Stored::kUInt64;
  if (name == "float32") return Stored::kFloat32;
  if (name == "float64") return Stored::kFloat64;
  TVM_FFI_THROW(ValueError) << "scalars of type " << name << " are not known to this runtime";
  TVM_FFI_UNREACHABLE();
}

class Kernel {
 public:
  Kernel(const std::string& name, std::string spirv, const std::string& description)
      : name_(name), spirv_(std::move(spirv)) {
    json::Object fields = json::Parse(description).cast<json::Object>();
    for (const ffi::Any& item : fields["arguments"].cast<json::Array>()) {
      json::Object entry = item.cast<json::Object>();
      Argument argument;
      argument.is_buffer = entry["kind"].cast<std::string>() == "buffer";
      std::string access = entry["access"].cast<std::string>();
      argument.is_read = access.find('r') != std::string::npos;
      argument.is_written = access.find('w') != std::string::npos;
      needs_.num_buffers += argument.is_buffer;
      if (!argument.is_buffer) argument.stored = StoredFromName(entry["stored"].cast<std::string>());
      argument.offset = static_cast<uint32_t>(entry["offset"].cast<int64_t>());
      arguments_.push_back(argument);
    }
    for (const ffi::Any& item : fields["launch"].cast<json::Array>()) {
      std::string tag = item.cast<std::string>();
      bool is_grid = tag.rfind("blockIdx.", 0) == 0;
      launch_axes_.push_back(is_grid ? tag.back() - 'x' : -1);
    }
    scalar_bytes_ = static_cast<uint32_t>(fields["scalar_bytes"].cast<int64_t>());
    needs_.name = name_;
    needs_.has_uniform_buffer = scalar_bytes_ > kPushConstantBytes;
    needs_.num_push_bytes = needs_.has_uniform_buffer ? 0 : scalar_bytes_;
    needs_.num_threads = static_cast<uint32_t>(fields["num_threads"].cast<int64_t>());
    needs_.shared_bytes = static_cast<uint32_t>(fields["shared_bytes"].cast<int64_t>());
    needs_.subgroup_width = static_cast<uint32_t>(fields["subgroup_width"].cast<int64_t>());
  }

  ~Kernel() {
    for (auto& [id, pipeline] : pipelines_) {
      try {
        Device::Get(id).DestroyPipeline(pipeline);
      } catch (const ffi::Error&) {
        // A device that is lost keeps nothing.
      }
    }
  }

  // Arguments in the kernel's order, then the sizes of the launch.
  void Launch(int device_id, const ffi::AnyView* args, int32_t num_args) {
    if (static_cast<size_t>(num_args) != arguments_.size() + launch_axes_.size()) {
      TVM_FFI_THROW(TypeError) << "kernel '" << name_ << "' takes "
                               << arguments_.size() + launch_axes_.size() << " arguments, got "
                               << num_args;
    }
    Device& device = Device::Get(device_id);
    Dispatch dispatch;
    for (size_t i = 0; i < launch_axes_.size(); ++i) {
      if (launch_axes_[i] < 0) continue;
      int64_t size = args[arguments_.size() + i].cast<int64_t>();
      if (size <= 0) return;  // nothing to do
      int64_t limit =
          device.physical().properties.limits.maxComputeWorkGroupCount[launch_axes_[i]];
      if (size > limit) {
        TVM_FFI_THROW(RuntimeError) << "kernel '" << name_ << "' wants " << size
                                    << " work groups in one dimension, but the Vulkan device "
                                    << device.physical().properties.deviceName << " takes " << limit;
      }
      dispatch.grid[launch_axes_[i]] = static_cast<uint32_t>(size);
    }
    dispatch.scalars.resize(scalar_bytes_);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Argument& argument = arguments_[i];
      if (argument.is_buffer) {
        dispatch.buffers.push_back(Buffer(device, args[i].cast<void*>()));
        dispatch.is_read.push_back(argument.is_read);
        dispatch.is_written.push_back(argument.is_written);
      } else {
        StoreScalar(argument, args[i], dispatch.scalars.data() + argument.offset);
      }
    }
    dispatch.in_uniform_buffer = needs_.has_uniform_buffer;
    dispatch.pipeline = &PipelineOn(device_id, device);
    device.Record(dispatch);
  }

  const std::string& spirv() const { return spirv_; }

  // Throws if the device lacks what the kernel needs.
  void Check(const Device& device) const { device.CheckNeeds(needs_, spirv_); }

 private:
  Region Buffer(Device& device, void* pointer) const {
    Region region = device.Find(pointer);
    const VkPhysicalDeviceLimits& limits = device.physical().properties.limits;
    if (region.offset % limits.minStorageBufferOffsetAlignment != 0) {
      TVM_FFI_THROW(RuntimeError) << "kernel '" << name_ << "' is given a tensor that starts at byte "
                                  << region.offset << " of another, but the Vulkan device "
                                  << device.physical().properties.deviceName << " wants a multiple of "
                                  << limits.minStorageBufferOffsetAlignment;
    }
    if (region.size > device.physical().MaxTensorBytes()) {
      TVM_FFI_THROW(RuntimeError) << "kernel '" << name_ << "' is given a tensor of " << region.size
                                  << " bytes, but the Vulkan device "
                                  << device.physical().properties.deviceName << " takes "
                                  << device.physical().MaxTensorBytes();
    }
    return region;
  }

  void StoreScalar(const Argument& argument, const ffi::AnyView& value, char* place) const {
    auto store = [&](auto number) { std::memcpy(place, &number, sizeof number); };
    switch (argument.stored) {
      case Stored::kFloat32:
        return store(static_cast<float>(value.cast<double>()));
      case Stored::kFloat64:
        return store(value.cast<double>());
      case Stored::kInt64:
      case Stored::kUInt64:
        return store(value.cast<int64_t>());
      case Stored::kUInt32:
        return store(static_cast<uint32_t>(value.cast<int64_t>()));
      case Stored::kInt32:
        break;
    }
    int64_t number = value.cast<int64_t>();
    if (number != static_cast<int32_t>(number)) {
      TVM_FFI_THROW(ValueError) << "kernel '" << name_ << "' is given the size " << number
                                << ", which does not fit in 32 bits";
    }
    store(static_cast<int32_t>(number));
  }

  const Pipeline& PipelineOn(int id, Device& device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = pipelines_.find(id);
    if (it == pipelines_.end()) {
      it = pipelines_.emplace(id, device.MakePipeline(needs_, spirv_)).first;
    }
    return it->second;
  }

  const std::string name_, spirv_;
  std::vector<Argument> arguments_;
  std::vector<int> launch_axes_;
  uint32_t scalar_bytes_ = 0;
  PipelineNeeds needs_;
  std::mutex mutex_;
  std::map<int, Pipeline> pipelines_;  // by device
};

using Strings = ffi::Map<ffi::String, ffi::String>;
using Codes = ffi::Map<ffi::String, ffi::Bytes>;

class VulkanModule final : public ffi::ModuleObj {
 public:
  VulkanModule(const Codes& codes, const Strings& descriptions, ffi::String source)
      : descriptions_(descriptions), source_(std::move(source)) {
    for (const auto& [name, code] : codes) {
      kernels_[name] = std::make_shared<Kernel>(name, std::string(code.data(), code.size()),
                                                descriptions[name]);
    }
  }

  const char* kind() const final { return "vulkan"; }

  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto it = kernels_.find(name);
    if (it == kernels_.end()) return std::nullopt;
    std::shared_ptr<Kernel> kernel = it->second;
    return ffi::Function::FromPacked(
        [kernel](const ffi::AnyView* args, int32_t num_args, ffi::Any*) {
          kernel->Launch(CurrentDevice(), args, num_args);
        });
  }

  ffi::Bytes SaveToBytes() const final {
    std::string bytes;
    auto put = [&](const char* data, uint64_t size) {
      bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
      bytes.append(data, size);
    };
    for (const auto& [name, kernel] : kernels_) {
      put(name.data(), name.size());
      put(kernel->spirv().data(), kernel->spirv().size());
      ffi::String description = descriptions_[name];
      put(description.data(), description.size());
    }
    return ffi::Bytes(bytes);
  }

  ffi::String InspectSource(const ffi::String&) const final { return source_; }

  void Check(const Device& device) const {
    for (const auto& [name, kernel] : kernels_) kernel->Check(device);
  }

  static int& CurrentDevice() {
    // What DeviceAPI::SetDevice was last called with in this thread.
    thread_local int id = 0;
    return id;
  }

 private:
  std::map<std::string, std::shared_ptr<Kernel>> kernels_;
  Strings descriptions_;
  ffi::String source_;
};

ffi::Module Create(const Codes& codes, const Strings& descriptions, const ffi::String& source) {
  return ffi::Module(ffi::make_object<VulkanModule>(codes, descriptions, source));
}

ffi::Module Load(const ffi::Bytes& bytes) {
  Codes codes;
  Strings descriptions;
  const char* position = bytes.data();
  const char* end = position + bytes.size();
  auto next = [&]() {
    uint64_t size = 0;
    if (end - position >= static_cast<ptrdiff_t>(sizeof size)) {
      std::memcpy(&size, position, sizeof size);
      position += sizeof size;
      if (size <= static_cast<uint64_t>(end - position)) {
        position += size;
        return std::string(position - size, size);
      }
    }
    TVM_FFI_THROW(ValueError) << "the Vulkan kernels of this library are cut short";
    TVM_FFI_UNREACHABLE();
  };
  while (position < end) {
    std::string name = next();
    codes.Set(name, ffi::Bytes(next()));
    descriptions.Set(name, next());
  }
  return Create(codes, descriptions, "");
}

// Throws if a kernel of a Vulkan module needs what the device lacks, before any of them is used.
void CheckModule(const ffi::Module& module, int id) {
  if (std::strcmp(module->kind(), "vulkan") != 0) {
    TVM_FFI_THROW(TypeError) << "a module of kind '" << module->kind() << "' has no Vulkan kernels";
  }
  static_cast<const VulkanModule*>(module.get())->Check(Device::Get(id));
}

}  // namespace

void SetCurrentDevice(int id) { VulkanModule::CurrentDevice() = id; }

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("ffi.Module.create.vulkan", Create)
      .def("ffi.Module.load_from_bytes.vulkan", Load)
      .def("everycast.vulkan.check_module", CheckModule);
}

}  // namespace everycast::vulkan
