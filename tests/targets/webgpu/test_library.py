"""Libraries for browsers, without a browser: their shaders' bounds, functions and metadata."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.errors import CompileError
from everycast.artifact.manifest import read_manifest
from everycast.artifact.model_list import webllm_advice
from everycast.native import wasm_runtime
from everycast.targets.build import BuildRequest, compile_model, open_source
from everycast.targets.library import BuiltLibrary
from everycast.targets.target import find_target
from everycast.targets.webgpu import library
from everycast.targets.webgpu import target as webgpu

MAX_BUFFERS, MAX_THREADS, WORKGROUP_BYTES = 10, 256, 16 << 10
"""What WebGPU promises, but for the buffers: those are what WebLLM asks of every device."""
CONTRACT = (
    "embed", "prefill", "decode", "create_tir_paged_kv_cache", "softmax_with_temperature",
    "argsort_probs", "sample_with_top_p", "_metadata",
)  # fmt: skip
IN_PLACE = ("apply_logit_bias_inplace", "apply_penalty_inplace", "apply_bitmask_inplace")
ITEM_BYTES = {"f32": 4, "i32": 4, "u32": 4, "f16": 2}


@dataclass
class Compiled:
    library: BuiltLibrary
    functions: str
    shaders: dict[str, str]


def sources(module: Any) -> str:
    own = module.inspect_source() if module.kind == "webgpu" else ""
    return own + "\n".join(sources(imported) for imported in module.imports)


def kernels(source: str) -> dict[str, str]:
    parts = re.split(r"^// Function: (\w+)$", source, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: code for name, code in found.items() if "@compute" in code}


@pytest.fixture
def compile_library(
    make_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Compiled]:
    """Compiles a tiny model, but links nothing: works without Emscripten."""
    executables: list[Any] = []
    monkeypatch.setattr(webgpu, "find_emscripten", lambda: Path("emcc"))
    monkeypatch.setattr(webgpu, "_export", lambda executable, path: executables.append(executable))

    def compiled(
        model_type: str, target: str, scheme: str, *, context: int = 128, **overrides: Any
    ) -> Compiled:
        checkpoint = make_tiny(model_type, tmp_path / model_type, **overrides)
        request = BuildRequest(str(checkpoint), target, scheme, tmp_path)
        source, found = open_source(request, lambda *_: None), find_target(target)
        assert found.build_library is not None
        built = found.build_library(
            source.config, source.plan.formats, found, tmp_path / "x.wasm",
            scheme_dtype=source.plan.dtype, context_window_size=context,
        )  # fmt: skip
        executable = executables.pop()
        module = getattr(executable, "mod", executable)
        return Compiled(built, executable.as_text(), kernels(sources(module)))

    return compiled


def check_bounds(
    shaders: dict[str, str], *, may_share: bool = True, shared_bytes: int = WORKGROUP_BYTES
) -> None:
    for name, code in shaders.items():
        assert len(re.findall(r"var<storage", code)) <= MAX_BUFFERS, name
        (size,) = re.findall(r"@workgroup_size\((\d+), (\d+), (\d+)\)", code)
        x, y, z = map(int, size)
        assert x * y * z <= MAX_THREADS, name
        shared = re.findall(r"var<workgroup> \w+ : array<(?:vec(\d)<)?(\w+)>?, (\d+)>", code)
        sizes = [ITEM_BYTES[dtype] * int(lanes or 1) * int(n) for lanes, dtype, n in shared]
        assert sum(sizes) <= shared_bytes, name
        assert code.count("var<workgroup>") == len(shared), name
        if not may_share:
            assert not shared and "workgroupBarrier" not in code, name
        assert "i64" not in code and "f64" not in code, name


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
}


def test_all_model_types_are_here(tiny_models) -> None:
    assert set(MODELS) == set(tiny_models.MODEL_TYPES)


@pytest.mark.parametrize(("model_type", "overrides"), MODELS.items(), ids=MODELS)
def test_every_model_type_keeps_the_bounds(compile_library, model_type, overrides) -> None:
    compiled = compile_library(model_type, "webgpu", "q4f16_1", **overrides)
    check_bounds(compiled.shaders)
    assert not any("f16" in code.replace("float16", "") for code in compiled.shaders.values())
    for name in CONTRACT:
        assert f"@{name}" in compiled.functions, name
    assert all(f"{name}_kernel" in compiled.shaders for name in IN_PLACE)
    assert compiled.library.metadata["schedules"]["default"] == 0


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_with_float16(compile_library, model_type) -> None:
    compiled = compile_library(model_type, "webgpu:f16", "q4f16_1")
    check_bounds(compiled.shaders)
    halves = {name for name, code in compiled.shaders.items() if "array<f16>" in code}
    assert any("attention" in name for name in halves)
    assert any("linear" in name for name in halves)
    assert all("enable f16;" in compiled.shaders[name] for name in halves)
    requirements = compiled.library.metadata["device_requirements"]
    assert requirements["required_features"] == ["shader-f16"]


def test_with_subgroups(compile_library) -> None:
    """Sums of few rows, norms and softmax."""
    compiled = compile_library("qwen3", "webgpu:f16-subgroups", "q4f16_1")
    check_bounds(compiled.shaders)
    exchanging = {name for name, code in compiled.shaders.items() if "subgroupShuffle" in code}
    assert all("enable subgroups;" in compiled.shaders[name] for name in exchanging)
    for kind in ("linear", "silu", "rms_norm", "softmax"):
        assert any(name.startswith(kind) for name in exchanging), kind
    requirements = compiled.library.metadata["device_requirements"]
    assert requirements["required_features"] == ["shader-f16", "subgroups"]
    assert requirements["min_subgroup_size"] == 32
    plain = compile_library("qwen3", "webgpu:f16", "q4f16_1")
    assert not any("subgroup" in code for code in plain.shaders.values())


@pytest.mark.parametrize("scheme", ["q4f16_1", "q3f16_1", "q0f16", "q0bf16", "q0f32"])
def test_for_cpus_that_act_as_gpus(compile_library, scheme) -> None:
    """The model's kernels neither share memory nor wait for each other."""
    compiled = compile_library("qwen3", "webgpu:cpu-adapter", scheme)
    check_bounds(compiled.shaders)
    kinds = ("linear", "silu", "attention", "rms_norm", "embedding", "rotate")
    model = {name: code for name, code in compiled.shaders.items() if name.startswith(kinds)}
    assert len(model) > 10
    check_bounds(model, may_share=False)


