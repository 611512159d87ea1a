"""The conversation template of MLC's clients, from a checkpoint's Jinja template.

WebLLM has no Jinja: it writes a conversation as

    system_template, then for each message   role + role_content_sep + text + seps[i % len(seps)]
                     and before the answer   role + role_empty_sep

What stands there is found by rendering marked conversations and looking at what comes between the
marks; then both ways of writing are compared.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..artifact.jinja_template import compile_template
from ..relax_models.checkpoint.tokenizer import TokenizerInfo

Conversation = Sequence[tuple[str, str]]
"""(role, text) of each message."""
Render = Callable[[Conversation, bool], str]
"""(conversation, whether an answer is to follow) → the prompt."""

_SYSTEM, _USER, _ANSWER, _AGAIN = "@system@", "@user@", "@answer@", "@again@"
_CHECKED: tuple[Conversation, ...] = (
    (("user", "one"),),
    (("system", "be brief"), ("user", "one")),
    (("user", "one"), ("assistant", "two"), ("user", "three")),
    (("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "three")),
)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a template writes around the texts."""

    before_system: str
    after_system: str
    user: str
    answer: str
    header: str
    """Where an answer is to follow."""
    after_user: str
    after_answer: str
    system_message: str
    """Where the conversation has none."""
    always_has_system: bool
    """Whether something is written for the system even if it says nothing."""
    has_user_after_system: bool
    """Whether the first message of the user begins like the others if there is a system message."""


def conv_template(folder: Path, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """`conv_template` of `mlc-chat-config.json`, for the tokenizer in `folder`.

    `is_exact` in it, which clients pass over, says whether prompts are those of the template. One
    that has no such form at all, or none, gives texts that follow each other as lines.
    """
    render, bos = _renderer(folder)
    if render is None:
        return {**_config(_PLAIN, tokenizer, tokenizer.add_bos_token), "is_exact": True}
    try:
        bos = bos if _is_first(render, bos) else ""
        found = _config(_find_parts(render, bos), tokenizer, bool(bos))
    except Exception:  # Templates are programs of strangers.
        return {**_config(_PLAIN, tokenizer, bool(bos)), "is_exact": False}
    is_exact = all(_agree(render, found, conversation, bos) for conversation in _CHECKED)
    return {**found, "is_exact": is_exact}


_PLAIN = _Parts("", "\n", "", "", "", "\n", "\n", "", False, True)


def _renderer(folder: Path) -> tuple[Render | None, str]:
    """What renders the checkpoint's template, and the text with which prompts begin."""
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None, ""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: config[name] for name in names if config.get(name)}

    def render(conversation: Conversation, add_generation_prompt: bool) -> str:
        messages = [{"role": role, "content": text} for role, text in conversation]
        text: str = compile_template(source).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **special
        )
        return text

    return render, str(special.get("bos_token", ""))


