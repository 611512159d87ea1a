"""What tests of several folders share."""

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from everycast.artifact.cache import cache_dir
from everycast.artifact.errors import EverycastError
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# The same examples in every run of CI, however slow its machine: a red run then means a change.
# Elsewhere each run tries others.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if "CI" in os.environ:
    settings.load_profile("ci")


def pytest_configure() -> None:
    """A shell lets what it runs in the background ignore SIGINT, which its children inherit; some
    tests interrupt theirs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _load(path: Path) -> ModuleType:
    """A helper beside the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """tests/relax_models/reference.py: the NumPy forward pass."""
    return _load(TESTS / "relax_models" / "reference.py")


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """tests/tiny_models.py."""
    return _load(TESTS / "tiny_models.py")


@pytest.fixture(scope="session")
def write_web_artifact() -> Callable[..., Path]:
    """`write_web_artifact(folder, targets=(…)) -> folder`, of tests/web_artifacts.py."""
    write: Callable[..., Path] = _load(TESTS / "web_artifacts.py").write_web_artifact
    return write


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    """tests/targets/emulation/emulator.py: runs GPUs' kernels on a CPU; skips without g++."""
    emulator = _load(TESTS / "targets" / "emulation" / "emulator.py")
    if emulator.compiler() is None:
        pytest.skip("kernels are compiled for the CPU by g++: apt install g++")
    return emulator


@pytest.fixture(scope="session")
def cuda_emulator(emulation: ModuleType) -> SimpleNamespace:
    """The emulator of CUDA C."""
    language = _load(TESTS / "targets" / "emulation" / "cuda_source.py")
    made: SimpleNamespace = emulation.emulator(language)
    return made


@pytest.fixture(scope="session")
def metal_emulator(emulation: ModuleType) -> SimpleNamespace:
    """The emulator of Metal's language."""
    language = _load(TESTS / "targets" / "emulation" / "metal_source.py")
    made: SimpleNamespace = emulation.emulator(language)
    return made


@pytest.fixture(scope="session")
def make_tiny(tiny_models: ModuleType) -> Callable[..., Path]:
    """`make_tiny(model_type, folder, **overrides) -> folder`; skips without transformers."""
    pytest.importorskip("torch", reason="tiny checkpoints are written by transformers and torch")
    pytest.importorskip("transformers", reason="tiny checkpoints are written by transformers")
    make: Callable[..., Path] = tiny_models.make_tiny
    return make


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF in the user's cache, fetched if it is not there.

    A continuous integration run (`CI` is set) fails without it, others skip.
    """
    from everycast.relax_models.checkpoint.named_models import fetch_named

    try:
        return fetch_named("smollm2-135m", cache_dir())
    except EverycastError as error:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"the default model cannot be had: {error}")


@pytest.fixture(scope="session")
def tiny_checkpoint(
    make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A two-layer llama with sampling advice; never change it."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny llama")
    advice = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps({**advice, "eos_token_id": 2}))
    return folder


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path) -> Path:
    """`tiny_checkpoint` as q4f16_1 for this machine; never change it, copy it."""
    from everycast.targets.build import BuildRequest, compile_model

    request = BuildRequest(str(tiny_checkpoint), "cpu", "q4f16_1", tiny_checkpoint.parent / "dist")
    return compile_model(request, lambda *_: None)
