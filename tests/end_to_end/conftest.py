"""The real product over tiny checkpoints: each is compiled once in a test session.

The source of most tests lies under a path that is as odd as paths get, so that every command that
works here works there.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast import build_process, cli
from everycast.artifact.cache import cache_dir
from everycast.artifact.errors import EverycastError
from everycast.engine.devices import DeviceMemory
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import StepInput
from everycast.engine.paged_runner import PagedRunner
from everycast.engine.parameters import load_parameters
from everycast.targets.build import BuildRequest, compile_model

ODD = 'Željko 張 庭/模型 a\'b "c"'
USERS_CACHE = cache_dir()
"""Before the tests have one of their own."""
COMMAND = (sys.executable, "-m", "everycast.cli")


def build_here(
    model: str | Path,
    target: str | None = "cpu",
    quantization: str | None = None,
    output: str | Path = "dist",
    *,
    progress: Any = None,
    device: str | None = None,
    **options: Any,
) -> Path:
    """`build_process.build` without the process, which takes seconds to import the compiler."""
    assert device is None, "of a device that was tuned for, the process is told"
    request = BuildRequest(str(model), target, quantization, Path(output).absolute(), **options)
    return compile_model(request, lambda *_: None)


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def error(self, *parts: str) -> None:
        """It failed as it should: exit code 2 and one line, which holds all of `parts`."""
        assert self.code == 2, (self.out, self.err)
        assert self.err.count("\n") == 1 and self.err.startswith("error: "), self.err
        assert self.out == ""
        for part in parts:
            assert part in self.err


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache of the whole session. Runtimes for devices, which take long to compile, are
    those of the cache outside."""
    cache = tmp_path_factory.mktemp("cache") / ODD
    cache.mkdir(parents=True)
    native = USERS_CACHE / "native"
    native.mkdir(parents=True, exist_ok=True)
    (cache / "native").symlink_to(native)
    return cache


@pytest.fixture(autouse=True)
def environment(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYCAST_CACHE", str(session_cache))
    monkeypatch.delenv("EVERYCAST_DEBUG", raising=False)


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """`run("compile", …)` calls the command line in this process, the compiler included."""
    monkeypatch.setattr(build_process, "build", build_here)

    def run(*arguments: str | Path) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture(scope="session")
def command() -> tuple[str, ...]:
    """What starts `everycast` as a user's shell does, from any folder."""
    return COMMAND


@pytest.fixture(scope="session")
def run_child(session_cache: Path) -> Callable[..., Result]:
    """`run_child("compile", …)` runs the command as a user's shell does."""

    def run_child(*arguments: str | Path) -> Result:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "EVERYCAST_CACHE": str(session_cache)},
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run_child


@pytest.fixture(scope="session")
def tiny(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied float32 llama in a folder with an odd name."""
    folder = tmp_path_factory.mktemp("tiny") / ODD
    folder.mkdir(parents=True)
    return make_tiny("llama", folder)


@dataclass(frozen=True, slots=True)
class Built:
    """An artifact, and the first answer of the `chat` command that built it."""

    folder: Path
    answer: dict[str, Any]


@pytest.fixture(scope="session")
def built(tiny: Path, session_cache: Path, run_child: Callable[..., Result]) -> Built:
    """`everycast chat FOLDER` with nothing built yet: the artifact, in the session's cache, has
    the default quantization."""
    done = run_child(
        "chat", tiny, "--prompt", "the 模型", "--max-tokens", "8", "--temperature", "0", "--json"
    )
    assert (done.code, done.err) == (0, "")
    (manifest,) = session_cache.glob("artifacts/*/*/everycast.json")
    return Built(manifest.parent, json.loads(done.out))


@pytest.fixture(scope="session")
def built_f32(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as q0f32."""
    output = tmp_path_factory.mktemp("f32") / ODD
    return build_here(tiny, quantization="q0f32", output=output)


@pytest.fixture(scope="session")
def vulkan() -> None:
    """A Vulkan device, or a skip."""
    try:
        DeviceMemory("vulkan")
    except EverycastError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def built_vulkan(
    vulkan: None, make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny llama as q4f16_1 for the CPU and Vulkan, in a folder with an odd name."""
    folder = tmp_path_factory.mktemp("vulkan") / ODD
    folder.mkdir(parents=True)
    source = make_tiny("llama", folder)
    for target in ("cpu", "vulkan"):
        built = build_here(source, target, "q4f16_1", folder / "dist")
    return built


@pytest.fixture
def artifact(built: Built, tmp_path: Path) -> Path:
    """A copy of the default artifact to damage, its packed weights left behind."""
    folder = tmp_path / "artifact"
    shutil.copytree(built.folder, folder, ignore=shutil.ignore_patterns(".packed"))
    return folder


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    folder = tmp_path / "source"
    shutil.copytree(tiny, folder)
    return folder


class Compiled:
    """An artifact's model driven without the engine: all logits of one sequence."""

    def __init__(self, folder: Path) -> None:
        opened = open_artifact(folder, engine_config={"max_total_seq_length": 256})
        parameters = load_parameters(folder, opened.library, opened.weights)
        self.activations: str = opened.library.metadata["activations"]
        self.runner = PagedRunner(opened.library, parameters, opened.info, opened.plan.num_pages)

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """[n] ids → [n, vocab_size] float32, in one prefill."""
        n = len(ids)
        step = StepInput(
            np.asarray(ids, np.int32),
            np.arange(n, dtype=np.int32),
            np.array([0, n], np.int32),
            np.arange(-(-n // self.runner.info.page_size), dtype=np.int32)[None],
            np.arange(n, dtype=np.int32),
        )
        return self.runner.execute(step).copy()


@pytest.fixture(scope="session")
def compiled() -> type[Compiled]:
    return Compiled


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """`build_here`."""
    return build_here
