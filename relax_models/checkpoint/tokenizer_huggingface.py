"""The tokenizer of a Hugging Face folder, from whichever files it has."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer

from ...artifact.errors import CheckpointError
from .huggingface import read_json_object
from .mapped_file import weight_file_size
from .pre_tokenizers import PRE_TOKENIZERS
from .sentencepiece_model import read_sentencepiece
from .tokenizer_build import (
    TokenizerSource,
    add_bos_and_eos,
    byte_level_bpe,
    mark_added_tokens,
    sentencepiece_bpe,
)

# What vocab.json + merges.txt leave out: how the tokenizer class cuts text.
_PRE_TOKENIZER_OF_CLASS = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
}
_CLASS_OF_MODEL_TYPE = {
    "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}
# Classes for which `transformers` lets tokenizer_config.json decide about BOS and EOS.
_CONFIG_DECIDES = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"}
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path, model_config: Mapping[str, Any]) -> TokenizerSource:
    """The tokenizer of a Hugging Face folder; `model_config` is its `config.json`.

    Raises CheckpointError if the folder has none, or one that is damaged or not supported.
    """
    config = _read_object(folder / "tokenizer_config.json")
    for name, token in _read_object(folder / "special_tokens_map.json").items():
        config.setdefault(name, token)
    for name in _NAMED_TOKENS:
        if isinstance(config.get(name), dict):
            config[name] = config[name].get("content")
    templates = _chat_templates(folder, config)
    extra = _extra_tokens(folder, config)
    if (folder / "tokenizer.json").exists():
        tokenizer = _from_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _from_vocab_and_merges(folder, config, model_config)
    elif (folder / "tokenizer.model").exists():
        tokenizer = _from_sentencepiece(folder / "tokenizer.model", config)
    else:
        raise _nothing_usable(folder)
    _add_tokens(tokenizer, extra, folder)
    generation = _read_object(folder / "generation_config.json")
    _name_tokens(tokenizer, config, generation, model_config)
    _settle_bos_and_eos(tokenizer, config, folder)
    ends = _end_ids(tokenizer, config, generation, model_config)
    return TokenizerSource(tokenizer, config, ends, templates)


def _from_tokenizer_json(path: Path) -> Tokenizer:
    data = _read_object(path)
    model = data.get("model") or {}
    vocab = model.get("vocab")
    known: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    for entry in data.get("added_tokens") or []:
        token, token_id = entry.get("content"), entry.get("id")
        if known.setdefault(token, token_id) != token_id:
            raise CheckpointError(
                f"{path}: token {token!r} occurs twice, as ids {known[token]} and {token_id}; "
                "fetch the tokenizer again or remove one of them"
            )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error


def _from_vocab_and_merges(
    folder: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> Tokenizer:
    name = config.get("tokenizer_class") or _CLASS_OF_MODEL_TYPE.get(
        str(model_config.get("model_type"))
    )
    pre_name = _PRE_TOKENIZER_OF_CLASS.get(str(name).removesuffix("Fast"))
    if pre_name is None:
        raise CheckpointError(
            f"{folder} has vocab.json and merges.txt but no tokenizer.json, and how tokenizer "
            f"class {name!r} cuts text is not known (known: "
            f"{', '.join(_PRE_TOKENIZER_OF_CLASS)}); add the model's tokenizer.json"
        )
    vocab = _read_object(folder / "vocab.json")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_read_text(folder / "merges.txt").split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise CheckpointError(
                f"{folder / 'merges.txt'} line {number} is {line!r}, not two tokens; fetch it again"
            )
        merges.append((pair[0], pair[1]))
    return byte_level_bpe(
        vocab,
        merges,
        PRE_TOKENIZERS[pre_name],
        add_prefix_space=bool(config.get("add_prefix_space", False)),
    )


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> Tokenizer:
    data = _read_bytes(path)
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\n", data):
        raise _only_tiktoken(path)
    model = read_sentencepiece(data, where=str(path))
    if model.kind != "bpe" or model.changes_text:
        reason = "it rewrites text before cutting it" if model.changes_text else "only bpe is read"
        raise CheckpointError(
            f"{path} is a SentencePiece model of kind {model.kind} that cannot be converted "
            f"({reason}); add the model's tokenizer.json"
        )
    prefix: Literal["none", "first", "every"] = "none"
    if model.add_dummy_prefix:
        prefix = "first" if config.get("legacy") is False else "every"
    tokenizer = sentencepiece_bpe(
        model.tokens,
        model.scores,
        model.types,
        space_prefix=prefix,
        where=str(path),
    )
    mark_added_tokens(tokenizer, model.tokens, model.types, frozenset())
    for name, token_id in (("bos_token", model.bos_id), ("eos_token", model.eos_id)):
        if token_id >= 0:
            config.setdefault(name, tokenizer.id_to_token(token_id))
    config.setdefault("tokenizer_class", "LlamaTokenizer")
    config.setdefault("add_bos_token", True)
    return tokenizer


def _nothing_usable(folder: Path) -> CheckpointError:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".tiktoken" or path.name == "tekken.json":
            return _only_tiktoken(path)
    return CheckpointError(
        f"{folder} has no tokenizer (looked for tokenizer.json, vocab.json with merges.txt, "
        "tokenizer.model); add the model's tokenizer.json"
    )


def _only_tiktoken(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.parent} has only a tiktoken vocabulary ({path.name}), which cannot be converted; "
        "add the model's tokenizer.json"
    )


def _extra_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Added tokens that stand beside the vocabulary, id → token."""
    found: dict[int, AddedToken] = {}
    for token, token_id in _read_object(folder / "added_tokens.json").items():
        found[int(token_id)] = AddedToken(token, normalized=False)
    for token_id, entry in (config.pop("added_tokens_decoder", None) or {}).items():
        flags = {name: bool(entry.get(name, False)) for name in _ADDED_TOKEN_FLAGS}
        found[int(token_id)] = AddedToken(entry["content"], **flags)
    return found


