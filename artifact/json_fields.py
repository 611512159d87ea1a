"""JSON objects to dataclasses, with every type checked (the way back is `dataclasses.asdict`)."""

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """`value`, parsed JSON, as `kind`: a dataclass of such kinds, str, int, float, bool, Any,
    `X | None`, tuple[X, ...] or dict[str, X].

    Unknown fields are passed over. ValueError naming the field for one that is missing (and has
    no default) or of another type.
    """
    result: T = _convert(kind, value, where)
    return result


def _convert(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _convert_dataclass(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType) and type(None) in args:
        if value is None:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(inner, value, where)
    if origin is tuple:
        items = _expect(list, value, where, "a list")
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        members = _expect(dict, value, where, "an object")
        return {key: _convert(args[1], item, f"{where}.{key}") for key, item in members.items()}
    if kind is float:
        return float(_expect((int, float), value, where, "a number"))
    return _expect(kind, value, where, kind.__name__)


def _convert_dataclass(kind: type, value: Any, where: str) -> Any:
    members = _expect(dict, value, where, "an object")
    hints = get_type_hints(kind)
    arguments = {}
    for field in fields(kind):
        place = f"{where}.{field.name}" if where else field.name
        if field.name in members:
            arguments[field.name] = _convert(hints[field.name], members[field.name], place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{place} is missing")
    return kind(**arguments)


def _expect(kind: Any, value: Any, where: str, wanted: str) -> Any:
    # JSON's true is an int in Python, and no number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where or 'the document'} is {value!r:.60}, expected {wanted}")
    return value
