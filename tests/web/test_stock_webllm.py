"""Our libraries in stock WebLLM, in Chromium: tokens, streams, interrupts, sampling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.benchmarks.browser import Browser, Page
from tokenizers import Tokenizer

LONG = 72
"""So many times the text are three chunks."""
TEXT = "the quick brown fox jumps over the lazy dog; "
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def page(model: Path, browser: Browser, web: Any) -> Iterator[Page]:
    page = browser.open(model.parent.parent.name)
    loaded = page.load(model, web.library, context=web.context)
    assert loaded["pipelines"]["faults"] == []
    assert loaded["pipelines"]["compiled"] > 10
    yield page
    page.close()


def greedy_request(prompt: str, max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def test_greedy_tokens_are_those_of_the_cpu_target(model: Path, page: Page, greedy: Any) -> None:
    """Prompts of one token, of one chunk, and of three. Of "qwen2" WebLLM gets a vocabulary that is
    in parts, and the CPU target the same in one."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    expected = greedy(model)
    for prompt in ("a", TEXT, TEXT * LONG):
        ids = page.call("tokenize", text=prompt)
        assert ids == tokenizer.encode(prompt).ids
        generated = page.call("generate", request=greedy_request(prompt))
        assert generated["usage"]["prompt_tokens"] == len(ids)
        assert generated["ids"] == expected(ids, NUM_TOKENS)
        assert generated["finish_reason"] == "length"
    assert len(ids) > 1024


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="session")
class TestOneModel:
    """What does not depend on the model's type."""

    def test_the_library_for_gpus_gives_the_same(
        self, model: Path, page: Page, browser: Browser, greedy: Any, web: Any
    ) -> None:
        """Its kernels use a block's shared memory, which SwiftShader compiles for half a minute."""
        other = browser.open("gpu-library")
        loaded = other.load(model, web.gpu_library, context=web.context)
        assert loaded["pipelines"]["faults"] == []
        prompt = TEXT * LONG
        expected = greedy(model)(page.call("tokenize", text=prompt), NUM_TOKENS)
        assert other.call("generate", request=greedy_request(prompt))["ids"] == expected
        other.close()

    def test_streams_at_once_answer_as_alone(self, page: Page) -> None:
        requests = [{**_chat(f"{TEXT} {i}"), "max_tokens": 12, "temperature": 0} for i in range(2)]
        alone = [page.call("generate", request=request)["text"] for request in requests]
        assert page.call("generate_together", requests=requests) == alone

    def test_an_interrupt_ends_the_answer_and_nothing_else(self, page: Page) -> None:
        request = greedy_request(TEXT, 400)
        whole = page.call("generate", request={**request, "max_tokens": 24})
        cut = page.call("generate_interrupted", request=request, after=3)
        assert cut["finish_reason"] == "abort"
        assert 3 <= len(cut["pieces"]) < 24 and whole["text"].startswith(cut["text"])
        again = page.call("generate", request={**request, "max_tokens": 24})
        assert again["ids"] == whole["ids"]

    def test_a_seed_gives_the_same_answer(self, page: Page) -> None:
        request = {**_chat(TEXT), "max_tokens": 12, "temperature": 1.2, "top_p": 0.9, "seed": 7}
        first = page.call("generate", request=request)
        assert page.call("generate", request=request)["ids"] == first["ids"]

    def test_penalties_and_bias_are_applied(self, page: Page) -> None:
        request = {**_chat(TEXT), "max_tokens": 16, "temperature": 0}
        biased = page.call("generate", request={**request, "logit_bias": {"70": 100}})
        assert biased["ids"] == [70] * 16
        # What is gained by the bias is lost after half a dozen tokens.
        request |= {"logit_bias": {"70": 12}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
        penalized = page.call("generate", request=request)
        assert 1 <= penalized["ids"].count(70) < 12

    def test_top_logprobs_are_the_largest_in_order(
        self, model: Path, page: Page, greedy: Any
    ) -> None:
        """`argsort_probs` does not sort: WebLLM looks for them itself, in all probabilities."""
        request = {
            **greedy_request(TEXT, 1), "temperature": 1.0, "logprobs": True, "top_logprobs": 5,
            "seed": 1,  # one that draws no token that ends the answer
        }  # fmt: skip
        answer = page.call("generate", request=request)
        logits = greedy(model).logits(page.call("tokenize", text=TEXT)).astype(float)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        (top,), (drawn,) = answer["top_logprobs"], answer["ids"]
        np.testing.assert_allclose(top, np.sort(expected)[::-1][:5], atol=2e-3)
        np.testing.assert_allclose(answer["logprobs"], [expected[drawn]], atol=2e-3)

    def test_json_mode(self, page: Page) -> None:
        schema = (
            '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
            '"additionalProperties": false}'
        )
        # Left alone, a model of random weights writes white space for ever.
        request = {
            **_chat(TEXT), "max_tokens": 200, "temperature": 0, "frequency_penalty": 2.0,
            "response_format": {"type": "json_object", "schema": schema},
        }  # fmt: skip
        answer = page.call("generate", request=request)
        assert json.loads(answer["text"])["a"] in (True, False)

    def test_a_number_draws_the_token_that_it_falls_on(self, page: Page) -> None:
        probabilities, rng = _probabilities()
        uniform = rng.random(200, np.float32)
        drawn = page.call(
            "draw", probabilities=probabilities.tolist(), top_p=1.0, uniform=uniform.tolist()
        )
        borders = np.cumsum(probabilities.astype(float))
        expected = np.searchsorted(borders / borders[-1], uniform)
        near_a_border = np.abs(borders[:, None] - uniform).min(0) < 1e-5
        assert np.all((drawn == expected) | near_a_border)

    def test_drawn_tokens_follow_the_probabilities(self, page: Page) -> None:
        """Chi-square over 10,000 draws, 5 deviations wide; none from outside the nucleus."""
        top_p = 0.8
        probabilities, rng = _probabilities()
        uniform = rng.random(10_000, np.float32)
        drawn = page.call(
            "draw", probabilities=probabilities.tolist(), top_p=top_p, uniform=uniform.tolist()
        )
        counts = np.bincount(drawn, minlength=len(probabilities))
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        kept = order[before < top_p]
        expected = np.zeros(len(probabilities))
        expected[kept] = probabilities[kept] / probabilities[kept].sum() * len(uniform)
        assert counts[expected == 0].sum() == 0
        cells = expected > 0
        assert expected[cells].min() > 8
        statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
        freedom = int(cells.sum()) - 1
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def _probabilities() -> tuple[np.ndarray, np.random.Generator]:
    """Of the model's 320 tokens, some a thousand times as likely as others."""
    rng = np.random.default_rng(1)
    powers = np.exp(rng.standard_normal(320) * 1.5)
    return (powers / powers.sum()).astype(np.float32), rng


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}