def _add_tokens(tokenizer: Tokenizer, extra: Mapping[int, AddedToken], folder: Path) -> None:
    """Add the tokens that the tokenizer does not have yet, at exactly their ids."""
    already = tokenizer.get_added_tokens_decoder()
    for token_id in sorted(extra):
        token = extra[token_id]
        known_id = tokenizer.token_to_id(token.content)
        if known_id is None:
            known_id = tokenizer.get_vocab_size(with_added_tokens=True)
        if known_id != token_id:
            raise CheckpointError(
                f"{folder}: added token {token.content!r} is given id {token_id}, but the "
                f"tokenizer has it at {known_id}; fetch the tokenizer files again"
            )
        if token_id not in already:
            tokenizer.add_tokens([token])


def _name_tokens(
    tokenizer: Tokenizer,
    config: dict[str, Any],
    generation: Mapping[str, Any],
    model_config: Mapping[str, Any],
) -> None:
    """Fill in the named tokens that are only given by id."""
    for name in _NAMED_TOKENS:
        if config.get(name) is None:
            ids = _ids(generation.get(f"{name}_id")) or _ids(model_config.get(f"{name}_id"))
            config[name] = tokenizer.id_to_token(ids[0]) if ids else None


def _settle_bos_and_eos(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Make tokenizer.json and `add_bos_token` / `add_eos_token` say the same."""
    bos, eos = config["bos_token"], config["eos_token"]
    encoded = tokenizer.encode("", add_special_tokens=True).ids
    ids = {
        name: None if token is None else tokenizer.token_to_id(token)
        for name, token in (("bos", bos), ("eos", eos))
    }
    adds_bos = bool(encoded) and ids["bos"] is not None and encoded[0] == ids["bos"]
    adds_eos = len(encoded) > adds_bos and ids["eos"] is not None and encoded[-1] == ids["eos"]
    decides = str(config.get("tokenizer_class")).removesuffix("Fast") in _CONFIG_DECIDES
    wants_bos = config.get("add_bos_token") if decides else None
    wants_eos = config.get("add_eos_token") if decides else None
    wants_bos = adds_bos if wants_bos is None else bool(wants_bos)
    wants_eos = adds_eos if wants_eos is None else bool(wants_eos)
    for wanted, name in ((wants_bos, "bos"), (wants_eos, "eos")):
        if wanted and ids[name] is None:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json sets add_{name}_token, but {name}_token "
                f"({config[f'{name}_token']!r}) is not in the vocabulary; correct {name}_token"
            )
    if (wants_bos, wants_eos) != (adds_bos, adds_eos):
        add_bos_and_eos(tokenizer, bos if wants_bos else None, eos if wants_eos else None)
    config["add_bos_token"], config["add_eos_token"] = wants_bos, wants_eos


def _end_ids(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    model_config: Mapping[str, Any],
) -> tuple[int, ...]:
    """Ids that end an answer: of generation_config.json, the tokenizer and config.json."""
    ids = _ids(generation.get("eos_token_id"))
    if config["eos_token"] is not None:
        ids += _ids(tokenizer.token_to_id(config["eos_token"]))
    ids += _ids(model_config.get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _ids(value: Any) -> list[int]:
    """`eos_token_id` and its like hold one id, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return [int(v) for v in values if v is not None]


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name → template, the first found of the file's two places; `default` is the usual one."""
    inside = config.pop("chat_template", None)
    templates: dict[str, str] = {}
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in inside}
    older = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    # transformers reads chat_template.jinja before the others.
    if (path := folder / "chat_template.jinja").exists():
        templates["default"] = _read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no such file."""
    return read_json_object(path) if path.exists() else {}


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}); fetch it again") from error


def _read_bytes(path: Path) -> bytes:
    weight_file_size(path)  # refuses an empty file and a git-lfs pointer
    return path.read_bytes()
