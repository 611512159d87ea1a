import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.artifact.errors import ArtifactError
from everycast.artifact.hashing import hash_bytes
from everycast.artifact.host import Host, Versions
from everycast.artifact.json_fields import from_json
from everycast.artifact.manifest import (
    LibraryStamp,
    Limits,
    Manifest,
    ModelStamp,
    WeightsStamp,
    check_library,
    check_weights,
    library_file,
    read_manifest,
    write_manifest,
)
from everycast.artifact.tensor_cache import TensorCacheReader, TensorCacheWriter
from hypothesis import given
from hypothesis import strategies as st

VERSIONS = Versions("0.1.0", "0.27.0", "0.1.14")
HOST = Host(VERSIONS, "linux-x86_64", frozenset({"avx2", "fma", "avx512f"}))
CPU = LibraryStamp(
    file="lib/cpu.so",
    sha256=hash_bytes(b"code"),
    platform="linux-x86_64",
    target_spec={"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+avx2"]},
    cpu_features=("avx2", "fma"),
    versions=VERSIONS,
    config_hash="config",
    layout_hash="layout",
    limits=Limits(512, 64, 16, 92160),
    function_memory_bytes={"prefill": 1 << 20},
)
MANIFEST = Manifest(
    versions=VERSIONS,
    model=ModelStamp(
        name="smollm2-135m",
        model_type="llama",
        architecture="LlamaForCausalLM",
        source="模型.gguf",
        source_hash="source",
        config_hash="config",
        num_parameters=134_515_008,
        licence="Apache-2.0",
    ),
    weights=WeightsStamp("gguf", 5.84, 98_000_000, "weights", "layout"),
    libraries={"cpu": CPU},
)


def with_library(**changes: Any) -> Manifest:
    return replace(MANIFEST, libraries={"cpu": replace(CPU, **changes)})


def edit(folder: Path, change: Any) -> None:
    path = folder / "everycast.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "張 a'b"
    folder.mkdir()
    write_manifest(folder, MANIFEST)
    assert read_manifest(folder) == MANIFEST
    write_manifest(folder, replace(MANIFEST, libraries={}))
    assert read_manifest(folder).libraries == {}


def test_not_an_artifact(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ArtifactError, match=r"is not an everycast artifact"):
            read_manifest(path)
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"is not an everycast artifact"):
        read_manifest(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", '{"format_version": 1}'])
def test_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "everycast.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"everycast\.json.*build the artifact again"):
        read_manifest(tmp_path)


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)

    def add(document: dict[str, Any]) -> None:
        document["later"] = 1
        document["model"]["later"] = {"x": 1}
        document["libraries"]["cpu"]["limits"]["later"] = []

    edit(tmp_path, add)
    assert read_manifest(tmp_path) == MANIFEST


