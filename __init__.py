"""everycast: compile one language model for every machine you own, and serve it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build_process import build as compile
    from .engine.async_mlc_engine import AsyncMLCEngine
    from .engine.mlc_engine import MLCEngine

__version__ = "0.5.1"
__all__ = ["AsyncMLCEngine", "MLCEngine", "__version__", "compile"]

_EXPORTS = {
    "MLCEngine": ("everycast.engine.mlc_engine", "MLCEngine"),
    "compile": ("everycast.build_process", "build"),
    "AsyncMLCEngine": ("everycast.engine.async_mlc_engine", "AsyncMLCEngine"),
}
"""Public name → module and name; imported when first asked for, so that `import everycast` is
instant."""


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
