"""A model runner without a model: the test double of the engine, and a mock engine for clients.

`ScriptedModel` keeps token ids where a real runner keeps keys and values, and gets each sequence's
history by reading them back through its block table. The script says which token follows a
history, so every mistake with pages, positions, forks or preemption changes the text.

    script = script_after((5, 6), (10, 11, 12), eos_token_id=0)   # a prompt that ends with 5, 6
    loop = EngineLoop(ScriptedModel(script, vocab_size=100), limits, eos_token_ids=(0,))
"""

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import numpy as np

from . import numpy_sampling
from .model_runner import ModelInfo, SampleInput, SampleOutput, StepInput, TokenParts
from .row_sampling import sample_rows
from .sampler import TokenLogprob
from .sequence import FinishReason
from .token_sink import RequestOutput

Script = Callable[[tuple[int, ...]], int]
"""All tokens of a sequence so far → the token that follows."""

_EMPTY = -1
_PEAK, _CERTAIN = 20.0, 40.0
"""Logits of the scripted token with noise, which leaves a choice, and without: at 20 the other
tokens would still be drawn once in a million times."""


class ScriptedModel:
    """A `ModelRunner` whose arg max follows `script`. It asserts what the seam promises."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        num_pages: int = 64,
        page_size: int = 16,
        context_window_size: int = 1024,
        prefill_chunk_size: int = 256,
        max_num_sequence: int = 64,
        noise: float = 0.0,
        step_time_s: float = 0.0,
    ) -> None:
        """noise: standard deviation of what is added to the logits, which are 0, and for the
        scripted token 20, or 40 without noise; it depends on the history alone. Above about 5
        sampling has a choice.
        step_time_s: how long a step takes."""
        self.info = ModelInfo(
            vocab_size=vocab_size,
            context_window_size=context_window_size,
            page_size=page_size,
            page_bytes=8 * page_size,
            prefill_chunk_size=prefill_chunk_size,
            max_num_sequence=max_num_sequence,
        )
        self.num_pages = num_pages
        self.num_tokens_computed = 0
        self.is_closed = False
        self._script = script
        self._noise = noise
        self._step_time_s = step_time_s
        self._pages = np.full((num_pages, page_size), _EMPTY, dtype=np.int64)
        self._step_logits = np.empty((0, vocab_size), np.float32)

    def execute(self, step: StepInput) -> np.ndarray:
        self._check(step)
        if self._step_time_s:
            time.sleep(self._step_time_s)
        page_size = self.info.page_size
        sequence_of = np.repeat(np.arange(len(step.block_tables)), np.diff(step.query_offsets))
        pages = step.block_tables[sequence_of, step.positions // page_size]
        slots = pages * page_size + step.positions % page_size
        assert len(set(slots.tolist())) == len(slots), "two tokens share one slot"
        self._pages.reshape(-1)[slots] = step.input_ids
        self.num_tokens_computed += len(step.input_ids)
        logits = np.empty((len(step.logit_rows), self.info.vocab_size), dtype=np.float32)
        for row, token in zip(logits, step.logit_rows, strict=True):
            num_tokens = int(step.positions[token]) + 1
            history = self._pages[step.block_tables[sequence_of[token]]].reshape(-1)[:num_tokens]
            assert (history != _EMPTY).all(), "a page that was never written is read"
            self._fill(row, tuple(history.tolist()))
            if step.arg_max_ids:
                _spoil(row, step.arg_max_ids)
        self._step_logits = logits
        return logits

    def sample(self, draws: SampleInput) -> SampleOutput:
        assert draws.settings.shape == (len(draws.rows), 5) and len(draws.rows)
        assert draws.rows.max() < len(self._step_logits)
        return sample_rows(numpy_sampling, self._step_logits, draws)

    def logprobs(
        self, rows: np.ndarray, token_ids: np.ndarray, *, num_ids: int, num_top: int
    ) -> TokenParts:
        return numpy_sampling.token_logprobs(self._step_logits, rows, token_ids, num_ids, num_top)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        assert len({*targets}) == len(targets) and not {*targets} & {*sources}
        self._pages[targets] = self._pages[sources]

    def close(self) -> None:
        self.is_closed = True

    def _fill(self, row: np.ndarray, history: tuple[int, ...]) -> None:
        row[:] = 0.0
        if self._noise:
            seed = hash_of(history)
            row += np.random.default_rng(seed).normal(0.0, self._noise, len(row))
            row.clip(max=_PEAK - 1, out=row)
        row[self._script(history)] = _PEAK if self._noise else _CERTAIN

    def _check(self, step: StepInput) -> None:
        for array in (
            step.input_ids,
            step.positions,
            step.query_offsets,
            step.block_tables,
            step.logit_rows,
        ):
            assert array.dtype == np.int32
        num_sequences, num_tokens = len(step.block_tables), len(step.input_ids)
        lengths = np.diff(step.query_offsets)
        assert 1 <= num_sequences <= self.info.max_num_sequence
        assert num_tokens <= self.info.prefill_chunk_size
        assert len(lengths) == num_sequences and step.query_offsets[-1] == num_tokens
        assert step.query_offsets[0] == 0 and (lengths > 0).all()
        assert len(step.positions) == num_tokens
        assert step.positions.max() < self.info.context_window_size
        assert ((step.block_tables >= 0) & (step.block_tables < self.num_pages)).all()


class RecordingSink:
    """A `TokenSink` that keeps what it is told; `on_token` says stop for the tokens in `stops`."""

    def __init__(self, stops: ListLike[int] = ()) -> None:
        self.stops = frozenset(stops)
        self.outputs: list[RequestOutput] = []
        self.token_ids: defaultdict[int, list[int]] = defaultdict(list)
        """Per choice, end and stop tokens too."""
        self.heard: defaultdict[int, list[int]] = defaultdict(list)
        """Per choice, what `on_token` was called with."""
        self.finish_reasons: dict[int, FinishReason] = {}
        self.prompt_logprobs: list[TokenLogprob] = []
        self.is_finished = threading.Event()

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def on_token(self, choice_index: int, token_id: int) -> bool:
        self.heard[choice_index].append(token_id)
        return token_id in self.stops

    def on_output(self, output: RequestOutput) -> None:
        assert not self.is_finished.is_set(), "an output after the last"
        self.outputs.append(output)
        self.prompt_logprobs += output.prompt_logprobs
        for choice in output.choices:
            assert choice.choice_index not in self.finish_reasons, "an output after the end"
            self.token_ids[choice.choice_index] += [token.token_id for token in choice.tokens]
            if choice.finish_reason is not None:
                self.finish_reasons[choice.choice_index] = choice.finish_reason
        if output.is_finished:
            self.is_finished.set()


def _spoil(row: np.ndarray, num_ids: int) -> None:
    """Leave nothing of a row but its arg max over the first ids, as a runner may."""
    place = int(row[:num_ids].argmax())
    highest = row[place]
    row[:] = highest - 1.0 - np.arange(len(row)) % 3
    row[num_ids:] = highest + 1.0
    row[place] = highest


def hash_of(history: ListLike[int]) -> int:
    """A 64-bit number that depends on every token and its place, the same in every process."""
    data = np.asarray(history, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_script(vocab_size: int, *, eos_token_id: int | None = None, eos_every: int = 0) -> Script:
    """A text without any pattern: each token is a hash of all before it; one in `eos_every` of
    them is the end token (0: none)."""

    def script(history: tuple[int, ...]) -> int:
        value = hash_of(history)
        if eos_token_id is not None and eos_every and value % eos_every == 0:
            return eos_token_id
        return (value >> 8) % vocab_size

    return script


def script_after(marker: ListLike[int], output: ListLike[int], *, eos_token_id: int) -> Script:
    """`output` after the last place where the history holds `marker` (say, the tokens with which
    every prompt ends), then the end token."""
    marker, output = tuple(marker), tuple(output)
    assert marker, "a marker has at least one token"

    def script(history: tuple[int, ...]) -> int:
        for end in range(len(history), len(marker) - 1, -1):
            if history[end - len(marker) : end] == marker:
                num_done = len(history) - end
                return output[num_done] if num_done < len(output) else eos_token_id
        return eos_token_id

    return script
