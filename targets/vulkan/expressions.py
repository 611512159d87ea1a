"""TIR expressions in GLSL.

Sizes and strides are 64-bit integers in TIR. Devices compute them slowly, if at all, so here they
have 32 bits wherever that gives the same result: sums, differences and products of what ends as an
index are exact modulo 2³², and everything else stays in 64 bits unless its bounds prove that 32
suffice. Scalar arguments are taken to fit; the runtime checks each launch.
"""

from collections.abc import Callable
from typing import Any

from tvm import sym, tirx

from .access import load
from .calls import call
from .division import floor_div, floor_mod, remainder
from .glsl_types import DType, convert, glsl_name, literal
from .memory import Array
from .writer import Writer, join_lanes

_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/"}
_BITS = {"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "LShift": "<<", "RShift": ">>"}
_COMPARISONS = {
    "LT": ("<", "lessThan"),
    "LE": ("<=", "lessThanEqual"),
    "GT": (">", "greaterThan"),
    "GE": (">=", "greaterThanEqual"),
    "EQ": ("==", "equal"),
    "NE": ("!=", "notEqual"),
}
_INT32 = range(-(1 << 31), 1 << 31)
_FULL_TYPES = ("float32", "int32", "uint32")
"""Types for which GLSL has every vector function."""

Pieces = list[str]


class Expressions:
    """Writes expressions into a `Writer`; the statements enter variables and arrays."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.analyzer = sym.Analyzer()
        self.values: dict[Any, Pieces] = {}
        self.arrays: dict[Any, Array] = {}
        """By the variable of a buffer, or of its pointer."""
        self.narrow: set[Any] = set()
        """64-bit integer variables whose GLSL name is one of 32 bits."""
        self.subgroup_width = 0
        """Lanes of a subgroup that exchange values; 0 if none do."""
        self._handlers: dict[str, Callable[[Any], Pieces]] = {
            "Var": self._var,
            "IntImm": lambda e: [literal(self.dtype(e).scalar, int(e.value))],
            "FloatImm": lambda e: [literal(self.dtype(e).scalar, float(e.value))],
            "Cast": self._cast,
            "Broadcast": self._broadcast,
            "Ramp": self._ramp,
            "Shuffle": self._shuffle,
            "Not": self._not,
            "BitwiseNot": lambda e: self._each(e, "(~{0})", e.a),
            "And": lambda e: self._logical(e, is_and=True),
            "Or": lambda e: self._logical(e, is_and=False),
            "Min": lambda e: self._extreme(e, "min"),
            "Max": lambda e: self._extreme(e, "max"),
            "Mod": lambda e: remainder(self, e),
            "FloorDiv": lambda e: floor_div(self, e),
            "FloorMod": lambda e: floor_mod(self, e),
            "Select": self._select,
            "Let": self._let,
            "TensorLoad": lambda e: load(self, e),
            "Call": lambda e: call(self, e),
        }
        for name in (*_ARITHMETIC, *_BITS):
            self._handlers[name] = self._operator
        for name in _COMPARISONS:
            self._handlers[name] = self._comparison

    # What statements and calls ask for.

    def value(self, e: Any) -> Pieces:
        """The pieces of an expression of numbers."""
        handler = self._handlers.get(type(e).__name__)
        if handler is None:
            self.writer.fail(f"it has an expression {type(e).__name__}")
        return handler(e)

    def scalar(self, e: Any) -> str:
        """The text of an expression of one lane."""
        pieces = self.value(e)
        if self.dtype(e).lanes != 1:
            self.writer.fail(f"it takes one lane of {self.dtype(e)}")
        return pieces[0]

    def lanes(self, e: Any) -> list[str]:
        """Each lane of an expression, as names."""
        return self.writer.lanes(self.dtype(e), self.value(e))

    def dtype(self, e: Any) -> DType:
        """The type of an expression of numbers."""
        text = str(getattr(e.ty, "dtype", e.ty))
        dtype = DType.parse(text)
        if dtype is None:
            self.writer.fail(f"it has a value of type {text}")
        return dtype

    def index(self, e: Any) -> str:
        """The text of an integer modulo 2³², as `int`: exact if the integer fits."""
        scalar, kind = self.dtype(e).scalar, type(e).__name__
        if scalar != "int64":
            return convert(self.scalar(e), scalar, "int32", 1)
        if kind == "IntImm":
            return literal("int32", (int(e.value) + (1 << 31)) % (1 << 32) - (1 << 31))
        if kind == "Var" and e in self.narrow:
            return self.values[e][0]
        if kind in ("Add", "Sub", "Mul"):
            return f"({self.index(e.a)} {_ARITHMETIC[kind]} {self.index(e.b)})"
        if kind == "Cast" and self.dtype(e.value).scalar in ("int32", "uint32", "int64"):
            return self.index(e.value)
        if kind in ("Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max") and self._fit(e):
            return self.scalar(type(e)(self._as_int32(e.a), self._as_int32(e.b)))
        return f"int({self.scalar(e)})"

    def fits(self, e: Any) -> bool:
        """Whether an integer is sure to have 32 bits."""
        bound = self.analyzer.const_int_bound(e)
        return int(bound.min_value) in _INT32 and int(bound.max_value) in _INT32

    def bind(self, variable: Any, value: Any) -> None:
        """Give `variable` the value, for what follows."""
        dtype = self.dtype(variable)
        if dtype == DType("int64") and self.fits(value):
            name = self.writer.fresh(variable.name)
            self.writer.emit(f"int {name} = {self.index(value)};")
            self.narrow.add(variable)
            self.values[variable] = [name]
        else:
            names = []
            for width, piece in zip(dtype.widths, self.value(value), strict=True):
                names.append(self.writer.fresh(variable.name))
                self.writer.emit(f"{glsl_name(dtype.scalar, width)} {names[-1]} = {piece};")
            self.values[variable] = names
        if dtype.scalar in ("int32", "int64") and dtype.lanes == 1:
            self.analyzer.bind(variable, value)

    def arithmetic(self, e: Any, symbol: str, a: Any, b: Any) -> Pieces:
        """`a symbol b` in the type of e."""
        dtype = self.dtype(e)
        if not dtype.is_small_int:
            return self._each(e, f"({{0}} {symbol} {{1}})", a, b)
        wide = "int32" if dtype.scalar.startswith("int") else "uint32"
        pieces = []
        for width, x, y in zip(dtype.widths, self.value(a), self.value(b), strict=True):
            x, y = (convert(text, dtype.scalar, wide, width) for text in (x, y))
            pieces.append(convert(f"({x} {symbol} {y})", wide, dtype.scalar, width))
        return pieces

    # How each kind of expression is written.

    def _each(self, e: Any, template: str, *operands: Any) -> Pieces:
        """The template, filled with the pieces of the operands, which have as many lanes as e."""
        pieces = [self.value(operand) for operand in operands]
        return [template.format(*parts) for parts in zip(*pieces, strict=True)]

    def _operator(self, e: Any) -> Pieces:
        return self.arithmetic(e, (_ARITHMETIC | _BITS)[type(e).__name__], e.a, e.b)

    def _var(self, e: Any) -> Pieces:
        pieces = self.values.get(e)
        if pieces is None:
            self.writer.fail(f"variable {e.name} has no value")
        return [f"int64_t({pieces[0]})"] if e in self.narrow else pieces

    def _cast(self, e: Any) -> Pieces:
        source, target = self.dtype(e.value), self.dtype(e)
        if source == DType("int64") and self.fits(e.value):
            return [convert(self.index(e.value), "int32", target.scalar, 1)]
        pieces = zip(target.widths, self.value(e.value), strict=True)
        if source.is_float and target.is_small_int:
            # Through 32 bits: what does not fit is cut as in C.
            wide = "int32" if target.scalar.startswith("int") else "uint32"
            return [
                convert(convert(piece, source.scalar, wide, width), wide, target.scalar, width)
                for width, piece in pieces
            ]
        return [convert(piece, source.scalar, target.scalar, width) for width, piece in pieces]

    def _broadcast(self, e: Any) -> Pieces:
        dtype = self.dtype(e)
        text = self.writer.temporary(dtype.scalar, 1, self.scalar(e.value))
        return [
            text if width == 1 else f"{glsl_name(dtype.scalar, width)}({text})"
            for width in dtype.widths
        ]

    def _ramp(self, e: Any) -> Pieces:
        dtype = self.dtype(e)
        base, stride = (
            self.writer.temporary(dtype.scalar, 1, self.scalar(x)) for x in (e.base, e.stride)
        )
        steps = [literal(dtype.scalar, i) for i in range(dtype.lanes)]
        return join_lanes(dtype, [f"{base} + {stride} * {step}" for step in steps])

    def _shuffle(self, e: Any) -> Pieces:
        lanes = [lane for vector in e.vectors for lane in self.lanes(vector)]
        return join_lanes(self.dtype(e), [lanes[int(index)] for index in e.indices])

    def _not(self, e: Any) -> Pieces:
        return [
            f"(!{piece})" if width == 1 else f"not({piece})"
            for width, piece in zip(self.dtype(e).widths, self.value(e.a), strict=True)
        ]

    def _logical(self, e: Any, *, is_and: bool) -> Pieces:
        dtype, symbol = self.dtype(e), "&&" if is_and else "||"
        if dtype.lanes > 1:
            lanes = zip(self.lanes(e.a), self.lanes(e.b), strict=True)
            return join_lanes(dtype, [f"({a} {symbol} {b})" for a, b in lanes])
        left = self.scalar(e.a)
        with self.writer.captured() as lines:
            right = self.scalar(e.b)
        if not lines:
            return [f"({left} {symbol} {right})"]
        # What the right side does must not happen where the left side decides.
        name = self.writer.fresh()
        self.writer.emit(f"bool {name} = {left};")
        with self.writer.block(f"if ({name if is_and else '!' + name})"):
            self.writer.insert(lines)
            self.writer.emit(f"{name} = {right};")
        return [name]

    def _comparison(self, e: Any) -> Pieces:
        symbol, function = _COMPARISONS[type(e).__name__]
        operands = self.dtype(e.a)
        if operands == DType("int64") and self._fit(e):
            return [f"({self.index(e.a)} {symbol} {self.index(e.b)})"]
        if operands.lanes == 1:
            return self._each(e, f"({{0}} {symbol} {{1}})", e.a, e.b)
        if operands.scalar in _FULL_TYPES:
            pieces = zip(operands.widths, self.value(e.a), self.value(e.b), strict=True)
            return [
                f"({a} {symbol} {b})" if width == 1 else f"{function}({a}, {b})"
                for width, a, b in pieces
            ]
        lanes = zip(self.lanes(e.a), self.lanes(e.b), strict=True)
        return join_lanes(self.dtype(e), [f"({a} {symbol} {b})" for a, b in lanes])

    def _extreme(self, e: Any, function: str) -> Pieces:
        dtype = self.dtype(e)
        if dtype.scalar in ("bool", "int64", "uint64"):
            symbol = "<" if function == "min" else ">"
            lanes = zip(self.lanes(e.a), self.lanes(e.b), strict=True)
            return join_lanes(dtype, [f"({a} {symbol} {b} ? {a} : {b})" for a, b in lanes])
        if not dtype.is_small_int:
            return self._each(e, f"{function}({{0}}, {{1}})", e.a, e.b)
        wide = "int32" if dtype.scalar.startswith("int") else "uint32"
        pieces = []
        for width, a, b in zip(dtype.widths, self.value(e.a), self.value(e.b), strict=True):
            a, b = (convert(text, dtype.scalar, wide, width) for text in (a, b))
            pieces.append(convert(f"{function}({a}, {b})", wide, dtype.scalar, width))
        return pieces

    def _select(self, e: Any) -> Pieces:
        dtype, condition = self.dtype(e), self.dtype(e.condition)
        a, b = self.value(e.true_value), self.value(e.false_value)
        if condition.lanes == 1:
            text = self.writer.temporary("bool", 1, self.scalar(e.condition))
            return [f"({text} ? {x} : {y})" for x, y in zip(a, b, strict=True)]
        if dtype.scalar in (*_FULL_TYPES, "float16"):
            pieces = zip(dtype.widths, self.value(e.condition), a, b, strict=True)
            return [
                f"({c} ? {x} : {y})" if width == 1 else f"mix({y}, {x}, {c})"
                for width, c, x, y in pieces
            ]
        lanes = zip(
            self.lanes(e.condition), self.writer.lanes(dtype, a), self.writer.lanes(dtype, b),
            strict=True,
        )  # fmt: skip
        return join_lanes(dtype, [f"({c} ? {x} : {y})" for c, x, y in lanes])

    def _let(self, e: Any) -> Pieces:
        self.bind(e.var, e.value)
        return self.value(e.body)

    def _fit(self, e: Any) -> bool:
        return self.fits(e.a) and self.fits(e.b)

    def _as_int32(self, e: Any) -> Any:
        return tirx.Cast("int32", e)
