"""`everycast web` and `everycast package web`, without a compiler, npm or a browser."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from everycast import cli, web_command, web_page
from everycast.artifact.errors import CapacityError, CompileError

WriteArtifact = Callable[..., Path]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `web` with sources, where npm has not run."""
    web = tmp_path / "web"
    (web / "src").mkdir(parents=True)
    (web / "src" / "main.tsx").write_text("code")
    (web / "package.json").write_text("{}")
    (web / "package-lock.json").write_text("{}")
    monkeypatch.setattr(web_page, "WEB", web)
    monkeypatch.setenv("EVERYCAST_CACHE", str(tmp_path / "cache"))
    return web


@pytest.fixture
def page(checkout: Path) -> Path:
    (checkout / "dist").mkdir()
    (checkout / "dist" / "index.html").write_text("page")
    return checkout / "dist"


def fake_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, *, build: str) -> Path:
    """An npm that logs its arguments and runs `build` (shell) for `npm run`."""
    npm = folder / "npm"
    npm.write_text(f'#!/bin/sh\necho "$@" >> {folder}/log\n[ "$1" = ci ] || {{ {build}; }}\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "log"


def test_the_page_is_built_once_and_again_after_a_change(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_npm(tmp_path, monkeypatch, build="mkdir -p dist && echo page > dist/index.html")
    notes: list[str] = []
    folder = web_page.page_folder(notes.append)
    assert (folder / "index.html").read_text() == "page\n"
    web_page.page_folder(notes.append)
    assert log.read_text().splitlines() == [
        "ci --omit=dev --ignore-scripts --no-audit --no-fund",
        "run build --silent",
    ]
    built_s = (folder / "index.html").stat().st_mtime
    os.utime(checkout / "src" / "main.tsx", (built_s + 5, built_s + 5))
    web_page.page_folder(notes.append)
    assert len(notes) == 2


def test_a_missing_npm_is_one_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapacityError, match=r"npm is needed once.*apt install nodejs npm"):
        web_page.page_folder(print)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("syntax error", "syntax error"),
        (
            "failed to load config from vite.config.ts\nerror during build:\n"
            "Error [ERR_MODULE_NOT_FOUND]: no package vite\n    at packageResolve (node:error)",
            "Error [ERR_MODULE_NOT_FOUND]: no package vite",
        ),
        (
            "npm error code ENOTFOUND\nnpm error syscall getaddrinfo\nnpm error\n"
            "npm error network request to https://r.org failed\nnpm error A complete log is in /x",
            "npm error network request to https://r.org failed",
        ),
        ("Killed", "Killed"),
    ],
)
def test_a_failed_build_shows_the_line_that_tells_why(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    (tmp_path / "said").write_text(said)
    fake_npm(tmp_path, monkeypatch, build=f"cat {tmp_path}/said >&2; exit 1")
    with pytest.raises(CompileError) as caught:
        web_page.page_folder(print)
    assert str(caught.value) == f"'npm run build --silent' failed in {checkout}: {reason}"


def test_the_page_is_built_by_its_dependencies_alone() -> None:
    """`npm ci --omit=dev` is all that is installed to build it."""
    web = Path(web_page.__file__).parent / "web"
    installed = json.loads((web / "package.json").read_text())["dependencies"]
    sources = [web / "vite.config.ts", *(web / "src").rglob("*.ts"), *(web / "src").rglob("*.tsx")]
    imported = re.compile(r'\b(?:from |import |import\()"(?!node:)([\w@][^"]*)"')
    for source in sources:
        for name in imported.findall(source.read_text()):
            package = "/".join(name.split("/")[: 2 if name[0] == "@" else 1])
            assert package in installed, (source, name)


def test_an_installation_without_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_page, "WEB", tmp_path / "web")
    with pytest.raises(CapacityError, match="this installation has no browser page"):
        web_page.page_folder(print)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(str(end.value.code or 0)), out, err


