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

WORKS = "decode,decode_4096,prefill_512,batch_8,batch_32"
SMALL_PAGES = "4 kB pages"
HUGE_PAGES = "on huge pages"
"""Key of the samples that say how many bytes of a worker lie there."""
_PR_SET_THP_DISABLE = 41
_SMALL_PAGES = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_THP_DISABLE}, 1, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Run the rest of the command line without huge pages (Linux)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """`schedule` are parameters that all linear kernels have, whatever is their default or was
    found by tuning; `change` runs in the process that compiles, before it does."""

    name: str
    schedule: Mapping[str, int] = field(default_factory=dict)
    change: Callable[[], None] | None = None
    target: str = "cpu"
    activations: str = "int8"
    build_environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    """Command that runs the worker's command."""


def _no_splits() -> None:
    from ..schedules.cpu import attention

    attention._MAX_SPLITS = 1


def _whole_head() -> None:
    from ..schedules.cpu import linear_inputs
    from ..targets import cpu

    for module in (linear_inputs, cpu):
        vars(module)["has_planes"] = lambda *args: False


def change_schedules(values: Mapping[str, int]) -> None:
    """Give all schedules of linear kernels these values, from now on in this process."""
    from ..schedules.cpu.linear_schedule import LinearSchedule

    check = LinearSchedule.__post_init__

    def change_and_check(schedule: LinearSchedule) -> None:
        for name, value in values.items():
            object.__setattr__(schedule, name, value)
        check(schedule)

    LinearSchedule.__post_init__ = change_and_check  # type: ignore[assignment, method-assign]


_NO_PAIRS = {"pair_tokens": 0, "many_tokens": 0}
VARIANTS = (
    Variant(OURS),
    Variant("a parallel region for each operator", build_environment={"EVERYCAST_ONE_REGION": "0"}),
    Variant(SMALL_PAGES, prefix=(sys.executable, "-S", "-c", _SMALL_PAGES)),
    Variant("no prefetch of weights", {"prefetch_one": 0, "prefetch_few": 0, "prefetch_many": 0}),
    Variant("half of the head in greedy decoding", change=_whole_head),
    Variant("words multiplied in pairs (for Zen 4)", target="cpu:znver4"),
    Variant("weights that stay in registers", {"many_tokens": 0, "pair_tokens": 4}),
    Variant("two blocks of rows at once", _NO_PAIRS),
    Variant("tiles of one token", {"tile_tokens": 1, "unpack_tokens": 0, **_NO_PAIRS}),
    Variant("a context is one thread's", change=_no_splits),
    Variant("AVX2 instead of AVX-512", target="cpu:x86-64-v3"),
    Variant("activations mixed", activations="mixed"),
    Variant("activations int16", activations="int16"),
    Variant("activations float32", activations="float32"),
)


def build(variant: int, gguf: Path, folder: Path) -> None:
    """Compile VARIANTS[variant]; for a process of its own, which its changes are for."""
    chosen = VARIANTS[variant]
    os.environ.update(chosen.build_environment)
    change_schedules(chosen.schedule)
    if chosen.change is not None:
        chosen.change()
    request = BuildRequest(
        str(gguf), chosen.target, None, folder, chosen.activations, context_window_size=8192
    )
    compile_model(request, lambda *progress: None)


def measure(
    gguf: Path, folder: Path, works: tuple[Work, ...], rounds: int, threads: int
) -> Samples:
    """Compile every variant and time each work on each; figures are tokens a second, and of
    HUGE_PAGES bytes."""
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
        if engines[SMALL_PAGES].worker.memory().on_huge_pages:
            raise SystemExit(f"the system gives huge pages to the worker of {SMALL_PAGES!r} too")
        run_rounds(engines, works, rounds, samples, console.note)
        for name, engine in engines.items():
            samples.figures[HUGE_PAGES][name].append(engine.worker.memory().on_huge_pages)
    return samples


def table(samples: Samples, works: tuple[Work, ...]) -> str:
    """Markdown: tokens a second of each variant, and the whole divided by it; MB on huge pages."""
    heads = ["without", *(work.name for work in works), HUGE_PAGES]
    lines = [f"| {' | '.join(heads)} |", f"{'|---' * len(heads)}|"]
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
        (num_bytes,) = samples.figures[HUGE_PAGES][variant.name]
        cells.append(f"{num_bytes / 1e6:.0f} MB")
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
