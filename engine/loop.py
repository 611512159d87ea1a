"""The engine's one loop: schedule → execute → sample → update, over a `ModelRunner`.

A background thread owns the runner, the scheduler and every page. Other threads only put requests
and aborts into the inbox, which the loop empties before and after the model runs: an aborted
request computes nothing after the step it was aborted in, and its pages are free when that step
ends. Outputs leave through each request's `TokenSink`, once a step, after pages are given back.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..artifact.errors import EverycastError, RequestError
from .engine_config import ScheduleLimits
from .metrics import EngineCounters, EngineMetrics
from .model_runner import ModelRunner
from .prefill_budget import PrefillBudget
from .sampler import SampledToken, SequenceSampler, TokenLogprob, sample_tokens, token_logprobs
from .scheduler import ScheduledChunk, Scheduler, StepPlan
from .sequence import FinishReason, Request, Sequence, SequenceStatus
from .step_input import build_step_input
from .token_sink import ChoiceOutput, RequestOutput, TokenSink, Usage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A request inside the loop."""

    request: Request
    sink: TokenSink
    max_output_tokens: int
    end_ids: frozenset[int]
    samplers: list[SequenceSampler]
    """One for each choice."""
    sequences: list[Sequence] = field(default_factory=list)
    """One until the prompt is computed, then one for each choice."""
    finished_choices: set[int] = field(default_factory=set)
    num_output_tokens: int = 0
    choices: list[ChoiceOutput] = field(default_factory=list)
    """News of this step, not delivered yet."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """News of this step, not delivered yet."""
    error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        return len(self.finished_choices) == len(self.samplers)

    def next_samplers(self, sequence: Sequence) -> list[SequenceSampler]:
        """Those of every choice when the prompt was just computed, else the sequence's own."""
        if len(self.sequences) == 1:
            return self.samplers
        return [self.samplers[sequence.choice_index]]


class _Turn(NamedTuple):
    """What a step does for one sequence."""

    job: _Job
    chunk: ScheduledChunk
    samplers: list[SequenceSampler]
    """Those that draw from the logits of the chunk's last token."""


