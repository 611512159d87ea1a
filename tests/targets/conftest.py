"""Loads the helpers that tests of this folder share (tests are no package)."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


def _load(path: Path) -> ModuleType:
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
def make_tiny(tiny_models: ModuleType) -> Callable[..., Path]:
    """`make_tiny(model_type, folder, **overrides) -> folder`; skips without transformers."""
    pytest.importorskip("torch", reason="tiny checkpoints are written by transformers and torch")
    pytest.importorskip("transformers", reason="tiny checkpoints are written by transformers")
    make: Callable[..., Path] = tiny_models.make_tiny
    return make
