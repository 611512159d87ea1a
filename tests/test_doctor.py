import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everycast import doctor
from everycast.artifact.errors import ArtifactError, CompileError
from everycast.artifact.host import host_platform
from everycast.doctor import Check, run_checks
from everycast.engine.device_runtimes import KINDS
from everycast.engine.devices import DeviceInfo
from everycast.targets.linker import Linker
from everycast.targets.target import TARGETS


def report() -> dict[str, Check]:
    checks = run_checks()
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_this_machine_can_do_what_the_tests_do() -> None:
    """They compile and run for it."""
    found = report()
    for name in ("python", "apache-tvm", "tvm runtime", "linker", "cpu", "target cpu"):
        assert found[name].status == "ok", found[name]
    assert not [check for check in found.values() if check.status == "fail"]
    assert found["target opencl"].status == "ok"


def test_every_target_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {f"target {name}" for name in TARGETS} <= set(report())
    emscripten = tmp_path / "emcc"
    emscripten.write_text("#!/bin/sh\n")
    emscripten.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report()["target webgpu"] == Check("target webgpu", "ok", f"compiles ({emscripten})")
    emscripten.unlink()
    missing = report()["target webgpu"]
    assert missing.status == "info" and "apt install emscripten" in missing.detail


def test_the_compiler_is_not_imported() -> None:
    script = (
        "import sys; from everycast.doctor import run_checks; run_checks(); "
        "sys.exit('tvm' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0


def requires(monkeypatch: pytest.MonkeyPatch, *lines: str) -> dict[str, Check]:
    """The package checks where everycast needs these and 1.5.0 of all is installed."""
    versions = {"everycast": "0.1.0"}
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: list(lines))
    monkeypatch.setattr(
        doctor,
        "_installed_version",
        lambda name: (
            None if "missing" in name or "nightly" in name else versions.get(name, "1.5.0")
        ),
    )
    return {check.name: check for check in doctor._packages()}


@pytest.mark.parametrize(
    ("requirement", "name", "status", "detail"),
    [
        ("jinja2>=1.5", "jinja2", "ok", "1.5.0 (jinja2>=1.5)"),
        ("huggingface_hub>=1.0", "huggingface_hub", "ok", "1.5.0"),
        ("numpy>=1.10", "numpy", "fail", "1.5.0, needs 1.10 or later; run: pip install"),
        ("numpy>=2", "numpy", "fail", "pip install 'numpy>=2'"),
        ("apache-tvm==1.5.0", "apache-tvm", "ok", "1.5.0"),
        ("apache-tvm==1.5.0.post1", "apache-tvm", "fail", "tested with 1.5.0.post1"),
        ("uvicorn[standard]>=1.0", "uvicorn", "ok", "1.5.0"),
        ("missing-one>=1.0", "missing-one", "fail", "missing; run: pip install 'missing-one>=1.0'"),
        ("numpy >= 1.0 ; python_version > '3'", "numpy", "ok", "1.5.0"),
    ],
)
def test_packages(
    monkeypatch: pytest.MonkeyPatch, requirement: str, name: str, status: str, detail: str
) -> None:
    found = requires(monkeypatch, requirement, 'pytest>=99; extra == "test"')
    assert list(found) == [name]
    assert found[name].status == status and detail in found[name].detail


def test_every_requirement_of_ours_can_be_read() -> None:
    found = {check.name for check in doctor._packages()}
    assert {"apache-tvm", "apache-tvm-ffi", "numpy", "jinja2", "ml_dtypes"} <= found


@pytest.mark.parametrize(
    ("features", "status", "kernels"),
    [
        ({"avx2", "fma"}, "ok", "AVX2"),
        ({"avx2", "fma", "avx512f"}, "ok", "AVX-512"),
        (
            {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni"},
            "ok",
            "AVX-512 VNNI",
        ),
        ({"avx2"}, "fail", None),
        ({"sse4.2", "avx"}, "fail", None),
        ({"neon"}, "ok", "NEON"),
        (set(), "warn", None),
    ],
)
def test_cpus(
    monkeypatch: pytest.MonkeyPatch, features: set[str], status: str, kernels: str | None
) -> None:
    monkeypatch.setattr(doctor, "host_features", lambda: frozenset(features))
    found = report()
    assert found["cpu"].status == status
    if kernels is None:
        assert "cpu kernels" not in found
    else:
        assert found["cpu kernels"].detail.startswith(kernels)
    if status == "fail":
        assert "lacks AVX2 and FMA; needs x86-64-v3" in found["cpu"].detail
        assert found["target cpu"] == Check("target cpu", "fail", "not without: cpu (above)")


def only(*platforms: str) -> Callable[[str], Linker]:
    def find_linker(platform: str) -> Linker:
        if platform in platforms:
            return Linker("cc", ("/usr/bin/cc", "-shared"))
        raise CompileError(f"no linker for {platform} is installed; run: pip install ziglang")

    return find_linker


def test_linkers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_platform()
    other = "linux-aarch64" if here != "linux-aarch64" else "linux-x86_64"
    monkeypatch.setattr(doctor, "find_linker", only(here))
    found = report()
    assert found["linker"] == Check("linker", "ok", "/usr/bin/cc -shared")
    assert found[f"linker {other}"].status == "info"
    assert found["target cpu"].status == "ok"
    monkeypatch.setattr(doctor, "find_linker", only(other))
    found = report()
    assert found["linker"].status == "fail" and "pip install ziglang" in found["linker"].detail
    assert found[f"linker {other}"].status == "ok"
    assert found["target cpu"].detail == "not without: linker (above)"


def test_little_memory_and_disk_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage: Any = namedtuple("usage", "total used free")
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(10, 9, 2**30))
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**29)
    found = report()
    assert found["memory"].status == found["cache"].status == "warn"
    assert found["memory"].detail.startswith("0.5 GiB free of")
    assert str(tmp_path / "not" / "yet") in found["cache"].detail
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert report()["cache"].status == "fail"


def test_a_runtime_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from everycast.engine import runtime

    def broken() -> None:
        raise OSError("libtvm_runtime.so: no such file")

    monkeypatch.setattr(runtime, "load_runtime", broken)
    found = report()
    assert found["tvm runtime"].status == "fail" and "no such file" in found["tvm runtime"].detail
    assert found["target cpu"].status == "fail"


def test_devices_that_libraries_can_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_devices(kind: str) -> list[DeviceInfo]:
        if kind != "cuda":
            raise ArtifactError(f"cannot run on {kind}: no driver")
        features = ("sm_90", "warps of 32")
        gpu = DeviceInfo(kind, 0, "H200", "CUDA 13.0", True, 140 << 30, 139 << 30, features)
        return [gpu, DeviceInfo(kind, 1, "A CPU", "", False, 0, 0, ())]

    monkeypatch.setattr(doctor, "list_devices", list_devices)
    found = report()
    assert found["device cuda:0"] == Check(
        "device cuda:0", "ok",
        "H200; CUDA 13.0; 139.0 GiB free of 140.0 GiB; sm_90, warps of 32",
    )  # fmt: skip
    assert found["device cuda:1"].detail == "A CPU; computes on the CPU"
    for kind in set(KINDS) - {"cuda"}:
        assert found[f"device {kind}"] == Check(
            f"device {kind}", "info", f"cannot run on {kind}: no driver"
        )


def test_every_kind_of_device_is_told_of_here() -> None:
    found = report()
    for kind in KINDS:
        name = f"device {kind}:0" if f"device {kind}:0" in found else f"device {kind}"
        assert found[name].status in ("ok", "info") and "\n" not in found[name].detail
