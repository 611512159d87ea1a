"""The default model in stock WebLLM."""

from pathlib import Path
from typing import Any

from everycast.artifact.web_index import WEB_TARGET
from everycast.benchmarks.browser import Browser
from everycast.model_store import ensure_artifact


def test_the_default_model_knows_the_capital_of_france(
    default_gguf: Path, browser: Browser, web: Any
) -> None:
    folder = ensure_artifact("smollm2-135m", WEB_TARGET, progress=lambda *_: None)
    page = browser.open("default-model")
    assert page.load(folder, web.library, context=1024)["pipelines"]["faults"] == []
    question = {"role": "user", "content": "What is the capital of France?"}
    request = {"messages": [question], "max_tokens": 16, "temperature": 0}
    assert "Paris" in page.call("generate", request=request)["text"]
    page.close()
