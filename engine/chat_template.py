"""A conversation to the prompt text, by the checkpoint's own Jinja template in a sandbox.

Renders what transformers' `apply_chat_template` renders (its `render_jinja_template`, version 5):
the same sandbox, filters and globals, the same handling of absent values. Templates come from
strangers, so they see plain JSON values and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..artifact.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
"""One message as OpenAI writes it: `role`, `content`, `tool_calls`, ..., JSON values only."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one checkpoint, chosen and rendered."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """templates: name → Jinja source; `default` is the usual one, `tool_use` the one for tools.

        special_tokens: `bos_token` and the like, which the templates name.
        """
        self._templates = templates
        self._special_tokens = special_tokens or {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text.

        Raises RequestError if there is no template, or if it refuses the messages or fails on them.
        """
        import jinja2

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        source = self._templates.get(name)
        if source is None:
            raise RequestError(
                "this model has no chat template, so it was not made for chat; "
                "use text completions instead",
                param="messages",
            )
        try:
            return compile_template(source).render(
                messages=[_prepare(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **template_kwargs},
            )
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is not valid: {error.message} (line {error.lineno})",
                param="messages",
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


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


def _prepare(message: Message) -> dict[str, Any]:
    """A copy without absent values, its reasoning under every name that templates read."""
    prepared = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING_FIELDS:
        if name in prepared:
            reasoning = prepared[name]
            return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared
