"""The browser page with its models, as a tree of files and headers: for our server or any host."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .files import atomic_folder, disk_errors
from .web_index import MODELS_JSON, WebModel, index_json

INDEX_HTML = "index.html"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; worker-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""As in the page itself (`web/index.html`), for hosts that cannot set headers; a header adds what
only a header can say, and reaches the workers."""

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'",
        "Cross-Origin-Embedder-Policy": "require-corp",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)
"""Of every response. The two of cross-origin isolation keep other sites out of the process."""

_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_NAMED_BY_CONTENTS = ("assets/", "models/")

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".bin": "application/octet-stream",
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".json": "application/json",
        ".svg": "image/svg+xml",
        ".wasm": "application/wasm",
        ".webmanifest": "application/manifest+json",
    }
)

README = """\
# A chat page that runs language models in the browser

Put this folder on any host that serves static files over https. Nothing has to run there.

- `_headers` holds the HTTP headers for hosts that read such a file at the root of a site (Netlify,
  Cloudflare Pages); elsewhere set them by hand, or go without: the page works, less sealed off.
- `models/` may be cached for ever: its folders are named by their contents. A file has at most
  32 MB, or holds one larger tensor; mind your host's limit.
- On your own machine: `python3 -m http.server` in this folder, then http://localhost:8000
"""


@dataclass(frozen=True, slots=True)
class SiteFile:
    """A file to be served. `etag` is None where the server is to make one from size and time."""

    source: Path
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """`page` is the built page's folder (`web/dist`)."""

    page: Path
    models: tuple[WebModel, ...]

    def files(self) -> dict[str, SiteFile]:
        """Everything but `models.json`, by path relative to the site's root."""
        files = {
            path.relative_to(self.page).as_posix(): SiteFile(path)
            for path in sorted(self.page.rglob("*"))
            if path.is_file()
        }
        for model in self.models:
            for file in model.all_files:
                files[model.base + file.path] = SiteFile(file.source, f'"{file.sha256}"')
        return files

    def write(self, folder: Path) -> None:
        """Write it all into a new folder, which replaces one of that name in one step."""
        with atomic_folder(folder) as new, disk_errors(folder):
            for name, file in self.files().items():
                target = new / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.source, target)
            (new / MODELS_JSON).write_bytes(index_json(self.models))
            (new / "_headers").write_text(headers_file(), encoding="utf-8")
            (new / "README.md").write_text(README, encoding="utf-8")


def content_type(name: str) -> str:
    return _TYPES.get(Path(name).suffix, "application/octet-stream")


def cache_control(name: str) -> str:
    """How long a file of the site may be kept: for ever if its name changes with its contents."""
    return _FOR_EVER if name.startswith(_NAMED_BY_CONTENTS) else _ASK_AGAIN


def headers_file() -> str:
    """The headers in the form that Netlify and Cloudflare Pages read."""
    lines = ["/*", *(f"  {name}: {value}" for name, value in HEADERS.items())]
    for folder in _NAMED_BY_CONTENTS:
        lines += [f"/{folder}*", f"  Cache-Control: {_FOR_EVER}"]
    lines += ["/models/*.wasm", f"  Content-Type: {_TYPES['.wasm']}"]
    return "\n".join(lines) + "\n"