def test_wide_heads_take_more_shared_memory(compile_library) -> None:
    """As those of Gemma: a page of keys has 16 KB."""
    shaders = compile_library("gemma3_text", "webgpu", "q4f16_1", head_dim=256).shaders
    attention = {name for name in shaders if name.startswith("attention")}
    check_bounds({name: shaders[name] for name in attention}, shared_bytes=32 << 10)
    check_bounds({name: code for name, code in shaders.items() if name not in attention})


def test_metadata(compile_library) -> None:
    built = compile_library("qwen2", "webgpu", "q4f16_1").library
    metadata = json.loads(json.dumps(built.metadata))
    assert metadata["kv_state_kind"] == "kv_cache"
    assert (metadata["context_window_size"], metadata["prefill_chunk_size"]) == (128, 512)
    names = [parameter["name"] for parameter in metadata["params"]]
    assert len(names) == len(set(names)) and "model.embed_tokens.q_weight" in names
    assert set(metadata["memory_usage"]) >= {"prefill", "decode", "embed"}
    assert built.page_bytes == 2 * 2 * 16 * 32 * 4  # layers, keys and values, page, head, float


@pytest.mark.parametrize("target", ["webgpu", "webgpu:cpu-adapter"])
def test_a_weight_that_not_every_device_binds_comes_in_parts(
    compile_library, monkeypatch, target
) -> None:
    """The embedding, of which the head is the same weight."""
    variants = {
        name: webgpu.replace(limits, max_weight_bytes=8 << 10)
        for name, limits in webgpu._VARIANTS.items()
    }
    monkeypatch.setattr(webgpu, "_VARIANTS", variants)
    compiled = compile_library("qwen2", target, "q8f16_1", vocab_size=331, tie_word_embeddings=True)
    check_bounds(compiled.shaders)
    assert compiled.library.row_parts == {
        "model.embed_tokens.q_weight": [128, 128, 75],
        "model.embed_tokens.q_scale": [128, 128, 75],
    }
    sizes = {p["name"]: p["shape"] for p in compiled.library.metadata["params"]}
    assert "model.embed_tokens.q_weight" not in sizes
    assert sizes["model.embed_tokens.q_weight.part2"] == [75, 16]
    for kind, launches in (("embedding", 1), ("linear_q8s32_float16_nk_331", 2)):
        found = [name for name in compiled.shaders if name.startswith(kind)]
        assert len(found) >= 3 * launches, kind
    requirements = compiled.library.metadata["device_requirements"]
    assert requirements["max_storage_buffer_binding_size"] > 8 << 10  # of a step


def test_a_step_that_not_every_device_can_take(compile_library, monkeypatch) -> None:
    monkeypatch.setattr(library, "PROMISED_BINDING_BYTES", 50_000)
    with pytest.raises(CompileError, match="a step of 512 tokens needs a buffer of") as caught:
        compile_library("llama", "webgpu", "q4f16_1")
    assert "\n" not in str(caught.value)


