"""everycast and llama.cpp on the same weights and threads, in turns, in the same minutes.

    python -m everycast.benchmarks.against_llama_cpp [MODEL] [--threads 1,2] [--rounds 7]
        [--activations auto] [--peer-python PYTHON] [--json FILE] [--plot FILE]

MODEL is a name or a GGUF. Its matrices narrower than 8 bits are rounded to Q4_0, for which
llama.cpp is fastest; embedding and head stay as they are. That one GGUF is given to both: llama.cpp
loads it, everycast imports it without loss and compiles it anew.

Every round takes each work to each engine in turn, while the others sleep, and measures the
machine's limits beside them: read bandwidth for decoding, int8 multiplications for prefill. What is
printed are medians over the rounds; a ratio above 1 is in our favour. llama.cpp runs twice, as it
comes (weights mapped from the file) and with huge pages (weights copied); the faster of the two
counts. Needs llama-cpp-python built for this CPU in the environment of --peer-python:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..artifact.cache import cache_dir
from ..artifact.errors import EverycastError
from ..artifact.host import running_versions
from ..build_process import build
from ..relax_models.checkpoint.resolve import open_checkpoint
from .machine import cpu_name, memory_bytes
from .q4_0_gguf import matrix_bytes, num_block_parameters, write_q4_0
from .workers import Worker, WorkerError
from .works import WORKS, num_tokens

PEER = "llama.cpp"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
Samples = dict[str, dict[str, list[float]]]
"""Work → engine (or limit) → its figure of each round."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. Rates are tokens a second."""

    work: str
    model: str
    threads: int
    activations: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    ratio_low: float
    ratio_high: float
    """Smallest and largest ratio of a round."""
    percent_of_limit: float
    peer_percent_of_limit: float
    bits_per_weight: float
    peer_bits_per_weight: float
    bytes_per_token: int
    limit: str


@dataclass(frozen=True, slots=True)
class Setup:
    """The model as both engines get it."""

    name: str
    gguf: Path
    artifact: Path
    peer_python: str


def prepare(model: str, activations: str, peer_python: str) -> Setup:
    """Make the GGUF, unless the cache has it, and compile it."""
    source = open_checkpoint(model).path
    folder = cache_dir() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    name = model if source.stem != Path(model).stem else source.stem
    gguf = folder / f"{name}-q4_0.gguf"
    if not gguf.is_file() or gguf.stat().st_mtime < source.stat().st_mtime:
        print(f"writing {gguf}", file=sys.stderr)
        write_q4_0(source, gguf)
    print(f"compiling for {activations} activations", file=sys.stderr)
    artifact = build(gguf, output=folder / activations, activations=activations)
    return Setup(name, gguf, artifact, peer_python)


def start_workers(setup: Setup, threads: int, stack: ExitStack) -> dict[str, Worker]:
    """Engines and limits, each loaded and warm."""

    def start(name: str, command: Sequence[str], **environment: str) -> Worker:
        return stack.enter_context(Worker(name, command, environment))

    python = [sys.executable, "-m"]
    script = str(Path(__file__).with_name("worker_llama_cpp.py"))
    peer = [setup.peer_python, script, str(setup.gguf), f"--threads={threads}"]
    ours = [*python, f"{__package__}.worker_everycast", str(setup.artifact)]
    limits = [*python, f"{__package__}.worker_limits"]
    return {
        "everycast": start("everycast", ours, TVM_NUM_THREADS=str(threads)),
        PEER: start(PEER, peer),
        f"{PEER}, huge pages": start(PEER, [*peer, "--copy"], **HUGE_PAGES),
        "limits": start("limits", limits, TVM_NUM_THREADS=str(threads)),
    }


