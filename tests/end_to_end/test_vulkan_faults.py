"""What a user is told where a Vulkan device lacks something or fails: always one line.

A loader of our own stands before the real one (faulty_vulkan.c) and lets the device be so.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REAL = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which our loader is found first."""
    real = next((f"{place}/libvulkan.so.1" for place in REAL
                 if Path(place, "libvulkan.so.1").exists()), None)  # fmt: skip
    compiler = shutil.which("cc")
    if real is None or compiler is None:
        pytest.skip("needs libvulkan.so.1 in its usual place, and a C compiler")
    folder = tmp_path_factory.mktemp("loader")
    source = Path(__file__).with_name("faulty_vulkan.c")
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libvulkan.so.1"]
    subprocess.run(
        [compiler, *options, str(source), "-o", str(folder / "libvulkan.so.1")], check=True
    )
    return {"LD_LIBRARY_PATH": str(folder), "FAULTY_VULKAN_REAL": real}


@pytest.fixture
def chat(
    built_vulkan: Path, faulty: dict[str, str], command: tuple[str, ...]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`chat(faults, device, …)`: a short answer, all else equal."""

    def chat(faults: str, device: str, *more: str, **environment: str) -> Any:
        options = ["--prompt", "a b", "--max-tokens", "4", "--temperature", "0", "--json", *more]
        return subprocess.run(
            [*command, "chat", str(built_vulkan), "--device", device, *options],
            env=os.environ | faulty | {"FAULTY_VULKAN": faults} | environment,
            capture_output=True, text=True,
        )  # fmt: skip

    return chat


FAULTS = {
    "no device": ("none", ("cannot run on vulkan: no such device", "mesa-vulkan-drivers")),
    "no second device": ("", ("no device vulkan:1; this machine has vulkan:0",)),
    "no 16-bit values": ("half=0", ("needs buffers of 16-bit values, which the Vulkan device",
                                    "compile the model in a quantization whose name has f32")),
    "small work groups": ("threads=128", ("take up to 256 threads", "has 128", "--device cpu")),
    "little shared memory": ("shared=1024", ("bytes of shared memory", "has 1024", "--device cpu")),
    "small tensors": ("allocation=1000", ("10,240 bytes", "has at most 1,000", "--device cpu")),
    "little memory": ("heap=100000000", ("the model needs", "100 MB", "take a smaller model")),
    "others have the memory": ("memory=10000000", ("has no memory for", "grants no more",
                                                   "take a smaller model or context")),
    "lost when given work": ("submit=1", ("was lost (reset by its driver", "start the program ag")),
    "lost later": ("submit=3", ("was lost (reset by its driver", "start the program again")),
    "lost while waited for": ("wait=2", ("was lost (reset by its driver", "start the program ag")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(chat: Callable[..., Any], name: str) -> None:
    faults, parts = FAULTS[name]
    run = chat(faults, "vulkan:1" if "second" in name else "vulkan")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.stderr
    assert run.stderr.startswith("error: ")
    for part in parts:
        assert part in run.stderr


def test_a_second_device_by_its_number(chat: Callable[..., Any]) -> None:
    first, second = chat("twice", "vulkan", "--quiet"), chat("twice", "vulkan:1", "--quiet")
    assert (first.returncode, first.stderr, second.returncode) == (0, "", 0)
    assert '"text"' in first.stdout
    assert first.stdout.split(', "ttft')[0] == second.stdout.split(', "ttft')[0]


def test_auto_takes_a_gpu_and_no_driver_that_computes_on_the_cpu(
    built_vulkan: Path, faulty: dict[str, str], command: tuple[str, ...]
) -> None:
    def chosen(faults: str, **environment: str) -> str:
        run = subprocess.run(
            [*command, "chat", str(built_vulkan), "--prompt", "a", "--max-tokens", "1"],
            env=os.environ | faulty | {"FAULTY_VULKAN": faults} | environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stderr.splitlines()[0]

    asked = {"EVERYCAST_VULKAN_DEVICE": "0"}
    assert chosen("gpu", **asked).startswith("device: vulkan:0 (")
    assert chosen("gpu,heap=1000000", **asked).startswith("device: cpu; not vulkan:0 (")
    assert chosen("").startswith("device: cpu, no GPU was found")
