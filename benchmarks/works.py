"""What is measured of an engine, the same for every one. Standard library only: the peers' workers
run in Python environments of their own."""

import random

DECODE_PROMPT_TOKENS = 16
DECODE_TOKENS = 128
"""Timed tokens of `decode`, each of them a step of its own."""
PREFILL_TOKENS = {"prefill_128": 128, "prefill_512": 512}
WORKS = ("decode", *PREFILL_TOKENS)


def num_tokens(work: str) -> int:
    """Tokens that the time of a work is for."""
    return PREFILL_TOKENS.get(work, DECODE_TOKENS)


def random_prompt(work: str, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a prompt that no cache knows: other ones for every seed."""
    count = PREFILL_TOKENS.get(work, DECODE_PROMPT_TOKENS)
    generator = random.Random(f"{work} {seed}")
    return [generator.randrange(vocab_size) for _ in range(count)]
