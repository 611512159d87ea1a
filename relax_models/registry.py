"""Which module reads which architecture."""

import difflib
import importlib
from types import ModuleType

from ..artifact.errors import CheckpointError
from . import name_map
from .checkpoint.source import Checkpoint
from .config import DecoderConfig
from .weights import WeightSource

HF_MODELS: dict[str, str] = {
    "llama": ".llama",
    "mistral": ".mistral",
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
    "gemma3": ".gemma3",
    "gemma3_text": ".gemma3",
}
"""`model_type` of a config.json → module of this package."""

GGUF_MODELS: dict[str, str] = {
    "llama": ".llama",  # Mistral and SmolLM2 as well
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
    "gemma3": ".gemma3",
}
"""`general.architecture` of a GGUF → module of this package."""


def load_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The decoder's configuration. Raises CheckpointError when the architecture is unknown or
    its settings are incomplete, impossible or not supported."""
    module = _module(checkpoint)
    config: DecoderConfig
    if checkpoint.kind == "gguf":
        config = module.from_gguf(checkpoint)
    else:
        config = module.from_hf(checkpoint.config)
    return config


def weight_map(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, WeightSource]:
    """Parameter name → source, in the order of the forward pass. Raises CheckpointError that lists
    every missing, unexpected and misshapen tensor."""
    sources: dict[str, WeightSource] = _module(checkpoint).weight_map(config, checkpoint)
    name_map.check_weight_map(config, sources, checkpoint)
    return sources


def _module(checkpoint: Checkpoint) -> ModuleType:
    if checkpoint.kind == "gguf":
        key, modules = "general.architecture", GGUF_MODELS
    else:
        key, modules = "model_type", HF_MODELS
    name = checkpoint.config.get(key)
    if not isinstance(name, str):
        raise CheckpointError(f"{checkpoint.path.name}: {key} is missing, so the model is unknown")
    if name not in modules:
        nearest = difflib.get_close_matches(name, modules, n=1, cutoff=0.0)[0]
        raise CheckpointError(
            f"{checkpoint.path.name}: {key} {name!r} is not supported; the nearest supported is "
            f"{nearest!r} (all: {', '.join(modules)})"
        )
    return importlib.import_module(modules[name], package=__package__)