class EngineLoop:
    """Runs requests together on one model.

    `start` gives the loop its thread; without it, call `step` yourself (tests do), from one
    thread. `submit`, `abort`, `metrics` and `shutdown` may be called from any thread.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: ScheduleLimits,
        *,
        tokenizer_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """tokenizer_size: number of real token ids; logits beyond it are padding.
        eos_token_ids: the model's own end tokens. clock: seconds, for the metrics and for the
        budget of prefills."""
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self._prefill_budget = PrefillBudget(limits.prefill_chunk_size)
        self._runner = runner
        self._vocab_size = runner.info.vocab_size
        self._tokenizer_size = min(tokenizer_size or self._vocab_size, self._vocab_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._counters = EngineCounters()
        self._jobs: dict[str, _Job] = {}
        self._thread: threading.Thread | None = None
        # Guards what other threads touch: the three below.
        self._wakeup = threading.Condition()
        self._inbox: deque[_Job | str] = deque()
        """Jobs to start and ids of requests to abort, in order."""
        self._live_ids: set[str] = set()
        self._is_closing = False

    # From any thread

    def submit(self, request: Request, sink: TokenSink) -> None:
        """Put the request in line.

        Raises RequestError when it is not valid or can never fit, EverycastError when the engine
        is shut down; then the sink hears nothing.
        """
        params, num_ids = request.params, self._tokenizer_size
        params.validate(self._vocab_size, num_ids)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty: it has no tokens", param="prompt")
        bad = next((token for token in request.prompt_ids if not 0 <= token < num_ids), None)
        if bad is not None:
            raise RequestError(
                f"the prompt has token id {bad}; this model's ids run from 0 to {num_ids - 1}",
                param="prompt",
            )
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        job = _Job(
            request,
            sink,
            max_output_tokens=self.scheduler.max_output_tokens(request),
            end_ids=frozenset((*eos_token_ids, *params.stop_token_ids)),
            samplers=[
                SequenceSampler(
                    params,
                    prompt_ids=request.prompt_ids,
                    num_ids=num_ids,
                    eos_token_ids=eos_token_ids,
                    choice_index=choice_index,
                )
                for choice_index in range(params.n)
            ],
        )
        with self._wakeup:
            if self._is_closing:
                raise EverycastError("the engine is shut down; make a new one")
            if request.request_id in self._live_ids:
                raise RequestError(f"a request with id {request.request_id!r} is already running")
            self._live_ids.add(request.request_id)
            self._inbox.append(job)
            self._wakeup.notify()

    def abort(self, request_id: str) -> None:
        """End the request, wherever it is; one that has ended, or never was, is no error. Its sink
        hears "abort" for the choices that were not finished."""
        with self._wakeup:
            self._inbox.append(request_id)
            self._wakeup.notify()

    def metrics(self) -> EngineMetrics:
        """The counters and the state of queues and pages now."""
        scheduler = self.scheduler
        return EngineMetrics(
            counters=replace(self._counters),
            num_preemptions=scheduler.num_preemptions,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            num_running_sequences=len(scheduler.running),
            num_waiting_sequences=len(scheduler.waiting),
            num_pages=scheduler.pool.num_pages,
            num_available_pages=scheduler.pool.num_available_pages,
            num_cached_pages=scheduler.pool.num_idle_pages,
        )

    def start(self) -> None:
        """Begin to work in a background thread."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="everycast-engine", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Abort what is running, end the thread and close the runner; again is no harm."""
        with self._wakeup:
            was_closing, self._is_closing = self._is_closing, True
            self._wakeup.notify()
        if self._thread is None:
            if not was_closing:
                self._close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # In the loop's thread

    def _run(self) -> None:
        try:
            while True:
                with self._wakeup:
                    while not (self._is_closing or self._inbox or self.scheduler.has_work):
                        self._wakeup.wait()
                    if self._is_closing:
                        return
                self.step()
        finally:
            self._close()

    def _close(self) -> None:
        with self._wakeup:
            self._is_closing = True
        self._take_inbox()
        for job in list(self._jobs.values()):
            self._abort(job)
        self._runner.close()

    def step(self) -> bool:
        """Run one step; False when there was nothing to compute.

        Never raises for what a request, its sink or the model does: whatever goes wrong in the
        model fails the requests of that step, and the loop goes on.
        """
        self._take_inbox()
        if not self.scheduler.has_work:
            return False
        try:
            self._run_step()
        except Exception as error:
            # Our own fault, and the books cannot be trusted any more: begin new ones.
            logger.exception("the engine failed in a step; every request in it is lost")
            self._start_over(error)
        return True

    def _run_step(self) -> None:
        start = self._clock()
        plan = self.scheduler.schedule(self._prefill_budget.num_tokens)
        turns = self._turns(plan)
        execute_start = self._clock()
        try:
            self._execute(plan, turns)
        except Exception as error:
            self._fail_step(plan, error)
            return
        self._counters.execute_time_s += self._clock() - execute_start
        self._take_inbox()
        self.scheduler.commit(plan)
        try:
            news, tokens = self._sample(turns)
        except Exception as error:
            self._fail_step(plan, error)
            return
        self._update(news, tokens)
        self._counters.num_steps += 1
        step_time_s = self._clock() - start
        self._counters.step_time_s += step_time_s
        self._prefill_budget.learn(plan, step_time_s)
        for job, _, _ in news:
            # Choices of one job are delivered together, with the first.
            if job.choices or job.prompt_logprobs:
                self._deliver(job)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        # A known error says all in its text, which goes to whoever asked.
        if isinstance(error, EverycastError):
            logger.info("a step of %d tokens failed: %s", plan.num_tokens, error)
        else:
            logger.error("the model failed in a step of %d tokens", plan.num_tokens, exc_info=error)
        for request_id in {chunk.sequence.request.request_id for chunk in plan.chunks}:
            if (job := self._jobs.get(request_id)) is not None:
                self._fail(job, error)

    def _start_over(self, error: Exception) -> None:
        self.scheduler = Scheduler(self.limits)
        for job in list(self._jobs.values()):
            for sequence in job.sequences:
                sequence.status = SequenceStatus.FINISHED
            self._fail(job, error)

    def _take_inbox(self) -> None:
        while self._inbox:
            with self._wakeup:
                message = self._inbox.popleft()
            if isinstance(message, _Job):
                self._counters.num_requests += 1
                self._jobs[message.request.request_id] = message
                self._begin(message)
            elif (job := self._jobs.get(message)) is not None:
                self._abort(job)

    def _begin(self, job: _Job) -> None:
        wants_rows = job.request.params.prompt_logprobs is not None
        if job.max_output_tokens == 0 and not (wants_rows and len(job.request.prompt_ids) > 1):
            self._finish_all(job, "length")
            self._deliver(job)
        else:
            job.sequences.append(self.scheduler.add(job.request))

    def _turns(self, plan: StepPlan) -> list[_Turn]:
        turns = []
        for chunk in plan.chunks:
            job = self._jobs[chunk.sequence.request.request_id]
            samplers = job.next_samplers(chunk.sequence) if chunk.is_sampled else []
            turns.append(_Turn(job, chunk, samplers))
        return turns

    def _execute(self, plan: StepPlan, turns: list[_Turn]) -> None:
        if plan.page_copies:
            self._copy_pages(plan.page_copies)
        # Whether nothing is asked of the step's logits but the arg max of each row.
        takes_arg_max = not plan.num_prompt_rows and all(
            [sampler.takes_arg_max for _, _, samplers in turns for sampler in samplers]
        )
        self._runner.execute(build_step_input(plan, self._tokenizer_size if takes_arg_max else 0))

    def _copy_pages(self, page_copies: list[tuple[int, int]]) -> None:
        """Make the copies in as few calls as keep sources and targets of one call apart."""
        sources: list[int] = []
        targets: list[int] = []
        for source, target in page_copies:
            if target in sources:
                # Its last owner was preempted after an earlier copy, which has to happen first.
                self._runner.copy_pages(sources, targets)
                sources, targets = [], []
            sources.append(source)
            targets.append(target)
        self._runner.copy_pages(sources, targets)

    def _sample(self, turns: list[_Turn]) -> tuple[list[_Turn], list[SampledToken | None]]:
        """The turns of sequences that are still running, and the tokens that all their samplers
        draw from the step's logits; None where these are not numbers."""
        news: list[_Turn] = []
        draws: list[tuple[int, SequenceSampler]] = []
        row = 0
        for turn in turns:
            job, (sequence, _, num_tokens, prompt_rows, is_sampled, is_decode), samplers = turn
            if not is_decode:
                self._counters.num_prefill_tokens += num_tokens
            if sequence.status is SequenceStatus.RUNNING:
                if prompt_rows:
                    self._add_prompt_logprobs(job, prompt_rows, row)
                for sampler in samplers:
                    draws.append((row + len(prompt_rows), sampler))
                news.append(turn)
            row += len(prompt_rows) + is_sampled
        return news, sample_tokens(self._runner, draws, num_ids=self._tokenizer_size)

    def _add_prompt_logprobs(self, job: _Job, prompt_rows: range, first_row: int) -> None:
        job.prompt_logprobs += token_logprobs(
            self._runner,
            range(first_row, first_row + len(prompt_rows)),
            job.request.prompt_ids[prompt_rows.start + 1 : prompt_rows.stop + 1],
            num_ids=self._tokenizer_size,
            num_top=job.request.params.prompt_logprobs or 0,
        )

    def _update(self, news: list[_Turn], tokens: list[SampledToken | None]) -> None:
        """Append the next token of each sequence; those of every choice when the prompt was just
        computed."""
        end = 0
        for job, chunk, samplers in news:
            start, end = end, end + len(samplers)
            sequence = chunk.sequence
            # Another choice may have ended the job meanwhile.
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            try:
                if len(samplers) == 1:
                    self._accept(job, sequence, tokens[start])
                elif samplers:
                    self._fork(job, sequence)
                    for owner, token in zip(job.sequences, tokens[start:end], strict=True):
                        self._accept(job, owner, token)
                elif sequence.num_tokens_to_compute == 0:
                    self._finish_all(job, "length")
            except Exception as error:
                self._fail(job, error)

    def _fork(self, job: _Job, sequence: Sequence) -> None:
        """Give the other choices their sequences, now that the prompt is computed."""
        for choice_index in range(1, len(job.samplers)):
            job.sequences.append(self.scheduler.fork(sequence, choice_index))

    def _accept(self, job: _Job, sequence: Sequence, token: SampledToken | None) -> None:
        if token is None:
            raise EverycastError("the model gave logits that are not numbers (NaN or infinity)")
        token_id, choice_index = token.token_id, sequence.choice_index
        sequence.token_ids.append(token_id)
        job.num_output_tokens += 1
        self._counters.num_output_tokens += 1
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        num_output_tokens = sequence.num_output_tokens
        if token_id in job.end_ids and num_output_tokens > job.request.params.min_tokens:
            reason, stop_token_id = "stop", token_id
        else:
            if num_output_tokens >= job.max_output_tokens:
                reason = "length"
            if job.sink.on_token(choice_index, token_id):
                reason = "stop"
        job.choices.append(ChoiceOutput(choice_index, (token,), reason, stop_token_id))
        if reason is not None:
            self.scheduler.finish(sequence, reason)
            job.finished_choices.add(choice_index)

    def _finish_all(self, job: _Job, reason: FinishReason) -> None:
        """End every choice of the job that has not ended, also those that have not begun."""
        for sequence in job.sequences:
            self.scheduler.finish(sequence, reason)
        for choice_index in range(job.request.params.n):
            if choice_index not in job.finished_choices:
                job.finished_choices.add(choice_index)
                job.choices.append(ChoiceOutput(choice_index, (), reason))

    def _abort(self, job: _Job) -> None:
        self._finish_all(job, "abort")
        self._deliver(job)

    def _fail(self, job: _Job, error: Exception) -> None:
        job.error = error
        self._finish_all(job, "error")
        # What a failed request left in its pages may be wrong: nobody shall find it.
        self.scheduler.prefix_cache.clear()
        self._deliver(job)

    def _deliver(self, job: _Job) -> None:
        """Give the sink the step's news; forget the job if these are the last."""
        request, is_finished = job.request, job.is_finished
        if is_finished:
            self._count_end(job)
            del self._jobs[request.request_id]
            with self._wakeup:
                self._live_ids.discard(request.request_id)
        num_cached_tokens = job.sequences[0].num_cached_tokens if job.sequences else 0
        output = RequestOutput(
            request.request_id,
            tuple(job.choices),
            tuple(job.prompt_logprobs),
            Usage(len(request.prompt_ids), job.num_output_tokens, num_cached_tokens),
            is_finished,
            job.error,
        )
        job.choices.clear()
        job.prompt_logprobs.clear()
        try:
            job.sink.on_output(output)
        except Exception:
            logger.exception("the receiver of request %s failed", request.request_id)
            if not is_finished:
                self._abort(job)

    def _count_end(self, job: _Job) -> None:
        if job.error is not None:
            self._counters.num_failed_requests += 1
        elif any(choice.finish_reason == "abort" for choice in job.choices):
            self._counters.num_aborted_requests += 1
        else:
            self._counters.num_finished_requests += 1
