"""Metal source that TVM writes, as C++ for the emulator."""

import re
from typing import Any

from tvm.target import Target, codegen

SPEC = {
    "kind": "metal", "thread_warp_size": 32, "max_num_threads": 1024,
    "max_threads_per_block": 1024, "max_shared_memory_per_block": 32768, "host": {"kind": "llvm"},
}  # fmt: skip
HEADER = "metal_language.h"

_SHARED = re.compile(r"threadgroup (\w+) (\w+)\[(\d+)\];")
_KERNEL = re.compile(r"kernel void (\w+)\(([^{]*)\) \{")
_ATTRIBUTE = re.compile(r"\s*\[\[.*?\]\]")
_UNION = re.compile(r"union __TVMArgUnion \{.*?\};", re.DOTALL)
_STRUCT = re.compile(r"struct (\w+_args_t) \{(.*?)\};", re.DOTALL)
_FIELD = re.compile(r"(\w+) (\w+)(\[2\])?;")


def source_of(device: Any, target: Target) -> str:
    """The source of the kernels in a module."""
    return str(codegen.build_module(device, target).inspect_source())


def kernels(source: str) -> dict[str, list[str]]:
    """Kernel → of each parameter 'pointer', 'real' or 'integer'; scalars come in a struct."""
    fields = _fields(source)
    kinds = {}
    for name, parameters in _parameters(source).items():
        kinds[name] = ["pointer" for p in parameters if "*" in p]
        kinds[name] += [_kind(dtype) for dtype, *_ in fields.get(f"{name}_args_t", [])]
    return kinds


def calls(source: str) -> dict[str, str]:
    """Kernel → C++ that calls it with the arguments `a`."""
    fields = _fields(source)
    made = {}
    for name, parameters in _parameters(source).items():
        values, text = [], ""
        for number, parameter in enumerate(parameters):
            dtype = parameter.rsplit(None, 1)[0]
            if "*" in parameter:
                values.append(f"({dtype})a[{number}].pointer")
            elif "_args_t" in parameter:
                text = f"{name}_args_t args; "
                for i, (of_field, field, is_pair) in enumerate(fields[f"{name}_args_t"]):
                    place = f"{field}[0]" if is_pair else field
                    text += f"args.{place} = a[{number + i}].{_kind(of_field)}; "
                values.append("args")
            else:
                index = "block_index" if "blockIdx" in parameter else "current->index"
                values.append(f"emulation::index<{dtype}>(emulation::{index})")
        made[name] = f"{text}{name}({', '.join(values)});"
    return made


def translated(source: str) -> str:
    """Threadgroup arrays that the driver gives; no attributes."""
    sites = iter(range(1 << 20))
    source = _SHARED.sub(
        lambda m: (
            f"{m[1]}* {m[2]} = ({m[1]}*)"
            f"emulation::shared_array({next(sites)}, {m[3]} * sizeof({m[1]}));"
        ),
        source,
    )
    return _ATTRIBUTE.sub("", _UNION.sub("", source))


def _parameters(source: str) -> dict[str, list[str]]:
    return {
        match[1]: [_ATTRIBUTE.sub("", p).strip() for p in match[2].split(",")]
        for match in _KERNEL.finditer(source)
    }


def _fields(source: str) -> dict[str, list[tuple[str, str, str]]]:
    """Struct → (type, name, '[2]' or nothing) of its fields."""
    return {match[1]: _FIELD.findall(match[2]) for match in _STRUCT.finditer(source)}


def _kind(dtype: str) -> str:
    return "real" if dtype in ("float", "double", "half") else "integer"
