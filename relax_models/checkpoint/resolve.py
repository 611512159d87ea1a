"""From what a user typed to an open checkpoint."""

import difflib
import os
from pathlib import Path

from ...artifact.cache import cache_dir
from ...artifact.errors import CheckpointError
from .gguf import GGUFCheckpoint, split_parts
from .hub import fetch_hub
from .huggingface import HuggingFaceCheckpoint
from .named_models import NAMED_MODELS, Progress, fetch_named
from .source import Checkpoint

HUB_PREFIX = "HF://"
_WANTED = "give a Hugging Face folder, HF://organization/model or a .gguf file"


def is_named(spec: str) -> bool:
    """Is `spec` the name of a model in the table? (`./name` is always a path.)"""
    return spec in NAMED_MODELS


def open_checkpoint(
    spec: str, *, cache: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """The checkpoint that `spec` stands for, fetched first if it is a name or on the hub.

    `spec` is, in this order: a named model, `HF://org/name[@revision]`, a Hugging Face folder, a
    folder with exactly one GGUF model (a split one counts as one), or a GGUF file. Named models
    are kept in `cache` (default: `cache_dir()`); `progress` follows their unpacking.

    Raises CheckpointError, one line, if it is none of these or cannot be opened.
    """
    if is_named(spec):
        return GGUFCheckpoint(fetch_named(spec, cache or cache_dir(), progress))
    if spec[: len(HUB_PREFIX)].upper() == HUB_PREFIX:
        repo, _, revision = spec[len(HUB_PREFIX) :].strip("/").partition("@")
        return HuggingFaceCheckpoint(fetch_hub(repo, revision=revision or None))
    # os.path, because Path raises for names that no file can have and for unknown users.
    path = Path(os.path.expanduser(spec))
    if spec and os.path.isdir(path):
        return _open_folder(path)
    if os.path.isfile(path):
        return _open_file(path)
    raise _unknown(spec, path)


def _open_folder(path: Path) -> Checkpoint:
    has_safetensors = next(path.glob("*.safetensors"), None) is not None
    models = _gguf_models(path)
    if has_safetensors or not models:
        return HuggingFaceCheckpoint(path)
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:10])
        raise CheckpointError(f"{path} holds {len(models)} GGUF models: {names}; give one of them")
    return GGUFCheckpoint(models[0])


def _gguf_models(folder: Path) -> list[Path]:
    """One file of each GGUF model in the folder."""
    first_parts: dict[Path, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        first_parts.setdefault(split_parts(path)[0], path)
    return list(first_parts.values())


def _open_file(path: Path) -> Checkpoint:
    if path.suffix.lower() == ".gguf" or _starts_with_magic(path):
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path} is one file of a model; give its folder, {path.parent}")
    raise CheckpointError(f"{path} is not a model; {_WANTED}")


def _starts_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _unknown(spec: str, path: Path) -> CheckpointError:
    if path.suffix.lower() == ".gguf" or spec.startswith((".", "/", "~")):
        return CheckpointError(f"there is no file or folder {spec!r}; {_WANTED}")
    near = difflib.get_close_matches(spec.lower(), NAMED_MODELS, n=2, cutoff=0.5)
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    if spec.count("/") == 1:
        hints.append(f"on the hub it is HF://{spec};")
    hints.append(f"known names: {', '.join(NAMED_MODELS)}; or {_WANTED}")
    return CheckpointError(f"no model {spec!r}: {' '.join(hints)}")
