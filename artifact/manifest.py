"""`everycast.json`: what an artifact holds, by what it was built, and where it may run."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import ArtifactError
from .files import atomic_write
from .hashing import hash_file
from .host import Host, Versions
from .json_fields import from_json
from .tensor_cache import TensorCacheReader

FORMAT_VERSION = 1
MANIFEST_JSON = "everycast.json"


@dataclass(frozen=True, slots=True)
class ModelStamp:
    """Where the model comes from. `licence` is as its source states it, None if it does not."""

    name: str
    model_type: str
    architecture: str
    source: str
    source_hash: str
    config_hash: str
    """`hash_json` of the model configuration that libraries are compiled for."""
    num_parameters: int
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsStamp:
    """The tensor cache: its two hashes are `TensorCacheReader`'s."""

    quantization: str
    bits_per_weight: float
    num_bytes: int
    weights_hash: str
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What a library was compiled for. Counts are tokens unless named otherwise."""

    prefill_chunk_size: int
    max_num_sequence: int
    page_size: int
    page_bytes: int
    """Bytes of one KV page over all layers."""


@dataclass(frozen=True, slots=True)
class LibraryStamp:
    """One compiled library, `file` relative to the artifact's folder."""

    file: str
    sha256: str
    platform: str
    """Where it loads, as `host_platform` spells it; `any` if that is not this machine's matter
    (wasm)."""
    target_spec: dict[str, Any]
    cpu_features: tuple[str, ...]
    """LLVM's names of the features that the machine must have."""
    versions: Versions
    config_hash: str
    layout_hash: str
    limits: Limits
    function_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Most workspace a function needs, at its limits."""
    schedules: dict[str, int] = field(default_factory=dict)
    """How many operators run tuned, scheduled by hand, or by the compiler's default."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of `everycast.json`; `libraries` is by target name."""

    versions: Versions
    model: ModelStamp
    weights: WeightsStamp
    libraries: dict[str, LibraryStamp] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace `everycast.json` in one step."""
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    atomic_write(folder / MANIFEST_JSON, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; ArtifactError if it is missing, damaged or of another format
    version. Fields this version does not know are passed over."""
    path = folder / MANIFEST_JSON
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{folder} is not an everycast artifact: it holds no {MANIFEST_JSON}"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}; build the artifact again") from None
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {version}, but this everycast reads {FORMAT_VERSION}; "
            f"build the artifact again or use the everycast it was built by"
        )
    try:
        return from_json(Manifest, document)
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}; build the artifact again") from None


def check_library(manifest: Manifest, target: str, host: Host) -> LibraryStamp:
    """The stamp of the library for `target`, once everything about it fits.

    ArtifactError naming all that does not: another everycast or TVM version, another platform, a
    CPU feature this machine lacks, another model configuration or weight layout.
    """
    library = manifest.libraries.get(target)
    if library is None:
        built = ", ".join(manifest.libraries) or "none"
        raise ArtifactError(
            f"{manifest.model.name} has no library for target '{target}' (built: {built}); "
            f"compile it with --target {target}"
        )
    faults = [
        f"built by {package} {built_by}, this is {running}"
        for package, built_by, running in (
            ("everycast", library.versions.everycast, host.versions.everycast),
            ("TVM", library.versions.tvm, host.versions.tvm),
            ("TVM FFI", library.versions.tvm_ffi, host.versions.tvm_ffi),
        )
        if built_by != running
    ]
    again = f"compile it again with --target {target}"
    here = f"compile one for this machine with --target {target.partition(':')[0]}"
    if library.platform not in ("any", host.platform):
        again = here
        faults.append(f"built for {library.platform}, this machine is {host.platform}")
    elif missing := sorted(set(library.cpu_features) - host.cpu_features):
        # Where the features cannot be found out, nothing is known to be missing.
        if host.cpu_features and library.platform != "any":
            again = here
            faults.append(f"needs CPU features this machine lacks: {', '.join(missing)}")
    if library.config_hash != manifest.model.config_hash:
        faults.append("compiled for another model configuration (config hash)")
    if library.layout_hash != manifest.weights.layout_hash:
        faults.append("compiled for other weight shapes or formats (layout hash)")
    if faults:
        raise ArtifactError(
            f"library '{target}' of {manifest.model.name} does not fit: {'; '.join(faults)}; "
            + again
        )
    return library


def check_weights(manifest: Manifest, cache: TensorCacheReader) -> None:
    """ArtifactError unless the weights beside the manifest are those it was written for (by the
    records of the tensor cache; `cache.verify()` hashes the bytes)."""
    if cache.weights_hash() != manifest.weights.weights_hash:
        raise ArtifactError(
            f"the weights in {cache.folder} are not those that {MANIFEST_JSON} was written for "
            f"(weights hash); build the artifact again"
        )


def library_file(folder: Path, library: LibraryStamp) -> Path:
    """The library's path, once its bytes are those that were stamped; else ArtifactError."""
    path = folder / library.file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ArtifactError(f"library {library.file} lies outside {folder}; build it again")
    if not path.is_file():
        raise ArtifactError(f"library {path} is missing; compile it again")
    if hash_file(path) != library.sha256:
        raise ArtifactError(f"library {path} is corrupted (SHA-256); compile it again")
    return path
