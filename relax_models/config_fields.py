"""Typed reading of a checkpoint's settings: `config.json`, or one architecture's GGUF metadata."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..artifact.errors import CheckpointError


class Fields:
    """The settings in `values`; every getter raises CheckpointError naming `source` and the key.

    A key whose value is None counts as absent: Hugging Face writes `null` for "use the default".
    """

    def __init__(self, values: Mapping[str, Any], *, source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.prefix}{key} {message}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.error(key, f"must be a whole number, got {value!r}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {value!r}")
        if not math.isfinite(value):
            raise self.error(key, f"must be finite, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"must be text, got {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.error(key, f"must be a list of names, got {value!r}")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key`: none, one, or a list of them."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.error(key, f"must be a token id or a list of them, got {value!r}")
        return tuple(ids)

    def uniform_integer(self, key: str, default: int | None = None) -> int:
        """`integer`, but a list with one value per layer is taken when all are the same."""
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            if len(set(value)) > 1:
                raise self.error(key, "differs between layers, which is not supported")
            return Fields({key: value[0]}, source=self.source).integer(key)
        return self.integer(key, default)

    def refuse(self, harmless: Mapping[str, Any]) -> None:
        """Raise if a key that would change the maths has another value than its harmless one;
        a harmless None stands for absent, false, zero or empty."""
        for key, allowed in harmless.items():
            value = self.get(key)
            if value is None or value == allowed or (allowed is None and not value):
                continue
            only = "leaving it out" if allowed is None else repr(allowed)
            raise self.error(
                key, f"= {value!r} is not supported for this architecture; supported: {only}"
            )
