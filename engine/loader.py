"""From an artifact (or what one can be built from) to an engine loop that is ready to start."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.errors import ArtifactError, EverycastError
from ..artifact.host import this_host
from ..artifact.manifest import (
    LibraryStamp,
    Manifest,
    check_library,
    check_weights,
    library_file,
    read_manifest,
)  # fmt: skip
from ..artifact.tensor_cache import TensorCacheReader
from .engine_config import EngineConfig, Mode
from .loop import EngineLoop
from .memory_plan import MemoryPlan, available_memory, plan_memory
from .model_description import ModelDescription
from .model_runner import ModelInfo
from .paged_runner import PagedRunner
from .parameters import Progress, load_parameters
from .runtime import Library
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHAT_CONFIG_JSON = "mlc-chat-config.json"
DEVICES = ("cpu",)
"""What a library can run on, best first."""

EngineParts = tuple[EngineLoop, Tokenizer, ModelDescription]


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact that fits this machine, and its memory plan; nothing big is loaded yet."""

    folder: Path
    manifest: Manifest
    library: Path
    weights: TensorCacheReader
    info: ModelInfo
    config: EngineConfig
    chat_config: Mapping[str, Any]
    plan: MemoryPlan

    def load(self, progress: Progress | None = None) -> EngineParts:
        """Load the library and its parameters and take the KV pages.

        `progress(done, total)` is called with bytes if weights must be packed first.
        """
        tokenizer = Tokenizer.from_folder(self.folder)
        limits = self.config.resolve(self.info, self.plan.num_pages)
        library = Library(self.library)
        parameters = load_parameters(self.folder, library, self.weights, progress)
        runner = PagedRunner(library, parameters, self.info, self.plan.num_pages)
        loop = EngineLoop(
            runner,
            limits,
            tokenizer_size=tokenizer.size,
            eos_token_ids=self.chat_config["eos_token_id"],
        )
        return loop, tokenizer, ModelDescription(self.folder.name, _defaults(self.chat_config))


def load_engine_parts(
    model: str | Path,
    device: str = "auto",
    model_lib: str | Path | None = None,
    mode: Mode = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
) -> EngineParts:
    """What `MLCEngine` is made of; builds the artifact first if `model` is not one.

    Raises the family of EverycastError.
    """
    from ..model_store import ensure_artifact

    folder = ensure_artifact(str(model))
    return open_artifact(folder, device, model_lib, mode, engine_config).load()


def open_artifact(
    folder: Path,
    device: str = "auto",
    model_lib: str | Path | None = None,
    mode: Mode = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
) -> OpenArtifact:
    """Check an artifact against this machine and plan its memory.

    Raises ArtifactError if it does not fit, CapacityError if memory does not suffice,
    RequestError for an engine_config that makes no sense.
    """
    manifest = read_manifest(folder)
    weights = TensorCacheReader(folder)
    check_weights(manifest, weights)
    stamp = _library_stamp(manifest, device)
    library = library_file(folder, stamp) if model_lib is None else Path(model_lib)
    chat_config = _read_chat_config(folder)
    limits = stamp.limits
    info = ModelInfo(
        vocab_size=int(chat_config["vocab_size"]),
        context_window_size=int(chat_config["context_window_size"]),
        page_size=limits.page_size,
        page_bytes=limits.page_bytes,
        prefill_chunk_size=limits.prefill_chunk_size,
        max_num_sequence=limits.max_num_sequence,
    )
    config = _engine_config(mode, engine_config)
    plan = plan_memory(
        config,
        info,
        weight_bytes=manifest.weights.num_bytes,
        workspace_bytes=_workspace_bytes(stamp),
        available_bytes=available_memory(),
    )
    if plan.num_tokens < config.kv_tokens(info):
        logger.warning(
            "KV pages reduced from %d to %d tokens, which is what memory allows",
            config.kv_tokens(info),
            plan.num_tokens,
        )
    return OpenArtifact(folder, manifest, library, weights, info, config, chat_config, plan)


def _library_stamp(manifest: Manifest, device: str) -> LibraryStamp:
    """The library for `device`, or of all that fit this machine the most specific: a library for
    a named CPU was asked for by someone who knew why."""
    names = list(manifest.libraries)
    if device != "auto":
        if device.partition(":")[0] not in DEVICES:
            raise ArtifactError(
                f"device '{device}' cannot be run on in this version; choose {', '.join(DEVICES)}"
            )
        names = [name for name in names if name == device or name.partition(":")[0] == device]
    if not names:
        return check_library(manifest, "cpu" if device == "auto" else device, this_host())
    refusal: EverycastError | None = None
    for name in sorted(names, key=len, reverse=True):
        try:
            return check_library(manifest, name, this_host())
        except ArtifactError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _engine_config(
    mode: Mode, engine_config: EngineConfig | Mapping[str, Any] | None
) -> EngineConfig:
    if isinstance(engine_config, EngineConfig):
        return replace(engine_config, mode=mode) if mode != "local" else engine_config
    return EngineConfig.from_dict({"mode": mode, **(engine_config or {})})


def _read_chat_config(folder: Path) -> dict[str, Any]:
    path = folder / CHAT_CONFIG_JSON
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        missing = {"vocab_size", "context_window_size", "eos_token_id"} - set(values)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}; build the model again") from None
    if missing:
        raise ArtifactError(f"{path} lacks {', '.join(sorted(missing))}; build the model again")
    return values


def _workspace_bytes(stamp: LibraryStamp) -> int:
    """Forward and logits run one after the other, but the allocator keeps both."""
    memory = stamp.function_memory_bytes
    return memory.get("forward", 0) + memory.get("logits", 0)


def _defaults(chat_config: Mapping[str, Any]) -> SamplingParams:
    """The checkpoint's advice on sampling, where it gives any."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: chat_config[name] for name in names if chat_config.get(name) is not None}
    return SamplingParams(**given)