def test_another_format_version_comes_before_everything_else(tmp_path: Path) -> None:
    (tmp_path / "everycast.json").write_text('{"format_version": 2, "model": "new shape"}')
    with pytest.raises(ArtifactError, match="has format version 2, but this everycast reads 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model",), 3, "model is 3, expected an object"),
        (("model", "num_parameters"), "many", "model.num_parameters is 'many', expected int"),
        (("model", "num_parameters"), True, "model.num_parameters is True, expected int"),
        (("model", "licence"), 7, "model.licence is 7, expected str"),
        (("weights", "bits_per_weight"), "5", "weights.bits_per_weight is '5', expected a number"),
        (
            ("libraries", "cpu", "cpu_features"),
            "avx2",
            r"cpu\.cpu_features is 'avx2', expected a l",
        ),
        (("libraries", "cpu", "cpu_features"), [1], r"cpu\.cpu_features\[0\] is 1, expected str"),
        (("libraries", "cpu", "limits", "page_size"), 1.5, r"limits\.page_size is 1.5"),
        (("format_version",), "1", "format_version is '1', expected int"),
    ],
)
def test_wrong_types_name_the_field(
    tmp_path: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    write_manifest(tmp_path, MANIFEST)

    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    edit(tmp_path, change)
    with pytest.raises(ArtifactError, match=message):
        read_manifest(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    edit(tmp_path, lambda document: document["model"].pop("source_hash"))
    with pytest.raises(ArtifactError, match=r"model\.source_hash is missing"):
        read_manifest(tmp_path)


def test_fields_with_a_default_may_be_missing(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    edit(tmp_path, lambda document: document["model"].pop("licence"))
    assert read_manifest(tmp_path).model.licence is None


def test_a_library_that_fits() -> None:
    assert check_library(MANIFEST, "cpu", HOST) is CPU


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (
            with_library(versions=replace(VERSIONS, everycast="0.2.0")),
            r"built by everycast 0\.2\.0, this is 0\.1\.0",
        ),
        (
            with_library(versions=replace(VERSIONS, tvm="0.28.0")),
            r"built by TVM 0\.28\.0, this is 0\.27\.0",
        ),
        (with_library(versions=replace(VERSIONS, tvm_ffi="0.1.15")), r"built by TVM FFI 0\.1\.15"),
        (
            with_library(platform="macos-aarch64"),
            "built for macos-aarch64, this machine is linux-x86_64",
        ),
        (
            with_library(cpu_features=("avx2", "avx512vnni", "amx-int8")),
            "needs CPU features this machine lacks: amx-int8, avx512vnni",
        ),
        (with_library(config_hash="other"), "another model configuration"),
        (with_library(layout_hash="other"), "other weight shapes or formats"),
    ],
)
def test_what_does_not_fit_is_named(manifest: Manifest, message: str) -> None:
    with pytest.raises(ArtifactError, match=f"library 'cpu' of smollm2-135m.*{message}"):
        check_library(manifest, "cpu", HOST)


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    manifest = with_library(config_hash="other", cpu_features=("avx10",))
    with pytest.raises(ArtifactError, match=r"avx10; .*config hash.*--target cpu"):
        check_library(manifest, "cpu", HOST)


def test_another_target() -> None:
    with pytest.raises(ArtifactError, match=r"no library for target 'cuda' \(built: cpu\)"):
        check_library(MANIFEST, "cuda", HOST)


def test_a_machine_of_unknown_features_is_trusted() -> None:
    assert check_library(MANIFEST, "cpu", replace(HOST, cpu_features=frozenset())) is CPU


def test_a_wasm_library_runs_anywhere() -> None:
    manifest = with_library(platform="any", cpu_features=("simd128",))
    assert check_library(manifest, "cpu", HOST).platform == "any"


def test_library_file_is_hashed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cpu\.so is missing"):
        library_file(tmp_path, CPU)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "cpu.so").write_bytes(b"code")
    assert library_file(tmp_path, CPU) == tmp_path / "lib" / "cpu.so"
    (tmp_path / "lib" / "cpu.so").write_bytes(b"coda")
    with pytest.raises(ArtifactError, match=r"cpu\.so is corrupted"):
        library_file(tmp_path, CPU)
    with pytest.raises(ArtifactError, match="lies outside"):
        library_file(tmp_path / "lib", replace(CPU, file="../secret.so"))


def test_weights_of_another_build(tmp_path: Path) -> None:
    with TensorCacheWriter(tmp_path) as writer:
        writer.add("w", np.zeros(3, np.float32))
    cache = TensorCacheReader(tmp_path)
    weights = replace(MANIFEST.weights, weights_hash=cache.weights_hash())
    check_weights(replace(MANIFEST, weights=weights), cache)
    with pytest.raises(ArtifactError, match=r"are not those that everycast\.json was written for"):
        check_weights(MANIFEST, cache)


@dataclass(frozen=True)
class Inner:
    flag: bool
    number: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: dict[str, Inner]
    maybe: int | None = None
    anything: Any = None
    names: tuple[str, ...] = field(default_factory=tuple)


def test_json_to_dataclasses() -> None:
    document = {"inner": {"a": {"flag": True, "number": 2}}, "names": ["x"], "anything": [1, {}]}
    assert from_json(Outer, document) == Outer({"a": Inner(True, 2.0)}, None, [1, {}], ("x",))
    with pytest.raises(ValueError, match=r"inner\.a\.flag is 1, expected bool"):
        from_json(Outer, {"inner": {"a": {"flag": 1}}})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["inner", "flag", "maybe"]), inner)
    ),
    max_leaves=8,
)


@given(json_values)
def test_any_json_is_converted_or_refused_by_value_error(value: Any) -> None:
    try:
        result = from_json(Outer, value)
    except ValueError:
        return
    assert isinstance(result, Outer)