def test_a_context_that_not_every_device_can_take(compile_library, monkeypatch, caplog) -> None:
    """A layer's keys and values have 256 bytes for a token, 128 as halves."""
    monkeypatch.setattr(library, "PROMISED_BINDING_BYTES", 1 << 20)
    with caplog.at_level("WARNING"):
        long = {"max_position_embeddings": 8192, "context": 8000}
        plain = compile_library("llama", "webgpu", "q4f16_1", **long).library
        half = compile_library("llama", "webgpu:f16", "q4f16_1", **long).library
    found = [
        (one.metadata["context_window_size"], one.metadata["device_requirements"])
        for one in (plain, half)
    ]
    assert [context for context, _ in found] == [4096, 8000]
    assert all(required["max_context_window_size"] == context for context, required in found)
    (line,) = [record.message for record in caplog.records if "conversation" in record.message]
    assert "at most 4096 of the model's 8000 tokens" in line


def test_a_kernel_with_too_many_tensors_is_a_compile_error(compile_library, monkeypatch) -> None:
    monkeypatch.setattr(
        webgpu, "_VARIANTS", {"": webgpu.replace(webgpu._VARIANTS[""], max_buffers=4)}
    )
    with pytest.raises(CompileError, match=r"takes \d tensors, the target allows 4; choose"):
        compile_library("llama", "webgpu", "q4f16_1")


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with the linked libraries."""
    try:
        wasm_runtime.find_emscripten()
    except CompileError as error:
        pytest.skip(str(error))
    request = BuildRequest(
        str(tiny_checkpoint), "webgpu", "q4f16_1", tmp_path_factory.mktemp("dist")
    )
    return compile_model(request, lambda *_: None)


def test_one_call_makes_all_variants(built: Path) -> None:
    libraries = read_manifest(built).libraries
    files = {name: stamp.file for name, stamp in libraries.items()}
    assert files == {
        "webgpu": "lib/webgpu.wasm",
        "webgpu:f16": "lib/webgpu-f16.wasm",
        "webgpu:f16-subgroups": "lib/webgpu-f16-subgroups.wasm",
        "webgpu:cpu-adapter": "lib/webgpu-cpu-adapter.wasm",
    }
    for stamp in libraries.values():
        wasm = (built / stamp.file).read_bytes()
        assert wasm.startswith(b"\0asm") and len(wasm) < 5_000_000
        assert stamp.platform == "any" and "required_features" in stamp.target_spec


def test_the_config_is_one_that_webllm_reads(built: Path) -> None:
    config = json.loads((built / "mlc-chat-config.json").read_bytes())
    advice = (config["temperature"], config["top_p"], config["frequency_penalty"])
    assert advice == (0.6, 0.9, 0.0) and config["sliding_window_size"] == -1
    assert config["tokenizer_info"]["token_postproc_method"] == "byte_level"
    template = config["conv_template"]
    assert template["roles"]["user"] == "<|im_start|>user\n"
    assert template["stop_token_ids"] == [2]


def test_advice_for_apps_built_on_webllm(built: Path) -> None:
    title, *records = webllm_advice(built, list(read_manifest(built).libraries))
    assert "model_list" in title
    plain, half, subgroups, _ = map(json.loads, records)
    assert subgroups["model_id"].endswith("-f16-subgroups")
    assert subgroups["required_features"] == ["shader-f16", "subgroups"]
    assert "subgroupMinSize of 32" in title
    assert plain["model_lib"].endswith(f"{built.name}/resolve/main/lib/webgpu.wasm")
    assert plain["required_features"] == [] and half["required_features"] == ["shader-f16"]
    assert plain["overrides"] == {"context_window_size": 256}
    assert webllm_advice(built, ["cpu"]) == []


def test_advice_where_the_chat_template_is_not_exact(built: Path, tmp_path: Path) -> None:
    config = json.loads((built / "mlc-chat-config.json").read_bytes())
    config["conv_template"]["is_exact"] = False
    (tmp_path / "mlc-chat-config.json").write_text(json.dumps(config))
    shutil.copy(built / "everycast.json", tmp_path)
    assert "chat template" in webllm_advice(tmp_path, ["webgpu"])[-1]


def test_without_emscripten_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm_runtime.shutil, "which", lambda _: None)
    with pytest.raises(CompileError, match="apt install emscripten") as caught:
        find_target("webgpu")
    assert "\n" not in str(caught.value)


def test_unknown_variants_and_activations_are_one_line() -> None:
    with pytest.raises(CompileError, match="unknown architecture 'f8' for target webgpu"):
        find_target("webgpu:f8")
    with pytest.raises(CompileError, match="activations 'int8' are for target cpu"):
        find_target("webgpu", activations="int8")
