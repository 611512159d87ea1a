"""`models.json`: what the browser page can run, and by which hashes it checks a download.

The page downloads each file itself, compares size and SHA-256 and only then hands it to the engine
(`web/src/models.ts` reads this; `web/src/download/` does the checking). The folder of a model's
files is named by their contents, so they can be cached for ever:

    models/<id>/<version>/resolve/main/mlc-chat-config.json, tensor-cache.json, params_shard_*.bin,
                                       tokenizer.json, lib/webgpu*.wasm

`resolve/main` is what WebLLM expects at the end of a model's URL.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ArtifactError
from .hashing import hash_file, hash_json
from .manifest import LibraryStamp, Manifest, check_weights, library_file, read_manifest
from .tensor_cache import TENSOR_CACHE_JSON, TensorCacheReader

MODELS_JSON = "models.json"
INDEX_VERSION = 2
WEB_TARGET = "webgpu"
_CHAT_CONFIG = "mlc-chat-config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""What WebLLM can read, in its order."""
_SAMPLING = ("temperature", "top_p")
_NO_ADVICE = 1.0
"""The value of these settings that changes nothing: chat configurations hold it by default."""


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file that the page may download. `path` is relative to the model's folder."""

    path: str
    source: Path
    num_bytes: int
    sha256: str

    def record(self) -> dict[str, Any]:
        return {"path": self.path, "num_bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class WebLibrary:
    """A library for the browser. `features`: WebGPU features that the device must have."""

    file: WebFile
    features: tuple[str, ...]
    max_binding_bytes: int | None
    """The largest part of a buffer that a kernel is given; None if the library does not say."""
    min_subgroup_size: int | None
    """Threads that must be able to hand each other values; None: the library relies on none."""
    is_for_cpu_adapters: bool

    def record(self) -> dict[str, Any]:
        return {
            **self.file.record(),
            "features": list(self.features),
            "max_binding_bytes": self.max_binding_bytes,
            "min_subgroup_size": self.min_subgroup_size,
            "is_for_cpu_adapters": self.is_for_cpu_adapters,
        }


@dataclass(frozen=True, slots=True)
class WebModel:
    """One artifact as the page sees it."""

    id: str
    base: str
    """Its folder, relative to `models.json`, with a slash at the end."""
    files: tuple[WebFile, ...]
    libraries: tuple[WebLibrary, ...]
    facts: Mapping[str, Any]
    """The fields of the record that describe the model."""

    @property
    def all_files(self) -> tuple[WebFile, ...]:
        return self.files + tuple(library.file for library in self.libraries)

    def record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "base": self.base,
            **self.facts,
            "files": [file.record() for file in self.files],
            "libraries": [library.record() for library in self.libraries],
        }


def index_json(models: tuple[WebModel, ...], *, has_server: bool = False) -> bytes:
    """The contents of `models.json`. has_server: the host also answers OpenAI's API."""
    document = {
        "format_version": INDEX_VERSION,
        "has_server": has_server,
        "models": [model.record() for model in models],
    }
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def web_libraries(manifest: Manifest) -> dict[str, LibraryStamp]:
    """The manifest's libraries for browsers, by target name; empty if it was built for none."""
    return {
        name: stamp
        for name, stamp in manifest.libraries.items()
        if name.partition(":")[0] == WEB_TARGET
    }


def web_model(folder: Path) -> WebModel:
    """Read an artifact, hash its files, describe it to the page.

    ArtifactError if it has no library for browsers, a file is missing or damaged, or its
    tokenizer is none that a browser can read.
    """
    manifest = read_manifest(folder)
    stamps = web_libraries(manifest)
    libraries = tuple(_library(folder, name, stamp) for name, stamp in stamps.items())
    if not libraries:
        raise ArtifactError(
            f"{folder} has no library for browsers; compile it with --target {WEB_TARGET}"
        )
    cache = TensorCacheReader(folder)
    check_weights(manifest, cache)
    cache.verify()  # the page only knows the hashes that it is told here
    config = _chat_config(folder)
    names = [_CHAT_CONFIG, TENSOR_CACHE_JSON, _tokenizer(folder, config), *cache.shards]
    files = tuple(_file(folder, name) for name in names)
    hashes = [[file.path, file.sha256] for file in (*files, *(one.file for one in libraries))]
    identifier = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
    return WebModel(
        id=identifier,
        base=f"models/{identifier}/{hash_json(hashes)[:16]}/resolve/main/",
        files=files,
        libraries=libraries,
        facts={
            "name": manifest.model.name,
            "quantization": manifest.weights.quantization,
            "bits_per_weight": manifest.weights.bits_per_weight,
            "num_parameters": manifest.model.num_parameters,
            "licence": manifest.model.licence,
            "context_window_size": min(
                stamp.target_spec.get("max_context_window_size", config["context_window_size"])
                for stamp in stamps.values()
            ),
            "largest_tensor_bytes": cache.largest_record_bytes,
            "sampling": {
                name: config[name]
                for name in _SAMPLING
                if config.get(name) not in (None, _NO_ADVICE)
            },
        },
    )


def _chat_config(folder: Path) -> dict[str, Any]:
    path = folder / _CHAT_CONFIG
    try:
        config = json.loads(path.read_bytes())
        int(config["context_window_size"])
        list(config["tokenizer_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"cannot read {path}: {error!r}; build the artifact again") from None
    return dict(config)


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> str:
    for name in _TOKENIZERS:
        if name in config["tokenizer_files"]:
            return name
    raise ArtifactError(
        f"{folder} has no tokenizer that browsers can read; allowed: {', '.join(_TOKENIZERS)}"
    )


def _library(folder: Path, name: str, stamp: LibraryStamp) -> WebLibrary:
    path = library_file(folder, stamp)
    return WebLibrary(
        file=WebFile(stamp.file, path, path.stat().st_size, stamp.sha256),
        features=tuple(stamp.target_spec.get("required_features", ())),
        max_binding_bytes=stamp.target_spec.get("max_storage_buffer_binding_size"),
        min_subgroup_size=stamp.target_spec.get("min_subgroup_size"),
        is_for_cpu_adapters=name == f"{WEB_TARGET}:cpu-adapter",
    )


def _file(folder: Path, name: str) -> WebFile:
    path = folder / name
    try:
        return WebFile(name, path, path.stat().st_size, hash_file(path))
    except OSError as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror or error}; build the artifact again"
        ) from None
