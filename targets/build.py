"""Checkpoint + scheme + target → artifact. Run as a child process by `everycast.build_process`.

python -m everycast.targets.build < request.json        (JSON lines on standard output)
"""

import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..artifact.errors import CapacityError, CompileError, EverycastError
from ..artifact.files import atomic_folder, atomic_write
from ..artifact.hashing import hash_file
from ..artifact.host import running_versions
from ..artifact.manifest import (
    MANIFEST_JSON,
    LibraryStamp,
    Limits,
    Manifest,
    ModelStamp,
    WeightsStamp,
    read_manifest,
    write_manifest,
)  # fmt: skip
from ..artifact.tensor_cache import TensorCacheReader, TensorCacheWriter, list_in_parts
from ..quant_schemes.scheme import DEFAULT_SCHEME, bits_per_weight, num_bytes
from ..relax_models.checkpoint.resolve import HUB_PREFIX, is_named, open_checkpoint
from ..relax_models.checkpoint.source import Checkpoint
from ..relax_models.checkpoint.tokenizer import write_tokenizer
from ..relax_models.config import DecoderConfig
from ..relax_models.name_map import parameter_shapes
from ..relax_models.registry import load_config, weight_map
from ..relax_models.weights import WeightSource
from .chat_config import CHAT_CONFIG_JSON, chat_config, sampling_advice
from .client_config import client_config
from .gpu import tuned_for
from .library import BuiltLibrary, build_library, config_hash
from .target import TARGETS, CompileTarget, find_target
from .weights import WeightPlan, plan_weights, rope_parameters, stored_tensors

logger = logging.getLogger(__name__)

ALL_TARGETS = "all"
"""In place of a target's name: all that can be compiled for on this machine."""

Report = Callable[[str, int, int, str], None]
"""(stage, done, total, unit)"""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """See `everycast.build_process.build`."""

    model: str
    target: str | None
    quantization: str | None
    output: Path
    activations: str = "auto"
    context_window_size: int | None = None
    dump_ir: Path | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    """Kind of device → the name of the one in tuning records that its library is for."""


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint and everything decided about it before any work."""

    name: str
    checkpoint: Checkpoint
    config: DecoderConfig
    sources: Mapping[str, WeightSource]
    plan: WeightPlan
    context_window_size: int


def compile_model(request: BuildRequest, report: Report) -> Path:
    """Build the artifact, or add a library to one whose weights are already there; its folder.

    Everything that can be checked is checked before work starts; nothing half-written stays.
    """
    if request.target == ALL_TARGETS:
        return _compile_for_all(request, report)
    target = None
    if request.target is not None:
        target = find_target(request.target, activations=request.activations)
        if target.name in request.devices:
            target = tuned_for(target, request.devices[target.name])
    source = open_source(request, report)
    folder = request.output / f"{source.name}-{source.plan.quantization}"
    known = _reusable(folder, source)
    if known is None:
        _check_disk(source, request.output)
        with atomic_folder(folder) as temporary:
            _build_all(temporary, source, target, request, report)
    elif target is not None:
        _add_library(folder, known, source, target, request, report)
    for name in target.variants if target is not None else ():
        dump_ir = None if request.dump_ir is None else request.dump_ir / name.replace(":", "-")
        compile_model(replace(request, target=name, dump_ir=dump_ir), report)
    return folder


def _compile_for_all(request: BuildRequest, report: Report) -> Path:
    """A library for every target whose tools are installed, the others left out with a warning."""
    names = []
    for name in TARGETS:
        try:
            find_target(name, activations=request.activations)
        except CompileError as error:
            logger.warning("left out: %s", error)
        else:
            names.append(name)
    if not names:
        raise CompileError("no target can be compiled for here (see above)")
    for name in names:
        dump_ir = None if request.dump_ir is None else request.dump_ir / name
        folder = compile_model(replace(request, target=name, dump_ir=dump_ir), report)
    return folder


def open_source(request: BuildRequest, report: Report) -> Source:
    """The request's checkpoint, with all decided that does not depend on the target."""
    report("open", 0, 0, "steps")
    checkpoint = open_checkpoint(
        request.model, progress=lambda done, total: report("fetch", done, total, "bytes")
    )
    config = load_config(checkpoint)
    sources = weight_map(config, checkpoint)
    plan = plan_weights(checkpoint, config, sources, request.quantization, DEFAULT_SCHEME)
    context = request.context_window_size or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise CapacityError(
            f"context_window_size {context} is more than the model's "
            f"{config.max_position_embeddings} positions; lower it"
        )
    return Source(_name(request.model, checkpoint), checkpoint, config, sources, plan, context)


def _name(model: str, checkpoint: Checkpoint) -> str:
    if is_named(model):
        return model
    if model.upper().startswith(HUB_PREFIX):
        return model.rstrip("/").rpartition("/")[2].partition("@")[0]
    path = checkpoint.path.resolve()
    return path.name.removesuffix(".gguf")


def _reusable(folder: Path, source: Source) -> Manifest | None:
    """The manifest of an artifact that already holds these very weights."""
    if not (folder / MANIFEST_JSON).is_file():
        return None
    try:
        manifest = read_manifest(folder)
        stored = TensorCacheReader(folder).weights_hash()
    except EverycastError:
        return None  # damaged: built anew
    same = (
        manifest.versions == running_versions()
        and manifest.model.source_hash == source.checkpoint.source_hash()
        and manifest.model.config_hash == config_hash(source.config)
        and manifest.weights.weights_hash == stored
    )
    return manifest if same else None


def _matrix_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    shapes = parameter_shapes(config).items()
    return {name: (shape[0], shape[1]) for name, shape in shapes if len(shape) == 2}


def _check_disk(source: Source, output: Path) -> None:
    shapes = _matrix_shapes(source.config)
    needed = sum(num_bytes(source.plan.formats[name], n, k) for name, (n, k) in shapes.items())
    existing = next(parent for parent in (output, *output.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * 1.1 + (64 << 20):
        raise CapacityError(
            f"the artifact needs {needed / 1e6:.0f} MB on disk, but {existing} has "
            f"{free / 1e6:.0f} MB free; make room or choose another folder with -o"
        )


def _build_all(
    folder: Path, source: Source, target: CompileTarget | None, request: BuildRequest,
    report: Report,
) -> None:  # fmt: skip
    """Weights on one thread while the library compiles on this one (both leave the GIL free).

    If one fails, or the user interrupts, the other does not go on for nothing.
    """
    tokenizer = write_tokenizer(source.checkpoint, folder)
    config = client_config(folder, tokenizer) | chat_config(
        source.config,
        tokenizer,
        source.plan.quantization,
        source.context_window_size,
        sampling_advice(source.checkpoint),
    )
    atomic_write(folder / CHAT_CONFIG_JSON, json.dumps(config, indent=2).encode())
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        weights = pool.submit(_write_weights, folder, source, report, stop)
        library = None
        try:
            if target is not None:
                library = _compile(folder, source, target, request, report)
            weights.result()
        finally:
            stop.set()
    manifest = _manifest(folder, source)
    if target is not None and library is not None:
        _list_weights_for(library, folder)
        manifest = _with_library(manifest, folder, request, target, library)
    write_manifest(folder, manifest)


def _write_weights(folder: Path, source: Source, report: Report, stop: threading.Event) -> None:
    """Every tensor of the artifact; with `stop`, no more than the next one."""
    tensors = source.checkpoint.tensors
    total = sum(tensors[s.name].num_bytes for s in source.sources.values())
    done = 0
    metadata = {"quantization": source.plan.quantization}
    with TensorCacheWriter(folder, metadata) as writer:
        for parameter, parts in stored_tensors(source.checkpoint, source.sources, source.plan):
            if stop.is_set():
                return
            for name, array in parts.items():
                writer.add(name, array)
            done += tensors[source.sources[parameter].name].num_bytes
            report("weights", min(done, total), total, "bytes")
        for name, array in rope_parameters(source.config).items():
            writer.add(name, array)


def _compile(
    folder: Path, source: Source, target: CompileTarget, request: BuildRequest, report: Report
) -> BuiltLibrary:
    report("compile", 0, 0, "steps")
    path = folder / _library_name(request, target)
    path.parent.mkdir(exist_ok=True)
    built: BuiltLibrary = (target.build_library or build_library)(
        source.config,
        source.plan.formats,
        target,
        path,
        scheme_dtype=source.plan.dtype,
        context_window_size=source.context_window_size,
        dump_ir=request.dump_ir,
    )
    report("compile", 1, 1, "steps")
    return built


def _list_weights_for(library: BuiltLibrary, folder: Path) -> None:
    """The hashes in the manifest stay right: they are those of whole tensors."""
    if library.row_parts is not None:
        list_in_parts(folder, library.row_parts)


def _library_name(request: BuildRequest, target: CompileTarget) -> str:
    assert request.target is not None
    return f"lib/{request.target.replace(':', '-')}.{target.library_suffix}"


def _add_library(
    folder: Path, manifest: Manifest, source: Source, target: CompileTarget,
    request: BuildRequest, report: Report,
) -> None:  # fmt: skip
    with atomic_folder(folder / ".building") as temporary:
        library = _compile(temporary, source, target, request, report)
        name = _library_name(request, target)
        (folder / "lib").mkdir(exist_ok=True)
        os.replace(temporary / name, folder / name)
    shutil.rmtree(folder / ".building", ignore_errors=True)
    _list_weights_for(library, folder)
    write_manifest(folder, _with_library(manifest, folder, request, target, library))


def _manifest(folder: Path, source: Source) -> Manifest:
    checkpoint, config = source.checkpoint, source.config
    licence = checkpoint.config.get("general.license") or checkpoint.config.get("license")
    cache = TensorCacheReader(folder)
    shapes = _matrix_shapes(config)
    model = ModelStamp(
        name=source.name,
        model_type=config.model_type,
        architecture="decoder",
        source=str(checkpoint.path),
        source_hash=checkpoint.source_hash(),
        config_hash=config_hash(config),
        num_parameters=sum(n * k for n, k in shapes.values()),
        licence=str(licence) if licence else None,
    )
    weights = WeightsStamp(
        quantization=source.plan.quantization,
        bits_per_weight=round(bits_per_weight(source.plan.formats, shapes), 3),
        num_bytes=int(cache.metadata["ParamBytes"]),
        weights_hash=cache.weights_hash(),
        layout_hash=cache.layout_hash(),
    )
    return Manifest(running_versions(), model, weights)


def _with_library(
    manifest: Manifest, folder: Path, request: BuildRequest, target: CompileTarget,
    library: BuiltLibrary,
) -> Manifest:  # fmt: skip
    assert request.target is not None
    name, metadata = _library_name(request, target), library.metadata
    stamp = LibraryStamp(
        file=name,
        sha256=hash_file(folder / name),
        platform=target.platform,
        target_spec={**target.spec, **metadata.get("device_requirements", {})},
        cpu_features=tuple(sorted(target.required_features)),
        versions=running_versions(),
        config_hash=manifest.model.config_hash,
        layout_hash=manifest.weights.layout_hash,
        limits=Limits(
            metadata["prefill_chunk_size"], metadata["max_num_sequence"], metadata["page_size"],
            library.page_bytes,
        ),
        function_memory_bytes=library.function_memory_bytes,
        schedules=metadata["schedules"],
    )  # fmt: skip
    return replace(manifest, libraries={**manifest.libraries, request.target: stamp})


def answer_request(request: str, answers: BinaryIO) -> int:
    """Build what the JSON `request` asks for and write what happens to `answers`, a line of JSON
    each; the exit code: 0, 2 for an error that was answered, 130 if the parent wants no more."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")  # in one piece: two threads report

    def report(stage: str, done: int, total: int, unit: str) -> None:
        progress = {"stage": stage, "done": done, "total": total, "unit": unit}
        answer({"progress": progress})

    def answer_error(kind: type[EverycastError], message: str) -> int:
        answer({"error": {"type": kind.__name__, "message": message}})
        return 2

    values = json.loads(request)
    for name in ("output", "dump_ir"):
        values[name] = Path(values[name]) if values[name] is not None else None
    try:
        folder = compile_model(BuildRequest(**values), report)
    except EverycastError as error:
        return answer_error(type(error), str(error))
    except MemoryError:
        message = "not enough memory to build this model; close programs or use a smaller model"
        return answer_error(CapacityError, message)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except OSError as error:
        return answer_error(CompileError, f"the build could not go on: {error}")
    except Exception as error:
        if os.environ.get("EVERYCAST_DEBUG"):
            traceback.print_exc()
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return answer_error(
            CompileError,
            f"unexpected {what} while building (set EVERYCAST_DEBUG=1 to see where, and report it)",
        )
    answer({"artifact": str(folder)})
    return 0


def main() -> int:
    """The child process; see the top of the file."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as after Ctrl-C
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)  # what compilers and linkers print is not an answer
        try:
            return answer_request(sys.stdin.read(), answers)
        except BrokenPipeError:
            return 130


if __name__ == "__main__":
    sys.exit(main())
