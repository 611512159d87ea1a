"""Writes a checkpoint's tokenizer into an artifact folder, in the Hugging Face file formats."""

import json
from dataclasses import dataclass
from pathlib import Path

from .source import Checkpoint
from .tokenizer_gguf import tokenizer_from_gguf
from .tokenizer_huggingface import tokenizer_from_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What the rest of an artifact repeats about its tokenizer."""

    vocab_size: int
    """One more than the highest token id; a model's logits may be wider or narrower."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer; the usual one first."""
    pad_token_id: int | None
    add_bos_token: bool
    """Whether text is meant to begin with BOS."""
    has_chat_template: bool
    files: tuple[str, ...] = TOKENIZER_FILES


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> TokenizerInfo:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`, which must exist.

    `tokenizer.json` holds the whole tokenizer, added tokens and BOS rule included.
    `tokenizer_config.json` names the special tokens, says in `add_bos_token` what `tokenizer.json`
    does, and holds the chat template (or a list of them, `transformers`' form for several).

    Raises CheckpointError if the checkpoint has no tokenizer, or one that is damaged or unknown.
    """
    if checkpoint.kind == "gguf":
        source = tokenizer_from_gguf(checkpoint.config, where=str(checkpoint.path))
    else:
        source = tokenizer_from_folder(checkpoint.path, checkpoint.config)
    tokenizer = source.tokenizer
    added = tokenizer.get_added_tokens_decoder()
    config = {name: value for name, value in source.config.items() if value is not None}
    config["added_tokens_decoder"] = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(added.items())
    }
    templates = source.chat_templates
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    # The class of the checkpoint may need files that the artifact does not have.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8"
    )

    def named_id(name: str) -> int | None:
        token = config.get(name)
        return None if token is None else tokenizer.token_to_id(token)

    return TokenizerInfo(
        vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
        bos_token_id=named_id("bos_token"),
        eos_token_ids=source.eos_token_ids,
        pad_token_id=named_id("pad_token"),
        add_bos_token=bool(config["add_bos_token"]),
        has_chat_template="default" in templates,
    )
