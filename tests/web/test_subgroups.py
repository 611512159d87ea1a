"""Kernels whose threads hand each other values, in a browser: with the subgroups of its adapter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everycast.benchmarks.browser import Browser
from everycast.targets.build import BuildRequest, compile_model
from everycast.targets.webgpu import target as webgpu

WIDTH = 4
"""SwiftShader's, which lacks float16 too."""
TARGET = "webgpu:f16-subgroups"
PROMPT = "the quick brown fox jumps over the lazy dog"
NUM_TOKENS = 16


@pytest.mark.parametrize("model", ["llama"], indirect=True, scope="session")
def test_greedy_tokens_are_those_of_the_cpu_target(
    model: Path,
    browser: Browser,
    greedy: Callable[[Path], Callable[[list[int], int], list[int]]],
    web: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = replace(webgpu._LIMITS, subgroup=WIDTH, gemv_lanes=WIDTH)
    monkeypatch.setitem(webgpu._VARIANTS, "f16-subgroups", limits)
    checkpoint = model.parent.parent / "llama"
    request = BuildRequest(str(checkpoint), TARGET, "q4f16_1", tmp_path)
    folder = compile_model(request, lambda *_: None)
    page = browser.open("subgroups")
    assert page.load(folder, web.subgroup_library, context=256)["pipelines"]["faults"] == []
    expected = greedy(model)(page.call("tokenize", text=PROMPT), NUM_TOKENS)
    asked = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    assert page.call("generate", request=asked)["ids"] == expected
    page.close()
