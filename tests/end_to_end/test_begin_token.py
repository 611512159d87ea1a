"""Case 30: exactly one begin token, by every way in; and case 13 where there is one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from everycast import AsyncMLCEngine, MLCEngine
from everycast.server.app import create_app

BOS = 0
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the 模型"}],
    "max_tokens": 2,
    "temperature": 0,
    "return_token_ids": True,
}
TEXT: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def with_bos(artifact: Path) -> Path:
    """An artifact whose tokenizer begins with BOS, and whose template writes it too."""
    path = artifact / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    template = "{{ bos_token }}" + config["chat_template"]
    path.write_text(json.dumps({**config, "add_bos_token": True, "chat_template": template}))
    return artifact


def over_http(folder: Path, route: str, body: dict[str, Any]) -> dict[str, Any]:
    async def post() -> httpx.Response:
        async with AsyncMLCEngine(folder) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
                return await client.post(f"/v1/{route}", json=body)

    answer: dict[str, Any] = asyncio.run(post()).json()["choices"][0]
    return answer


def test_one_begin_token_offline_and_over_http(with_bos: Path) -> None:
    with MLCEngine(with_bos) as engine:
        chat = engine.chat.completions.create(**CHAT).choices[0]
        text = engine.completions.create(prompt="the 模型", **TEXT).choices[0]
        empty = engine.completions.create(prompt="", **TEXT).choices[0]
    for ids in (chat.prompt_token_ids, text.prompt_token_ids):
        assert ids is not None and ids[0] == BOS and ids.count(BOS) == 1 and len(ids) > 3
    # With a begin token an empty prompt is a prompt.
    assert empty.prompt_token_ids == [BOS] and len(empty.token_ids or ()) == 2

    for expected, route, body in (
        (chat, "chat/completions", CHAT),
        (text, "completions", {"prompt": "the 模型", **TEXT}),
    ):
        answer = over_http(with_bos, route, body)
        assert answer["prompt_token_ids"] == expected.prompt_token_ids
        assert answer["token_ids"] == expected.token_ids