def test_package_writes_a_folder_and_replaces_only_its_own(
    page: Path,
    write_web_artifact: WriteArtifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    artifact = write_web_artifact(tmp_path / "tiny-q4f32_1")
    output = tmp_path / "site"
    code, out, err = run(capsys, "package", "web", str(artifact), "-o", str(output))
    assert (code, out) == (0, f"{output}\n")
    assert "lib/webgpu-f16.wasm" in err and "http.server" in err
    models = json.loads((output / "models.json").read_bytes())["models"]
    assert [model["id"] for model in models] == ["tiny-q4f32_1"]
    assert run(capsys, "package", "web", str(artifact), "-o", str(output), "--quiet")[0] == 0

    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").write_text("keep me")
    code, _, err = run(capsys, "package", "web", str(artifact), "-o", str(other))
    assert code == 2 and "is no earlier package" in err
    assert (other / "letter.txt").exists()


def test_two_models_of_one_name_are_refused(
    page: Path, write_web_artifact: WriteArtifact, tmp_path: Path
) -> None:
    folders = [write_web_artifact(tmp_path / side / "tiny") for side in ("a", "b")]
    with pytest.raises(ValueError, match="two models are called tiny"):
        web_command.make_site([str(folder) for folder in folders], None, quiet=True)


def test_an_artifact_without_a_library_for_browsers_gets_one(
    page: Path,
    write_web_artifact: WriteArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact = write_web_artifact(tmp_path / "dist" / "tiny", targets=("cpu",))
    asked: list[object] = []

    def build(*arguments: object, **_: object) -> Path:
        asked.extend(arguments)
        return write_web_artifact(tmp_path / "built" / "tiny")

    monkeypatch.setattr("everycast.build_process.build", build)
    site = web_command.make_site([str(artifact)], None, quiet=True)
    assert asked == ["tiny.gguf", "webgpu", "q4f32_1", tmp_path / "dist"]
    assert site.models[0].libraries


@pytest.mark.parametrize(
    ("target", "use"), [("webgpu", "web"), ("webgpu:f16", "web"), ("cpu", "chat"), ("all", "chat")]
)
def test_compile_says_how_to_use_what_it_made(
    write_web_artifact: WriteArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    use: str,
) -> None:
    artifact = write_web_artifact(tmp_path / "tiny")
    monkeypatch.setattr("everycast.build_process.build", lambda *_, **__: artifact)
    monkeypatch.setattr("everycast.artifact.model_list.webllm_advice", lambda *_: [])
    _, _, err = run(capsys, "compile", "m", "--target", target)
    assert err.endswith(f"next: everycast {use} {artifact}\n")


@pytest.mark.parametrize(("options", "quantization"), [([], "q4f32_1"), (["-q", "q0f32"], "q0f32")])
def test_compile_takes_a_compiled_folder_for_its_checkpoint(
    write_web_artifact: WriteArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    quantization: str,
) -> None:
    artifact = write_web_artifact(tmp_path / "tiny")
    asked: list[object] = []

    def build(*arguments: object, **_: object) -> Path:
        asked.extend(arguments)
        return artifact

    monkeypatch.setattr("everycast.build_process.build", build)
    arguments = ["compile", str(artifact), "--target", "vulkan", "-o", "out", "--quiet", *options]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert asked == ["tiny.gguf", "vulkan", quantization, Path("out")]


def test_web_serves_the_page_and_says_where(
    write_web_artifact: WriteArtifact, tmp_path: Path
) -> None:
    """In a process of its own: Ctrl-C ends it in order."""
    artifact = write_web_artifact(tmp_path / "tiny")
    web = tmp_path / "web"
    (web / "dist").mkdir(parents=True)
    (web / "dist" / "index.html").write_text("page")
    program = (
        "import pathlib; from everycast import cli, web_page; "
        f"web_page.WEB = pathlib.Path({str(web)!r}); "
        f"cli.main(['web', {str(artifact)!r}, '--port', '0'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            described, where = process.stderr.readline(), process.stderr.readline()
            assert described.startswith("tiny: ") and "lib/webgpu.wasm" in described
            found = re.match(r"chat in a browser at (http://127\.0\.0\.1:\d+) ", where)
            assert found is not None, where
            assert httpx.get(found[1]).text == "page"
            assert httpx.get(f"{found[1]}/v1/models").status_code == 404
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) in (0, 130)
        finally:
            process.kill()
