"""Kernels for GPUs taken apart for a CPU: the host part runs as it is, on tensors of the CPU, and
finds each launch as a global function."""

import ctypes
from typing import Any

import numpy as np
import tvm
from tvm.tirx.build import split_host_device_mods


def tensor_of(array: np.ndarray) -> Any:
    """A copy as a tensor of the CPU."""
    tensor = tvm.runtime.empty(array.shape, array.dtype.name, tvm.cpu())
    view_of(tensor, array)[...] = array
    return tensor


def view_of(tensor: Any, array: np.ndarray) -> np.ndarray:
    """The tensor's memory, as an array like `array`."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def split(
    pipeline: Any, module: tvm.IRModule, cpu: tvm.target.Target
) -> tuple[tvm.IRModule, tvm.IRModule]:
    """(functions that launch kernels, for tensors of the CPU; the kernels)."""
    for step in pipeline.passes:
        if step.info.name == "tirx.MakePackedAPI":
            module = _with_host_on_cpu(module, cpu.with_host(cpu))
        module = step(module)
    host, devices = split_host_device_mods(module)
    (device,) = devices.values()
    return host, device


def launch_axes(device: tvm.IRModule) -> dict[str, list[str]]:
    """Kernel → the axes whose extents follow its arguments in a launch."""
    return {
        str(func.attrs["global_symbol"]): list(map(str, func.attrs["tirx.kernel_launch_params"]))
        for func in device.functions.values()
    }


def _with_host_on_cpu(module: tvm.IRModule, cpu: tvm.target.Target) -> tvm.IRModule:
    """Functions that launch kernels, for tensors of the CPU."""
    updated = {
        variable: func
        if "tirx.kernel_launch_params" in func.attrs
        else func.with_attr("target", cpu)
        for variable, func in module.functions.items()
    }
    return tvm.IRModule(updated, attrs=module.attrs)
