"""What an inspection finds: plain records."""

from dataclasses import dataclass

from ...artifact.errors import CompileError


class ToolMissing(CompileError):
    """A target's tool is not installed; the message says what brings it."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What a kernel takes of its device. None: the target's tool does not say.

    For a target with several architectures there is a record for each.
    """

    name: str
    arch: str | None = None
    registers: int | None = None
    """Of a thread: 32 bits wide on GPUs."""
    scalar_registers: int | None = None
    """Of a wave, on AMD."""
    threads: int | None = None
    """Of a block."""
    buffers: int | None = None
    """Tensors that it is given."""
    bindings: int | None = None
    """Buffers, and what holds its sizes."""
    shared_bytes: int | None = None
    """Shared memory of a block, as far as it is known before the launch."""
    stack_bytes: int | None = None
    """Memory of a thread for what registers do not hold."""
    spills: int | None = None
    """CUDA: whether there is a stack to spill to (its bytes). ROCm: registers that were spilled.
    CPU: vector registers stored on the stack, by instructions."""
    code_bytes: int | None = None
    """Machine code or SPIR-V; of targets that compile later, the source."""
    instructions: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a target's tool says of one library."""

    tool: str
    """The program that read it, with its version."""
    kernels: tuple[KernelUse, ...]
    facts: tuple[str, ...] = ()
    """What else there is to know, a line each."""
    faults: tuple[str, ...] = ()
    """What is wrong, a line each: the library cannot be used."""


@dataclass(frozen=True, slots=True)
class LibraryReport:
    """A library of an artifact. Exactly one of `finding` and `missing` is there."""

    target: str
    file: str
    platform: str
    num_bytes: int
    finding: Finding | None
    missing: str | None = None
    """Why it was not inspected: what is not installed, and the command that brings it."""
