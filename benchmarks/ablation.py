"""What each optimization of the CPU kernels is worth: one switched off at a time.

    python -m everycast.benchmarks.ablation MODEL [--rounds 5] [--threads 2] [--works decode,…]

Every variant is compiled into a folder of its own under the cache's `benchmarks/` and runs in a
worker of its own; each work goes to all variants in turn, round after round. Printed are medians,
and how many times the whole is faster than without the one thing.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from .. import console
from ..artifact.cache import cache_dir
from ..targets.build import BuildRequest, compile_model
from .bench_model import prepare_gguf
from .rounds import LoadedEngine, run_rounds
from .samples import OURS, Samples
from .workers import Worker
from .works import Work, parse_works

WORKS = "decode,decode_4096,prefill_512,batch_8"
_PR_SET_THP_DISABLE = 41
_SMALL_PAGES = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_THP_DISABLE}, 1, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Run the rest of the command line without huge pages (Linux)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """`change` runs in the process that compiles, before it does."""

    name: str
    change: Callable[[], None] | None = None
    target: str = "cpu"
    activations: str = "int8"
    build_environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    """Command that runs the worker's command."""


def _tiles_of_one() -> None:
    from ..schedules.cpu.isa import CpuIsa

    CpuIsa.largest_tile = lambda self, terms: 1  # type: ignore[method-assign]
    _no_pairs()


def _no_pairs() -> None:
    from ..schedules.cpu.isa import CpuIsa

    CpuIsa.pair_tile = lambda self, terms: 0  # type: ignore[method-assign]


def _no_prefetch() -> None:
    from ..schedules.cpu.linear_schedule import LinearSchedule

    LinearSchedule.prefetch_bytes = lambda self, tokens: 0  # type: ignore[method-assign]


def _no_splits() -> None:
    from ..schedules.cpu import attention

    attention._MAX_SPLITS = 1


VARIANTS = (
    Variant(OURS),
    Variant("a parallel region for each operator", build_environment={"EVERYCAST_ONE_REGION": "0"}),
    Variant("4 kB pages", prefix=(sys.executable, "-S", "-c", _SMALL_PAGES)),
    Variant("no prefetch of weights", _no_prefetch),
    Variant("no tiles of two blocks of rows", _no_pairs),
    Variant("tiles of one token", _tiles_of_one),
    Variant("a context is one thread's", _no_splits),
    Variant("AVX2 instead of AVX-512", target="cpu:x86-64-v3"),
    Variant("activations mixed", activations="mixed"),
    Variant("activations int16", activations="int16"),
    Variant("activations float32", activations="float32"),
)


def build(variant: int, gguf: Path, folder: Path) -> None:
    """Compile VARIANTS[variant]; for a process of its own, which its changes are for."""
    chosen = VARIANTS[variant]
    os.environ.update(chosen.build_environment)
    if chosen.change is not None:
        chosen.change()
    request = BuildRequest(
        str(gguf), chosen.target, None, folder, chosen.activations, context_window_size=8192
    )
    compile_model(request, lambda *progress: None)


def measure(
    gguf: Path, folder: Path, works: tuple[Work, ...], rounds: int, threads: int
) -> Samples:
    """Compile every variant and time each work on each; figures are tokens a second."""
    context = multiprocessing.get_context("spawn")
    names = ",".join(work.name for work in works)
    samples = Samples()
    with ExitStack() as stack:
        engines = {}
        for i, variant in enumerate(VARIANTS):
            console.note(f"compiling: {variant.name}")
            place = folder / f"ablation-{i}"
            process = context.Process(target=build, args=(i, gguf, place))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{variant.name} does not compile; see above")
            (artifact,) = (path for path in place.iterdir() if path.is_dir())
            module = [sys.executable, "-P", "-m", f"{__package__}.worker_everycast"]
            command = [*variant.prefix, *module, str(artifact), variant.target, names]
            environment = {"TVM_NUM_THREADS": str(threads)}

            def start(
                name: str = variant.name,
                command: list[str] = command,
                environment: dict[str, str] = environment,
            ) -> Worker:
                return Worker(name, command, environment)

            engines[variant.name] = LoadedEngine(start, stack)
        run_rounds(engines, works, rounds, samples, console.note)
    return samples


def table(samples: Samples, works: tuple[Work, ...]) -> str:
    """Markdown: tokens a second of each variant, and the whole divided by it."""
    lines = [f"| without | {' | '.join(work.name for work in works)} |", "|---" * (len(works) + 1)]
    lines[1] += "|"
    medians = {
        work.name: {
            name: statistics.median(figures) for name, figures in samples.figures[work.name].items()
        }
        for work in works
    }
    for variant in VARIANTS:
        cells = []
        for work in works:
            own, whole = (medians[work.name][name] for name in (variant.name, OURS))
            cells.append(f"{own:.4g}" if variant.name == OURS else f"{own:.4g} ({whole / own:.2f})")
        name = "nothing: all of it" if variant.name == OURS else variant.name
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a known name or a GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--works", default=WORKS, help="names by commas, as in everycast bench")
    options = parser.parse_args()
    folder = cache_dir() / "benchmarks"
    works = parse_works(options.works.split(","))
    model = prepare_gguf(options.model, folder, console.note)
    samples = measure(model.gguf, folder, works, options.rounds, options.threads)
    print(table(samples, works))


if __name__ == "__main__":
    main()
