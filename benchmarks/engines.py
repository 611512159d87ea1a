"""From the table of peers to engines that do works."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .bench_model import BenchModel
from .fresh_process import FreshCommand, FreshWorker
from .loadgen import HOST
from .peer_environments import PeerError, peer_package, peer_python, prepare
from .peers import Isa, Peer, Variant
from .rounds import Contender, LoadedEngine, Note, StartWorker
from .samples import OURS
from .serving import ServedEngine, Server
from .workers import Worker, WorkerError
from .works import Work

PROMPT = "What is the capital of France?"
_PEER_ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}
"""A failed assertion must not call a debugger."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A peer and the Python that has its package."""

    peer: Peer
    python: Path


def install(
    peers: Sequence[Peer],
    isa: Isa,
    chosen: Mapping[str, Path],
    folder: Path,
    note: Note,
    *,
    gguf: Path,
    server: bool = False,
) -> list[Installed]:
    """The peers (their servers) that can be had and can use the GGUF; of each other one line is
    said."""
    installed = []
    for peer in peers:
        try:
            package = peer_package(peer, isa, server=server)
            python = peer_python(package, chosen, folder, note)
            if not server:
                prepare(peer, python, gguf, note)
            installed.append(Installed(peer, python))
        except PeerError as error:
            note(str(error))
    return installed


@dataclass(frozen=True, slots=True)
class Line:
    """The engines of one artifact and number of threads."""

    model: BenchModel
    artifact: Path
    device: str
    threads: int
    peers: Sequence[Installed]

    @property
    def is_on_cpu(self) -> bool:
        return self.device.partition(":")[0] == "cpu"

    def loaded(self, works: Sequence[Work], stack: ExitStack, note: Note) -> dict[str, Contender]:
        """Engines that keep their model loaded, ours first; a peer that cannot load it is named
        and left out."""
        engines: dict[str, Contender] = {OURS: LoadedEngine(self.ours(works), stack)}
        for name, start in self._peer_workers():
            try:
                engines[name] = LoadedEngine(start, stack)
            except WorkerError as error:
                note(f"{error}: its rows are left out")
        return engines

    def memory(self, work: Work) -> dict[str, Contender]:
        """Engines for the memory of a whole process."""
        return {OURS: FreshWorker(self.ours([work])), **self._fresh_peers()}

    def start(self) -> dict[str, Contender]:
        """Engines for the start; ours is `everycast chat`, with its tokenizer and template."""
        chat = [sys.executable, "-P", "-m", "everycast.cli", "chat", str(self.artifact)]
        answer = ["--prompt", PROMPT, "--max-tokens", "1", "--temperature", "0", "--quiet"]
        command = [*chat, *answer, "--device", self.device]
        return {OURS: FreshCommand(OURS, command, self._environment), **self._fresh_peers()}

    def served(
        self, works: Sequence[Work], servers: Sequence[Installed], stack: ExitStack, note: Note
    ) -> dict[str, Contender]:
        """Servers under load, ours first, with a place for each client and keys and values of as
        many tokens; a peer's that does not start is named and left out."""
        slots = max(work.streams for work in works)
        context = slots * max(256, *(work.context for work in works))
        serve = [sys.executable, "-P", "-m", "everycast.cli", "serve", str(self.artifact)]
        options = ["--device", self.device, "--max-total-seq-length", str(context), "--quiet"]
        server = Server(
            OURS, lambda port: [*serve, "--port", str(port), *options], self._environment
        )
        engines: dict[str, Contender] = {OURS: ServedEngine(stack.enter_context(server))}
        for installed in servers:
            peer = installed.peer
            for variant in peer.variants:
                command = [
                    *(str(installed.python), str(peer.server_script), "-m", str(self.model.gguf)),
                    *("--host", HOST, "-np", str(slots), "-c", str(context)),
                    *("-t", str(self.threads), "-tb", str(self.threads), "--cache-ram", "0"),
                    *variant.server_arguments,
                ]
                name = _engine_name(peer, variant)
                try:
                    server = Server(name, _on_port(command), variant.environment)
                except WorkerError as error:
                    note(f"{error}: its rows are left out")
                else:
                    engines[name] = ServedEngine(stack.enter_context(server))
        return engines

    def limits(self) -> Worker:
        """The worker that measures what the machine can do."""
        command = [sys.executable, "-P", "-m", f"{__package__}.worker_limits"]
        return Worker("the worker of the limits", command, self._environment)

    def ours(self, works: Sequence[Work]) -> StartWorker:
        names = ",".join(work.name for work in works)
        module = [sys.executable, "-P", "-m", f"{__package__}.worker_everycast"]
        command = [*module, str(self.artifact), self.device, names]
        return lambda: Worker(OURS, command, self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return {"TVM_NUM_THREADS": str(self.threads)}

    def _fresh_peers(self) -> dict[str, Contender]:
        return {name: FreshWorker(start) for name, start in self._peer_workers()}

    def _peer_workers(self) -> list[tuple[str, StartWorker]]:
        """(`peer` or `peer, variant`; how to start it)."""
        return [
            (_engine_name(installed.peer, variant), self._peer_worker(installed, variant))
            for installed in self.peers
            for variant in installed.peer.variants
        ]

    def _peer_worker(self, installed: Installed, variant: Variant) -> StartWorker:
        peer = installed.peer
        script = [str(installed.python), str(peer.script), *peer.arguments, str(self.model.gguf)]
        command = [*script, f"--threads={self.threads}", *variant.arguments]
        environment = {**_PEER_ENVIRONMENT, **variant.environment}
        return lambda: Worker(_engine_name(peer, variant), command, environment)


def _engine_name(peer: Peer, variant: Variant) -> str:
    """`peer` or `peer, variant`, as `rows.py` takes it apart."""
    return f"{peer.name}, {variant.name}" if variant.name else peer.name


def _on_port(command: Sequence[str]) -> Callable[[int], list[str]]:
    return lambda port: [*command, "--port", str(port)]
