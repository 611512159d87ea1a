"""CUDA C that TVM writes, as C++ for the emulator."""

import re
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm.target import Target, codegen

SPEC = {
    "kind": "cuda", "arch": "sm_80", "thread_warp_size": 32, "max_num_threads": 1024,
    "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "host": {"kind": "llvm"},
}  # fmt: skip
HEADER = "cuda_language.h"

_SHARED = re.compile(r"__shared__\s+(?:alignas\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[(\d+)\];")
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(([^)]*)\) \{'
)
_ASM = re.compile(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)((?:[^;"]|"[^"]*")*?)\)\s*;')
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)')
INSTRUCTIONS = {
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};": "ptx_mma_m16n8k16",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": "ptx_ldmatrix_x4",
    "cp.async.ca.shared.global [%0], [%1], 4;": "ptx_cp_async<4>",
    "cp.async.ca.shared.global [%0], [%1], 8;": "ptx_cp_async<8>",
    "cp.async.cg.shared.global [%0], [%1], 16;": "ptx_cp_async<16>",
    "cp.async.commit_group;": "ptx_cp_async_commit",
    **{f"cp.async.wait_group {n};": f"ptx_cp_async_wait<{n}>" for n in range(4)},
}
"""Inline PTX → the function of cuda_language.h in its place; all operands in order."""


def source_of(device: Any, target: Target) -> str:
    """The source of the kernels in a module."""
    said: list[str] = []

    def keep(source: str, _: object) -> str:
        said.append(source)
        return source

    callbacks = {"tvm_callback_cuda_postproc": keep, "tvm_callback_cuda_compile": lambda *_: ""}
    before = {name: tvm_ffi.get_global_func(name, allow_missing=True) for name in callbacks}
    for name, function in callbacks.items():
        tvm_ffi.register_global_func(name, function, override=True)
    try:
        codegen.build_module(device, target)
    finally:
        for name, function in before.items():
            if function is None:
                tvm_ffi.registry.remove_global_func(name)
            else:
                tvm_ffi.register_global_func(name, function, override=True)
    return said[0]


def kernels(source: str) -> dict[str, list[str]]:
    """Kernel → of each parameter 'pointer', 'real' or 'integer'."""
    return {match[1]: _kinds(match[2]) for match in _KERNEL.finditer(source)}


def calls(source: str) -> dict[str, str]:
    """Kernel → C++ that calls it with the arguments `a`."""
    return {
        match[1]: f"{match[1]}({', '.join(map(_argument, range(99), match[2].split(',')))});"
        for match in _KERNEL.finditer(source)
    }


def translated(source: str) -> str:
    """Shared arrays that the driver gives, and functions in place of instructions. ValueError if
    there is none for an instruction."""
    sites = iter(range(1 << 20))
    source = _SHARED.sub(
        lambda m: (
            f"{m[1]}* {m[2]} = ({m[1]}*)"
            f"emulation::shared_array({next(sites)}, {m[3]} * sizeof({m[1]}));"
        ),
        source,
    )
    return _ASM.sub(_instruction, source)


def _kinds(parameters: str) -> list[str]:
    return [_kind(parameter) for parameter in parameters.split(",")]


def _kind(parameter: str) -> str:
    if "*" in parameter:
        return "pointer"
    return "real" if re.search(r"\b(float|double)\b", parameter) else "integer"


def _argument(number: int, parameter: str) -> str:
    dtype = parameter.rsplit(None, 1)[0].replace("__restrict__", "")
    return f"({dtype})a[{number}].{_kind(parameter)}"


def _instruction(found: re.Match[str]) -> str:
    text = re.sub(r"\s+", " ", "".join(re.findall(r'"([^"]*)"', found[1]))).strip()
    if text not in INSTRUCTIONS:
        raise ValueError(f"there is no emulation of the instruction: {text}")
    # A shared address is a pointer here, too long for an unsigned.
    operands: Sequence[str] = [
        o.replace("(unsigned)__cvta", "__cvta") for o in _OPERAND.findall(found[2])
    ]
    return f"emulation::{INSTRUCTIONS[text]}({', '.join(['__LINE__', *operands])});"
