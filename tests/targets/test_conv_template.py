"""Jinja chat templates in the form that WebLLM has."""

import json
from pathlib import Path
from typing import Any

import pytest
from everycast.artifact.jinja_template import compile_template
from everycast.relax_models.checkpoint.tokenizer import TokenizerInfo
from everycast.targets.client_config import tokenizer_info
from everycast.targets.conv_template import conv_template, written

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n"
    "    {%- if messages[0]['content'] is string -%}\n"
    "        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n"
    "    {%- endif -%}\n    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n"
    "    {%- set first_user_prefix = '' -%}\n    {%- set loop_messages = messages -%}\n"
    "{%- endif -%}\n{%- for message in loop_messages -%}\n"
    "    {%- if (message['role'] == 'assistant') -%}\n        {%- set role = 'model' -%}\n"
    "    {%- else -%}\n        {%- set role = message['role'] -%}\n    {%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "\n    {{- message['content'] | trim -}}\n    {{ '<end_of_turn>\n' }}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
    "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
    "{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}"
    "{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token}}"
    "{%- endif %}{%- endfor %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n"
    "    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n"
    "    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}\n"
    "{{- 'Cutting Knowledge Date: December 2023\\n' }}\n"
    "{{- 'Today Date: ' + date_string + '\\n\\n' }}\n{{- system_message }}\n"
    "{{- '<|eot_id|>' }}\n{%- for message in messages %}\n"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message"
    "['content'] | trim + '<|eot_id|>' }}"
    "\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n"
    "' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n"
    "'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}\n"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "\n{%- elif message.role == 'assistant' %}\n{%- if loop.last %}"
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n\\n</think>\\n\\n' + message.cont"
    "ent }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- endif %}"
    "\n{{- '<|im_end|>\\n' }}\n{%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}"
    "\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)

TEMPLATES = {
    "chatml": (CHATML, "<|im_start|>"),
    "gemma": (GEMMA, "<bos>"),
    "mistral": (MISTRAL, "<s>"),
    "llama3": (LLAMA3, "<|begin_of_text|>"),
    "zephyr": (ZEPHYR, "<s>"),
    "qwen3": (QWEN3, None),
}
CONVERSATIONS = (
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "Hi")],
    [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")],
    [
        ("system", "Be brief."), ("user", "1"), ("assistant", "2"), ("user", "3"),
        ("assistant", "4"), ("user", "5"),
    ],
)  # fmt: skip


def derive(folder: Path, template: str | None, bos: str | None) -> dict[str, Any]:
    config = {"chat_template": template, "bos_token": bos, "eos_token": "</s>"}
    text = json.dumps({k: v for k, v in config.items() if v is not None})
    (folder / "tokenizer_config.json").write_text(text, "utf-8")
    return conv_template(folder, TokenizerInfo(10, 1, (2, 7), 0, False, template is not None))


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_written_as_the_template_writes_them(name: str, tmp_path: Path) -> None:
    template, bos = TEMPLATES[name]
    found = derive(tmp_path, template, bos)
    assert found["is_exact"]
    begins = found["system_prefix_token_ids"] is not None
    assert begins == (name in ("gemma", "mistral", "llama3"))
    for conversation in CONVERSATIONS:
        expected = compile_template(template).render(
            messages=[{"role": role, "content": text} for role, text in conversation],
            add_generation_prompt=True, bos_token=bos, eos_token="</s>",
        )  # fmt: skip
        if begins:
            assert bos is not None
            expected = expected.removeprefix(bos)
        assert written(found, conversation) == expected
    assert found["stop_token_ids"] == [2, 7]


def test_a_default_system_message_is_kept(tmp_path: Path) -> None:
    found = derive(tmp_path, CHATML, "<|im_start|>")
    assert found["system_message"].startswith("You are a helpful AI assistant named SmolLM")
    assert found["system_template"] == "<|im_start|>system\n{system_message}<|im_end|>\n"


def test_without_a_template_texts_are_lines(tmp_path: Path) -> None:
    found = derive(tmp_path, None, "<s>")
    assert written(found, [("user", "Hi"), ("assistant", "Yes"), ("user", "So")]) == "Hi\nYes\nSo\n"
    assert found["system_prefix_token_ids"] is None


def test_without_a_template_prompts_begin_as_the_tokenizer_says(tmp_path: Path) -> None:
    """WebLLM's tokenizer adds nothing by itself, and base models like Gemma need it."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    found = conv_template(tmp_path, TokenizerInfo(10, 1, (2,), 0, True, False))
    assert found["system_prefix_token_ids"] == [1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}",
        "{{ nothing.at_all }}",
        "{% for m in messages %}[{{ m.role }} {{ loop.index }}] {{ m.content }}\n{% endfor %}",
    ],
)
def test_what_webllm_cannot_write_is_marked(template: str, tmp_path: Path) -> None:
    found = derive(tmp_path, template, None)
    assert found["seps"] and not found["is_exact"]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"decoder": {"type": "ByteLevel"}}, ("byte_level", False, False)),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Strip"}],
                },
                "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}]},
            },
            ("byte_fallback", True, True),
        ),
        ({"decoder": None}, ("byte_fallback", False, False)),
    ],
)
def test_how_tokens_become_text(parts: Any, expected: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    assert tuple(tokenizer_info(tmp_path).values()) == expected
