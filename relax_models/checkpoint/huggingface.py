"""Hugging Face folders as checkpoints: config.json and one or more safetensors files."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ...artifact.errors import CheckpointError
from .mapped_file import GIT_LFS_PREFIX, hash_files, map_array, quote
from .safetensors_header import read_header
from .source import FLOAT_DTYPES, TensorInfo

INDEX_NAME = "model.safetensors.index.json"
_FLOATS: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_SHARD_NAME = re.compile(
    r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL
)
# What the model is made of, besides the weights: a change there must change the hash too.
_SOURCE_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")


class HuggingFaceCheckpoint:
    """The `Checkpoint` in a Hugging Face folder.

    With an index, exactly the files it names are read; without one, every `*.safetensors`.

    Raises CheckpointError if config.json or a shard is missing or damaged, if a tensor is stored
    twice, or if the weights are pickled or already quantized. Buffers that are not float (such as
    position ids) are listed, and refused only when read.
    """

    kind: Literal["huggingface", "gguf"] = "huggingface"

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder")
        self.path = path
        self.config: Mapping[str, Any] = read_json_object(path / "config.json")
        _refuse_quantized(path, self.config)
        weight_map = _read_weight_map(path / INDEX_NAME)
        shards = _all_shards(path) if weight_map is None else _indexed_shards(path, weight_map)

        tensors: dict[str, TensorInfo] = {}
        self._locations: dict[str, tuple[Path, int]] = {}
        for shard in shards:
            header = read_header(shard)
            for name, info in header.tensors.items():
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: tensor {quote(name)} is both in {self._locations[name][0].name} "
                        f"and in {shard.name}; remove the file that does not belong to the model"
                    )
                tensors[name] = info
                self._locations[name] = (shard, header.offsets_bytes[name])
        self.tensors: Mapping[str, TensorInfo] = tensors
        _check_index(path, weight_map or {}, self._locations)
        _check_dtypes(path, tensors)

    def read(self, name: str) -> np.ndarray:
        """Memory-mapped tensor, float32 / float16 / bfloat16 [shape].

        Raises CheckpointError if there is no such tensor or it is not float.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {quote(name)}")
        info = self.tensors[name]
        if info.dtype not in _FLOATS:
            raise _unsupported_dtype(self.path, info)
        path, offset = self._locations[name]
        return map_array(path, offset, info.shape, _FLOATS[info.dtype])

    def source_hash(self) -> str:
        return hash_files({file for pattern in _SOURCE_FILES for file in self.path.glob(pattern)})


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. CheckpointError if it is missing or anything else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a Hugging Face folder holds it beside its *.safetensors files"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if content.startswith(GIT_LFS_PREFIX):
        raise CheckpointError(
            f"{path}: this is a git-lfs pointer, not the file itself; run `git lfs pull` there"
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Name the quantization of weights that are not plain floats."""
    method = None
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            if isinstance(quantization := part.get("quantization_config"), dict):
                method = str(quantization.get("quant_method", "quantized"))
            elif isinstance(part.get("quantization"), dict):
                method = "MLX"
    if method is None and (path / "quantize_config.json").exists():
        method = "GPTQ"
    if method is None and (path / "quant_config.json").exists():
        method = "AWQ"
    if method is not None:
        raise _quantized(path, method)


def _quantized(path: Path, method: str) -> CheckpointError:
    shown = method.upper() if method.lower() in ("gptq", "awq", "mlx", "hqq", "fp8") else method
    return CheckpointError(
        f"{shown} checkpoint detected: {path}; its weights are already quantized in a way that "
        "cannot be imported. Use the model's float checkpoint, or a GGUF of it"
    )


def _read_weight_map(path: Path) -> dict[str, str] | None:
    """Tensor name → shard name from the index, or None if there is no index."""
    if not path.exists():
        return None
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; fetch it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path} names the shard {quote(str(shard))}, which is no file name"
            )
    return weight_map


def _indexed_shards(path: Path, weight_map: Mapping[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (path / name).exists()]
    if missing:
        raise CheckpointError(
            f"{path}: {INDEX_NAME} names {len(names)} shards, missing: {_listed(missing)}; "
            "fetch them"
        )
    return [path / name for name in names]


def _all_shards(path: Path) -> list[Path]:
    """Every safetensors file of a folder without index, none missing by the files' own numbers."""
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        pickles = sorted(p.name for kind in ("bin", "pt", "pth") for p in path.glob(f"*.{kind}"))
        if pickles:
            raise CheckpointError(
                f"{path} holds only pickled weights ({_listed(pickles)}), which can run code when "
                "opened; save the model again with safetensors (transformers: "
                "save_pretrained(..., safe_serialization=True))"
            )
        raise CheckpointError(f"{path} holds no *.safetensors file; fetch the model's weights")
    names = {shard.name for shard in shards}
    expected = {
        f"{match['stem']}-{part:05d}-of-{match['count']}.safetensors"
        for match in map(_SHARD_NAME.fullmatch, names)
        if match is not None
        for part in range(1, int(match["count"]) + 1)
    }
    if missing := sorted(expected - names):
        raise CheckpointError(f"{path}: missing shards: {_listed(missing)}; fetch them")
    return shards


def _check_index(
    path: Path, weight_map: Mapping[str, str], locations: Mapping[str, tuple[Path, int]]
) -> None:
    wrong = [
        quote(name)
        for name, shard in weight_map.items()
        if name not in locations or locations[name][0].name != shard
    ]
    if wrong:
        raise CheckpointError(
            f"{path}: {INDEX_NAME} says where these tensors are, but they are not there: "
            f"{_listed(wrong)}; index and shards are not of the same model"
        )


def _check_dtypes(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    if any(name.endswith((".qweight", ".qzeros")) for name in tensors):
        raise _quantized(
            path, "GPTQ" if any(name.endswith(".g_idx") for name in tensors) else "GPTQ or AWQ"
        )
    for info in tensors.values():
        if info.dtype not in _FLOATS and info.name.endswith((".weight", ".bias")):
            raise _unsupported_dtype(path, info)


def _unsupported_dtype(path: Path, info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {quote(info.name)} has dtype {info.dtype}, which is not supported; "
        f"supported: {', '.join(FLOAT_DTYPES)}"
    )


def _listed(names: list[str]) -> str:
    """The first ten names, and how many there are beyond them."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
