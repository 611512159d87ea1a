"""`MLCEngine` on a real, tiny, compiled model (`everycast.compile`: test_builds.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from everycast import MLCEngine
from everycast.artifact.errors import EverycastError
from everycast.relax_models import registry
from everycast.relax_models.checkpoint.huggingface import HuggingFaceCheckpoint

COMPILER = ("tvm", "torch", "transformers")
TIE = 1e-3
"""Log probabilities closer than this may change places between the reference and the engine."""

CHILD = f"""
import json, sys
import everycast
assert not set(sys.modules) & set({COMPILER!r}), "the import"
everycast.MLCEngine, everycast.AsyncMLCEngine, everycast.compile
assert not set(sys.modules) & set({COMPILER!r}), "the public names"
with everycast.MLCEngine(sys.argv[1]) as engine:
    messages = [dict(role="user", content="the 模型")]
    answer = engine.chat.completions.create(
        messages=messages, temperature=0, max_tokens=8, return_token_ids=True
    )
    unseeded = engine.completions.create(prompt=[5, 6], max_tokens=30, ignore_eos=True)
assert not set(sys.modules) & set({COMPILER!r}), "an engine"
assert "everycast.targets" not in sys.modules and "everycast.relax_models" not in sys.modules
print(json.dumps([answer.choices[0].token_ids, unseeded.choices[0].text]))
"""


def test_an_engine_never_loads_the_compiler(tiny: Path, built: Any) -> None:
    """Of the model's own folder, which finds what `chat` has built. Without a seed another process
    draws something else (case 8)."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny)],
        capture_output=True, encoding="utf-8", env=dict(os.environ), timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    token_ids, unseeded = json.loads(done.stdout)
    assert token_ids == built.answer["token_ids"]
    with MLCEngine(built.folder) as engine:
        mine = engine.completions.create(prompt=[5, 6], max_tokens=30, ignore_eos=True)
    assert mine.choices[0].text != unseeded


@pytest.fixture(scope="module")
def engine(built_f32: Path) -> Iterator[MLCEngine]:
    with MLCEngine(built_f32, device="cpu", mode="interactive") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference_logprobs(
    tiny: Path, reference: ModuleType, tiny_models: ModuleType
) -> Callable[[list[int]], np.ndarray]:
    """Log probabilities of what follows each token, by the NumPy forward pass; over the ids that
    the tokenizer has, because padded ones can never come."""
    checkpoint = HuggingFaceCheckpoint(tiny)
    config = registry.load_config(checkpoint)
    weights = reference.float_weights(registry.weight_map(config, checkpoint), checkpoint)

    def logprobs(ids: list[int]) -> np.ndarray:
        logits = reference.reference_logits(config, weights, ids).astype(np.float64)
        logits = logits[:, : tiny_models.TOKENIZER_SIZE]
        peak = logits.max(-1, keepdims=True)
        out: np.ndarray = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        return out

    return logprobs


PROMPT = [int(i) for i in np.random.default_rng(3).integers(3, 300, 37)]


def test_greedy_tokens_and_logprobs_are_the_references(
    engine: MLCEngine, reference_logprobs: Callable[[list[int]], np.ndarray]
) -> None:
    """Case 16: the chosen token's log probability is that of the raw logits."""
    answer = engine.completions.create(
        prompt=PROMPT, max_tokens=12, temperature=0, logprobs=5, ignore_eos=True,
        return_token_ids=True,
    )  # fmt: skip
    (choice,) = answer.choices
    ids, logprobs = choice.token_ids, choice.logprobs
    assert ids is not None and logprobs is not None and len(ids) == 12
    assert choice.prompt_token_ids == PROMPT
    expected = reference_logprobs(PROMPT + ids)[len(PROMPT) - 1 : -1]
    for token, logprob, row in zip(ids, logprobs.token_logprobs, expected, strict=True):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        assert row[token] > row.max() - TIE
    assert logprobs.top_logprobs is not None
    best = np.sort(expected[0])[::-1][:5]
    top = logprobs.top_logprobs[0]
    assert top is not None
    assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_are_the_references(
    engine: MLCEngine, reference_logprobs: Callable[[list[int]], np.ndarray], max_tokens: int
) -> None:
    """Case 12: also with nothing generated. Echo and the extension say the same."""
    answer = engine.completions.create(
        prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True, logprobs=0,
        prompt_logprobs=0, ignore_eos=True,
    )  # fmt: skip
    (choice,) = answer.choices
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    assert choice.logprobs is not None and choice.prompt_logprobs is not None
    first, *given = choice.logprobs.token_logprobs[: len(PROMPT)]
    assert first is None and len(choice.logprobs.tokens) == len(PROMPT) + max_tokens
    rows = reference_logprobs(PROMPT)
    expected = [rows[i, token] for i, token in enumerate(PROMPT[1:])]
    assert given == pytest.approx(expected, abs=1e-4)
    by_id = [
        entry[token].logprob
        for token, entry in zip(PROMPT[1:], choice.prompt_logprobs[1:], strict=True)
        if entry is not None
    ]
    assert by_id == given


def test_chat_logprobs_are_those_of_the_completion(engine: MLCEngine) -> None:
    messages = [{"role": "user", "content": "the quick fox"}]
    chat = engine.chat.completions.create(
        messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2,
        return_token_ids=True, ignore_eos=True,
    ).choices[0]  # fmt: skip
    text = engine.completions.create(
        prompt=chat.prompt_token_ids, max_tokens=6, temperature=0, logprobs=2, ignore_eos=True,
        return_token_ids=True,
    ).choices[0]  # fmt: skip
    assert chat.token_ids == text.token_ids
    assert chat.logprobs is not None and text.logprobs is not None
    assert [t.logprob for t in chat.logprobs.content] == text.logprobs.token_logprobs


def test_a_stream_gives_the_ids_and_the_text_of_the_answer(engine: MLCEngine) -> None:
    request = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    whole = engine.completions.create(**request).choices[0]
    chunks = [chunk.choices[0] for chunk in engine.completions.create(**request, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids or ()] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_seed_decides_alone_and_in_company(engine: MLCEngine) -> None:
    """Case 8, on real logits."""
    request = {
        "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "return_token_ids": True,
        "ignore_eos": True,
    }  # fmt: skip
    alone = engine.completions.create(**request, seed=7).choices[0].token_ids
    assert engine.completions.create(**request, seed=7).choices[0].token_ids == alone
    assert engine.completions.create(**request, seed=8).choices[0].token_ids != alone
    four = [c.token_ids for c in engine.completions.create(**request, seed=7, n=4).choices]
    assert len({tuple(ids or ()) for ids in four}) > 1
    assert [c.token_ids for c in engine.completions.create(**request, seed=7, n=4).choices] == four


def test_a_terminated_engine_says_so(built_f32: Path) -> None:
    engine = MLCEngine(built_f32)
    engine.terminate()
    engine.terminate()
    with pytest.raises(EverycastError):
        engine.completions.create(prompt=PROMPT)
