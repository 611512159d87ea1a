"""The text of one shader while it is being written."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ...artifact.errors import CompileError
from .glsl_types import COMPONENTS, DType, glsl_name

_NAME_OR_NUMBER = re.compile(r"-?[\w.]+")


class Writer:
    """Lines of `main`, fresh names, and what the shader must declare before it."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.lines: list[str] = []
        self.extensions: set[str] = set()
        self.helpers: dict[str, str] = {}
        """Functions before `main`, by name."""
        self._depth = 1
        self._num_names = 0

    def fail(self, construct: str) -> NoReturn:
        """Raise CompileError: this kernel has something for which there is no form."""
        raise CompileError(
            f"kernel '{self.kernel}' cannot be compiled for Vulkan: {construct}; "
            "schedule it otherwise"
        )

    def emit(self, line: str) -> None:
        self.lines.append("  " * self._depth + line)

    def fresh(self, base: str = "t") -> str:
        """A name of its own that reads like `base`."""
        self._num_names += 1
        letters = re.sub(r"_+", "_", re.sub(r"\W", "_", base, flags=re.ASCII)).strip("_")
        return (
            f"{letters or 'v'}_{self._num_names}"
            if letters[:1].isalpha()
            else (f"v{letters}_{self._num_names}")
        )

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines between `head {` and `}`."""
        self.emit(head + " {")
        self._depth += 1
        yield
        self._depth -= 1
        self.emit("}")

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """The lines written inside are put into the list instead."""
        outer, self.lines = self.lines, []
        try:
            yield self.lines
        finally:
            self.lines = outer

    def insert(self, lines: list[str]) -> None:
        """Lines that were captured, in the block that is open now."""
        self.lines += lines

    def temporary(self, scalar: str, width: int, text: str) -> str:
        """`text`, which may now be used more than once."""
        if _NAME_OR_NUMBER.fullmatch(text):
            return text
        name = self.fresh()
        self.emit(f"{glsl_name(scalar, width)} {name} = {text};")
        return name

    def lanes(self, dtype: DType, pieces: list[str]) -> list[str]:
        """Each lane of a value by itself."""
        lanes = []
        for width, piece in zip(dtype.widths, pieces, strict=True):
            if width == 1:
                lanes.append(self.temporary(dtype.scalar, 1, piece))
                continue
            name = self.temporary(dtype.scalar, width, piece)
            lanes += [f"{name}.{COMPONENTS[i]}" for i in range(width)]
        return lanes


def join_lanes(dtype: DType, lanes: list[str]) -> list[str]:
    """Pieces from single lanes: the inverse of `Writer.lanes`."""
    pieces, first = [], 0
    for width in dtype.widths:
        part = lanes[first : first + width]
        text = ", ".join(part)
        pieces.append(part[0] if width == 1 else f"{glsl_name(dtype.scalar, width)}({text})")
        first += width
    return pieces
