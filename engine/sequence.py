"""What the engine is asked for, and the state of one sequence on its way through the scheduler."""

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from .prefix_cache import PrefixNode
from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `params.n` choices come out, numbered from 0."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"
    """Owns no pages."""
    RUNNING = "running"
    FINISHED = "finished"
    """Owns no pages."""


class Sequence:
    """One choice of one request: its tokens, and the pages that hold their keys and values.

    `token_ids[:num_computed_tokens]` are in the pages of `block_table`. A sequence decodes when
    one token is left to compute, and prefills when there are more (a prompt, or prompt and output
    after a preemption).
    """

    __slots__ = (
        "block_table",
        "choice_index",
        "finish_reason",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_rows_done",
        "num_prompt_tokens",
        "order",
        "prefix_node",
        "request",
        "status",
        "token_ids",
        "wants_prompt_logprobs",
        "was_admitted",
    )

    def __init__(
        self, request: Request, choice_index: int, *, arrival: int, prefix_root: PrefixNode
    ) -> None:
        self.request = request
        self.choice_index = choice_index
        self.order = (arrival, choice_index)
        """Age: what is smaller came first, and goes first."""
        self.token_ids = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.block_table = array("i")
        self.prefix_node = prefix_root
        """Node of the last page of `block_table` that the prefix cache knows."""
        self.num_cached_tokens = 0
        """Prompt tokens the prefix cache saved at first admission."""
        asks_prompt_logprobs = request.params.prompt_logprobs is not None
        self.wants_prompt_logprobs = asks_prompt_logprobs and choice_index == 0
        self.num_prompt_rows_done = 0
        """Prompt positions whose logits were already turned into prompt logprobs."""
        self.was_admitted = False
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
