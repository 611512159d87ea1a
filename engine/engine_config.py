"""The engine's settings under MLC's names: what the user asked for, and what came of it."""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ..artifact.errors import CapacityError, RequestError
from .model_runner import ModelInfo

logger = logging.getLogger(__name__)

Mode = Literal["local", "interactive", "server"]
PrefixCacheMode = Literal["radix", "disable"]

_PRESET_NUM_SEQUENCES: dict[str, int] = {"local": 4, "interactive": 1, "server": 64}
_PRESET_CONTEXT: dict[str, int] = {"local": 8192, "interactive": 8192, "server": 32768}
"""Longest context a mode takes unless asked, in tokens."""
_PRESET_FULL_CONTEXTS: dict[str, int] = {"local": 2, "interactive": 1, "server": 8}
"""Tokens of KV pages a mode takes unless asked, in full contexts."""
_ALIASES = {"max_total_sequence_length": "max_total_seq_length"}
"""MLC spells one setting in two ways."""


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What the scheduler keeps to; every number is settled. Counts are tokens unless named."""

    max_num_sequence: int
    """Most sequences that run together; at most `prefill_chunk_size`."""
    prefill_chunk_size: int
    """Most tokens in one step."""
    context_window_size: int
    """Most tokens of one sequence, prompt and output."""
    page_size: int
    num_pages: int
    is_prefix_cache_enabled: bool = True

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_sequence <= self.prefill_chunk_size
        assert 1 <= self.context_window_size <= self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user asked for. None leaves a value to the mode, the library and the memory plan.

    Raises RequestError for a value that makes no sense by itself.
    """

    mode: Mode = "local"
    """local: a few requests; interactive: one at a time; server: many."""
    max_num_sequence: int | None = None
    """Most sequences that run together."""
    max_total_seq_length: int | None = None
    """Tokens the KV pages hold over all sequences."""
    context_window_size: int | None = None
    """Most tokens of one sequence, prompt and output."""
    prefill_chunk_size: int | None = None
    """Most tokens in one step."""
    kv_cache_page_size: int | None = None
    """Tokens in one page; the library decides, another number is refused."""
    num_threads: int | None = None
    """Threads that compute; otherwise as many as are fastest on this machine."""
    prefix_cache_mode: PrefixCacheMode = "radix"
    """radix: sequences that begin alike share pages, also after they ended; disable: never."""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("prefix_cache_mode", self.prefix_cache_mode, get_args(PrefixCacheMode))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("mode") or value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _config_error(f"{field.name} must be a whole number above 0, got {value!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "EngineConfig":
        """The config with MLC's names. Raises RequestError, naming the nearest, for another."""
        names = [field.name for field in fields(cls)]
        settings: dict[str, object] = {}
        for key, value in values.items():
            name = _ALIASES.get(key, key)
            if name not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
                raise _config_error(f"unknown setting {key!r}; {hint}")
            if name in settings:
                raise _config_error(f"{name} is given twice, under two spellings")
            settings[name] = value
        return cls(**settings)  # type: ignore[arg-type]  # __post_init__ checks the values

    def context_tokens(self, info: ModelInfo) -> int:
        """Tokens of one sequence, before memory is looked at.

        Raises CapacityError when more is asked than the library was built for.
        """
        return _settle(
            "context_window_size",
            self.context_window_size,
            preset=_PRESET_CONTEXT[self.mode],
            limit=info.context_window_size,
        )

    def kv_tokens(self, info: ModelInfo) -> int:
        """Tokens the KV pages should hold; the memory plan may grant fewer if none are asked."""
        if self.max_total_seq_length is not None:
            return self.max_total_seq_length
        return _PRESET_FULL_CONTEXTS[self.mode] * self.context_tokens(info)

    def resolve(self, info: ModelInfo, num_pages: int) -> ScheduleLimits:
        """The limits to run with on `num_pages` pages that the memory plan granted.

        Raises CapacityError, naming both numbers, when the library or the pages cannot give what
        was asked; a context that nobody asked for is reduced to the pages, with a warning.
        """
        if self.kv_cache_page_size not in (None, info.page_size):
            raise CapacityError(
                f"kv_cache_page_size {self.kv_cache_page_size} is not what the model library was "
                f"built with ({info.page_size}); leave it out or compile again"
            )
        context = self.context_tokens(info)
        capacity = num_pages * info.page_size
        if capacity < 1:
            raise CapacityError("there is no memory for a single KV page; free some memory")
        if context > capacity:
            if self.context_window_size is not None:
                raise CapacityError(
                    f"context_window_size {context} does not fit: the KV pages hold {capacity} "
                    "tokens; lower it, or raise max_total_seq_length if memory allows"
                )
            logger.warning(
                "context reduced from %d to %d tokens, which is what the KV pages hold",
                context,
                capacity,
            )
            context = capacity
        chunk = _settle(
            "prefill_chunk_size",
            self.prefill_chunk_size,
            preset=info.prefill_chunk_size,
            limit=info.prefill_chunk_size,
        )
        num_sequences = _settle(
            "max_num_sequence",
            self.max_num_sequence,
            preset=min(_PRESET_NUM_SEQUENCES[self.mode], chunk),
            limit=info.max_num_sequence,
        )
        if num_sequences > chunk:
            raise CapacityError(
                f"max_num_sequence {num_sequences} is more than prefill_chunk_size {chunk}, the "
                "tokens of one step; lower the one or raise the other"
            )
        return ScheduleLimits(
            max_num_sequence=num_sequences,
            prefill_chunk_size=chunk,
            context_window_size=context,
            page_size=info.page_size,
            num_pages=num_pages,
            is_prefix_cache_enabled=self.prefix_cache_mode == "radix",
        )


def _settle(name: str, asked: int | None, *, preset: int, limit: int) -> int:
    if asked is None:
        return min(preset, limit)
    if asked > limit:
        raise CapacityError(
            f"{name} {asked} is more than the model library was built for ({limit}); "
            "lower it or compile again"
        )
    return asked


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _config_error(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _config_error(message: str) -> RequestError:
    return RequestError(f"engine_config: {message}", param="engine_config")
