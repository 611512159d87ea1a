"""Names of works, and the prompts that every engine gets."""

import pytest
from everycast.benchmarks.works import (
    GROUPS,
    MAX_STREAMS,
    Work,
    parse_work,
    parse_works,
    random_prompt,
)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("decode", Work("decode", "decode", 1, 16, 128)),
        ("decode_busy", Work("decode_busy", "decode", 1, 16, 128, is_beside_others=True)),
        ("decode_4096", Work("decode_4096", "decode", 1, 4096, 32)),
        ("prefill_512", Work("prefill_512", "prefill", 1, 512, 0)),
        ("batch_8", Work("batch_8", "batch", 8, 16, 64)),
        ("serve_16", Work("serve_16", "serve", 16, 64, 64)),
        ("serve_rate_4", Work("serve_rate_4", "serve", 24, 64, 64, 4)),
        ("memory", Work("memory", "memory", 1, 128, 64)),
        ("start", Work("start", "start", 1, 16, 0)),
    ],
)
def test_names(name: str, work: Work) -> None:
    assert parse_work(name) == work


@pytest.mark.parametrize(
    "name", ["", "decod", "decode_0", "decode_-1", "batch_65", "prefill_999999", "batch", "serve_x"]
)
def test_unknown_names_say_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"work '.*'.*(choose of decode|is more than)"):
        parse_work(name)


def test_groups_are_taken_apart_and_nothing_is_twice() -> None:
    works = parse_works(["batch_8", "batches", "decode", "decode"])
    assert [work.name for work in works] == [
        "batch_8",
        *(name for name in GROUPS["batches"] if name != "batch_8"),
        "decode",
    ]
    for names in GROUPS.values():
        assert all(work.streams <= MAX_STREAMS for work in parse_works(names))


@pytest.mark.parametrize("name", ["decode", "prefill_128", "batch_8"])
def test_prompts_are_the_same_for_every_engine_and_new_in_every_round(name: str) -> None:
    work = parse_work(name)
    prompt = random_prompt(work, 1000, seed=1)
    assert prompt == random_prompt(work, 1000, seed=1)
    assert prompt != random_prompt(work, 1000, seed=2)
    assert len(prompt) == work.prompt_tokens
    assert all(0 <= token < 1000 for token in prompt)


def test_a_long_context_that_is_not_timed_is_always_the_same() -> None:
    work = parse_work("decode_512")
    assert random_prompt(work, 1000, seed=1) == random_prompt(work, 1000, seed=2)
