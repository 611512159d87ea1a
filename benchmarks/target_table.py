"""Sizes and seconds of every target's library, as a table in Markdown (docs/targets.md has one).

python -m everycast.benchmarks.target_table [MODEL …] [--tiny] [-o FOLDER]

Each model is compiled as `everycast compile MODEL --target all` does, for every target whose tools
are installed. `--tiny` adds a tiny random model of each model type, which needs the packages of the
tests.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..artifact.manifest import read_manifest
from ..targets.build import ALL_TARGETS, BuildRequest, compile_model

_TINY = Path(__file__).parents[1] / "tests" / "tiny_models.py"


class Clock:
    """Seconds of each library, from what the build reports."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if stage != "compile":
            return
        if total == 0:
            self._start = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._start)


def measure(model: str, output: Path) -> dict[str, tuple[int, float]]:
    """Target → (bytes of its library, seconds to make it)."""
    clock = Clock()
    folder = compile_model(BuildRequest(model, ALL_TARGETS, None, output), clock)
    libraries = read_manifest(folder).libraries
    return {
        target: ((folder / stamp.file).stat().st_size, seconds)
        for (target, stamp), seconds in zip(libraries.items(), clock.seconds, strict=True)
    }


def table(results: dict[str, dict[str, tuple[int, float]]]) -> str:
    """A row for each target, a column for each model: `1.4 MB, 7.7 s`."""
    targets = list(dict.fromkeys(target for found in results.values() for target in found))
    lines = [
        "| target | " + " | ".join(results) + " |",
        "| --- " * (len(results) + 1) + "|",
    ]
    for target in targets:
        cells = [
            f"{found[target][0] / 1e6:.2f} MB, {found[target][1]:.1f} s" if target in found else "-"
            for found in results.values()
        ]
        lines.append(f"| `{target}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tiny_models(folder: Path) -> list[str]:
    """A checkpoint of each model type, written under `folder`."""
    spec = importlib.util.spec_from_file_location(_TINY.stem, _TINY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [str(module.make_tiny(kind, folder / f"tiny {kind}")) for kind in module.MODEL_TYPES]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sizes and seconds of every target's library.")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="where the models' folders go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        output = options.output or Path(temporary, "dist")
        models = list(options.models)
        if options.tiny:
            models += tiny_models(Path(temporary))
        results = {}
        for model in models:
            results[Path(model).name] = measure(model, output)
            print(f"{Path(model).name}: {results[Path(model).name]}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
