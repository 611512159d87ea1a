"""Which tokens of which sequences the next step computes, and on which pages.

Pure Python: no tensors, no clock, no randomness. Rules:

- A step holds at most `prefill_chunk_size` tokens. Every decoding sequence gets its one token
  first; the rest goes to prefills, oldest first, in chunks. Beside decoding sequences, which wait
  for the step's end, prefills get a budget that the caller sets.
- Waiting sequences are admitted strictly in order of arrival, when the pages of all their tokens
  and one page more for every running sequence are available.
- When pages run out, the youngest running sequence is preempted: it gives back its pages, waits
  again at its place by age, and recomputes (what the prefix cache still holds comes for free).
  The oldest is never preempted for others, so everything that fits alone ends.
- Until then a sequence keeps the pages of all its tokens, also those that fell out of a sliding
  window. Models that mix windows with full attention need them, and so does the prefix cache, which
  finds a page by all pages before it.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ..artifact.errors import RequestError
from .engine_config import ScheduleLimits
from .kv_pages import PagePool
from .prefix_cache import PrefixCache
from .sequence import FinishReason, Request, Sequence, SequenceStatus

_NO_ROWS = range(0)
MAX_PROMPT_ROWS = 64
"""Most rows of logits one step may give for prompt logprobs: 12 MB at 49,152 tokens."""


class ScheduledChunk(NamedTuple):
    """The tokens `first_token : first_token + num_tokens` of one sequence."""

    sequence: Sequence
    first_token: int
    num_tokens: int
    prompt_rows: range
    """Positions whose logits are wanted for prompt logprobs."""
    is_sampled: bool
    """Whether the last token's logits give the next token."""
    is_decode: bool


