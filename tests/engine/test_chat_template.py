from typing import Any

import pytest
from everycast.artifact.errors import RequestError
from everycast.engine.chat_template import ChatTemplate

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {{- "\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + (call.function | tojson(indent=2)) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n' }}
    {%- endif %}
{%- endif %}
{{- '[last user ' ~ ns.last ~ ']' }}
"""
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] != 'text' -%}{%- continue -%}{%- endif -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
GENERATION = """
{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
<|{{ message.role }}|>{{ message.content }}
    {% endif %}
    {% if loop.index0 == 5 %}{% break %}{% endif %}
{% endfor %}
"""
REASONING = """\
{%- set settings = dict(sep='|') -%}
{%- for message in messages -%}
{{ message.role }}{{ settings.sep }}{% if message.reasoning_content is defined %}\
<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.thinking }}\
{% if message.content is defined %}{{ message.content }}{% else %}nothing{% endif %}
{% endfor -%}
{% for document in documents or [] %}{{ document.title }}: {{ document.text }}{% endfor %}
"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "für <b>'Zürich'</b> & 東京",
            "parameters": {},
        },
    }
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello <b>&'\" 你好 "},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "wetter", "arguments": {"ort": "Zürich"}}}],
    },
    {"role": "tool", "content": "21 °C"},
]
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " a "}]}]
THOUGHTS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "reasoning": "hm", "content": None},
    {"role": "assistant", "reasoning_content": "so", "content": "b"},
]


@pytest.mark.parametrize(
    ("source", "messages", "kwargs"),
    [
        (CHATML_WITH_TOOLS, CHAT, {}),
        (CHATML_WITH_TOOLS, CHAT, {"tools": TOOLS}),
        (CHATML_WITH_TOOLS, CALLS, {"tools": TOOLS, "enable_thinking": False}),
        (CHATML_WITH_TOOLS, CHAT, {"add_generation_prompt": False}),
        (LLAMA2, CHAT, {}),
        (LLAMA2, CHAT, {"bos_token": "<other>"}),
        (GEMMA, CHAT, {}),
        (GEMMA, PARTS, {}),
        (GENERATION, CHAT, {}),
        (REASONING, THOUGHTS, {"documents": [{"title": "T", "text": "ü"}]}),
    ],
)
def test_equals_transformers(
    source: str, messages: list[dict[str, Any]], kwargs: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", reason="transformers is the reference and not installed")
    from transformers.utils.chat_template_utils import (
        _normalize_chat_messages,
        render_jinja_template,
    )

    ours = ChatTemplate({"default": source}, SPECIAL).render(messages, **kwargs)
    options = {"add_generation_prompt": True, **SPECIAL, **kwargs}
    rendered = render_jinja_template(
        [_normalize_chat_messages(messages)], chat_template=source, **options
    )
    assert ours == rendered[0][0]
    assert ours


def test_llama2_text() -> None:
    text = ChatTemplate({"default": LLAMA2}, SPECIAL).render(CHAT[:2])
    assert text == "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hello <b>&'\" 你好 [/INST]"


def test_the_templates_refusal_is_the_message() -> None:
    with pytest.raises(RequestError, match="must alternate") as caught:
        ChatTemplate({"default": LLAMA2}, SPECIAL).render(CHAT[1:2] * 2)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__x__ = 1 %}{{ n.__x__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'a' %}",
        "{{ strftime_now(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template") as caught:
        ChatTemplate({"default": source}).render(CHAT)
    assert "\n" not in str(caught.value)


def test_no_template_says_what_to_use() -> None:
    with pytest.raises(RequestError, match="use text completions"):
        ChatTemplate({}).render(CHAT)


def test_tool_template_is_used_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with {{ tools | length }}"})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "with 1"


def test_the_date() -> None:
    text = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}).render(CHAT)
    assert text.isdigit() and len(text) == 4
