"""From what the user typed to a built model or a loaded engine, with progress on stderr."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from .build_view import BuildView

if TYPE_CHECKING:
    from .engine.engine_config import Mode
    from .engine.loader import EngineParts
    from .engine.mlc_engine import MLCEngine


def build_and_report(
    model: str,
    target: str | None,
    quantization: str | None,
    output: Path,
    *,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Build into `output`; print the path (or a record as JSON), and what to do next.

    target None: no library. options: further ones of `build_process.build`.
    """
    from .artifact.manifest import read_manifest
    from .artifact.model_list import WEB_TARGET, webllm_advice
    from .build_process import build
    from .model_store import folder_bytes, is_artifact

    if is_artifact(Path(model).expanduser()):
        model, quantization = _as_it_was_built(model, quantization)
    with BuildView(quiet=quiet) as view:
        path = build(model, target, quantization, output, progress=view.progress, **options)
    manifest = read_manifest(path)
    weights = manifest.weights
    num_bytes = folder_bytes(path)
    if as_json:
        console.print_json(
            {
                "path": str(path),
                "quantization": weights.quantization,
                "bits_per_weight": weights.bits_per_weight,
                "num_bytes": num_bytes,
            }
        )
        return
    print(path)
    if quiet:
        return
    console.note(
        f"{weights.quantization}, {weights.bits_per_weight:.2f} bits per weight, "
        f"{console.human_bytes(num_bytes)}"
    )
    built = [name for name in manifest.libraries if target in ("all", name, name.partition(":")[0])]
    for name in built:
        library = manifest.libraries[name]
        counts = ", ".join(f"{count} {kind}" for kind, count in library.schedules.items())
        console.note(f"{library.file}: schedules of operators: {counts}")
    for line in webllm_advice(path, built):
        console.note(line)
    use = "web" if (target or "").partition(":")[0] == WEB_TARGET else "chat"
    follow = [use, str(path)] if target else ["compile", model, "-q", weights.quantization]
    console.note(f"next: {shlex.join(['everycast', *follow])}")


def _as_it_was_built(folder: str, quantization: str | None) -> tuple[str, str | None]:
    """The checkpoint of a compiled folder, and the quantization if none is given."""
    from .artifact.manifest import read_manifest
    from .web_command import GGUF

    manifest = read_manifest(Path(folder).expanduser())
    stored = manifest.weights.quantization
    return manifest.model.source, quantization or (None if stored == GGUF else stored)


def load_parts(
    model: str,
    device: str,
    quantization: str | None,
    mode: "Mode",
    config: dict[str, Any],
    *,
    quiet: bool,
    activations: str = "auto",
) -> "EngineParts":
    """Build what is missing, print device and memory plan, load. config: engine_config, None is
    unset."""
    from .engine import loader

    with BuildView(quiet=quiet) as view:
        artifact = loader.open_model(
            model,
            device,
            mode=mode,
            engine_config=config,
            quantization=quantization,
            activations=activations,
            progress=view.progress,
        )
    if not quiet:
        console.note(artifact.choice)
        console.note(artifact.plan.summary())
    with BuildView(quiet=quiet) as view:
        stage = "pack weights" if artifact.memory is None else "load weights"
        return artifact.load(view.bytes_of(stage))


def open_engine(
    model: str,
    device: str,
    quantization: str | None,
    config: dict[str, Any],
    *,
    quiet: bool,
    activations: str = "auto",
) -> "MLCEngine":
    """As `load_parts`, for one request at a time."""
    parts = load_parts(
        model, device, quantization, "interactive", config, quiet=quiet, activations=activations
    )
    from .engine.mlc_engine import MLCEngine

    return MLCEngine.from_parts(*parts)
