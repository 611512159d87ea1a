"""A model's library samples as the definition says, on the CPU and on a Vulkan device: the runner
over compiled functions, without the compiler's own runtime."""

from dataclasses import replace

import numpy as np
import pytest
from everycast.artifact.errors import EverycastError
from everycast.engine import numpy_sampling
from everycast.engine.device_runner import DeviceRunner
from everycast.engine.devices import DeviceMemory
from everycast.engine.loader import open_artifact
from everycast.engine.model_runner import ModelRunner, StepInput
from everycast.engine.row_sampling import sample_rows
from everycast.engine.sampler import SequenceSampler, sample_tokens, token_logprobs
from everycast.engine.sampling_params import SamplingParams
from everycast.targets.build import BuildRequest, compile_model

NUM_ROWS = 6
PARAMS = SamplingParams(seed=3, temperature=0.8, logprobs=True, top_logprobs=4)
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "draw": PARAMS,
    "no alternatives": replace(PARAMS, top_logprobs=0),
    "filters": replace(PARAMS, top_k=20, top_p=0.9, min_p=0.01),
    "bias": replace(PARAMS, logit_bias={3: 5.0, 8: -100.0}, min_tokens=2),
    "penalties": replace(
        PARAMS, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
}


class OverNumpy:
    """The same logits, sampled by the definition."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits.copy()

    def sample(self, draws):
        return sample_rows(numpy_sampling, self.logits, draws)

    def logprobs(self, rows, token_ids, *, num_ids, num_top):
        return numpy_sampling.token_logprobs(self.logits, rows, token_ids, num_ids, num_top)


@pytest.fixture(scope="module", params=["cpu", "vulkan"])
def runner(request, make_tiny, tmp_path_factory):
    if request.param != "cpu":
        try:
            DeviceMemory(request.param)
        except EverycastError as error:
            pytest.skip(str(error))
    source = make_tiny("llama", tmp_path_factory.mktemp("sampling"))
    folder = compile_model(
        BuildRequest(str(source), request.param, "q0f32", source.parent / "dist"), lambda *_: None
    )
    return open_artifact(folder, request.param).runner()


def step_logits(runner: ModelRunner) -> np.ndarray:
    ids = np.arange(NUM_ROWS, dtype=np.int32) + 5
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    tables = np.zeros((1, 2), np.int32)
    offsets = np.array([0, NUM_ROWS], np.int32)
    logits = runner.execute(StepInput(ids, rows, offsets, tables, rows))
    if isinstance(runner, DeviceRunner):
        return runner.logits()
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_definition(runner: ModelRunner, kind: str) -> None:
    num_ids = runner.info.vocab_size - 3
    samplers = [
        [SequenceSampler(KINDS[kind], prompt_ids=range(9), num_ids=num_ids, eos_token_ids=(4,),
                         choice_index=i) for i in range(NUM_ROWS)]
        for _ in range(2)
    ]  # fmt: skip
    for _ in range(12):
        definition = OverNumpy(step_logits(runner))
        # Rows in another order, so that a row is not taken for a draw.
        ours, theirs = (
            sample_tokens(over, [*enumerate(own)][::-1], num_ids=num_ids)
            for over, own in ((runner, samplers[0]), (definition, samplers[1]))
        )
        for token, expected in zip(ours, theirs, strict=True):
            assert token is not None and expected is not None
            assert token.token_id == expected.token_id
            if expected.logprob is not None:
                assert token.logprob is not None
                assert token.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-5)
                assert [i for i, _ in token.logprob.top] == [i for i, _ in expected.logprob.top]


def test_log_probabilities_of_a_prompt(runner: ModelRunner) -> None:
    definition = OverNumpy(step_logits(runner))
    rows, token_ids = [4, 0, 2], [7, 0, 11]
    ours, theirs = (
        token_logprobs(over, rows, token_ids, num_ids=runner.info.vocab_size, num_top=3)
        for over in (runner, definition)
    )
    for token, expected in zip(ours, theirs, strict=True):
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [i for i, _ in token.top] == [i for i, _ in expected.top]
