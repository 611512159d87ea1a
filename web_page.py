"""The built browser page: shipped in the wheel, or made by npm in a source checkout."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .artifact.cache import cache_dir
from .artifact.errors import CapacityError, CompileError

WEB = Path(__file__).parent / "web"
_SOURCES = ("index.html", "package-lock.json", "tsconfig.json", "vite.config.ts", "src", "public")
_TELLS_NOTHING = re.compile(
    r"npm (error|ERR!)( (code|errno|syscall|path|dest|cwd|A complete log)\b.*|\W*)$"
    r"|.*:$|failed to load config"
)
"""What stands around the reason in the output of npm, or is a heading."""


def page_folder(note: Callable[[str], None]) -> Path:
    """The folder of the built page, made first where sources are newer or nothing is built.

    `note` is told before npm starts, which takes seconds, the first time longer. Raises
    CapacityError if npm is needed and missing, CompileError if the build fails.
    """
    built = WEB / "dist"
    if not (WEB / "package.json").is_file():
        if not (built / "index.html").is_file():
            raise CapacityError(
                "this installation has no browser page; install a wheel of everycast, or work in "
                "a source checkout, where npm builds the page"
            )
        return built
    if _is_fresh(built / "index.html"):
        return built
    from filelock import FileLock

    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / "web-page.lock"):
        if not _is_fresh(built / "index.html"):
            note("building the browser page with npm …")
            _build()
    return built


def _is_fresh(result: Path) -> bool:
    if not result.is_file():
        return False
    built_s = result.stat().st_mtime
    return all(path.stat().st_mtime <= built_s for path in _source_files())


def _source_files() -> list[Path]:
    roots = [WEB / name for name in _SOURCES]
    inner = [path for root in roots if root.is_dir() for path in root.rglob("*") if path.is_file()]
    return [root for root in roots if root.is_file()] + inner


def _build() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise CapacityError(
            "npm is needed once, to build the browser page; install Node.js 18 or later with npm "
            "(apt install nodejs npm), then run this again"
        )
    installed = WEB / "node_modules" / ".package-lock.json"
    lock = WEB / "package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < lock.stat().st_mtime:
        # The tests' packages stay out; no package's own script is run.
        _run([npm, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"])
    _run([npm, "run", "build", "--silent"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=WEB, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        what = " ".join(["npm", *command[1:]])
        raise CompileError(f"'{what}' failed in {WEB}: {_reason(done.stderr + done.stdout)}")


def _reason(output: str) -> str:
    """The line that tells most of what npm, or a program that it ran, said before it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() and not _TELLS_NOTHING.match(line)]
    return (telling or lines[-1:] or ["no output"])[0]
