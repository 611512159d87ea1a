"""Where everycast keeps what it fetched and built for the user."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """`$EVERYCAST_CACHE`, else `everycast` in the platform's cache folder. May not exist yet."""
    if chosen := os.environ.get("EVERYCAST_CACHE"):
        return Path(os.path.abspath(Path(chosen).expanduser()))
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / "everycast"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "everycast"
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.path.abspath(parent)) / "everycast"
