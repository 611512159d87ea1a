"""`everycast bench`: prepares the model and the peers, runs the rounds, keeps the results."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from .. import console
from ..artifact.cache import cache_dir
from ..artifact.manifest import read_manifest
from ..build_view import BuildView
from ..engine.device_choice import best_kind
from ..engine.devices import AUTO, CPU, DeviceMemory, library_name, split_device
from .bench_model import BenchModel, compile_for, prepare_gguf, prepare_shape
from .engines import Installed, Line, install
from .limits import ModelCost
from .options import BenchOptions
from .peers import Isa
from .plots import draw
from .report import details, table
from .results import Results
from .rounds import Contender, LoadedEngine, Note, run_rounds
from .rows import Subject, rows_of
from .samples import OURS, Samples
from .works import Work

TARGETS: Mapping[Isa, str] = {"native": "cpu", "avx2": "cpu:x86-64-v3"}


def run_bench(options: BenchOptions) -> None:
    """Measure, print the table, write and draw what was asked for.

    What was measured is printed and written also when a later work fails or Ctrl-C comes.
    """
    results = Results(options.json)
    try:
        measure(options, console.note, results)
    finally:
        if results.rows:
            print(table(results.rows))
            if more := details(results.rows):
                print(f"\n{more}")
            if options.json is not None:
                console.note(f"rows and samples are in {options.json}")
    if options.plot is not None:
        for path in draw(results.rows, results.machines, options.plot):
            console.note(f"drew {path}")
    if not options.peers:
        console.note("next: the same with --against llama.cpp, to measure a peer beside it")
    else:
        console.note(f"next: everycast chat {options.model or 'MODEL'}")


def measure(options: BenchOptions, note: Note, results: Results) -> None:
    """Run everything, and add to `results` after each set of rounds, also after one that failed or
    was interrupted."""
    device = _device(options)
    folder = cache_dir() / "benchmarks"
    model = _model(options, folder, note)
    environments = folder.parent / "peers"
    given = (options.isa, options.peer_pythons, environments, note)
    kinds = {work.kind for work in options.works}
    peers = install(options.peers, *given, gguf=model.gguf) if kinds - {"serve"} else []
    servers = (
        install(options.peers, *given, gguf=model.gguf, server=True) if "serve" in kinds else []
    )
    for activations in options.activations:
        note(f"compiling {model.gguf.name} for {activations} activations")
        with BuildView(quiet=False) as view:
            target = library_name(device)
            artifact = compile_for(model, activations, target, folder, view.progress)
        for threads in options.threads:
            line = Line(model, artifact, device, threads, peers)
            _Sets(options, line, servers, activations, note, results).run()


class _Sets:
    """Sets of rounds of one artifact and number of threads."""

    def __init__(
        self,
        options: BenchOptions,
        line: Line,
        servers: Sequence[Installed],
        activations: str,
        note: Note,
        results: Results,
    ) -> None:
        self._options = options
        self._line = line
        self._servers = servers
        self._activations = activations
        self._note = note
        self._results = results

    def run(self) -> None:
        for kinds, measure in (
            (("decode", "prefill", "batch"), self._loaded),
            (("memory",), self._memory),
            (("start",), self._start),
            (("serve",), self._served),
        ):
            works = [work for work in self._options.works if work.kind in kinds]
            if works:
                self._note(
                    f"{', '.join(work.name for work in works)}; {self._line.threads} threads"
                )
                with self._kept(works, "/".join(kinds)) as samples:
                    measure(works, samples)

    @contextlib.contextmanager
    def _kept(self, works: Sequence[Work], what: str) -> Iterator[Samples]:
        samples = Samples()
        try:
            yield samples
        finally:
            subject = self._subject(samples)
            key = f"{self._activations}, {subject.threads} threads, {what}"
            self._results.add(key, subject.threads, rows_of(subject, works, samples), samples)

    def _loaded(self, works: Sequence[Work], samples: Samples) -> None:
        with ExitStack() as stack:
            engines = self._line.loaded(works, stack, self._note)
            for name, engine in engines.items():
                assert isinstance(engine, LoadedEngine)
                samples.ready[name] = engine.worker.ready
            # What a device can do at best, gpu_check.sh measures.
            limits = stack.enter_context(self._line.limits()) if self._line.is_on_cpu else None
            rounds = self._options.rounds
            run_rounds(engines, works, rounds, samples, self._note, limits=limits)

    def _memory(self, works: Sequence[Work], samples: Samples) -> None:
        self._fresh(self._line.memory(works[0]), works, samples)

    def _start(self, works: Sequence[Work], samples: Samples) -> None:
        self._fresh(self._line.start(), works, samples)

    def _fresh(
        self, engines: Mapping[str, Contender], works: Sequence[Work], samples: Samples
    ) -> None:
        # Once before: what is packed or cached at first use is there, and files are in memory.
        run_rounds(engines, works, 1, Samples(), lambda text: None)
        run_rounds(engines, works, self._options.rounds, samples, self._note)

    def _served(self, works: Sequence[Work], samples: Samples) -> None:
        with ExitStack() as stack:
            engines = self._line.served(works, self._servers, stack, self._note)
            run_rounds(engines, works, self._options.rounds, samples, self._note)

    def _subject(self, samples: Samples) -> Subject:
        line, ready = self._line, samples.ready.get(OURS, {})
        cost = ModelCost(
            ready.get("bytes_per_token", 0),
            ready.get("kv_bytes_per_token", 0.0),
            line.model.num_block_parameters,
            line.model.num_head_parameters,
            ready.get("unread_bytes", 0),
        )
        return Subject(
            model=line.model.name,
            threads=line.threads,
            activations=ready.get("activations", self._activations),
            isa=self._options.isa if line.is_on_cpu else line.device,
            bits_per_weight=read_manifest(line.artifact).weights.bits_per_weight,
            peer_bits_per_weight=line.model.bits_per_weight,
            cost=cost,
        )


def _device(options: BenchOptions) -> str:
    device = best_kind() if options.device == AUTO else options.device
    if split_device(device)[0] != CPU:
        DeviceMemory(device)  # before anything is compiled for it
    return TARGETS[options.isa] if device == CPU else device


def _model(options: BenchOptions, folder: Path, note: Note) -> BenchModel:
    if options.shape is not None:
        return prepare_shape(options.shape, folder, note)
    assert options.model is not None
    return prepare_gguf(options.model, folder, note)
