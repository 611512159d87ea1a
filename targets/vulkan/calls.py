"""Calls in TIR expressions: mathematics, bits, barriers, subgroups.

Kernels may call these GLSL functions by name (`T.call_pure_extern(dtype, name, …)`): `EXTERNS`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .access import places
from .bits import reinterpret
from .glsl_types import convert, glsl_name, literal
from .writer import join_lanes

if TYPE_CHECKING:
    from .expressions import Expressions, Pieces

_MATH = {
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt",
    "rsqrt": "inversesqrt", "pow": "pow", "fabs": "abs", "abs": "abs", "floor": "floor",
    "ceil": "ceil", "trunc": "trunc", "round": "everycast_round", "nearbyint": "roundEven",
    "rint": "roundEven", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos",
    "atan": "atan", "atan2": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "everycast_tanh",
    "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "everycast_erf", "fma": "fma",
    "log1p": "everycast_log1p", "exp10": "everycast_exp10", "log10": "everycast_log10",
    "sigmoid": "everycast_sigmoid", "fmin": "min", "fmax": "max", "fmod": "everycast_fmod",
    "isnan": "isnan", "isinf": "isinf",
}  # fmt: skip
"""TIR's functions of floats → GLSL's, or one of `_HELPERS`. C's names with `f` mean the same."""

_HELPERS = {
    "everycast_round": "{T} everycast_round({T} x) {{ return sign(x) * floor(abs(x) + 0.5); }}",
    # Drivers may compute exp(x) / exp(-x), which overflows.
    "everycast_tanh": (
        "{T} everycast_tanh({T} x) {{ return tanh(clamp(x, {T}(-15.0), {T}(15.0))); }}"
    ),
    # Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: error below 1.5e-7.
    "everycast_erf": (
        "{T} everycast_erf({T} x) {{ {T} t = 1.0 / (1.0 + 0.3275911 * abs(x)); "
        "{T} p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t "
        "+ 0.254829592) * t; return sign(x) * (1.0 - p * exp(-x * x)); }}"
    ),
    "everycast_log1p": (
        # Kahan: exact where 1 + x is rounded.
        "{T} everycast_log1p({T} x) {{ precise {T} u = 1.0 + x; precise {T} d = u - 1.0; "
        "return mix(log(u) * (x / mix(d, {T}(1.0), equal({V}(d), {V}(0.0)))), x, "
        "equal({V}(d), {V}(0.0))); }}"
    ),
    "everycast_exp10": "{T} everycast_exp10({T} x) {{ return exp2(x * 3.3219280948873623); }}",
    "everycast_log10": "{T} everycast_log10({T} x) {{ return log2(x) * 0.3010299956639812; }}",
    "everycast_sigmoid": "{T} everycast_sigmoid({T} x) {{ return 1.0 / (1.0 + exp(-x)); }}",
    "everycast_fmod": "{T} everycast_fmod({T} x, {T} y) {{ return x - y * trunc(x / y); }}",
}
_IN_DOUBLE = ("floor", "ceil", "trunc", "sqrt", "rsqrt", "fabs", "abs", "fma", "fmin", "fmax")
_INTEGER_MATH = {"abs": "abs", "popcount": "bitCount", "ctpop": "bitCount"}
_BITS = {
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "shift_left": "<<",
    "shift_right": ">>",
}
_SUBGROUP = "GL_KHR_shader_subgroup_"
EXTERNS = {
    **dict.fromkeys(
        ("subgroupAdd", "subgroupMul", "subgroupMin", "subgroupMax"), _SUBGROUP + "arithmetic"
    ),
    **dict.fromkeys(("subgroupShuffle", "subgroupShuffleXor"), _SUBGROUP + "shuffle"),
    **dict.fromkeys(("subgroupBroadcast", "subgroupBroadcastFirst"), _SUBGROUP + "ballot"),
    "subgroupElect": _SUBGROUP + "basic",
    "subgroupBarrier": _SUBGROUP + "basic",
    "bitfieldExtract": "",
    "packHalf2x16": "",
    "unpackHalf2x16": "",
}
"""Functions that a kernel may call by GLSL's own name, and the extension that each needs. What a
subgroup is, is the device's choice: see `Kernel.subgroup_width`."""


def call(code: "Expressions", e: Any) -> "Pieces":
    """The pieces of a call's result; none of a call for its effect."""
    name, arguments = str(e.op.name).rpartition(".")[2], list(e.args)
    if name in ("call_extern", "call_pure_extern"):
        name, arguments = str(arguments[0].value), arguments[1:]
        if name in EXTERNS:
            return _extern(code, e, name, arguments)
        name = name if name in _MATH else name.removesuffix("f")
    if name in _HANDLERS:
        return _HANDLERS[name](code, e, arguments)
    if name in _BITS:
        return code.arithmetic(e, _BITS[name], *arguments)
    if name in _MATH or name in _INTEGER_MATH:
        return _math(code, e, name, arguments)
    code.writer.fail(f"it calls {name}")


