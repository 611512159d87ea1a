"""Names of devices, and whether a library fits one."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import ArtifactError
from everycast.engine.device_check import check_device
from everycast.engine.devices import library_name, split_device


@pytest.mark.parametrize(
    ("text", "kind", "index", "library"),
    [
        ("vulkan", "vulkan", 0, "vulkan"),
        ("cuda:1", "cuda", 1, "cuda"),
        ("cuda:sm_90", "cuda", 0, "cuda:sm_90"),
        ("cpu:x86-64-v3", "cpu", 0, "cpu:x86-64-v3"),
    ],
)
def test_names(text: str, kind: str, index: int, library: str) -> None:
    assert split_device(text) == (kind, index) and library_name(text) == library


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vulkan:x", "needs a number after the colon, such as vulkan:0"),
        ("vulkan:-1", "needs a number"),
        ("cuda:", "needs a number"),
        ("cuda:-1", "needs a number"),
        ("cpu:1", "there is no device cpu:1; all processors are one device, cpu"),
        ("vulcan", "did you mean vulkan?"),
        ("webgpu", "choose auto, cuda"),
    ],
)
def test_names_of_no_device(text: str, said: str) -> None:
    with pytest.raises(ArtifactError, match=re.escape(said)):
        split_device(text)


def fake(kind: str, architecture: str | None = None, **limits: int) -> Any:
    """A device's memory, as far as it is asked."""
    return SimpleNamespace(
        kind=kind, label=f"{kind}:0 (GPU)", architecture=lambda: architecture,
        max_threads=lambda: limits.get("threads"), max_shared_bytes=lambda: limits.get("shared"),
        max_tensor_bytes=lambda: limits.get("tensor"),
    )  # fmt: skip


PARAMETERS: Any = [SimpleNamespace(name=f"w{n}", num_bytes=n) for n in (10, 2000, 30)]


def check(memory: Any, **metadata: Any) -> None:
    library: Any = SimpleNamespace(metadata={"device": memory.kind, **metadata})
    check_device(library, PARAMETERS, memory)


USUAL = ["sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize("here", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_103", "sm_120"])
def test_machine_code_for_an_earlier_minor_version_or_ptx_for_a_later_one(here: str) -> None:
    check(fake("cuda", here), architectures=USUAL)


@pytest.mark.parametrize(
    ("kind", "here", "architectures"),
    [
        ("cuda", "sm_80", ["sm_86"]), ("cuda", "sm_89", ["sm_90"]),
        ("rocm", "gfx1100", ["gfx942"]), ("rocm", "gfx90a", ["gfx942"]),
    ],
)  # fmt: skip
def test_machine_code_for_other_architectures(
    kind: str, here: str, architectures: list[str]
) -> None:
    with pytest.raises(ArtifactError) as caught:
        check(fake(kind, here), architectures=architectures)
    assert f"is {here}; compile it with --target {kind}:{here}" in str(caught.value)


def test_a_gpu_from_before_ampere() -> None:
    with pytest.raises(ArtifactError, match="is sm_75, but the kernels need sm_80 or later"):
        check(fake("cuda", "sm_75"), architectures=USUAL)


def test_limits_of_a_device() -> None:
    limits = {"threads_per_block": 256, "shared_bytes_per_block": 32768}
    check(fake("metal", threads=256, shared=32768, tensor=2000), device_limits=limits)
    check(fake("metal"), device_limits=limits)  # a runtime that does not say
    for given, message in (
        ({"threads": 128}, "take up to 256 threads in a block, but metal:0 (GPU) has 128"),
        ({"shared": 16384}, "32768 bytes of shared memory in a block, but metal:0 (GPU) has 16384"),
        (
            {"tensor": 1999},
            "w2000 has 2,000 bytes, but a tensor on metal:0 (GPU) has at most 1,999",
        ),
    ):
        with pytest.raises(ArtifactError) as caught:
            check(fake("metal", **given), device_limits=limits)
        assert message in str(caught.value) and "--device cpu" in str(caught.value)


def test_a_library_for_another_kind() -> None:
    with pytest.raises(ArtifactError, match="was compiled for rocm, not for cuda"):
        check(fake("cuda"), device="rocm")
