"""The model as every engine gets it: one Q4_0 GGUF, and our artifact compiled from it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..artifact.errors import EverycastError
from ..build_process import Progress, build
from ..build_view import BuildView
from ..relax_models.checkpoint.gguf import GGUFCheckpoint
from ..relax_models.checkpoint.resolve import open_checkpoint
from .workers import BenchError

TOKENIZER_OF = "smollm2-135m"
CONTEXT = 8192
"""Most tokens of a sequence that ours is compiled for, if the model has as many."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A GGUF and what the limits need to know of it."""

    name: str
    gguf: Path
    bits_per_weight: float
    """Of all matrices."""
    num_block_parameters: int
    """Numbers in the matrices that multiply every token: all but embedding and head."""
    num_head_parameters: int


def prepare_gguf(model: str, folder: Path, note: Callable[[str], None]) -> BenchModel:
    """The GGUF of `model` in `folder`, made unless it is there: matrices narrower than 8 bits are
    rounded to Q4_0, for which llama.cpp is fastest; embedding and head stay as they are."""
    _check_extra()
    from .q4_0_gguf import write_q4_0

    checkpoint = open_checkpoint(model)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise BenchError(
            f"{model} is no GGUF, which is what every engine can read; give a GGUF file, a known "
            "name, or --shape"
        )
    source = checkpoint.path
    folder.mkdir(parents=True, exist_ok=True)
    name = source.stem if source.stem == Path(model).stem else model
    target = folder / f"{name}-q4_0.gguf"
    if not target.is_file() or target.stat().st_mtime < source.stat().st_mtime:
        note(f"writing {target}")
        write_q4_0(source, target)
    return describe(name, target)


def prepare_shape(name: str, folder: Path, note: Callable[[str], None]) -> BenchModel:
    """A GGUF of random weights in `folder`, made unless it is there. Its tokenizer is that of the
    default model."""
    _check_extra()
    from .random_gguf import borrowed_tokenizer, write_random
    from .shapes import find_shape

    shape = find_shape(name)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-random-q4_0.gguf"
    if not target.is_file():
        note(f"writing {target}")
        tokenizer = borrowed_tokenizer(open_checkpoint(TOKENIZER_OF).path)
        with BuildView(quiet=False) as view:
            progress = view.bytes_of("random weights") or (lambda done, total: None)
            write_random(shape, name, tokenizer, target, progress)
    return describe(f"{name} (random weights)", target)


def describe(name: str, gguf: Path) -> BenchModel:
    """Sizes of a GGUF."""
    _check_extra()
    from .q4_0_gguf import matrix_bytes, num_block_parameters, num_head_parameters

    num_bytes, num_weights = matrix_bytes(gguf)
    return BenchModel(
        name,
        gguf,
        round(8 * num_bytes / num_weights, 3),
        num_block_parameters(gguf),
        num_head_parameters(gguf),
    )


def compile_for(
    model: BenchModel, activations: str, target: str, folder: Path, progress: Progress | None
) -> Path:
    """Our artifact, without loss from the GGUF; compiled anew, weights kept if they are there."""
    output = folder / f"{activations}-{target.replace(':', '-')}"
    context = open_checkpoint(str(model.gguf)).config
    architecture = context.get("general.architecture")
    longest = int(context.get(f"{architecture}.context_length", CONTEXT))
    return build(
        model.gguf,
        target,
        output=output,
        activations=activations,
        context_window_size=min(CONTEXT, longest),
        progress=progress,
    )


def _check_extra() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise EverycastError(
            "bench needs the package gguf: pip install 'everycast[bench]'"
        ) from None
