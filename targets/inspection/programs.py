"""Programs that read what compilers wrote."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...artifact.errors import CompileError
from .report import ToolMissing

_SECONDS = 300
_VERSION = re.compile(r"(?:V|version |LLVM |v)(\d+(?:\.\d+)+)|(\d+\.\d+(?:\.\d+)*)")


def find_program(names: Sequence[str], what: str, install: str, folders: Sequence[str] = ()) -> str:
    """Path of the first of `names` that is in `folders` or on the PATH, under its name or, as
    Debian has it, `name-15` (the newest). ToolMissing otherwise."""
    places = [*folders, *os.environ.get("PATH", "").split(os.pathsep)]
    for name in names:
        if (found := shutil.which(name, path=os.pathsep.join(places))) is not None:
            return found
        numbered = [
            (int(path.name.rpartition("-")[2]), path)
            for folder in filter(None, places)
            for path in Path(folder).glob(f"{name}-*")
            if path.name.rpartition("-")[2].isdigit() and os.access(path, os.X_OK)
        ]
        if numbered:
            return str(max(numbered)[1])
    raise ToolMissing(f"{what} are read by {names[0]}, which is not installed; run: {install}")


def run_program(
    command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] = {}
) -> tuple[int, str, str]:
    """(exit code, output, errors). CompileError if it does not start or does not end."""
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            env={**os.environ, **environment},
            timeout=_SECONDS,
        )
    except OSError as error:
        raise CompileError(f"{command[0]} does not start: {error}; install it again") from None
    except subprocess.TimeoutExpired:
        raise CompileError(f"{command[0]} did not end within {_SECONDS} s") from None
    return run.returncode, run.stdout, run.stderr


def output_of(
    command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] = {}
) -> str:
    """What a program prints; CompileError, with its first line, if it fails."""
    code, output, errors = run_program(command, folder=folder, environment=environment)
    if code != 0:
        raise CompileError(f"{Path(command[0]).name} failed: {first_line(errors or output)}")
    return output


def version_of(command: Sequence[str], *, environment: Mapping[str, str] = {}) -> str:
    """The program's name and version, as far as it says one."""
    _, output, errors = run_program([*command, "--version"], environment=environment)
    match = _VERSION.search(output + errors)
    version = (match[1] or match[2]) if match else "of unknown version"
    return f"{Path(command[0]).name} {version}"


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else "no message"
