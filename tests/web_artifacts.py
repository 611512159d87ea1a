"""An artifact with libraries for browsers that holds no real model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from everycast import __version__
from everycast.artifact.hashing import hash_bytes
from everycast.artifact.host import Versions
from everycast.artifact.manifest import (
    LibraryStamp,
    Limits,
    Manifest,
    ModelStamp,
    WeightsStamp,
    write_manifest,
)
from everycast.artifact.tensor_cache import TensorCacheReader, TensorCacheWriter

VERSIONS = Versions(__version__, "0.27.0", "0.1.14")
LIBRARIES: dict[str, tuple[str, list[str]]] = {
    "webgpu": ("lib/webgpu.wasm", []),
    "webgpu:f16": ("lib/webgpu-f16.wasm", ["shader-f16"]),
    "webgpu:f16-subgroups": ("lib/webgpu-f16-subgroups.wasm", ["shader-f16", "subgroups"]),
    "webgpu:cpu-adapter": ("lib/webgpu-cpu-adapter.wasm", []),
    "cpu": ("lib/cpu.so", []),
}


def write_web_artifact(
    folder: Path, *, targets: tuple[str, ...] = tuple(LIBRARIES), **chat_config: Any
) -> Path:
    """Write `folder` with two tensors in two shards and a library of a few bytes per target."""
    (folder / "lib").mkdir(parents=True)
    with TensorCacheWriter(folder, shard_bytes=4096) as writer:
        writer.add("embed", np.arange(1000, dtype=np.float32))
        writer.add("head", np.ones((20, 100), np.float32))
    config = {
        "context_window_size": 2048,
        "tokenizer_files": ["tokenizer.json", "tokenizer_config.json"],
        "temperature": 0.7,
        "top_p": 1.0,
        **chat_config,
    }
    (folder / "mlc-chat-config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    cache = TensorCacheReader(folder)
    libraries = {target: _library(folder, target, cache) for target in targets}
    weights = WeightsStamp("q4f32_1", 4.5, 12_000, cache.weights_hash(), cache.layout_hash())
    model = ModelStamp(
        name="tiny",
        model_type="llama",
        architecture="decoder",
        source="tiny.gguf",
        source_hash="source",
        config_hash="config",
        num_parameters=3000,
        licence="apache-2.0",
    )
    write_manifest(folder, Manifest(VERSIONS, model, weights, libraries))
    return folder


def _library(folder: Path, target: str, cache: TensorCacheReader) -> LibraryStamp:
    file, features = LIBRARIES[target]
    code = b"\0asm" + target.encode()
    (folder / file).write_bytes(code)
    return LibraryStamp(
        file=file,
        sha256=hash_bytes(code),
        platform="any",
        target_spec={
            "kind": "webgpu",
            "required_features": features,
            "max_storage_buffer_binding_size": 8000,
            "min_subgroup_size": 32 if "subgroups" in features else None,
        },
        cpu_features=(),
        versions=VERSIONS,
        config_hash="config",
        layout_hash=cache.layout_hash(),
        limits=Limits(512, 1, 16, 1024),
    )
