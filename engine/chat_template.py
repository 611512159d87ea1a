"""A conversation to the prompt text, by the checkpoint's own Jinja template in a sandbox.

Renders what transformers' `apply_chat_template` renders (its `render_jinja_template`, version 5):
the same sandbox, filters and globals, the same handling of absent values. Templates come from
strangers, so they see plain JSON values and nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..artifact.errors import RequestError
from ..artifact.jinja_template import compile_template

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


def _prepare(message: Message) -> dict[str, Any]:
    """A copy without absent values, its reasoning under every name that templates read."""
    prepared = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING_FIELDS:
        if name in prepared:
            reasoning = prepared[name]
            return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared
