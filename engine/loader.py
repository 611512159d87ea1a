"""From an artifact (or what one can be built from) to an engine loop that is ready to start."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.dtypes import numpy_dtype
from ..artifact.errors import ArtifactError, CapacityError, RequestError
from ..artifact.host import this_host
from ..artifact.manifest import (
    MANIFEST_JSON,
    LibraryStamp,
    Limits,
    Manifest,
    check_library,
    check_weights,
    library_file,
    read_manifest,
)  # fmt: skip
from ..artifact.tensor_cache import TensorCacheReader
from .device_check import check_device
from .device_choice import how_to_add, open_best
from .device_runner import DeviceRunner, load_device_parameters
from .devices import AUTO, CPU, DeviceMemory, library_name, split_device
from .engine_config import EngineConfig, Mode
from .loop import EngineLoop
from .memory_plan import MemoryPlan, available_memory, plan_memory
from .model_description import ModelDescription
from .model_runner import ModelInfo, ModelRunner
from .paged_runner import PagedRunner
from .parameters import Progress, load_parameters, read_parameters
from .runtime import Library
from .sampling_params import SamplingParams
from .threads import usable_cpus
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHAT_CONFIG_JSON = "mlc-chat-config.json"

_ADVICE: dict[str, Any] = {
    "temperature": int | float,
    "top_p": int | float,
    "top_k": int,
    "min_p": int | float,
    "repetition_penalty": int | float,
}
"""Sampling settings that `mlc-chat-config.json` may hold, and their types."""

EngineParts = tuple[EngineLoop, Tokenizer, ModelDescription]


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact that fits this machine, and its memory plan; no weights are loaded yet."""

    folder: Path
    manifest: Manifest
    library: Library
    weights: TensorCacheReader
    info: ModelInfo
    config: EngineConfig
    chat_config: Mapping[str, Any]
    plan: MemoryPlan
    memory: DeviceMemory | None
    """Of the device that the library runs on; None for the CPU."""
    choice: str
    """One line: the device, and why it was chosen."""

    def load(self, progress: Progress | None = None) -> EngineParts:
        """Load the library's parameters and take the KV pages.

        `progress(done, total)` is called with bytes if weights must be packed first.
        """
        tokenizer = Tokenizer.from_folder(self.folder)
        defaults = _defaults(self.chat_config, self.info)
        names = (self.manifest.model.name,)
        description = ModelDescription(self.folder.name, defaults, names)
        limits = self.config.resolve(self.info, self.plan.num_pages)
        loop = EngineLoop(
            self.runner(progress),
            limits,
            tokenizer_size=tokenizer.size,
            eos_token_ids=self.chat_config["eos_token_id"],
        )
        return loop, tokenizer, description

    def runner(self, progress: Progress | None = None) -> ModelRunner:
        """The model with its parameters and pages, on its device."""
        num_pages, num_threads = self.plan.num_pages, self.config.num_threads
        if self.memory is None:
            parameters = load_parameters(self.folder, self.library, self.weights, progress)
            return PagedRunner(self.library, parameters, self.info, num_pages, num_threads)
        parameters = load_device_parameters(self.library, self.weights, self.memory, progress)
        return DeviceRunner(self.library, self.memory, parameters, self.info, num_pages)


def load_engine_parts(
    model: str | Path,
    device: str = AUTO,
    model_lib: str | Path | None = None,
    mode: Mode = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
) -> EngineParts:
    """What `MLCEngine` is made of; builds the artifact first if `model` is not one.

    Raises the family of EverycastError.
    """
    artifact = open_model(str(model), device, model_lib, mode, engine_config)
    logger.info(artifact.choice)
    return artifact.load()


