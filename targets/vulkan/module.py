"""Vulkan's code generator, as TVM calls it: device functions in, a runtime module out.

The module's form, which `native/vulkan/module.cc` reads:

    name, spirv bytes, description (JSON of `kernel.Kernel` without its source)

for each kernel.
"""

import json
from dataclasses import asdict
from typing import Any

import tvm_ffi

from ...artifact.errors import CompileError
from ...native.vulkan_runtime import load_vulkan_runtime
from .kernel import write_kernel
from .spirv import compile_shaders


def build_module(module: Any, _: Any) -> Any:
    """The runtime module of an IRModule of device functions (`target.build.vulkan`). Raises
    CompileError, naming the kernel, for what cannot be compiled."""
    load_vulkan_runtime()
    kernels = [
        write_kernel(str(function.attrs["global_symbol"]), function)
        for function in module.functions.values()
    ]
    codes = compile_shaders({kernel.name: kernel.source for kernel in kernels})
    descriptions = {}
    for kernel in kernels:
        description = asdict(kernel)
        del description["source"]
        descriptions[kernel.name] = json.dumps(description)
    sources = "\n".join(f"// {kernel.name}\n{kernel.source}" for kernel in kernels)
    create = tvm_ffi.get_global_func("ffi.Module.create.vulkan")
    return create(codes, descriptions, sources)


def register() -> None:
    """Make `build_module` the code generator of TVM's target kind `vulkan`."""
    # Else it would come out of `tvm.compile` as a RuntimeError.
    tvm_ffi.error.register_error("CompileError", CompileError)
    tvm_ffi.register_global_func("target.build.vulkan", build_module, override=True)
