"""Chat templates of checkpoints, compiled by Jinja in a sandbox.

The same filters and globals as transformers' `render_jinja_template`, version 5. Templates come
from strangers, so they see plain JSON values and nothing else.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


@lru_cache(maxsize=16)
def compile_template(source: str) -> "Template":
    """A template with the names and filters that chat templates expect."""
    # Not at the top: text completions never need it.
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTags(Extension):
        """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body).set_lineno(line)

    class SafeNamespace(Namespace):
        """`namespace()` that refuses names through which Python's internals could be reached."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            # Without named parameters, so that `namespace(self=1)` works.
            self, rest = args[0], args[1:]
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _check_attribute(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    def _check_attribute(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace cannot have an attribute named {name!r}"
            )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTags, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = SafeNamespace
    return environment.from_string(source)


class _TemplateDict:
    """`dict()` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a model would read as written.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)
