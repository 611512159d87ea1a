"""`everycast web` and `everycast package web`: the browser page with its models."""

import shlex
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from . import console
from .artifact.errors import CapacityError, RequestError
from .artifact.manifest import read_manifest
from .artifact.web_index import WEB_TARGET, WebModel, web_libraries, web_model
from .artifact.web_site import Site
from .build_view import BuildView

if TYPE_CHECKING:
    from .engine.async_mlc_engine import AsyncMLCEngine

GGUF = "gguf"
"""The quantization of an artifact whose GGUF was imported as it is."""


def serve_web(
    models: Sequence[str],
    quantization: str | None,
    *,
    host: str,
    port: int,
    with_server: bool,
    quiet: bool,
) -> None:
    """Serve the page and `models` until Ctrl-C; what is missing is built first.

    with_server: also answer OpenAI's routes, with the first model on this machine."""
    from .server.run import bind, run_app, url
    from .server.web_app import create_web_app

    with bind(host, port) as bound:
        site = make_site(models, quantization, quiet=quiet)
        engine = _engine(models[0], quantization, quiet=quiet) if with_server else None
        try:
            app = create_web_app(site, engine)
            bound.listen()
            _describe(site, quiet=quiet)
            console.note(f"chat in a browser at {url(bound)} (Ctrl-C stops)")
            if not ip_address(bound.getsockname()[0]).is_loopback:
                console.note(
                    "browsers on other machines run models only over https: put a proxy before it"
                )
            run_app(app, bound, engine)
        finally:
            if engine is not None:
                engine.terminate()


def package_web(
    models: Sequence[str], quantization: str | None, output: Path, *, quiet: bool
) -> None:
    """Write page and `models` into the folder `output`, for any host of static files.

    An earlier package there is replaced; RequestError if the folder holds anything else."""
    if output.exists() and not _is_package(output):
        raise RequestError(
            f"{output} exists and is no earlier package; give -o a folder that does not exist",
            param="output",
        )
    site = make_site(models, quantization, quiet=quiet)
    site.write(output)
    print(output)
    if quiet:
        return
    _describe(site, quiet=quiet)
    here = shlex.join(["python3", "-m", "http.server", "--directory", str(output)])
    console.note(f"put the folder on any https host, or try it here: {here}")


def make_site(models: Sequence[str], quantization: str | None, *, quiet: bool) -> Site:
    """The page with every model of `models`, each built for browsers where it is not."""
    from .web_page import page_folder

    described = [web_model(_artifact(model, quantization, quiet=quiet)) for model in models]
    names = [model.id for model in described]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RequestError(
            f"two models are called {', '.join(sorted(twice))}; rename one of their folders"
        )
    page = page_folder((lambda text: None) if quiet else console.note)
    return Site(page, tuple(described))


def _artifact(model: str, quantization: str | None, *, quiet: bool) -> Path:
    """The artifact of a model, with libraries for browsers."""
    from .build_process import build
    from .model_store import ensure_artifact

    with BuildView(quiet=quiet) as view:
        folder = ensure_artifact(model, WEB_TARGET, quantization, progress=view.progress)
        manifest = read_manifest(folder)
        if web_libraries(manifest):
            return folder
        # An artifact that was compiled for other targets only: its checkpoint is needed again.
        stored = manifest.weights.quantization
        return build(
            manifest.model.source,
            WEB_TARGET,
            None if stored == GGUF else stored,
            folder.parent,
            progress=view.progress,
        )


def _engine(model: str, quantization: str | None, *, quiet: bool) -> "AsyncMLCEngine":
    from .engine.async_mlc_engine import AsyncMLCEngine
    from .open_model import load_parts

    return AsyncMLCEngine.from_parts(
        *load_parts(model, "auto", quantization, "server", {}, quiet=quiet)
    )


def _describe(site: Site, *, quiet: bool) -> None:
    if quiet:
        return
    for model in site.models:
        console.note(f"{model.id}: {_download(model)}")


def _download(model: WebModel) -> str:
    weights = sum(file.num_bytes for file in model.files)
    libraries = ", ".join(
        f"{library.file.path} ({console.human_bytes(library.file.num_bytes)})"
        for library in model.libraries
    )
    return f"{console.human_bytes(weights)} of weights and tokenizer, {libraries}"


def _is_package(folder: Path) -> bool:
    if not folder.is_dir():
        raise CapacityError(f"{folder} is a file; give -o a folder")
    names = {path.name for path in folder.iterdir()}
    return not names or {"index.html", "models.json", "_headers"} <= names