def _is_first(render: Render, bos: str) -> bool:
    """Whether prompts begin with `bos`, and nothing else does: some models begin messages with
    it."""
    whole = render([("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN)], False)
    return bool(bos) and whole.startswith(bos) and whole.count(bos) == 1


def _find_parts(render: Render, bos: str) -> _Parts:
    """ValueError where what is between two marks is not what is between two others."""
    user, answer = ("user", _USER), ("assistant", _ANSWER)
    again = ("user", _AGAIN)
    start, after_user = _split(render([user], False), _USER)
    _, after_header = _split(render([user], True), _USER)
    header = _without_start(after_header, after_user)
    whole = render([user, answer, again], False)
    between, rest = _split(_split(whole, _USER)[1], _ANSWER)
    before_answer = _without_start(between, after_user)
    after_answer = _split(render([user, answer], False), _ANSWER)[1]
    before_again, _ = _split(rest, _AGAIN)
    # At the end, templates may leave out what separates messages.
    if not before_again.startswith(after_answer):
        after_answer = ""
    before_user = _without_start(before_again, after_answer)
    start = start.removeprefix(bos)
    if start == before_user.strip() and start != before_user:
        # A line break between the messages, but not before the first.
        cut = before_user.index(start) if start else len(before_user)
        after_answer, before_user = after_answer + before_user[:cut], before_user[cut:]
    parts = _Parts(
        "", "", before_user, before_answer, header, after_user, after_answer, "", False, True
    )
    return _with_system(parts, render, start, bos)


def _with_system(parts: _Parts, render: Render, start: str, bos: str) -> _Parts:
    """`start` is what comes before the user's text where there is no system message."""
    default = _without_end(start, parts.user)
    try:
        whole = render([("system", _SYSTEM), ("user", _USER)], False).removeprefix(bos)
        before, rest = _split(whole, _SYSTEM)
    except Exception:  # no system messages: a user's text may stand there
        return replace(parts, before_system=default, after_system="")
    after, _ = _split(rest, _USER)
    separate = after.endswith(parts.user)
    if separate:
        after = after.removesuffix(parts.user)
    fits = len(default) >= len(before) + len(after)
    fits = bool(default) and fits and default.startswith(before) and default.endswith(after)
    message = default[len(before) : len(default) - len(after)] if fits else ""
    return replace(
        parts,
        before_system=before,
        after_system=after,
        system_message=message,
        always_has_system=fits and not message,
        has_user_after_system=separate,
    )


def _config(parts: _Parts, tokenizer: TokenizerInfo, has_bos: bool) -> dict[str, Any]:
    # What a role begins with; it differs where an answer is to follow, or stands there.
    shared = _common_start(parts.answer, parts.header)
    content_sep = parts.answer[len(shared) :]
    return {
        "name": "everycast",
        "system_template": parts.before_system + "{system_message}" + parts.after_system,
        "system_message": parts.system_message,
        "render_empty_system_message": parts.always_has_system,
        "system_prefix_token_ids": [tokenizer.bos_token_id] if has_bos else None,
        "add_role_after_system_message": parts.has_user_after_system,
        "roles": {
            "user": parts.user.removesuffix(content_sep),
            "assistant": shared,
            "tool": parts.user.removesuffix(content_sep),
        },
        "role_templates": {
            "user": "{user_message}", "assistant": "{assistant_message}", "tool": "{tool_message}",
        },
        "seps": [parts.after_user, parts.after_answer],
        "role_content_sep": content_sep,
        "role_empty_sep": parts.header[len(shared) :],
        "stop_str": [],
        "stop_token_ids": list(tokenizer.eos_token_ids),
    }  # fmt: skip


def written(config: Mapping[str, Any], conversation: Conversation) -> str:
    """The prompt of a conversation that an answer is to follow, as WebLLM writes it."""
    messages = list(conversation)
    system = config["system_message"]
    if messages[0][0] == "system":
        system = messages.pop(0)[1]
    text = ""
    if system or config["render_empty_system_message"]:
        text = config["system_template"].replace("{system_message}", system)
    has_system = text != ""
    for i, (role, content) in enumerate(messages):
        if i > 0 or not has_system or config["add_role_after_system_message"]:
            text += config["roles"][role] + config["role_content_sep"]
        text += content + config["seps"][i % len(config["seps"])]
    return text + str(config["roles"]["assistant"]) + str(config["role_empty_sep"])


def _agree(render: Render, config: Mapping[str, Any], conversation: Conversation, bos: str) -> bool:
    try:
        expected = render(conversation, True)
    except Exception:  # The template refuses it: nothing to agree with.
        return True
    return expected.removeprefix(bos) == written(config, conversation)


def _split(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ValueError("it does not write a message once")
    return before, after


def _without_start(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError("messages do not end alike")
    return text.removeprefix(start)


def _without_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("messages do not begin alike")
    return text.removesuffix(end)


def _common_start(a: str, b: str) -> str:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return a[:count]
