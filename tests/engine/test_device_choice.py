"""What `auto` takes, and what is said of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from everycast import model_store
from everycast.artifact.errors import ArtifactError, CapacityError, CompileError
from everycast.engine import device_choice, loader
from everycast.engine.device_choice import best_kind, find_gpu, open_best
from everycast.engine.devices import DeviceInfo


def device(kind: str, *, is_gpu: bool = True) -> DeviceInfo:
    return DeviceInfo(kind, 0, "GPU", "", is_gpu, 0, 0, ())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, DeviceInfo | str]:
    """Kind → the machine's device of it, or why it cannot be used. Every kind shows a sign."""
    devices: dict[str, DeviceInfo | str] = {}

    def list_devices(kind: str) -> list[DeviceInfo]:
        found = devices.get(kind, f"cannot run on {kind}: no driver")
        if isinstance(found, str):
            raise ArtifactError(found)
        return [found]

    monkeypatch.delenv("EVERYCAST_VULKAN_DEVICE", raising=False)
    monkeypatch.setattr(device_choice, "list_devices", list_devices)
    monkeypatch.setattr(device_choice, "has_runtime", lambda kind: True)
    monkeypatch.setattr(device_choice, "has_sign_of", lambda kind: kind in devices)
    return devices


def test_the_best_that_is_there(machine: dict[str, DeviceInfo | str]) -> None:
    assert open_best(str.upper) == ("CPU", "device: cpu, no GPU was found")
    assert best_kind() == "cpu"
    for kind in ("vulkan", "metal", "rocm", "cuda"):  # from the last to the best
        machine[kind] = device(kind)
        choice = f"device: {kind}:0 (GPU), the best that is here"
        assert open_best(str.upper) == (kind.upper(), choice)
        assert best_kind() == kind


def test_what_a_better_one_lacks_is_said(machine: dict[str, DeviceInfo | str]) -> None:
    old = "cannot run on rocm: its driver is too old"
    machine |= {"cuda": device("cuda"), "rocm": old, "vulkan": device("vulkan")}
    errors: dict[str, Exception] = {"cuda": CapacityError("too large")}

    def open_on(kind: str) -> str:
        if kind in errors:
            raise errors[kind]
        return kind

    opened, line = open_best(open_on)
    assert opened == "vulkan" and line == (
        "device: vulkan:0 (GPU), the best that is here; not cuda:0 (GPU): too large; "
        "not rocm: its driver is too old"
    )
    errors["vulkan"] = CompileError("no glslang")
    opened, line = open_best(open_on, lambda kind: "add a library" if kind == "cuda" else "")
    assert opened == "cpu" and line == (
        "device: cpu; not cuda:0 (GPU): add a library; not rocm: its driver is too old; "
        "not vulkan:0 (GPU): no glslang"
    )
    errors["cpu"] = ArtifactError("no library")
    with pytest.raises(ArtifactError, match="no library"):
        open_best(open_on)


def test_a_driver_that_computes_on_the_cpu_is_no_gpu_unless_asked_for(
    machine: dict[str, DeviceInfo | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["vulkan"] = device("vulkan", is_gpu=False)
    assert find_gpu("vulkan") == (None, "")
    monkeypatch.setenv("EVERYCAST_VULKAN_DEVICE", "llvmpipe")
    assert find_gpu("vulkan") == (machine["vulkan"], "")


def test_vulkan_is_not_loaded_without_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERYCAST_VULKAN_DEVICE", raising=False)
    monkeypatch.setattr(device_choice, "_SIGNS", {"vulkan": ("/no/such/renderD*",)})

    def list_devices(kind: str) -> list[DeviceInfo]:
        raise AssertionError(kind)

    monkeypatch.setattr(device_choice, "list_devices", list_devices)
    assert find_gpu("vulkan") == (None, "")


@dataclass(frozen=True)
class Opened:
    target: str
    choice: str = ""


def test_a_model_is_built_for_the_device(
    machine: dict[str, DeviceInfo | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def ensure_artifact(model: str, target: str, **options: Any) -> Path:
        assert (model, options) == ("m", {"quantization": "q4f16_1"})
        built.append(target)
        if target == "cuda":
            raise CompileError("target cuda needs nvcc")
        return Path(target)

    monkeypatch.setattr(model_store, "ensure_artifact", ensure_artifact)
    monkeypatch.setattr(loader, "open_artifact", lambda folder, kind, *_: Opened(folder.name))
    machine |= {"cuda": device("cuda"), "vulkan": device("vulkan")}
    opened = loader.open_model("m", quantization="q4f16_1")
    assert isinstance(opened, Opened) and opened.target == "vulkan"
    assert opened.choice.endswith("not cuda:0 (GPU): target cuda needs nvcc")
    assert built == ["cuda", "vulkan"]
    assert loader.open_model("m", "cpu:znver4", quantization="q4f16_1") == Opened("cpu:znver4")


def test_nothing_is_built_for_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "ensure_artifact", lambda *_, **__: pytest.fail("built"))
    for name, message in (("opencl", "cannot run on opencl"), ("gpu", "choose auto, cuda")):
        with pytest.raises(ArtifactError, match=message):
            loader.open_model("m", name)
