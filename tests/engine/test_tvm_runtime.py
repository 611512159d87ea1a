import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from everycast.engine.tvm_runtime import runtime_file

TORCH = "print('torch is loaded')\n__version__ = '0'\n"


def run(script: str, folder: Path) -> list[str]:
    """Lines that the script prints, with a `torch` of ours in front of any other."""
    (folder / "torch.py").write_text(TORCH)
    head = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", head + script], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_torch_stays_out_but_can_be_imported_later(tmp_path: Path) -> None:
    script = """
from everycast.engine.tvm_runtime import tvm_ffi
print(hasattr(tvm_ffi, "load_module"), "torch" in sys.modules, "tvm" in sys.modules)
import torch
"""
    assert run(script, tmp_path) == ["True False False", "torch is loaded"]


def test_a_torch_that_is_there_stays(tmp_path: Path) -> None:
    script = """
from types import ModuleType
sys.modules["torch"] = torch = ModuleType("torch")
sys.modules["tvm_ffi"] = ModuleType("tvm_ffi")  # it would use the real one's insides
from everycast.engine import tvm_runtime
print(sys.modules["torch"] is torch)
"""
    assert run(script, tmp_path) == ["True"]


@pytest.mark.parametrize(
    ("part", "platform", "name"),
    [
        ("", "linux", "libtvm_runtime.so"),
        ("extra", "linux", "libtvm_runtime_extra.so"),
        ("", "darwin", "libtvm_runtime.dylib"),
        ("metal", "darwin", "libtvm_runtime_metal.dylib"),
    ],
)
def test_files_are_named_as_the_platform_does(part: str, platform: str, name: str) -> None:
    assert runtime_file(part, platform) == name


@pytest.mark.parametrize("part", ["", "extra"])
def test_files_of_the_runtime_are_there(part: str) -> None:
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    assert (Path(spec.origin).parent / "lib" / runtime_file(part)).is_file()