def open_model(
    model: str,
    device: str = AUTO,
    model_lib: str | Path | None = None,
    mode: Mode = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
    **build_options: Any,
) -> OpenArtifact:
    """As `open_artifact`, of whatever `model` names: what is not built yet is built for the device
    (`build_options` are those of `model_store.ensure_artifact`).

    Raises the family of EverycastError.
    """
    from ..model_store import ensure_artifact, is_artifact

    def built_for(target: str) -> Path:
        return ensure_artifact(model, target, **build_options)

    if device != AUTO:
        kind, _ = split_device(device)
        if kind != CPU:
            DeviceMemory(device)  # before anything is built for it
        folder = built_for(library_name(device))
    elif model_lib is not None or is_artifact(Path(model).expanduser()):
        folder = built_for(CPU)
    else:
        opened, choice = open_best(
            lambda kind: open_artifact(built_for(kind), kind, None, mode, engine_config)
        )
        return replace(opened, choice=choice)
    return open_artifact(folder, device, model_lib, mode, engine_config)


def open_artifact(
    folder: Path,
    device: str = AUTO,
    model_lib: str | Path | None = None,
    mode: Mode = "local",
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
) -> OpenArtifact:
    """Check an artifact against this machine and plan its memory.

    device: `auto`, or one by name, perhaps with a number (`cuda:1`) or the name of a library
    (`cpu:x86-64-v3`). Raises ArtifactError if it does not fit, CapacityError if memory does not
    suffice, RequestError for an engine_config that makes no sense.
    """
    manifest = read_manifest(folder)
    weights = TensorCacheReader(folder)
    check_weights(manifest, weights)
    chat_config = _read_chat_config(folder)
    config = _engine_config(mode, engine_config)
    if (config.num_threads or 1) > usable_cpus():
        raise CapacityError(
            f"num_threads {config.num_threads} is more than the {usable_cpus()} CPUs that this "
            "process may use; lower it, or leave it out"
        )
    path = None if model_lib is None else Path(model_lib)

    def open_on(name: str) -> OpenArtifact:
        memory, library = _open_library(manifest, folder, name, path)
        info = model_info(library.metadata)
        plan = plan_for(config, info, library, memory)
        label = CPU if memory is None else memory.label
        return OpenArtifact(
            folder, manifest, library, weights, info, config, chat_config, plan, memory,
            f"device: {label}",
        )  # fmt: skip

    if device != AUTO:
        split_device(device)
        return open_on(device)
    if path is not None:
        return open_on(CPU)
    kinds = {name.partition(":")[0] for name in manifest.libraries}
    if CPU not in kinds and "vulkan" in kinds:
        # No other library: a driver that computes on the CPU will do.
        return open_on("vulkan")
    opened, choice = open_best(open_on, lambda kind: how_to_add(manifest, folder, kind))
    return replace(opened, choice=choice)


def _open_library(
    manifest: Manifest, folder: Path, device: str, path: Path | None
) -> tuple[DeviceMemory | None, Library]:
    """The library for `device` (`path`, or the artifact's own), and the device's memory; None for
    the CPU."""
    kind, index = split_device(device)
    memory = None if kind == CPU else DeviceMemory(device)
    place = f"{kind}:{index}"
    if path is None:
        stamp = _library_stamp(manifest, library_name(device), memory)
        library = Library(library_file(folder, stamp), place)
        if _limits(library.metadata) != stamp.limits:
            raise ArtifactError(
                f"library {stamp.file} of {folder} has other limits than {MANIFEST_JSON} says; "
                "compile it again"
            )
    else:
        library = Library(path, place)
        if library.metadata.get("config_hash") != manifest.model.config_hash:
            raise ArtifactError(
                f"model_lib {path} was compiled for another model than {manifest.model.name}; "
                "compile it again"
            )
    if memory is not None:
        check_device(library, read_parameters(library.metadata)[0], memory)
    return memory, library


def plan_for(
    config: EngineConfig, info: ModelInfo, library: Library, memory: DeviceMemory | None
) -> MemoryPlan:
    """What a library will take of the device's memory (None: the CPU's). Raises CapacityError if
    there is too little."""
    plan = plan_memory(
        config,
        info,
        weight_bytes=read_parameters(library.metadata)[1],
        workspace_bytes=_workspace_bytes(library.metadata, config.num_threads or usable_cpus()),
        available_bytes=_available_bytes(memory),
        max_page_bytes=_max_page_bytes(info, memory),
    )
    if plan.num_tokens < config.kv_tokens(info):
        logger.warning(
            "KV pages reduced from %d to %d tokens, which is what memory allows",
            config.kv_tokens(info),
            plan.num_tokens,
        )
    return plan


