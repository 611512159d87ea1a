"""Where a kernel's arrays live, and how their elements are reached.

A buffer argument is declared once for each type and width that it is read or written as; all these
declarations share one binding, so that a vector access is one instruction:

    layout(binding = 0) buffer B0_float { float b0_float[]; };
    layout(binding = 0) buffer B0_vec4 { vec4 b0_vec4[]; };

Shared and local arrays cannot be seen in two ways. They are vectors where every access is one of
that width, else scalars; the first of the two passes over a kernel finds out.
"""

from dataclasses import dataclass, field
from typing import Literal

from .glsl_types import DType, glsl_name


@dataclass(slots=True)
class Array:
    """One array of a kernel. `length` is in scalars; None where only the caller knows."""

    name: str
    scalar: str
    place: Literal["buffer", "shared", "local"]
    length: int | None = None
    binding: int = 0
    width: int = 1
    """Lanes of one element of a shared or local array."""
    is_loaded: bool = False
    is_stored: bool = False
    views: set[tuple[str, int]] = field(default_factory=set)
    """Scalar type and width of every access."""

    @property
    def num_bytes(self) -> int:
        """Of a shared or local array."""
        assert self.length is not None
        return self.length * DType(self.scalar).bits // 8

    def common_width(self) -> int:
        """The width of every access, or 1 if they differ."""
        widths = {width for _, width in self.views}
        return widths.pop() if len(widths) == 1 else 1

    def element(self, scalar: str, width: int, index: str) -> str:
        """The text of the element `index`, counted in vectors of `width` lanes of `scalar`."""
        if self.place == "buffer":
            return f"{self.name}_{glsl_name(scalar, width)}[{index}]"
        return f"{self.name}[{index}]"

    def declarations(self) -> list[str]:
        """What stands outside `main`, of buffers and shared arrays."""
        if self.place == "shared":
            return [f"shared {self.declarator()};"]
        access = "" if self.is_stored else "readonly "
        lines = []
        for scalar, width in sorted(self.views):
            glsl = glsl_name(scalar, width)
            lines.append(
                f"layout(std430, set = 0, binding = {self.binding}) {access}"
                f"buffer B{self.binding}_{glsl} {{ {glsl} {self.name}_{glsl}[]; }};"
            )
        return lines

    def declarator(self) -> str:
        """Type, name and length of a shared or local array."""
        assert self.length is not None
        return f"{glsl_name(self.scalar, self.width)} {self.name}[{-(-self.length // self.width)}]"
