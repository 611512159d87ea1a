"""Whose records a library is compiled with, over devices that are not there."""

from dataclasses import replace
from pathlib import Path

import pytest
from everycast import build_process, tuned_devices
from everycast.artifact import tuning
from everycast.artifact.errors import ArtifactError, EverycastError, RequestError
from everycast.engine.devices import DeviceInfo
from everycast.tuned_devices import device_to_tune, devices_with_records, record_name

FIRST = DeviceInfo("vulkan", 0, "Radeon RX 7900 XTX", "Mesa 25", True, 24 << 30, 0, ("fp16",))
SECOND = replace(FIRST, index=1, name="llvmpipe (LLVM 15)", is_gpu=False)


class Memory:
    def __init__(self, device: str) -> None:
        self.device = device

    def architecture(self) -> str | None:
        return None


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DeviceInfo]:
    here = [FIRST, SECOND]

    def listed(kind: str) -> list[DeviceInfo]:
        if kind != "vulkan":
            raise ArtifactError(f"cannot run on {kind}: no driver")
        return here

    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuned_devices, "list_devices", listed)
    monkeypatch.setattr(tuned_devices, "DeviceMemory", Memory)
    return here


def add_records(*infos: DeviceInfo) -> None:
    for info in infos:
        path = tuning.user_folder() / f"{record_name(info)}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")


def test_a_name_is_the_devices_driver_and_features() -> None:
    name = record_name(FIRST)
    assert name.startswith("vulkan-radeon-rx-7900-xtx-")
    assert record_name(replace(FIRST, index=3, free_bytes=7)) == name
    changes = ({"driver": "Mesa 26"}, {"features": ()}, {"kind": "rocm"})
    assert len({name, *(record_name(replace(FIRST, **change)) for change in changes)}) == 4


def test_device_to_tune() -> None:
    found = device_to_tune("vulkan", None)
    assert found is not None and (found.index, found.name) == (0, record_name(FIRST))
    found = device_to_tune("vulkan", "vulkan:1")
    assert found is not None and found.label == "vulkan:1 (llvmpipe (LLVM 15))"
    assert device_to_tune("cpu", None) is None and device_to_tune("webgpu", None) is None


@pytest.mark.parametrize(
    ("target", "device", "error", "message"),
    [
        ("vulkan", "vulkan:2", ArtifactError, "no device vulkan:2; .* vulkan:0 to vulkan:1"),
        ("cuda:sm_90", None, ArtifactError, "no driver"),
        ("vulkan", "cuda", RequestError, "kernels for vulkan do not run on cuda"),
        ("cpu", "vulkan", RequestError, "kernels for cpu do not run on vulkan"),
        ("vulkan", "vulcan", ArtifactError, "did you mean vulkan"),
    ],
)
def test_no_such_device(
    target: str, device: str | None, error: type[EverycastError], message: str
) -> None:
    with pytest.raises(error, match=message):
        device_to_tune(target, device)


def test_the_first_device_with_records(caplog: pytest.LogCaptureFixture) -> None:
    assert devices_with_records("vulkan", None) == {}
    add_records(SECOND)
    for target in ("vulkan", "all"):
        assert devices_with_records(target, None) == {"vulkan": record_name(SECOND)}
    assert not caplog.records
    add_records(FIRST)
    assert devices_with_records("vulkan", None) == {"vulkan": record_name(FIRST)}
    assert "--device takes another: vulkan:1 (llvmpipe" in caplog.text
    assert devices_with_records("cuda:sm_90", None) == {}


def test_a_device_that_is_asked_for() -> None:
    add_records(replace(FIRST, kind="cuda", name="H200"))
    elsewhere = record_name(replace(FIRST, kind="cuda", name="H200"))
    assert devices_with_records("vulkan", "vulkan:1") == {"vulkan": record_name(SECOND)}
    assert devices_with_records("cuda:sm_90", elsewhere) == {"cuda": elsewhere}
    assert devices_with_records("cuda", None) == {}  # it is not here
    for target, device in (("cpu", "vulkan:0"), ("cuda", "vulkan:0"), ("webgpu", "vulkan")):
        with pytest.raises(RequestError, match="leave --device out"):
            devices_with_records(target, device)
    with pytest.raises(ArtifactError, match="vulkan-radeon"):
        devices_with_records("vulkan", "vulkan-radeon")


def test_builds_ask_for_records_of_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    add_records(FIRST)
    find = build_process._tuned_devices
    assert find("vulkan", None) == find("all", None) == {"vulkan": record_name(FIRST)}
    assert find(None, None) == find("cpu:znver4", None) == find("webgpu:f16", None) == {}
    with pytest.raises(RequestError):
        find("cpu", "vulkan:0")