def _max_page_bytes(info: ModelInfo, memory: DeviceMemory | None) -> int | None:
    """Bytes that the tensors of KV pages may have together; None if nothing limits them."""
    limit = None if memory is None else memory.max_tensor_bytes()
    return None if limit is None else info.page_tensors * limit


def _available_bytes(memory: DeviceMemory | None) -> int:
    if memory is None:
        return available_memory()
    if memory.shares_host_memory:
        return min(memory.free_bytes(), available_memory())
    return memory.free_bytes()


def _library_stamp(
    manifest: Manifest, name: str, memory: DeviceMemory | None = None
) -> LibraryStamp:
    """The library called `name` (`cpu`, or `cpu:x86-64-v3`: this one and no other). Of several that
    fit, the one for the device's architecture, or that uses most of this machine's CPU features."""
    fitting = [full for full in manifest.libraries if name in (full, full.partition(":")[0])]
    if not fitting:
        return check_library(manifest, name, this_host())
    architecture = None if memory is None else memory.architecture()
    fitting.sort(
        key=lambda full: (
            architecture != full.partition(":")[2],
            ":" in full and memory is not None,  # for other architectures, if not for this one
            -len(manifest.libraries[full].cpu_features),
        )
    )
    refusals = []
    for full in fitting:
        try:
            return check_library(manifest, full, this_host())
        except ArtifactError as error:
            refusals.append(error)
    raise refusals[0]


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
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}; build the model again") from None
    if not isinstance(values, dict) or not isinstance(values.get("eos_token_id"), list):
        raise ArtifactError(f"{path} has no list eos_token_id; build the model again")
    return values


def _limits(metadata: Mapping[str, Any]) -> Limits:
    layers, _, *rest = metadata["page_shape"]
    page_bytes = math.prod((_page_tensors(metadata), layers, *rest))
    page_bytes *= numpy_dtype(metadata["kv_dtype"]).itemsize
    return Limits(
        metadata["prefill_chunk_size"], metadata["max_num_sequence"], metadata["page_size"],
        page_bytes,
    )  # fmt: skip


def _page_tensors(metadata: Mapping[str, Any]) -> int:
    """1 in libraries from before there could be more."""
    number: int = metadata.get("page_tensors", 1)
    return number


def model_info(metadata: Mapping[str, Any]) -> ModelInfo:
    """What the library was compiled for; it holds whatever the artifact's other files say."""
    limits = _limits(metadata)
    return ModelInfo(
        vocab_size=metadata["vocab_size"],
        context_window_size=metadata["context_window_size"],
        page_size=limits.page_size,
        page_bytes=limits.page_bytes,
        page_tensors=_page_tensors(metadata),
        prefill_chunk_size=limits.prefill_chunk_size,
        max_num_sequence=limits.max_num_sequence,
    )


def _workspace_bytes(metadata: Mapping[str, Any], num_threads: int) -> int:
    """Forward and logits run one after the other, but the allocator keeps both. On a CPU each
    thread that draws tokens has scratch memory, float32."""
    memory: dict[str, int] = metadata["function_memory_bytes"]
    scratch: int = math.prod(metadata.get("sampling_workspace", (0,))) * 4
    return memory.get("forward", 0) + memory.get("logits", 0) + num_threads * scratch


def _defaults(chat_config: Mapping[str, Any], info: ModelInfo) -> SamplingParams:
    """The checkpoint's advice on sampling, where it gives any; ArtifactError if it makes no
    sense (someone edited the file)."""
    given = {name: chat_config[name] for name in _ADVICE if chat_config.get(name) is not None}
    try:
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, _ADVICE[name]):
                raise RequestError(f"{name} must be a number, got {value!r}")
        advice = SamplingParams(**given)
        advice.validate(info.vocab_size, info.vocab_size)
    except RequestError as error:
        raise ArtifactError(f"{CHAT_CONFIG_JSON}: {error}; correct it") from None
    return advice
