import pytest
from everycast.artifact import host as module
from everycast.artifact.host import (
    Host,
    features_from_cpuinfo,
    features_from_sysctl,
    host_features,
    host_platform,
    this_host,
)

X86 = """\
processor\t: 0
flags\t\t: fpu sse4_2 pni abm bmi1 avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx_vnni
processor\t: 1
flags\t\t: fpu sse4_2 pni abm bmi1 avx2 fma f16c avx512f avx512_vnni avx512_bf16
vmx flags\t: avx512vl
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd aes atomics fphp asimdhp asimddp i8mm bf16\n"
APPLE = "hw.optional.arm64: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"


def test_x86_flags_become_llvm_names_common_to_all_processors() -> None:
    assert features_from_cpuinfo(X86) == {
        *("sse4.2", "sse3", "lzcnt", "bmi", "avx2", "fma", "f16c"),
        *("avx512f", "avx512vnni", "avx512bf16"),
    }


def test_arm_features_become_llvm_names() -> None:
    expected = {"neon", "aes", "lse", "fullfp16", "dotprod", "i8mm", "bf16"}
    assert features_from_cpuinfo(ARM) == expected


def test_macos_features() -> None:
    assert features_from_sysctl(APPLE) == {"neon", "dotprod"}


@pytest.mark.parametrize("text", ["", "flags:", "\x00garbage\nFeatures"])
def test_unknown_is_empty(text: str) -> None:
    assert features_from_cpuinfo(text) == features_from_sysctl(text) == frozenset()


def test_another_system_has_no_known_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "plan9")
    assert host_features() == frozenset()


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Darwin", "arm64", "macos-aarch64"),
        ("Windows", "AMD64", "windows-x86_64"),
    ],
)
def test_platform_names(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, expected: str
) -> None:
    monkeypatch.setattr(module.platform, "system", lambda: system)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert host_platform() == expected


def test_versions_are_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = this_host()
    assert isinstance(host, Host)
    assert host.versions.tvm.startswith("0.")
    monkeypatch.setattr(module, "_version", lambda package: f"version of {package}")
    assert module.running_versions().tvm_ffi == "version of apache-tvm-ffi"


def test_a_package_that_is_missing() -> None:
    assert module._version("no-such-package-here") == "not installed"