@dataclass(slots=True)
class StepPlan:
    chunks: list[ScheduledChunk] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) pages to copy, one after the other, before the step."""
    num_tokens: int = 0
    num_prompt_rows: int = 0


class Scheduler:
    def __init__(self, limits: ScheduleLimits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.prefix_cache = PrefixCache(self.pool, enabled=limits.is_prefix_cache_enabled)
        self.waiting: deque[Sequence] = deque()
        """Oldest first."""
        self.running: list[Sequence] = []
        """Oldest first."""
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def max_output_tokens(self, request: Request) -> int:
        """Tokens after which the request's output is cut.

        Raises RequestError when prompt and output do not fit the context, naming both numbers.
        """
        num_prompt_tokens, asked = len(request.prompt_ids), request.params.max_tokens
        context = self.limits.context_window_size
        room = context - num_prompt_tokens
        if room < (0 if asked is not None else 1):
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the context is {context} tokens"
                + (" and must hold the output too" if room == 0 else "")
                + "; shorten it",
                param="prompt",
            )
        if asked is not None and asked > room:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, together "
                f"{num_prompt_tokens + asked}, but the context is {context} tokens",
                param="max_tokens",
            )
        return room if asked is None else asked

    def add(self, request: Request) -> Sequence:
        """The request's first sequence, now last in the queue. Its other choices are made by
        `fork` when the prompt is computed."""
        self._num_arrivals += 1
        sequence = Sequence(
            request, 0, arrival=self._num_arrivals, prefix_root=self.prefix_cache.root
        )
        self.waiting.append(sequence)
        return sequence

    def schedule(self, prefill_budget: int | None = None) -> StepPlan:
        """The next step; empty only when there is no work. Preempts, admits, gives out pages.

        prefill_budget: most tokens of prefills, at least 1, in a step that also decodes; None: as
        many as it holds.
        """
        plan = StepPlan()
        # Preemptions take from the end of `running` only, so places stay the same.
        nums_to_compute = [sequence.num_tokens_to_compute for sequence in self.running]
        num_decodes = nums_to_compute.count(1)
        num_prefill_tokens = self.limits.prefill_chunk_size - num_decodes
        if num_decodes and prefill_budget is not None:
            num_prefill_tokens = min(num_prefill_tokens, prefill_budget)
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            is_decode = nums_to_compute[index] == 1
            num_tokens = 1 if is_decode else self._chunk_size(sequence, num_prefill_tokens, plan)
            if num_tokens and self._acquire_pages(sequence, num_tokens, plan):
                self._plan_chunk(sequence, num_tokens, plan)
                num_prefill_tokens -= 0 if is_decode else num_tokens
            # A sequence that preempted itself was the last one: the loop ends.
            index += 1
        if self.num_preemptions == num_preemptions:
            self._admit(num_prefill_tokens, plan)
        assert plan.chunks or not self.has_work, "no sequence can be scheduled"
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Record that the step was computed: its tokens are in their pages, and full pages are
        offered to the prefix cache. Sequences that were aborted meanwhile are passed over."""
        page_size, caches_pages = self.limits.page_size, self.prefix_cache.enabled
        for sequence, first_token, num_tokens, prompt_rows, _, _ in plan.chunks:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            end = sequence.num_computed_tokens = first_token + num_tokens
            if prompt_rows:
                sequence.num_prompt_rows_done = prompt_rows.stop
            if caches_pages and first_token // page_size < end // page_size:
                self._cache_full_pages(sequence, first_token)

    def fork(self, parent: Sequence, choice_index: int) -> Sequence:
        """A copy of a running sequence that shares its pages; the first to write to a shared page
        copies it. Without a free place to run, the copy waits and computes for itself later."""
        child = Sequence(
            parent.request,
            choice_index,
            arrival=parent.order[0],
            prefix_root=self.prefix_cache.root,
        )
        child.token_ids = list(parent.token_ids)
        child.was_admitted = True
        if len(self.running) < self.limits.max_num_sequence:
            self.pool.share(parent.block_table)
            child.block_table = parent.block_table[:]
            child.num_computed_tokens = parent.num_computed_tokens
            child.prefix_node = parent.prefix_node
            self._run(child)
        else:
            self._wait(child)
        return child

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a waiting or running sequence and give back its pages; again is no harm."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release_pages(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _chunk_size(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
        """Tokens of a prefill's next chunk: at most `num_tokens`, and no more prompt logprobs
        than the step has rows left for. May be 0."""
        size = min(sequence.num_tokens_to_compute, num_tokens)
        rows = _prompt_rows(sequence, sequence.num_computed_tokens + size)
        num_rows_left = MAX_PROMPT_ROWS - plan.num_prompt_rows
        if len(rows) > num_rows_left:
            size = rows.start + num_rows_left - sequence.num_computed_tokens
        return size

    def _plan_chunk(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        first_token = sequence.num_computed_tokens
        end = first_token + num_tokens
        is_complete = end == len(sequence.token_ids)
        is_sampled = is_complete and sequence.request.params.max_tokens != 0
        is_decode = is_complete and num_tokens == 1 and end > sequence.num_prompt_tokens
        prompt_rows = _prompt_rows(sequence, end)
        plan.chunks.append(
            ScheduledChunk(sequence, first_token, num_tokens, prompt_rows, is_sampled, is_decode)
        )
        plan.num_tokens += num_tokens
        plan.num_prompt_rows += len(prompt_rows)

    def _acquire_pages(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Make the pages of the next `num_tokens` tokens exist and be the sequence's own,
        preempting the youngest as needed; False when that is the sequence itself."""
        table = sequence.block_table
        page_size = self.limits.page_size
        first_block, offset = divmod(sequence.num_computed_tokens, page_size)
        num_missing = sequence.num_computed_tokens + num_tokens - len(table) * page_size
        num_new_pages = _ceil_div(num_missing, page_size) if num_missing > 0 else 0
        while True:
            # A preemption may end the sharing, so look again each time.
            is_shared = offset > 0 and self.pool.ref_count(table[first_block]) > 1
            if not num_new_pages and not is_shared:
                return True
            if self.pool.can_allocate(num_new_pages + is_shared):
                break
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if is_shared:
            source, (target,) = table[first_block], self.pool.allocate(1)
            plan.page_copies.append((source, target))
            table[first_block] = target
            self.pool.release((source,))
        table.extend(self.pool.allocate(num_new_pages))
        return True

    def _admit(self, num_prefill_tokens: int, plan: StepPlan) -> None:
        while (
            self.waiting
            and num_prefill_tokens > 0
            and len(self.running) < self.limits.max_num_sequence
        ):
            sequence = self.waiting[0]
            if not self._start(sequence):
                return
            num_tokens = self._chunk_size(sequence, num_prefill_tokens, plan)
            if num_tokens:
                self._plan_chunk(sequence, num_tokens, plan)
                num_prefill_tokens -= num_tokens

    def _start(self, sequence: Sequence) -> bool:
        """Move the head of the queue to the running ones with pages for all its tokens, unless
        too few are available."""
        # The last token is always computed: its logits are what is wanted.
        num_reusable = len(sequence.token_ids) - 1
        if sequence.wants_prompt_logprobs:
            num_reusable = min(num_reusable, sequence.num_prompt_rows_done)
        nodes = self.prefix_cache.match(sequence.token_ids, num_reusable)
        cached = [node.page for node in nodes]
        num_new_pages = _ceil_div(len(sequence.token_ids), self.limits.page_size) - len(cached)
        num_idle_hits = sum(self.pool.ref_count(page) == 0 for page in cached)
        if not self.pool.can_allocate(num_new_pages + num_idle_hits + len(self.running)):
            return False
        self.waiting.popleft()
        self.pool.share(cached)
        sequence.block_table.extend(cached)
        sequence.block_table.extend(self.pool.allocate(num_new_pages))
        sequence.num_computed_tokens = len(cached) * self.limits.page_size
        if nodes:
            sequence.prefix_node = nodes[-1]
            self.num_prefix_hit_tokens += sequence.num_computed_tokens
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._run(sequence)
        return True

    def _cache_full_pages(self, sequence: Sequence, first_token: int) -> None:
        page_size, table = self.limits.page_size, sequence.block_table
        for block in range(first_token // page_size, sequence.num_computed_tokens // page_size):
            page = table[block]
            tokens = sequence.token_ids[block * page_size : (block + 1) * page_size]
            node = self.prefix_cache.insert(sequence.prefix_node, tokens, page)
            sequence.prefix_node = node
            if node.page != page:
                # Another sequence computed the same page meanwhile: one copy is enough.
                self.pool.share((node.page,))
                table[block] = node.page
                self.pool.release((page,))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release_pages(sequence)
        self._wait(sequence)

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.block_table))
        sequence.block_table = sequence.block_table[:0]
        sequence.num_computed_tokens = 0
        sequence.prefix_node = self.prefix_cache.root

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        place = 0
        while place < len(self.waiting) and self.waiting[place].order < sequence.order:
            place += 1
        self.waiting.insert(place, sequence)

    def check_integrity(self) -> None:
        """AssertionError unless queues, pages and prefixes agree with each other; for tests."""
        for queue, status in (
            (self.waiting, SequenceStatus.WAITING),
            (self.running, SequenceStatus.RUNNING),
        ):
            assert all(sequence.status is status for sequence in queue)
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(set(orders)), "a queue is out of order"
        assert all(not sequence.block_table for sequence in self.waiting)
        for sequence in self.running:
            assert 0 <= sequence.num_tokens_to_compute <= len(sequence.token_ids)
            num_needed = _ceil_div(sequence.num_computed_tokens, self.limits.page_size)
            assert len(sequence.block_table) >= num_needed
        self.pool.check_integrity(sequence.block_table for sequence in self.running)
        self.prefix_cache.check_integrity()


def _prompt_rows(sequence: Sequence, end: int) -> range:
    """Positions before `end`, still to be computed, whose logits the prompt logprobs want. The
    last position of the prompt predicts the output and is not among them."""
    if not sequence.wants_prompt_logprobs:
        return _NO_ROWS
    start = max(sequence.num_computed_tokens, sequence.num_prompt_rows_done)
    return range(start, max(start, min(end, sequence.num_prompt_tokens - 1)))


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
