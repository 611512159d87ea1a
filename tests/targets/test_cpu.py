from collections.abc import Callable
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.host import host_features, host_platform
from everycast.targets import cpu
from everycast.targets.cpu import make_target
from everycast.targets.linker import Linker


@pytest.fixture(autouse=True)
def any_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that can link for all."""
    monkeypatch.setattr(cpu, "find_linker", lambda platform: Linker("none", ()))


def pretend(monkeypatch: pytest.MonkeyPatch, mcpu: str, features: set[str]) -> None:
    monkeypatch.setattr(cpu.codegen, "llvm_get_system_cpu", lambda: mcpu)
    monkeypatch.setattr(cpu, "host_features", lambda: frozenset(features))
    monkeypatch.setattr(cpu, "host_platform", lambda: "linux-x86_64")


@pytest.mark.parametrize(
    ("arch", "platform", "isa", "activations", "needs", "needs_not"),
    [
        ("x86-64-v3", "linux-x86_64", "avx2", "mixed", {"avx2", "fma", "f16c"}, {"avx512f"}),
        ("x86-64-v4", "linux-x86_64", "avx512", "mixed", {"avx512f"}, {"avx512vnni"}),
        ("znver4", "linux-x86_64", "avx512", "mixed", {"avx512f", "avx512vnni"}, set()),
        ("cortex-a76", "linux-aarch64", "neon", "mixed", {"neon", "dotprod"}, {"avx2"}),
        ("generic-arm64", "linux-aarch64", "neon", "float32", {"neon"}, {"dotprod"}),
    ],
)
def test_named_cpus(
    arch: str, platform: str, isa: str, activations: str, needs: set[str], needs_not: set[str]
) -> None:
    target = make_target(arch)
    assert (target.platform, target.constants) == (
        platform,
        {"isa": isa, "activations": activations},
    )
    assert needs <= target.required_features and not needs_not & target.required_features
    assert (target.kv_dtype("float32"), target.kv_dtype("float16")) == ("float32", "float16")


def test_this_machine_needs_only_what_it_has() -> None:
    target = make_target(None)
    assert target.platform == host_platform() and "mtriple" not in target.spec
    assert target.required_features <= host_features()


def test_hidden_features_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine with a Zen 4's name, but not all it can do."""
    everything = make_target("znver4").required_features
    pretend(monkeypatch, "znver4", everything - {"avx512vnni", "gfni"})
    target = make_target(None)
    assert target.spec["mattr"] == ["-avx512vnni", "-gfni"]
    assert target.required_features == everything - {"avx512vnni", "gfni"}


def test_features_of_a_cpu_without_a_name_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = make_target("znver4").required_features
    pretend(monkeypatch, "x86-64", set(everything))
    target = make_target(None)
    assert target.required_features == everything
    assert target.constants == {"isa": "avx512", "activations": "mixed"}


def test_an_unknown_system_is_taken_at_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "haswell", set())
    assert make_target(None).spec == {"kind": "llvm", "mcpu": "haswell"}


def test_macos_is_held_to_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sysctl` does not list SSE or AES: they are neither turned off nor asked for."""
    pretend(monkeypatch, "haswell", {"avx", "avx2", "fma", "f16c", "sse4.2"})
    monkeypatch.setattr(cpu, "host_platform", lambda: "macos-x86_64")
    target = make_target(None)
    assert "mattr" not in target.spec
    assert target.required_features == {"avx", "avx2", "fma", "f16c", "sse4.2"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_target("x86-64-v2"), r"CPU \(x86-64-v2\) lacks AVX2 and FMA.*x86-64-v3"),
        (lambda: make_target("cortex-a7777"), "unknown CPU 'cortex-a7777'.*cortex-a77"),
        (lambda: make_target("haswel"), "did you mean .*haswell"),
        (lambda: make_target("xyzzy"), "did you mean x86-64-v3 or cortex-a76"),
        (lambda: make_target("cortex-a72", activations="int16"), "need dot products.*cortex-a72"),
        (lambda: make_target("znver4", activations="int4"), "'int4' is unknown; choose auto"),
    ],
)
def test_what_cannot_be_compiled_for(make: Callable[[], object], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        make()


def test_an_old_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "ivybridge", {"sse", "sse2", "avx", "f16c"})
    with pytest.raises(CompileError, match=r"this CPU \(ivybridge\) lacks AVX2 and FMA"):
        make_target(None)


def test_a_missing_linker_is_found_out_before_any_work(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everycast.targets import build

    def no_linker(platform: str) -> Linker:
        raise CompileError(f"no linker for {platform}")

    monkeypatch.setattr(cpu, "find_linker", no_linker)
    monkeypatch.setattr(build, "open_checkpoint", lambda *_, **__: pytest.fail("opened"))
    request = build.BuildRequest(str(tiny_checkpoint), "cpu:cortex-a76", None, tmp_path / "dist")
    with pytest.raises(CompileError, match="no linker for linux-aarch64"):
        build.compile_model(request, lambda *_: None)
    assert not (tmp_path / "dist").exists()