def _math(code: "Expressions", e: Any, name: str, arguments: list[Any]) -> "Pieces":
    result, operand = code.dtype(e), code.dtype(arguments[0])
    pieces = [code.value(argument) for argument in arguments]
    if not operand.is_float:
        function = _INTEGER_MATH.get(name)
        if function is None or operand.bits > 32:
            code.writer.fail(f"it calls {name} of {operand}")
        wide = "uint32" if operand.scalar.startswith("uint") else "int32"
        return [
            convert(
                f"{function}({convert(part, operand.scalar, wide, width)})",
                wide,
                result.scalar,
                width,
            )
            for width, (part,) in zip(operand.widths, zip(*pieces, strict=True), strict=True)
        ]
    if operand.scalar == "float64" and name not in _IN_DOUBLE:
        code.writer.fail(f"it calls {name} of float64")
    # Half precision has few functions on some devices, and loses much in the others.
    working = "float32" if operand.scalar == "float16" else operand.scalar
    function = _MATH[name]
    texts = []
    for width, parts in zip(operand.widths, zip(*pieces, strict=True), strict=True):
        if function in _HELPERS:
            _declare_helper(code, function, working, width)
        inner = ", ".join(convert(part, operand.scalar, working, width) for part in parts)
        text = f"{function}({inner})"
        texts.append(text if result.is_bool else convert(text, working, result.scalar, width))
    return texts


def _declare_helper(code: "Expressions", function: str, scalar: str, width: int) -> None:
    glsl = glsl_name(scalar, width)
    text = _HELPERS[function]
    if function == "everycast_log1p" and width == 1:
        text = (
            "{T} everycast_log1p({T} x) {{ precise {T} u = 1.0 + x; precise {T} d = u - 1.0; "
            "return d == 0.0 ? x : log(u) * (x / d); }}"
        )
    code.writer.helpers[f"{function} {glsl}"] = text.format(T=glsl, V=glsl)


