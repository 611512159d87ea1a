"""Text to token ids and token ids to bytes, from the tokenizer files of an artifact."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from ..artifact.errors import ArtifactError, RequestError
from .token_bytes import TokenText, read_token_text


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What everycast reads from `tokenizer_config.json` (and `chat_template.jinja`)."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Role → text, such as `bos_token` → `<s>`; chat templates see these names."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Name → Jinja source; the usual one is named `default`."""
    add_bos_token: bool | None = None
    """None leaves it to what `tokenizer.json` does."""

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerConfig":
        """The configuration; empty if the folder has none. Raises ArtifactError if damaged."""
        path = folder / "tokenizer_config.json"
        values = _read_json(path) if path.exists() else {}
        special_tokens = {}
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special_tokens[name] = text
        templates: dict[str, str] = {}
        source = values.get("chat_template")
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates = {entry["name"]: entry["template"] for entry in source}
        if (template_file := folder / "chat_template.jinja").exists():
            templates["default"] = template_file.read_text(encoding="utf-8")
        add_bos = values.get("add_bos_token")
        return cls(special_tokens, templates, add_bos if isinstance(add_bos, bool) else None)


class Tokenizer:
    """A checkpoint's tokenizer. Methods may be called from several threads."""

    def __init__(self, tokenizer_json: str, config: TokenizerConfig | None = None) -> None:
        """Raises ArtifactError if the JSON is not a tokenizer whose tokens can be streamed."""
        self.config = config or TokenizerConfig()
        self._json = tokenizer_json
        self._parsing = _parse(tokenizer_json)
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.size: int = 1 + max(
            self._parsing.get_vocab_size(with_added_tokens=False) - 1, *added, -1
        )
        """One more than the highest token id."""
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.adds_bos = self.bos_token_id is not None and self._adds_bos()
        """Whether text gets a begin token in front when nothing else is said."""
        self._token_text: TokenText | None = None
        self._bytes: dict[int, bytes] = {}
        """Of the ids that were asked for."""

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and its companions. Raises ArtifactError, naming the file."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ArtifactError(f"{folder} has no tokenizer.json; build the model again")
        try:
            return cls(path.read_text(encoding="utf-8"), TokenizerConfig.from_folder(folder))
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"the tokenizer files in {folder} are damaged: {error}") from error

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        add_bos: put the begin token in front unless the text has it already; None does what the
            checkpoint does. parse_special: the text `<|im_end|>` is that token, not characters.
        Raises RequestError if the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half a surrogate pair at character {error.start}; send UTF-8"
            ) from None
        tokenizer = self._parsing if parse_special else self._without_special()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        bos = self.bos_token_id if (self.adds_bos if add_bos is None else add_bos) else None
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of whole token ids; bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        pieces = [piece for i in kept if (piece := self.id_to_bytes(i))]
        if pieces:
            pieces[0] = self.strip_start(pieces[0])
        return b"".join(pieces).decode("utf-8", "replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """What a token writes in the middle of a text; empty for an id that has no token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._parsing.id_to_token(token_id) or ""
            found = self._bytes[token_id] = self._text_rules.to_bytes(token)
        return found

    def strip_start(self, first: bytes) -> bytes:
        """The bytes of a text's first token, without the space the tokenizer had put there."""
        return self._text_rules.strip_start(first)

    def _special_id(self, role: str) -> int | None:
        text = self.config.special_tokens.get(role)
        token_id: int | None = None if text is None else self._parsing.token_to_id(text)
        return token_id

    def _adds_bos(self) -> bool:
        if self.config.add_bos_token is not None:
            return self.config.add_bos_token
        added: list[int] = self._parsing.encode("", add_special_tokens=True).ids
        return added[:1] == [self.bos_token_id]

    @property
    def _text_rules(self) -> TokenText:
        # Read when first needed: a model that only embeds text may have a decoder we cannot stream.
        if self._token_text is None:
            decoder = self._parsing.decoder
            state = None if decoder is None else json.loads(decoder.__getstate__())
            self._token_text = read_token_text(state)
        return self._token_text

    def _without_special(self) -> tokenizers.Tokenizer:
        # A second instance, because the library's switch is a state that threads would share.
        with self._lock:
            if self._plain is None:
                self._plain = _parse(self._json)
                self._plain.encode_special_tokens = True
            return self._plain


def _parse(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise ArtifactError(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} must hold a JSON object")
    return values
