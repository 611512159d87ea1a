"""Engine settings: names, presets, and refusals that name both numbers."""

import logging

import pytest
from everycast.artifact.errors import CapacityError, RequestError
from everycast.engine.engine_config import EngineConfig
from everycast.engine.model_runner import ModelInfo

INFO = ModelInfo(
    vocab_size=320,
    context_window_size=2048,
    page_size=16,
    page_bytes=1024,
    prefill_chunk_size=512,
    max_num_sequence=32,
)


def test_names_are_mlcs() -> None:
    config = EngineConfig.from_dict(
        {"max_num_sequence": 3, "max_total_sequence_length": 64, "prefix_cache_mode": "disable"}
    )
    limits = config.resolve(INFO, num_pages=1000)
    assert config.max_total_seq_length == 64 and config.kv_tokens(INFO) == 64
    assert limits.max_num_sequence == 3 and not limits.is_prefix_cache_enabled


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_sequences": 3}, "did you mean max_num_sequence?"),
        ({"zzz": 1}, "known: mode, max_num_sequence"),
        ({"mode": "fast"}, "one of local, interactive, server, got 'fast'"),
        ({"prefix_cache_mode": "on"}, "one of radix, disable"),
        ({"prefill_chunk_size": 0}, "above 0, got 0"),
        ({"prefill_chunk_size": "many"}, "got 'many'"),
        ({"max_num_sequence": True}, "got True"),
        ({"max_total_seq_length": 1, "max_total_sequence_length": 2}, "given twice"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match="engine_config") as caught:
        EngineConfig.from_dict(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(("mode", "expected"), [("local", 4), ("interactive", 1), ("server", 32)])
def test_modes_choose_what_is_unset(mode: str, expected: int) -> None:
    limits = EngineConfig.from_dict({"mode": mode}).resolve(INFO, num_pages=1000)
    assert limits.max_num_sequence == expected  # the library's limit caps the server's 64
    assert limits.prefill_chunk_size == 512
    assert limits.context_window_size == 2048


@pytest.mark.parametrize(
    ("config", "num_pages", "numbers"),
    [
        (EngineConfig(max_num_sequence=33), 1000, ("33", "32")),
        (EngineConfig(context_window_size=4096), 1000, ("4096", "2048")),
        (EngineConfig(context_window_size=1024), 10, ("1024", "160")),
        (EngineConfig(prefill_chunk_size=1024), 1000, ("1024", "512")),
        (EngineConfig(prefill_chunk_size=8, max_num_sequence=9), 1000, ("8", "9")),
        (EngineConfig(kv_cache_page_size=32), 1000, ("32", "16")),
        (EngineConfig(), 0, ("single KV page",)),
    ],
)
def test_what_cannot_be_given_is_refused(
    config: EngineConfig, num_pages: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(CapacityError) as caught:
        config.resolve(INFO, num_pages)
    assert all(number in str(caught.value) for number in numbers)


def test_a_context_nobody_asked_for_shrinks_to_memory_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        limits = EngineConfig().resolve(INFO, num_pages=10)
    assert limits.context_window_size == 160
    assert "2048 to 160" in caplog.text
