"""A whole model on a Vulkan device, through the engine, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everycast.engine.device_runner import DeviceRunner
from everycast.engine.loader import open_artifact
from everycast.engine.mlc_engine import MLCEngine
from everycast.engine.model_runner import StepInput
from everycast.engine.sampler import SequenceSampler, sample_tokens
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.tvm_runtime import tvm_ffi
from everycast.targets.build import BuildRequest, compile_model

LENGTH = 45


@pytest.fixture(scope="module")
def artifact(memory, make_tiny, tmp_path_factory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny")
    request = BuildRequest(str(folder), "vulkan", "q0f32", folder.parent / "dist")
    return compile_model(request, lambda *_: None)


@pytest.fixture(scope="module")
def runner(artifact: Path) -> DeviceRunner:
    opened = open_artifact(artifact, "vulkan")
    return opened.runner()


def run(runner: DeviceRunner, ids: np.ndarray, start: int = 0, first_page: int = 0) -> np.ndarray:
    count = len(ids)
    table = np.arange(first_page, first_page + 6, dtype=np.int32)[None]
    positions = np.arange(start, start + count, dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    offsets = np.array([0, count], np.int32)
    step = StepInput(ids.astype(np.int32), positions, offsets, table, rows)
    runner.execute(step)
    return runner.logits()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(abs(got - expected).max() / abs(expected).max())


def test_a_model_on_the_device(artifact: Path, runner: DeviceRunner) -> None:
    """Prefill, token by token, and after pages were copied; two submissions a token at most."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(1).integers(3, 300, LENGTH)
    source = artifact.parent.parent / "tiny"
    reference = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        expected = reference(torch.tensor(ids[None])).logits[0].numpy()
    for length in (1, 7, 16, LENGTH):
        assert relative_error(run(runner, ids[:length]), expected[:length]) < 1e-3
    counters = tvm_ffi.get_global_func("everycast.vulkan.counters")
    before = int(counters(0)["submissions"])
    rows = [run(runner, ids[i : i + 1], i, first_page=8)[0] for i in range(20)]
    assert relative_error(np.stack(rows), expected[:20]) < 1e-3
    assert int(counters(0)["submissions"]) - before <= 2 * 20
    runner.copy_pages([0, 1, 2], [20, 21, 22])
    assert relative_error(run(runner, ids[40:], 40, first_page=20), expected[40:]) < 1e-3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(
            seed=3, temperature=0.8, top_p=0.9, top_k=20, presence_penalty=0.5, logprobs=True,
            top_logprobs=3, logit_bias={7: 2.0},
        ),
    ],
    ids=["greedy", "all"],
)  # fmt: skip
def test_a_step_is_two_submissions_with_its_draw(
    runner: DeviceRunner, params: SamplingParams
) -> None:
    counters = tvm_ffi.get_global_func("everycast.vulkan.counters")
    num_ids = runner.info.vocab_size
    samplers = [SequenceSampler(params, prompt_ids=(5, 6), num_ids=num_ids, choice_index=i)
                for i in range(4)]  # fmt: skip
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)
    offsets, rows = np.arange(5, dtype=np.int32), np.arange(4, dtype=np.int32)
    ids, submissions = np.full(4, 5, np.int32), []
    for position in range(12):
        before = int(counters(0)["submissions"])
        positions = np.full(4, position, np.int32)
        runner.execute(StepInput(ids, positions, offsets, tables, rows))
        drawn = sample_tokens(runner, [*enumerate(samplers)], num_ids=num_ids)
        ids = np.array([token.token_id for token in drawn if token is not None], np.int32)
        assert len(ids) == 4
        submissions.append(int(counters(0)["submissions"]) - before)
    assert max(submissions) <= 2


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in
                ("gemma3_text", "mistral", "qwen2", "qwen3"))],
)  # fmt: skip
def test_the_same_text_as_on_the_cpu(memory, make_tiny, tmp_path, model_type) -> None:
    """Greedy, and drawn: several choices after a prompt whose log probabilities are wanted too."""
    source = make_tiny(model_type, tmp_path / "tiny")
    greedy: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 16, "temperature": 0}
    drawn: dict[str, Any] = {
        "prompt": "One two three", "max_tokens": 6, "temperature": 0.9, "top_p": 0.9, "seed": 5,
        "n": 2, "presence_penalty": 0.3, "echo": True, "logprobs": 3,
    }  # fmt: skip
    texts, logprobs = [], []
    for device in ("cpu", "vulkan"):
        request = BuildRequest(str(source), device, "q0f32", tmp_path / "dist")
        with MLCEngine(compile_model(request, lambda *_: None), device=device) as engine:
            answers = [
                engine.completions.create(ignore_eos=True, **fields) for fields in (greedy, drawn)
            ]
        choices = [choice for answer in answers for choice in answer.choices]
        texts.append([choice.text for choice in choices])
        logprobs.append([choice.logprobs for choice in choices[1:]])
    assert texts[0] == texts[1] and len(texts[0]) == 3
    for cpu, vulkan in zip(*logprobs, strict=True):
        assert cpu is not None and vulkan is not None and cpu.tokens == vulkan.tokens
        assert vulkan.token_logprobs[1:] == pytest.approx(cpu.token_logprobs[1:], abs=1e-4)
        assert [list(top) for top in vulkan.top_logprobs[1:]] == [
            list(top) for top in cpu.top_logprobs[1:]
        ]


def test_the_engine_runs_on_the_device(artifact: Path) -> None:
    """The same greedy text whichever way the work is cut; sampling is the library's own."""
    engine = MLCEngine(artifact, device="vulkan")
    try:
        answers = [
            engine.completions.create(prompt="Hello there", max_tokens=8, temperature=0, seed=1)
            for _ in range(2)
        ]
    finally:
        engine.terminate()
    texts = [answer.choices[0].text for answer in answers]
    assert texts[0] == texts[1] and answers[0].usage.completion_tokens > 0
