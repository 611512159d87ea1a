"""The peers' Python environments: found, or made at first use under the cache's `peers/`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .peers import Isa, Package, Peer
from .workers import BenchError

_DONE = "everycast-installed.txt"
"""Written last, holds the requirements: an environment without it is not finished."""
_TIMEOUT_S = 3600


class PeerError(BenchError):
    """A peer cannot be had. One line."""


def peer_package(peer: Peer, isa: Isa, *, server: bool = False) -> Package:
    """Raises PeerError if the peer has none for these instructions, or no server."""
    packages = peer.servers if server else peer.packages
    if isa in packages:
        return packages[isa]
    what = "server" if server and not packages else f"build for {isa} alone"
    raise PeerError(f"{peer.name} has no {what}: its rows are left out")


def peer_python(
    package: Package, chosen: Mapping[str, Path], folder: Path, note: Callable[[str], None]
) -> Path:
    """The Python that has `package`: the user's choice (by the package's name), else an environment
    in `folder`, made if it is not there.

    Raises PeerError if it cannot be made.
    """
    if package.name in chosen:
        return chosen[package.name]
    target = folder / package.name
    python = target / "bin" / "python"
    wanted = "\n".join((*package.requirements, *_settings(package)))
    record = target / _DONE
    if record.is_file() and record.read_text(encoding="utf-8") == wanted:
        return python
    note(f"installing {', '.join(package.requirements)} into {target} ({package.takes})")
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    install = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet")
    try:
        _run([sys.executable, "-P", "-m", "venv", str(target)], {})
        _run([str(python), *install, *package.requirements], package.environment)
    except _FailedError as error:
        raise PeerError(
            f"{package.name} cannot be installed: {error}; its rows are left out "
            f"(--peer-python {package.name}=PYTHON takes an environment of yours)"
        ) from None
    record.write_text(wanted, encoding="utf-8")
    return python


def prepare(peer: Peer, python: Path, gguf: Path, note: Callable[[str], None]) -> None:
    """Let the peer make of the GGUF what it needs; does nothing where that is there already.

    Raises PeerError if it cannot.
    """
    if peer.prepare_script is None:
        return
    note(f"preparing {gguf.name} for {peer.name}")
    try:
        _run([str(python), str(peer.prepare_script), str(gguf)], {})
    except _FailedError as error:
        raise PeerError(
            f"{peer.name} cannot use {gguf.name}: {error}; its rows are left out"
        ) from None


def _settings(package: Package) -> list[str]:
    return [f"{name}={value}" for name, value in package.environment.items()]


class _FailedError(Exception):
    """Why a command failed, in one line."""


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment},
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _FailedError(str(error)) from None
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if "error:" in line.lower()] or lines or ["no reason"]
        raise _FailedError(reasons[-1][:300])
