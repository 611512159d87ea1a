"""Drives stock WebLLM in headless Chromium: the other side of `web/tests/driver.mjs`.

Needs a checkout, Node.js, Chromium, and `npm ci` in `web`.
"""

import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifact.errors import EverycastError

WEB = Path(__file__).parents[1] / "web"


class BrowserError(EverycastError):
    """The page or the browser failed, or did not answer in time."""


class Browser:
    """Chromium and a server for its pages, until closed. Use it from one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", str(WEB / "tests" / "driver.mjs")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._last_id = 0

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the other side ends with its input
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def call(self, method: str, *, timeout_s: float = 180, **arguments: Any) -> Any:
        """The result of a method of the driver. Raises BrowserError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._last_id += 1
        request = {"id": self._last_id, "method": method, **arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise BrowserError(f"no answer to {method} within {timeout_s} s")
        answer = json.loads(line)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, name: str, path: str = "/tests/engine_page.html") -> "Page":
        """A new page of that name, which must not be taken."""
        self.call("open", page=name, path=path)
        return Page(self, name)


@dataclass(frozen=True, slots=True)
class Page:
    """A page with stock WebLLM; its calls are those of `web/tests/engine_page.mjs`."""

    browser: Browser
    name: str

    def call(self, call: str, *, timeout_s: float = 180, **argument: Any) -> Any:
        """The result of a call in the page. Raises BrowserError."""
        return self.browser.call(
            "call", page=self.name, name=call, argument=argument, timeout_s=timeout_s
        )

    def load(self, folder: Path, library: str, *, context: int) -> Any:
        """Load the artifact in `folder`; `context` is its KV cache, in tokens."""
        base = f"/models/{self.name}/"
        self.browser.call("serve", prefix=f"{base}resolve/main/", folder=str(folder))
        overrides = {"context_window_size": context}
        return self.call("load", base=base, library=library, overrides=overrides, timeout_s=600)

    def close(self) -> None:
        """Close the page, and with it its engine."""
        self.browser.call("close", page=self.name)
