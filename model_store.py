"""Built models on this machine: find one, build what is missing, list, remove.

Light on purpose (standard library only): `chat` of a cached model goes through here before the
engine starts. One slot per source, quantization, target, activations and version:

    <cache>/artifacts/<name>-<key>/
        slot.json            the record below, written last: a slot without it is not finished
        <artifact folder>/   what the compiler wrote
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .artifact.cache import cache_dir
from .artifact.errors import ArtifactError, CheckpointError, RequestError

MANIFEST = "everycast.json"
_SLOT_RECORD = "slot.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot of the cache was built from; `artifact` is the folder's name in the slot."""

    model: str
    quantization: str | None
    target: str
    version: str
    artifact: str
    activations: str = "auto"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A finished artifact. `slot` is None for one outside the cache; `num_bytes` is on disk."""

    path: Path
    slot: Slot | None
    num_bytes: int

    @property
    def names(self) -> set[str]:
        """Names that `everycast rm` accepts for it."""
        return {self.path.name} | ({self.slot.model} if self.slot else set())

    def record(self) -> dict[str, Any]:
        """What `everycast list` shows; `error` instead of the model if it cannot be read."""
        from .artifact.manifest import read_manifest

        record: dict[str, Any] = {
            "name": self.path.name,
            "path": str(self.path),
            "num_bytes": self.num_bytes,
        }
        try:
            manifest = read_manifest(self.path)
        except ArtifactError as error:
            return {**record, "error": str(error)}
        return {
            **record,
            "model": self.slot.model if self.slot else manifest.model.name,
            "quantization": manifest.weights.quantization,
            "targets": sorted(manifest.libraries),
            "bits_per_weight": manifest.weights.bits_per_weight,
        }


def is_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def ensure_artifact(
    model: str,
    target: str = "cpu",
    quantization: str | None = None,
    *,
    activations: str = "auto",
    build: Callable[..., Path] | None = None,
    **build_options: Any,
) -> Path:
    """The artifact folder of `model`: an artifact as it is, else from the cache, else built.

    `model` is a name, a Hugging Face folder, `HF://org/name`, a GGUF file or an artifact folder.
    A cached one is found by sizes and times of the source's files alone: nothing is opened.
    `build` (default: `everycast.build_process.build`) gets `build_options` as they are.

    Raises CheckpointError for a path that does not exist, RequestError if an artifact folder is
    not of the asked quantization or activations are asked of one, and what `build` raises.
    """
    if target == "all":
        raise RequestError("a model runs on one target: target 'all' is for everycast compile")
    path = Path(model).expanduser()
    if is_artifact(path):
        _check_quantization(path, quantization)
        if activations != "auto":
            raise RequestError(
                f"{path} is compiled already, activations included; leave --activations out, or "
                "compile its checkpoint again",
                param="activations",
            )
        return path
    spec = model
    if path.exists():
        spec = str(path.resolve())
    elif _looks_like_path(model):
        raise CheckpointError(f"{model}: no such file or folder")
    folder = cache_dir() / "artifacts" / _slot_name(spec, target, quantization, activations)
    if (found := _finished(folder)) is not None:
        return found
    from filelock import FileLock

    from . import build_process

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # two terminals build it once
        if (found := _finished(folder)) is not None:
            return found
        shutil.rmtree(folder, ignore_errors=True)  # left by a build that was killed
        built = (build or build_process.build)(
            model,
            target=target,
            quantization=quantization,
            output=folder,
            activations=activations,
            **build_options,
        )
        slot = Slot(spec, quantization, target, __version__, built.name, activations)
        record = folder / f"{_SLOT_RECORD}.part"
        record.write_text(json.dumps(asdict(slot)), encoding="utf-8")
        record.replace(folder / _SLOT_RECORD)
    return built


def stored_models(*more_folders: Path) -> list[StoredModel]:
    """Every finished artifact in the cache, then those directly inside `more_folders`."""
    found = []
    artifacts = cache_dir() / "artifacts"
    for folder in _subfolders(artifacts):
        slot = _read_slot(folder)
        if slot is not None and is_artifact(folder / slot.artifact):
            path = folder / slot.artifact
            found.append(StoredModel(path, slot, folder_bytes(path)))
    for parent in more_folders:
        for path in _subfolders(parent):
            if is_artifact(path):
                found.append(StoredModel(path, None, folder_bytes(path)))
    return found


def removable(name: str) -> list[Path]:
    """Folders that `rm name` would delete: the artifact at that path, or by name in the cache
    (an artifact's name, or the model it was built from).

    Raises ArtifactError if there is none.
    """
    path = Path(name).expanduser()
    if is_artifact(path):
        return [path]
    stored = stored_models()
    spec = str(path.resolve()) if path.exists() else name
    folders = [entry.path.parent for entry in stored if {spec, name} & entry.names]
    if not folders:
        known = ", ".join(sorted({entry.path.name for entry in stored})) or "none"
        raise ArtifactError(f"no built model is named {name!r}; built: {known}")
    return folders


def remove(folder: Path) -> int:
    """Delete a folder that `removable` named; its bytes.

    Raises ArtifactError for any folder that is neither an artifact nor a slot of the cache.
    """
    folder = Path(os.path.abspath(folder))
    in_cache = folder.parent == cache_dir() / "artifacts"
    if not in_cache and not is_artifact(folder):
        raise ArtifactError(f"{folder} is not a built model: left alone")
    if folder.is_symlink():
        raise ArtifactError(f"{folder} is a link: remove the folder it points to")
    if any(place.is_relative_to(folder) for place in (Path.cwd(), Path.home())):
        raise ArtifactError(f"{folder} holds the current or the home folder: left alone")
    num_bytes = folder_bytes(folder)
    shutil.rmtree(folder)
    return num_bytes


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under `folder`; links are not followed."""
    return sum(
        (Path(parent) / name).lstat().st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _looks_like_path(model: str) -> bool:
    if re.match(r"[A-Za-z]+://", model):
        return False
    return "/" in model or os.sep in model or model.endswith(".gguf")


def _check_quantization(artifact: Path, wanted: str | None) -> None:
    if wanted is None:
        return
    from .artifact.manifest import read_manifest

    has = read_manifest(artifact).weights.quantization
    if has != wanted:
        raise RequestError(
            f"{artifact} is quantized as {has}, not {wanted}; leave --quantization out, or "
            "compile its checkpoint again",
            param="quantization",
        )


def _slot_name(spec: str, target: str, quantization: str | None, activations: str) -> str:
    """Folder name that changes when the source's files, the request or everycast do."""
    path = Path(spec)
    state = []
    for file in _source_files(path):
        status = file.stat()
        state.append([file.name, status.st_size, status.st_mtime_ns])
    key = json.dumps([spec, sorted(state), target, quantization, activations, __version__])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    stem = path.name.removesuffix(".gguf") if path.exists() else spec.rpartition("/")[2]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', stem)[:60] or 'model'}-{digest}"


def _source_files(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in path.iterdir() if file.is_file()]
    if not path.exists():
        return []
    if shard := _SHARD.search(path.name):
        prefix, suffix = path.name[: shard.start()], path.name[-len("-of-00000.gguf") :]
        return [
            file
            for file in path.parent.iterdir()
            if file.name.startswith(prefix) and file.name.endswith(suffix)
        ]
    return [path]


def _finished(folder: Path) -> Path | None:
    slot = _read_slot(folder)
    if slot is None or not is_artifact(folder / slot.artifact):
        return None
    return folder / slot.artifact


def _read_slot(folder: Path) -> Slot | None:
    """The slot's record; None if missing or unreadable, which means: build it again."""
    try:
        return Slot(**json.loads((folder / _SLOT_RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _subfolders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from sorted(entry for entry in parent.iterdir() if entry.is_dir())