def _if_then_else(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    dtype, writer = code.dtype(e), code.writer
    names = [writer.fresh() for _ in dtype.widths]
    condition = code.scalar(arguments[0])
    for width, name in zip(dtype.widths, names, strict=True):
        writer.emit(f"{glsl_name(dtype.scalar, width)} {name};")
    # Not ?: of GLSL, of which compilers may evaluate both sides: one side may read past an end.
    for head, argument in ((f"if ({condition})", arguments[1]), ("else", arguments[2])):
        with writer.block(head):
            for name, piece in zip(names, code.value(argument), strict=True):
                writer.emit(f"{name} = {piece};")
    return names


def _storage_sync(code: "Expressions", _: Any, arguments: list[Any]) -> "Pieces":
    scope = str(arguments[0].value)
    if scope == "warp":
        code.writer.extensions.add(_SUBGROUP + "basic")
        code.writer.emit("subgroupBarrier();")
    elif scope in ("shared", "shared.dyn"):
        code.writer.emit("barrier();")
    else:
        code.writer.fail(f"it waits for all of {scope} memory")
    return []


def _shuffle(code: "Expressions", e: Any, arguments: list[Any], lane_of: str) -> "Pieces":
    """CUDA's __shfl_*_sync(mask, value, lane or delta, width): groups of `width` lanes, which must
    be a power of two; a lane outside the group reads its own value."""
    _, value, other, width, _ = arguments
    count = getattr(width, "value", None)
    if count is None or int(count) & (int(count) - 1):
        code.writer.fail("it shuffles in a width that is not a constant power of two")
    code.subgroup_width = max(code.subgroup_width, int(count))
    code.writer.extensions |= {_SUBGROUP + "basic", _SUBGROUP + "shuffle"}
    lane = lane_of.format(
        own="gl_SubgroupInvocationID",
        other=f"uint({code.scalar(other)})",
        last=f"{int(count) - 1}u",
    )
    source = code.writer.temporary("uint32", 1, lane)
    dtype, names = code.dtype(e), []
    for piece_width, piece in zip(dtype.widths, code.value(value), strict=True):
        name = code.writer.fresh()
        glsl = glsl_name(dtype.scalar, piece_width)
        code.writer.emit(f"{glsl} {name} = subgroupShuffle({piece}, {source});")
        names.append(name)
    return names


_SHUFFLES = {
    "tvm_warp_shuffle": "({own} & ~{last}) | ({other} & {last})",
    "tvm_warp_shuffle_up": "({own} & {last}) < {other} ? {own} : {own} - {other}",
    "tvm_warp_shuffle_down": "({own} & {last}) + {other} > {last} ? {own} : {own} + {other}",
    "tvm_warp_shuffle_xor": "{own} ^ {other}",
}


def _extern(code: "Expressions", e: Any, name: str, arguments: list[Any]) -> "Pieces":
    if EXTERNS[name]:
        code.writer.extensions |= {_SUBGROUP + "basic", EXTERNS[name]}
        code.subgroup_width = max(code.subgroup_width, 1)
    parts = []
    for argument in arguments:
        pieces = code.value(argument)
        if len(pieces) != 1:
            code.writer.fail(f"it calls {name} of {code.dtype(argument)}")
        parts += pieces
    text = f"{name}({', '.join(parts)})"
    if not str(getattr(e.ty, "dtype", "")) or name == "subgroupBarrier":
        code.writer.emit(text + ";")
        return []
    dtype = code.dtype(e)
    # By a statement: all invocations take part here, whatever the expression around it chooses.
    result = code.writer.fresh()
    code.writer.emit(f"{glsl_name(dtype.scalar, dtype.lanes)} {result} = {text};")
    return [result]


def _dp4a(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    a, b, *rest = arguments
    scalar = code.dtype(e).scalar
    if any(code.dtype(x).lanes != 4 or not code.dtype(x).is_small_int for x in (a, b)):
        code.writer.fail(f"it calls dp4a of {code.dtype(a)} and {code.dtype(b)}")
    products = code.writer.temporary(
        scalar,
        4,
        " * ".join(convert(code.value(x)[0], code.dtype(x).scalar, scalar, 4) for x in (a, b)),
    )
    total = f"({products}.x + {products}.y + {products}.z + {products}.w)"
    return [f"({total} + {code.scalar(rest[0])})" if rest else total]


def _atomic_add(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    pointer, value = arguments[:2]
    dtype = code.dtype(e)
    load = pointer.args[0] if type(pointer).__name__ == "Call" else None
    if type(load).__name__ != "TensorLoad" or dtype.scalar not in ("int32", "uint32"):
        code.writer.fail(f"it adds to {dtype} atomically")
    assert load is not None
    array = code.arrays[load.source]
    array.is_loaded = array.is_stored = True
    (place,), _ = places(code, load.source, load.indices, 1)
    name = code.writer.fresh()
    code.writer.emit(
        f"{glsl_name(dtype.scalar)} {name} = atomicAdd({place}, {code.scalar(value)});"
    )
    return [name]


def _vector_part(code: "Expressions", e: Any, arguments: list[Any], is_high: bool) -> "Pieces":
    lanes = code.lanes(arguments[0])
    half = len(lanes) // 2
    return join_lanes(code.dtype(e), lanes[half:] if is_high else lanes[:half])


def _combine(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    return join_lanes(code.dtype(e), [lane for part in arguments for lane in code.lanes(part)])


def _copysign(code: "Expressions", e: Any, arguments: list[Any]) -> "Pieces":
    dtype = code.dtype(e)
    if dtype.scalar != "float32":
        code.writer.fail(f"it calls copysign of {dtype}")
    lanes = zip(code.lanes(arguments[0]), code.lanes(arguments[1]), strict=True)
    return join_lanes(
        dtype,
        [
            f"uintBitsToFloat((floatBitsToUint({a}) & 0x7fffffffu) | "
            f"(floatBitsToUint({b}) & 0x80000000u))"
            for a, b in lanes
        ],
    )


def _statement(text: str) -> Callable[["Expressions", Any, list[Any]], "Pieces"]:
    def emit(code: "Expressions", _: Any, __: list[Any]) -> "Pieces":
        code.writer.emit(text)
        return []

    return emit


def _active_mask(code: "Expressions", e: Any, _: list[Any]) -> "Pieces":
    return [literal(code.dtype(e).scalar, 0)]  # only ever given to a shuffle, which needs none


_HANDLERS: dict[str, Callable[["Expressions", Any, list[Any]], "Pieces"]] = {
    "if_then_else": _if_then_else,
    "tvm_storage_sync": _storage_sync,
    "tvm_warp_activemask": _active_mask,
    "reinterpret": reinterpret,
    "dp4a": _dp4a,
    "atomic_add": _atomic_add,
    "vectorlow": lambda code, e, a: _vector_part(code, e, a, is_high=False),
    "vectorhigh": lambda code, e, a: _vector_part(code, e, a, is_high=True),
    "vectorcombine": _combine,
    "copysign": _copysign,
    "bitwise_not": lambda code, e, a: [f"(~{piece})" for piece in code.value(a[0])],
    "likely": lambda code, e, a: code.value(a[0]),
    "tvm_thread_invariant": lambda code, e, a: code.value(a[0]),
    "thread_return": _statement("return;"),
    "break_loop": _statement("break;"),
    "continue_loop": _statement("continue;"),
    **{
        name: lambda code, e, a, lane=lane: _shuffle(code, e, a, lane)  # type: ignore[misc]
        for name, lane in _SHUFFLES.items()
    },
}
