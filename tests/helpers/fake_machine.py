"""Stands in for compiler and loader under the command line: no checkpoint, no download."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from everycast.artifact.host import Versions
from everycast.artifact.manifest import (
    LibraryStamp,
    Limits,
    Manifest,
    ModelStamp,
    WeightsStamp,
    write_manifest,
)
from everycast.build_process import BuildProgress
from everycast.engine.engine_config import ScheduleLimits
from everycast.engine.loop import EngineLoop
from everycast.engine.model_description import ModelDescription
from everycast.engine.scripted_model import Script, ScriptedModel
from everycast.engine.tokenizer import Tokenizer, TokenizerConfig
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 2
LIMITS = ScheduleLimits(
    max_num_sequence=4,
    prefill_chunk_size=64,
    context_window_size=256,
    page_size=16,
    num_pages=32,
)


def make_tokenizer(*, has_template: bool = True) -> Tokenizer:
    """Bytes as tokens, three special ones."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = HFTokenizer(models.BPE({t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(special)
    templates = {"default": CHATML} if has_template else {}
    return Tokenizer(hf.to_str(), TokenizerConfig({"eos_token": "<|im_end|>"}, templates))


def echo(tokenizer: Tokenizer, start: str, end: str, answer: str = "") -> Script:
    """Answers with `answer`, or with the text between the last `start` and `end`."""

    def script(history: tuple[int, ...]) -> int:
        text = b"".join(map(tokenizer.id_to_bytes, history))
        asked, _, done = text.rpartition(end.encode())
        wanted = answer.encode() or asked.rpartition(start.encode())[2]
        ids = tokenizer.encode(wanted.decode(), add_bos=False)
        return ids[len(done)] if len(done) < len(ids) else END

    return script


def chat_script(tokenizer: Tokenizer, answer: str = "") -> Script:
    """Repeats the user's last message, or says `answer`."""
    return echo(tokenizer, "user\n", "<|im_end|>\n<|im_start|>assistant\n", answer)


def scripted_parts(
    script: Script, tokenizer: Tokenizer, *, step_time_s: float = 0.0
) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
    model = ScriptedModel(script, vocab_size=259, num_pages=32, step_time_s=step_time_s)
    loop = EngineLoop(model, LIMITS, tokenizer_size=259, eos_token_ids=(END,))
    return loop, tokenizer, ModelDescription("scripted")


class FakeMachine:
    """Stands in for the compiler and the loader."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.answer = ""
        self.script: Script | None = None
        self.error: Exception | None = None
        self.builds: list[dict[str, Any]] = []
        self.opened: list[tuple[Path, str, dict[str, Any]]] = []

    def build(
        self,
        model: str | Path,
        target: str | None = "cpu",
        quantization: str | None = None,
        output: str | Path = "dist",
        *,
        progress: Callable[[BuildProgress], None] | None = None,
        **options: Any,
    ) -> Path:
        self.builds.append({"model": model, "target": target, **options})
        if progress is not None:
            progress(BuildProgress("weights", 1, 2, "bytes"))
            progress(BuildProgress("compile", 0, 0))
        if self.error is not None:
            raise self.error
        path = Path(output) / "m-q4f16_1"
        path.mkdir(parents=True, exist_ok=True)
        versions = Versions("1", "2", "3")
        library = LibraryStamp(
            "lib/cpu.so", "0", "any", {}, (), versions, "b", "d", Limits(64, 4, 16, 128)
        )
        manifest = Manifest(
            versions,
            ModelStamp("m", "llama", "LlamaForCausalLM", str(model), "a", "b", 1000),
            WeightsStamp(quantization or "q4f16_1", 4.5, 1000, "c", "d"),
            {target: library} if target else {},
        )
        write_manifest(path, manifest)
        return path

    def open_artifact(
        self, folder: Path, device: str, model_lib: None, mode: str, config: dict[str, Any]
    ) -> "FakeArtifact":
        self.opened.append((folder, mode, config))
        script = self.script or chat_script(self.tokenizer, self.answer)
        return FakeArtifact(script, self.tokenizer, f"device: {device}")


@dataclass(frozen=True)
class FakeArtifact:
    script: Script
    tokenizer: Tokenizer
    choice: str
    memory: None = None

    @property
    def plan(self) -> Any:
        return SimpleNamespace(summary=lambda: "memory: 1 MB")

    def load(self, progress: Any) -> tuple[EngineLoop, Tokenizer, ModelDescription]:
        return scripted_parts(self.script, self.tokenizer)


class Result(SimpleNamespace):
    code: int
    out: str
    err: str


Run = Callable[..., Result]