def run_rounds(workers: Mapping[str, Worker], num_rounds: int) -> Samples:
    """Tokens a second of each work and engine, and what the limits' worker measures."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    engines = [name for name in workers if name != "limits"]
    for round_ in range(num_rounds):
        print(f"round {round_ + 1} of {num_rounds}", file=sys.stderr)
        order = engines[round_ % len(engines) :] + engines[: round_ % len(engines)]
        for limit in ("read", "multiply"):
            per_second = workers["limits"].measure(limit)["per_second"]
            samples["limits"][limit].append(per_second)
        for work in WORKS:
            for name in order:
                seconds = workers[name].measure(work)["seconds"]
                samples[work][name].append(num_tokens(work) / seconds)
    return samples


def rows_of(setup: Setup, threads: int, ready: Mapping[str, Any], samples: Samples) -> list[Row]:
    """One row for each work, from the samples of one number of threads."""
    weight_bytes, num_weights = matrix_bytes(setup.gguf)
    num_multiplied = num_block_parameters(setup.gguf)
    bandwidth, peak = (statistics.median(samples["limits"][x]) for x in ("read", "multiply"))
    rows = []
    for work in WORKS:
        rates = dict(samples[work])
        ours = rates.pop("everycast")
        peer = max(rates, key=lambda name: statistics.median(rates[name]))
        theirs = rates[peer]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        is_decode = work == "decode"
        num_bytes = ready["bytes_per_token"]
        limit = bandwidth / num_bytes if is_decode else peak / (2 * num_multiplied)
        what = f"{bandwidth / 1e9:.1f} GB/s" if is_decode else f"{peak / 1e9:.0f} GOP/s"
        median, their_median = statistics.median(ours), statistics.median(theirs)
        rows.append(
            Row(
                work=work,
                model=setup.name,
                threads=threads,
                activations=ready["activations"],
                ours=round(median, 1),
                peer=peer,
                theirs=round(their_median, 1),
                ratio=round(median / their_median, 3),
                ratio_low=round(min(ratios), 3),
                ratio_high=round(max(ratios), 3),
                percent_of_limit=round(100 * median / limit, 1),
                peer_percent_of_limit=round(100 * their_median / limit, 1),
                bits_per_weight=ready["bits_per_weight"],
                peer_bits_per_weight=round(8 * weight_bytes / num_weights, 3),
                bytes_per_token=num_bytes,
                limit=what,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| work | activations | threads | everycast tok/s | llama.cpp tok/s | ratio (rounds) "
        "| of the limit, ours / theirs | limit | MB a token | bits per weight, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        note = " (huge pages)" if "huge" in r.peer else ""
        lines.append(
            f"| {r.work} | {r.activations} | {r.threads} | {r.ours:.0f} | {r.theirs:.0f}{note} "
            f"| **{r.ratio:.2f}** ({r.ratio_low:.2f}-{r.ratio_high:.2f}) "
            f"| {r.percent_of_limit:.0f} % / {r.peer_percent_of_limit:.0f} % | {r.limit} "
            f"| {r.bytes_per_token / 1e6:.1f} "
            f"| {r.bits_per_weight:.2f} / {r.peer_bits_per_weight:.2f} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of both engines, a panel for each work."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    panels = figure.subplots(1, len(WORKS))
    for work, axes in zip(WORKS, panels, strict=True):
        chosen = [row for row in rows if row.work == work]
        places = range(len(chosen))
        axes.bar([p - 0.2 for p in places], [r.ours for r in chosen], 0.4, label="everycast")
        axes.bar([p + 0.2 for p in places], [r.theirs for r in chosen], 0.4, label="llama.cpp")
        for place, row in zip(places, chosen, strict=True):
            axes.annotate(f"{row.ratio:.2f} x", (place - 0.2, row.ours), ha="center", va="bottom")
        names = [f"{row.activations}\nthreads: {row.threads}" for row in chosen]
        axes.set_xticks(list(places), names)
        axes.set_title(f"{work.replace('_', ' ')}, tokens/s")
        axes.margins(y=0.15)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(f"{rows[0].model}, Q4_0 weights with 8-bit head, medians")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def machine(peer: Worker, load_average: float) -> dict[str, Any]:
    """What the figures were measured on and with."""
    return {
        "cpu": cpu_name(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": asdict(running_versions()),
        "peer": f"llama-cpp-python {peer.ready['version']}",
        "peer_system_info": peer.ready["system_info"],
        "load_average_at_start": round(load_average, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a name or a GGUF file")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--activations", default="auto", help="modes of ours, by commas")
    parser.add_argument("--peer-python", default=sys.executable, help="has llama-cpp-python")
    parser.add_argument("--json", type=Path, help="write rows, samples and machine to this file")
    parser.add_argument("--plot", type=Path, help="write a picture (matplotlib) to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    load_average = os.getloadavg()[0]
    all_samples, about = {}, {}
    try:
        for activations in options.activations.split(","):
            setup = prepare(options.model, activations, options.peer_python)
            for threads in map(int, options.threads.split(",")):
                with ExitStack() as stack:
                    workers = start_workers(setup, threads, stack)
                    samples = run_rounds(workers, options.rounds)
                    ready = workers["everycast"].ready
                    rows += rows_of(setup, threads, ready, samples)
                    all_samples[f"{ready['activations']}, {threads} threads"] = samples
                    about = machine(workers[PEER], load_average)
    except (EverycastError, WorkerError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if options.json is not None:
        record = {"rows": [asdict(r) for r in rows], "machine": about, "samples": all_samples}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
