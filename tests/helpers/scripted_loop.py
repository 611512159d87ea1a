"""The engine's loop over a scripted model, step by step in the test's thread."""

from collections.abc import Iterable

from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.sampling_params import SamplingParams
from everycast.engine.scripted_model import (
    RecordingSink,
    ScriptedModel,
    hash_script,
)
from everycast.engine.sequence import Request

VOCAB = 50
EOS = 0
GREEDY = SamplingParams(temperature=0.0)


def make_loop(
    model: ScriptedModel | None = None,
    *,
    max_num_sequence: int = 4,
    chunk: int = 16,
    is_prefix_cache_enabled: bool = True,
    tokenizer_size: int | None = None,
    eos_token_ids: Iterable[int] = (EOS,),
) -> EngineLoop:
    model = model or make_model()
    info = model.info
    limits = ScheduleLimits(
        max_num_sequence=max_num_sequence,
        prefill_chunk_size=chunk,
        context_window_size=min(info.context_window_size, model.num_pages * info.page_size),
        page_size=info.page_size,
        num_pages=model.num_pages,
        is_prefix_cache_enabled=is_prefix_cache_enabled,
    )
    return EngineLoop(model, limits, tokenizer_size=tokenizer_size, eos_token_ids=eos_token_ids)


def make_model(
    *, num_pages: int = 64, page_size: int = 4, noise: float = 0.0, eos_every: int = 0
) -> ScriptedModel:
    script = hash_script(VOCAB, eos_token_id=EOS, eos_every=eos_every)
    return ScriptedModel(
        script, vocab_size=VOCAB, num_pages=num_pages, page_size=page_size, noise=noise
    )


def run(loop: EngineLoop, *, max_steps: int = 1000) -> int:
    """Steps until there is nothing to do."""
    for num_steps in range(max_steps + 1):
        if not loop.step():
            return num_steps
        loop.scheduler.check_integrity()
    raise AssertionError(f"still at work after {max_steps} steps")


def submit(
    loop: EngineLoop, prompt: Iterable[int], params: SamplingParams, name: str = "a"
) -> RecordingSink:
    sink = RecordingSink()
    loop.submit(Request(name, tuple(prompt), params), sink)
    return sink


def text_of(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What the script says, without an engine."""
    script, history = hash_script(VOCAB), list(prompt)
    num_prompt_tokens = len(history)
    for _ in range(num_tokens):
        history.append(script(tuple(history)))
    return history[num_prompt_tokens:]


def assert_all_pages_return(loop: EngineLoop) -> None:
    pool = loop.scheduler.pool
    assert loop.metrics().num_available_pages == pool.num_pages
    loop.scheduler.prefix_cache.clear()
    pool.check_integrity([])
    assert pool.num_idle_pages == 0
