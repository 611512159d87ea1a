"""Compile a model in a child process: the caller never loads the compiler.

The child (`python -m everycast.targets.build`) reads one JSON request from its standard input and
answers with JSON lines: progress as it goes, at the end the artifact or one error.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .artifact import errors

# -P: nothing in the current folder may stand in for a module of the compiler.
COMMAND = (sys.executable, "-P", "-m", "everycast.targets.build")

Progress = Callable[["BuildProgress"], None]


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is: `done` of `total` in `unit` ("bytes" or "steps"); total 0 is unknown."""

    stage: str
    done: int
    total: int
    unit: str = "steps"


def build(
    model: str | Path,
    target: str | None = "cpu",
    quantization: str | None = None,
    output: str | Path = "dist",
    *,
    activations: str = "auto",
    context_window_size: int | None = None,
    dump_ir: str | Path | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build `<output>/<model>-<quantization>` and give its path.

    `model` is a known name, a Hugging Face folder, `HF://org/name` or a GGUF file. Without a
    quantization a GGUF is imported without loss and a float checkpoint gets the default scheme.
    Weights that are already there are kept and only the library is built; without a target
    (None) only the weights are converted.

    A library for a GPU has what tuning found for `device`: one of this machine (`vulkan:1`), or a
    name in tuning records; None: the first one here that there are records of.

    Raises the family of `artifact.errors.EverycastError`.
    """
    request = {
        "model": str(model),
        "target": target,
        "quantization": quantization,
        "output": str(Path(output).absolute()),
        "activations": activations,
        "context_window_size": context_window_size,
        "dump_ir": None if dump_ir is None else str(Path(dump_ir).absolute()),
        "devices": _tuned_devices(target, device),
    }
    # In a group of its own, the child does not get the terminal's Ctrl-C: it is ended below, or
    # ends by itself when nobody reads its answers any more.
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace",
        process_group=0,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died; what it left is read below
                child.stdin.write(json.dumps(request))
                child.stdin.close()
            answer = _follow(child.stdout, progress)
        except BaseException:
            child.terminate()
            raise
    if answer is None:
        raise errors.CompileError(_end_of(child.returncode))
    if "error" in answer:
        raise _error(answer["error"])
    return Path(answer["artifact"])


def _tuned_devices(target: str | None, device: str | None) -> dict[str, str]:
    if target is None or (device is None and target.partition(":")[0] in ("cpu", "webgpu")):
        return {}
    from .tuned_devices import devices_with_records

    return devices_with_records(target, device)


def _follow(lines: Any, progress: Progress | None) -> dict[str, Any] | None:
    answer = None
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a library printed something
        if not isinstance(message, dict):
            continue
        if "progress" in message:
            if progress is not None:
                progress(BuildProgress(**message["progress"]))
        elif "artifact" in message or "error" in message:
            answer = message
    return answer


def _end_of(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return (
            f"the compiler was ended by signal {name}; where memory ran out, close programs or use "
            "a smaller model"
        )
    return f"the compiler stopped without an answer (exit code {exit_code}); see what it printed"


def _error(error: dict[str, str]) -> errors.EverycastError:
    kind = getattr(errors, error["type"], errors.CompileError)
    raised: errors.EverycastError = kind(error["message"])
    return raised
