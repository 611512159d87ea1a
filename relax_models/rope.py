"""Rotary position embedding: the frequencies of every scaling a checkpoint may ask for.

Frequencies are those of transformers' `modeling_rope_utils.ROPE_INIT_FUNCTIONS`, in float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from ..artifact.errors import CheckpointError
from .config_fields import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding over the first `rotary_dim` values of a head, halves rotated together:
    value i pairs with value i + rotary_dim / 2.

    `factor` stretches positions (linear, llama3, yarn). `attention_factor` multiplies cos and sin
    (yarn). `divisors`, one per frequency, divide the frequencies before any scaling: the
    `rope_freqs.weight` of a GGUF.
    """

    rotary_dim: int
    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise CheckpointError(f"rope: {message}")

        require(
            self.kind in get_args(RopeKind), f"type {self.kind!r} is not supported; {_SUPPORTED}"
        )
        require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"head dimension must be even and positive, got {self.rotary_dim}",
        )
        require(self.theta > 0, f"rope_theta must be positive, got {self.theta}")
        require(self.factor > 0, f"factor must be positive, got {self.factor}")
        require(
            self.attention_factor > 0,
            f"attention_factor must be positive, got {self.attention_factor}",
        )
        if self.kind in ("llama3", "yarn"):
            require(
                self.original_max_position_embeddings > 0,
                "original_max_position_embeddings must be positive, got "
                f"{self.original_max_position_embeddings}",
            )
        if self.kind == "llama3":
            require(
                0 < self.low_freq_factor < self.high_freq_factor,
                "low_freq_factor must be positive and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}",
            )
        if self.kind == "yarn":
            require(
                0 < self.beta_slow <= self.beta_fast and self.theta > 1,
                f"yarn needs 0 < beta_slow <= beta_fast and rope_theta > 1, got "
                f"{self.beta_slow}, {self.beta_fast} and {self.theta}",
            )
        require(
            len(self.divisors) in (0, self.rotary_dim // 2)
            and all(math.isfinite(d) and d > 0 for d in self.divisors),
            f"frequency factors must be {self.rotary_dim // 2} positive numbers, got "
            f"{len(self.divisors)}: {self.divisors[:4]}",
        )


_SUPPORTED = f"supported: {', '.join(get_args(RopeKind))}"


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position of each rotated pair: [rotary_dim / 2] float32."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    wave: np.ndarray = np.float32(rope.theta) ** exponents
    if rope.divisors:
        wave = wave * np.asarray(rope.divisors, np.float32)
    plain: np.ndarray = np.float32(1.0) / wave
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.kind == "yarn":
        stretched = np.float32(1.0) / (np.float32(rope.factor) * wave)
        kept = np.float32(1.0) - _yarn_ramp(rope)
        return stretched * (np.float32(1.0) - kept) + plain * kept
    return plain


def _llama3_frequencies(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long waves divided by `factor`, short ones kept, those between blended (Llama 3.1)."""
    context = rope.original_max_position_embeddings
    low, high, factor = map(np.float32, (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (np.float32(context) / wavelength - low) / (high - low)
    blended = (np.float32(1.0) - smooth) * plain / factor + smooth * plain
    is_long = wavelength > context / rope.low_freq_factor
    is_short = wavelength < context / rope.high_freq_factor
    return np.where(is_long, plain / factor, np.where(is_short, plain, blended))


def _yarn_ramp(rope: RopeConfig) -> np.ndarray:
    """0 where a frequency is kept, 1 where it is stretched (YaRN, arXiv:2309.00071, 3.2)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp: np.ndarray = (steps - np.float32(low)) / np.float32(high - low)
    return ramp.clip(0, 1)


# ---- Hugging Face -------------------------------------------------------------------------------

_COMMON_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings",
}  # fmt: skip
_KIND_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    },
}  # fmt: skip


def hf_rope_settings(fields: Fields) -> Mapping[str, Any]:
    """The rope settings of a `config.json`, under the old name `rope_scaling` or the new one
    `rope_parameters`. Raises CheckpointError when both are there and differ."""
    old, new = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    if old and new and any(new.get(key, value) != value for key, value in old.items()):
        raise fields.error(
            "rope_scaling", f"= {dict(old)} contradicts rope_parameters = {dict(new)}; remove one"
        )
    return {**(old or {}), **(new or {})}


def hf_rope(
    fields: Fields,
    settings: Mapping[str, Any],
    *,
    head_dim: int,
    default_theta: float = 10_000.0,
    theta_key: str = "rope_theta",
) -> RopeConfig:
    """The rotary embedding that `settings` (see `hf_rope_settings`) and the top-level `theta_key`
    describe. Raises CheckpointError for an unknown type or key, so that nothing is ignored."""
    rope = Fields(settings, source=f"{fields.source}: rope settings")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if "type" in rope and rope.text("type") != kind:
        raise rope.error("rope_type", f"= {kind!r} contradicts type = {rope.text('type')!r}")
    if kind not in _KIND_KEYS:
        raise rope.error("rope_type", f"= {kind!r} is not supported; {_SUPPORTED}")
    allowed = _COMMON_KEYS | _KIND_KEYS[kind]
    unknown = sorted(k for k, v in settings.items() if k not in allowed and v is not None)
    if unknown and not (kind == "default" and unknown == ["factor"] and rope.get("factor") == 1):
        raise rope.error(
            ", ".join(unknown),
            f"is not understood for rope type {kind!r}; known: {', '.join(sorted(allowed))}",
        )
    rope.refuse({"partial_rotary_factor": 1.0})
    fields.refuse({"partial_rotary_factor": 1.0})

    theta = rope.number("rope_theta", fields.number(theta_key, default_theta))
    if theta_key in fields and fields.number(theta_key) != theta:
        raise rope.error(
            "rope_theta", f"= {theta} contradicts {theta_key} = {fields.get(theta_key)}"
        )
    if kind == "default":
        return RopeConfig(head_dim, theta)

    # transformers lets the top-level key win over the one beside the type.
    max_positions = fields.integer("max_position_embeddings")
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_positions),
    )
    implied = max_positions / original if kind == "yarn" and original > 0 else None
    factor = rope.number("factor", implied)
    return RopeConfig(
        head_dim,
        theta,
        cast(RopeKind, kind),
        factor=factor,
        original_max_position_embeddings=original,
        # Without defaults: transformers has none either.
        low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return _yarn_mscale(factor)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# ---- GGUF ---------------------------------------------------------------------------------------


def gguf_rope(
    fields: Fields, *, head_dim: int, context_length: int, divisors: tuple[float, ...] = ()
) -> RopeConfig:
    """The rotary embedding that the `rope.*` metadata of one architecture describes, read as
    llama.cpp does. Raises CheckpointError for an unknown scaling type."""
    dimensions = fields.integer("rope.dimension_count", head_dim)
    if dimensions != head_dim:
        raise fields.error(
            "rope.dimension_count",
            f"= {dimensions}: rotating part of a head (of {head_dim}) is not supported",
        )
    theta = fields.number("rope.freq_base", 10_000.0)
    # Files older than the `scaling` keys hold the factor alone.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(head_dim, theta, divisors=divisors)
    if kind == "linear":
        return RopeConfig(head_dim, theta, "linear", factor=factor, divisors=divisors)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", f"= {kind!r} is not supported; {_GGUF_SUPPORTED}")
    fields.refuse({"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0})
    extra = fields.number("rope.scaling.attn_factor", 1.0)
    extra *= fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        head_dim,
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", context_length
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=extra * _yarn_mscale(factor),
        divisors=divisors,
    )


_GGUF_SUPPORTED = "supported: none, linear, yarn"
